"""Token gradients of a real model: the MiniLM sentence encoder, with padded sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from minilm import encoder, one_thread, similarities
from torch import Tensor, nn

import torchfmri
from torchfmri._tokens.calls.gradients import TokenGradients

__all__ = ["encoder", "one_thread"]
Encoder = tuple[nn.Module, dict[str, Tensor]]


def measured(model: nn.Module, batch: dict[str, Tensor], keep: Any) -> TokenGradients:
    model.zero_grad(set_to_none=True)
    with torchfmri.token_gradients(model, keep=keep) as found:
        similarity = similarities(model(**batch), batch)
        (similarity[0, 2] + similarity[1, 3] - similarity[0, 1]).backward()
    return found


@pytest.fixture(scope="module")
def factors(encoder: Encoder) -> TokenGradients:
    return measured(*encoder, "factors")


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.one_in(3)
def test_every_parameter_is_covered(encoder: Encoder, keep: str) -> None:
    model, batch = encoder
    coverage = measured(model, batch, keep).coverage()
    received = {name for name, each in model.named_parameters() if each.grad is not None}
    assert len(received) > 90
    assert {row.name for row in coverage} == received
    assert not coverage.missing
    assert all(row.residual is not None and row.residual < 1e-4 for row in coverage)
    assert {row.tokens for row in coverage} == {(f"4 x {batch['input_ids'].shape[1]}",)}


def test_norms_are_those_of_the_factors(encoder: Encoder, factors: TokenGradients) -> None:
    norms = measured(*encoder, "norms")
    assert norms.names == factors.names
    for name in norms.names:
        one, other = norms[name].norm(), factors[name].norm()
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6 * float(other.max())), name


def test_padding_has_no_gradient(encoder: Encoder, factors: TokenGradients) -> None:
    """Sentences of different lengths: zeros behind the end, something everywhere before it."""
    _, batch = encoder
    mask, norms = batch["attention_mask"].bool(), factors.norm()
    assert not mask.all()
    assert not norms[~mask].any()
    assert bool((norms[mask] > 0).all())


def test_linear_by_hand(encoder: Encoder, factors: TokenGradients) -> None:
    """Input and gradient of one layer by plain hooks: the norm is the product of both norms."""
    model, batch = encoder
    name = "encoder.layer.2.intermediate.dense"
    seen: dict[str, Tensor] = {}

    def forward(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen["x"] = arguments[0].detach()
        output.register_hook(lambda gradient: seen.update(g=gradient))

    handle = model.get_submodule(name).register_forward_hook(forward)
    similarity = similarities(model(**batch), batch)
    (similarity[0, 2] + similarity[1, 3] - similarity[0, 1]).backward()
    handle.remove()
    kept = batch["attention_mask"].bool()
    expected = seen["g"].norm(dim=-1) * seen["x"].norm(dim=-1) * kept
    assert torch.allclose(factors[f"{name}.weight"].norm(), expected, rtol=1e-4, atol=1e-9)
    assert torch.allclose(
        factors[f"{name}.bias"].norm(), seen["g"].norm(dim=-1) * kept, rtol=1e-4, atol=1e-9
    )


def test_a_sentence_outside_of_the_loss_has_no_gradient(encoder: Encoder) -> None:
    """Sentences 0 and 1 alone are in the loss: all of their tokens have a gradient."""
    model, batch = encoder
    model.zero_grad(set_to_none=True)
    with torchfmri.token_gradients(model, "encoder.layer.*") as found:
        similarities(model(**batch), batch)[0, 1].backward()
    norms = found.norm()
    assert bool((norms[:2][batch["attention_mask"][:2].bool()] > 0).all())
    assert not norms[2:].any()
