"""Each token's own loss: it adds up to the model's loss, and wrong data are refused."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import torchfmri
from torchfmri import InspectionError, token_losses


def logits_and_labels(
    *shape: int, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocabulary, shape, generator=generator)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_the_sum_is_the_loss_of_transformers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = architecture.build().eval(), architecture.batch()
    assert (batch["labels"] == -100).any(), "the batch must have ignored labels"
    output = model(**batch)
    losses = token_losses(output.logits, batch["labels"], reduction="mean")
    torch.testing.assert_close(losses.sum(), output.loss)
    ours = torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True)
    theirs = torch.autograd.grad(output.loss, list(model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_column_t_is_the_loss_at_position_t() -> None:
    logits, labels = logits_and_labels(2, 5)
    losses = token_losses(logits, labels)
    for b in range(2):
        for t in range(4):
            expected = -logits[b, t].log_softmax(-1)[labels[b, t + 1]]
            torch.testing.assert_close(losses[b, t], expected, rtol=1e-14, atol=0)
    assert not losses[:, -1].any()


def test_without_shift_label_t_belongs_to_position_t() -> None:
    logits, labels = logits_and_labels(2, 5)
    losses = token_losses(logits, labels, shift=False)
    expected = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(losses, expected, rtol=1e-14, atol=1e-15)


def test_ignored_labels_have_no_loss_and_no_gradient() -> None:
    logits, labels = logits_and_labels(2, 5)
    labels[0, 2] = labels[1, 3:] = -100
    logits.requires_grad_()
    losses = token_losses(logits, labels, reduction="mean")
    ignored = torch.zeros(2, 5, dtype=torch.bool)
    ignored[0, 1] = ignored[1, 2:] = ignored[:, -1] = True
    assert torch.equal(losses == 0, ignored)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert torch.equal((gradient == 0).all(-1), ignored)
    sevens = labels.masked_fill(labels == -100, 7)
    own = token_losses(logits, sevens, ignore_index=7)
    assert torch.equal(own == 0, F.pad(sevens[:, 1:], (0, 1), value=7) == 7)


@settings(deadline=None, max_examples=25)
@given(b=st.integers(1, 3), s=st.integers(2, 6), ignored=st.integers(0, 3), seed=st.integers(0, 99))
def test_values_add_up_to_either_reduction(b: int, s: int, ignored: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(b, s, 7, dtype=torch.float64, generator=generator)
    labels = torch.randint(7, (b, s), generator=generator)
    labels[torch.rand(b, s, generator=generator) < ignored / 6] = -100
    labels[0, 1] = 3  # at least one counts
    flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    for reduction in ("sum", "mean"):
        expected = F.cross_entropy(*flat, reduction=reduction)
        found = token_losses(logits, labels, reduction=reduction).sum()
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(2, 5, dtype=dtype)
    losses = token_losses(logits, labels)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide = token_losses(logits.double(), labels)
    torch.testing.assert_close(losses.double(), wide, rtol=1e-6, atol=1e-6)


def test_a_single_sequence_and_other_integers() -> None:
    logits, labels = logits_and_labels(5)
    assert token_losses(logits, labels).shape == (5,)
    torch.testing.assert_close(
        token_losses(logits, labels.int()), token_losses(logits[None], labels[None])[0]
    )


def test_what_does_not_fit_is_refused_with_what_was_expected() -> None:
    logits, labels = logits_and_labels(2, 5)
    with pytest.raises(InspectionError, match=r"\(2, 4\).*\(2, 5, 11\).*expected \(2, 5\)"):
        token_losses(logits, labels[:, 1:])
    wrong = labels.clone()
    wrong[1, 2] = 11
    with pytest.raises(InspectionError, match=r"Label 11 at \(1, 2\).*vocabulary of 11"):
        token_losses(logits, wrong)
    wrong[1, 2] = -1
    with pytest.raises(InspectionError, match="Label -1"):
        token_losses(logits, wrong)
    with pytest.raises(InspectionError, match="integers"):
        token_losses(logits, labels.double())
    with pytest.raises(InspectionError, match="floating point"):
        token_losses(labels, labels)
    with pytest.raises(InspectionError, match="'average'"):
        token_losses(logits, labels, reduction="average")


def test_the_logits_are_not_copied() -> None:
    logits, labels = logits_and_labels(1, 64, vocabulary=2000, dtype=torch.float32)
    logits.requires_grad_()
    large: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= logits.numel():
            large.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torchfmri.token_losses(logits, labels)
    assert len(large - {logits.untyped_storage().data_ptr()}) == 1  # the log-probabilities


def test_labels_of_a_masked_language_model() -> None:
    architecture = ARCHITECTURES["bert"]
    model, batch = architecture.build().eval(), architecture.batch()
    output = model(**batch)
    losses = token_losses(output.logits, batch["labels"], shift=False, reduction="mean")
    torch.testing.assert_close(losses.sum(), output.loss)
    assert tokens().shape == losses.shape
