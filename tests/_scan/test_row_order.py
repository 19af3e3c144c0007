"""Rows that are not the tokens in their order: a shape alone would take them for tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scan_oracles import build, prompts
from torch import Tensor, nn

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread")
CHOSEN = "its rows are in another order: they were chosen by the data"
UNKNOWN = "its rows cannot be followed through the operation turned"
OTHER = "its rows are in another order than the tokens"


@torch.library.custom_op("torchfmri_tests::turned", mutates_args=())
def turned(x: Tensor, turns: bool) -> Tensor:
    """An operation that nobody can look into."""
    return x.flip(1) if turns else x.clone()


class Rows(nn.Module):
    """A layer that returns its rows in the order of the function."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.order(x)


class Reader(nn.Module):
    """A causal model of one linear layer, which may see its rows in another order.

    `there` and `back` are the orders before and after the layer; together they change nothing.
    """

    def __init__(self, there: Any = None, back: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, 8)
        self.there = nn.Identity() if there is None else Rows(there)
        self.inner = nn.Linear(8, 8)
        self.back = nn.Identity() if back is None else Rows(back)
        self.head = nn.Linear(8, 67)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x + self.back(self.inner(self.there(x))))


def reader(there: Any = None, back: Any = None) -> Reader:
    torch.manual_seed(0)
    return Reader(there, back).eval()


def by_value(x: Tensor) -> Tensor:
    """Rows sorted by their first entry."""
    order = x[..., 0].argsort(1)
    return x.gather(1, order[..., None].expand(x.shape))


def activation(scan: torchfmri.Scan, layer: str) -> Any:
    return scan.only.layers["activation"][:, scan.layers.index(layer)]


@pytest.mark.parametrize("prompt", [prompts()[0], [7]], ids=["several tokens", "one token"])
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_rows_sorted_by_expert(name: str, new: int, prompt: list[int]) -> None:
    """A mixture with one expert per token has a row per token, but they stand by expert."""
    scans = {}
    for experts in ("grouped_mm", "batched_mm"):
        model = build(name, experts=experts, num_experts_per_tok=1)
        scans[experts] = torchfmri.scan(model, None, prompt, new, per=None)
    grouped, batched = scans["grouped_mm"], scans["batched_mm"]
    sorted_ones = [f"model.layers.{block}.mlp.experts.act_fn" for block in (0, 1)]
    assert {each: grouped.meta["missed"].get(each) for each in sorted_ones} == dict.fromkeys(
        sorted_ones, CHOSEN
    )
    # In the other implementation the rows of the same layer are the tokens.
    assert {*batched.layers} - {*grouped.layers} == {*sorted_ones}
    for layer in grouped.layers:
        np.testing.assert_allclose(
            activation(grouped, layer), activation(batched, layer), rtol=1e-4, err_msg=layer
        )


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (lambda x: x.flip(1), OTHER),
        (lambda x: x.roll(1, 1), OTHER),
        (lambda x: x.transpose(0, 1).reshape(x.shape), OTHER),
        (by_value, CHOSEN),
        # Of 7 tokens, the one in the middle stays where it is, and the next one is a row early.
        (lambda x: turned(x, True), f"{UNKNOWN}, and a change of token 4 moves an earlier row"),
    ],
    ids=["flip", "roll", "sequence first", "sort", "unknown operation"],
)
def test_a_layer_that_permutes_rows(order: Any, reason: str) -> None:
    model = reader(order)
    model.inner.weight.data.zero_()  # so that the model itself is causal
    scan = torchfmri.scan(model, None, prompts()[0], 0, per=None)
    assert scan.meta["missed"]["there"] == reason
    assert "there" not in scan.layers
    assert {"embed", "head"} <= {*scan.layers} - {*scan.meta["missed"]}
    assert reason in scan.table(width=400)


@pytest.mark.parametrize(
    "order",
    [
        lambda x: x * 2,
        lambda x: nn.functional.pad(x, (0, 0, 1, -1)),
        lambda x: x.flip(1).flip(1),
        lambda x: turned(x, False),
        lambda x: x.cumsum(1),
        lambda x: x.new_ones(x.shape).cumsum(1),
    ],
    ids=["plain", "token before", "there and back", "unknown operation", "sum", "constants"],
)
def test_layers_in_order_stay(order: Any) -> None:
    """Their values are those that a hook on the whole pass sees."""
    model = reader(order)
    prompt = prompts()[0]
    seen: list[Tensor] = []
    handle = model.there.register_forward_hook(lambda *each: seen.append(each[2]))
    with torch.no_grad():
        model(torch.tensor([prompt]))
    handle.remove()
    scan = torchfmri.scan(model, None, prompt, 0, per=None)
    expected = seen[0][0].square().mean(-1).sqrt()
    np.testing.assert_allclose(activation(scan, "there"), expected, rtol=1e-5)
    assert scan.meta["missed"] == {}


def test_an_unknown_operation_of_a_model_that_is_not_causal() -> None:
    """Any row may depend on any token there, so nothing speaks against the order."""
    model = reader(lambda x: turned(x, False) + x.mean(1, keepdim=True))
    scan = torchfmri.scan(model, None, prompts()[0], 0, per=None)
    assert scan.meta["missed"] == {}


def test_the_learning_cost_of_a_layer_in_another_order() -> None:
    """It has no activations, but the gradients of its parameters still belong to tokens."""
    model, plain = reader(lambda x: x.flip(1), lambda x: x.flip(1)), reader()
    found, expected = (torchfmri.scan(each, None, prompts()[0], 0) for each in (model, plain))
    column = found.layers.index("inner")
    assert np.isnan(activation(found, "inner")).all()
    assert "another order" in found.meta["missed"]["inner"]
    assert "learning cost" in found.meta["layer_notes"]["inner"]
    np.testing.assert_allclose(
        found.only.layers["learning_cost"][:, column],
        expected.only.layers["learning_cost"][:, expected.layers.index("inner")],
        rtol=1e-4,
    )
    np.testing.assert_allclose(activation(found, "back"), activation(expected, "back"), rtol=1e-5)
