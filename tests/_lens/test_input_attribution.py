"""Gradient x input and integrated gradients against loops over plain autograd, and Captum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import tokens
from test_lens import SINGLE
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError


def by_hand(model: nn.Module, ids: Tensor, start: Tensor, steps: int, token: int) -> Tensor:
    """Integrated gradients one point at a time, through inputs_embeds."""
    vectors = model.get_input_embeddings()(ids).detach()  # type: ignore[operator]
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(vectors)
    for node, weight in zip(nodes, weights, strict=True):
        given = (start + (1 + node) / 2 * (vectors - start)).requires_grad_()
        logit = model(inputs_embeds=given).logits[0, -1, token]
        total += weight / 2 * torch.autograd.grad(logit, given)[0]
    return (total * (vectors - start)).sum(-1)[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("baseline", ["zero", "mean", 7])
def test_integrated_gradients_equal_a_loop(name: str, baseline: str | int) -> None:
    model, ids = SINGLE[name].build().eval().double(), tokens(batch=1)
    table = model.get_input_embeddings()(torch.arange(67)).detach()  # type: ignore[operator]
    start = {"zero": torch.zeros(16), "mean": table.mean(0)}.get(str(baseline), table[7])
    expected = by_hand(model, ids, start.double(), 20, token=3)
    found = torchfmri.attribute_inputs(model, None, ids, 3, steps=20, baseline=baseline)
    assert np.allclose(found.values, expected, rtol=1e-9, atol=1e-12)
    other = torchfmri.attribute_inputs(model, None, ids, 4, steps=20, baseline=baseline)
    assert not np.allclose(other.values, expected, rtol=1e-3)


@pytest.mark.parametrize("against", [None, 11])
def test_equal_to_captum(against: int | None) -> None:
    attr = pytest.importorskip("captum.attr")  # rounds the weights of its steps to float32
    model, ids = SINGLE["llama"].build().eval().double(), tokens(batch=1)

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids).logits[:, -1]
        return logits[:, 3] - (0 if against is None else logits[:, against])

    embedding = model.get_input_embeddings()  # type: ignore[operator]
    vectors = embedding(ids)
    zeros = torch.zeros_like(vectors)
    captum = attr.LayerIntegratedGradients(forward, embedding)
    # Captum's baselines are inputs of the layer: token 0 here.
    values = captum.attribute(ids, baselines=torch.zeros_like(ids), n_steps=30)
    found = torchfmri.attribute_inputs(model, None, ids, 3, against=against, steps=30, baseline=0)
    assert np.allclose(found.values, values.sum(-1)[0].detach(), rtol=1e-6, atol=1e-8)

    def through(embeds: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=embeds).logits[:, -1]
        return logits[:, 3] - (0 if against is None else logits[:, against])

    product = attr.InputXGradient(through).attribute(vectors.detach())
    found = torchfmri.attribute_inputs(
        model, None, ids, 3, against=against, method="gradient_x_input"
    )
    assert np.allclose(found.values, product.sum(-1)[0].detach(), rtol=1e-6, atol=1e-8)
    plain = attr.IntegratedGradients(through).attribute(vectors.detach(), zeros, n_steps=30)
    found = torchfmri.attribute_inputs(
        model, None, ids, 3, against=against, steps=30, baseline="zero"
    )
    assert np.allclose(found.values, plain.sum(-1)[0].detach(), rtol=1e-6, atol=1e-8)


def test_it_adds_up_where_it_converges_and_says_so_where_it_does_not() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    ask = "The capital of France is"
    good = torchfmri.attribute_inputs(model, tokenizer, ask, " Paris", steps=60)
    assert good.has_converged
    assert abs(good.residual) < 0.02 * abs(good.logit - good.baseline)
    assert "not converged" not in good.table()
    bad = torchfmri.attribute_inputs(model, tokenizer, ask, " Paris", steps=20, baseline="zero")
    assert not bad.has_converged
    assert "not converged in 20 steps" in bad.table().replace("\n", " ")
    assert len(good.plot().patches) == len(good.values)


def test_bad_input() -> None:
    model, ids = SINGLE["llama"].build(), tokens(batch=1)
    for options, words in (
        ({"method": "shap"}, "method='shap'"),
        ({"steps": 0}, "steps=0"),
        ({"baseline": "nothing"}, "baseline='nothing'"),
        ({"baseline": 10**6}, "baseline=1000000"),
        ({"token": 10**6}, "Token id 1000000"),
    ):
        with pytest.raises(InspectionError, match=words):
            torchfmri.attribute_inputs(model, None, ids, **options)  # type: ignore[arg-type]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))  # type: ignore[no-any-return]

    with pytest.raises(InspectionError, match="get_input_embeddings"):
        torchfmri.attribute_inputs(Own(), None, torch.tensor([[1, 2]]))


def test_the_title_fits_into_the_picture() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    ask = ("The capital of France is", " Paris")
    for method in ("gradient_x_input", "integrated_gradients"):
        found = torchfmri.attribute_inputs(model, tokenizer, *ask, against=" Rome", method=method)
        ax = found.plot()
        ax.figure.canvas.draw()
        (title,) = [each for each in (ax.title, ax._left_title) if each.get_text()]
        assert title.get_text().replace("\n", " ") == found.title
        assert title.get_window_extent().x1 <= ax.figure.bbox.x1


@pytest.mark.parametrize("option", ["token", "against", "baseline"])
@pytest.mark.parametrize("wrong", [-1, 67])
def test_a_token_out_of_range_is_refused_before_the_model_runs(option: str, wrong: int) -> None:
    model, passes = SINGLE["llama"].build(), []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    known = {"token": 3, "against": 4, "baseline": 5}
    torchfmri.attribute_inputs(model, None, tokens(batch=1), **known, steps=1)  # type: ignore[arg-type]
    assert passes, "the control: passes are seen"
    passes.clear()
    with pytest.raises(InspectionError, match=rf"{wrong}\b.*0 to 66"):
        torchfmri.attribute_inputs(model, None, tokens(batch=1), **{**known, option: wrong})  # type: ignore[arg-type]
    assert not passes
    if option != "baseline":
        with pytest.raises(InspectionError, match=rf"Token id {wrong} .*0 to 66"):
            torchfmri.attribute_logit(model, None, tokens(batch=1), **{option: wrong})  # type: ignore[arg-type]
        assert not passes
