"""Laws of growth: known polynomials are found again, and peaks beyond the data are predicted."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchfmri
from torchfmri import Growth, InspectionError
from torchfmri._cost.laws import Law, choose_terms, fit_law
from torchfmri._cost.resizing import Size, data_of_size

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"batch": (1, 2, 4), "length": (8, 16, 32)}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 10**6), min_size=6, max_size=6))
def test_a_polynomial_is_found_again(coefficients: list[int]) -> None:
    sizes = [Size(b, s) for b in SIZES["batch"] for s in SIZES["length"]]
    terms = choose_terms(sizes)
    truth = Law(dict(zip(terms, map(float, coefficients), strict=True)), 0.0)
    law = fit_law(terms, sizes, np.array([truth(*size) for size in sizes]))
    assert law(8, 64) == pytest.approx(truth(8, 64), rel=1e-6, abs=1e-3)
    assert law.error < 1e-6  # a term that is nothing beside the others is left out


def test_another_kind_of_growth_is_noticed() -> None:
    sizes = [Size(1, s) for s in (8, 16, 32, 64)]
    law = fit_law(choose_terms(sizes), sizes, np.array([float(size.length**4) for size in sizes]))
    assert law.error > 0.05


def build(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return layer, torch.randn(2, 8, 16), "sum"
    if name == "gru":
        return nn.GRU(8, 16, batch_first=True), torch.randn(2, 8, 8), lambda out: out[0].sum()
    if name == "moe":
        pytest.importorskip("transformers")
        from architectures import ARCHITECTURES, tokens

        ids = tokens()
        return ARCHITECTURES["qwen3-moe"].build(), {"input_ids": ids, "labels": ids}, None
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES, tokens

    ids = tokens()
    model = ARCHITECTURES["qwen3"].build(name.split("-")[1], max_position_embeddings=128)
    return model, {"input_ids": ids, "labels": ids}, None


@cache
def grown(name: str) -> tuple[nn.Module, Any, Any, Growth]:
    model, data, loss = build(name)
    growth = torchfmri.cost(model, data, loss, sizes=SIZES, rounds=0).growth
    assert growth is not None
    return model, data, loss, growth


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["qwen3-eager", "qwen3-sdpa", "encoder", "gru", "moe"])
@pytest.mark.parametrize("double", [{"batch": 8, "length": 32}, {"batch": 4, "length": 64}])
def test_peak_of_double_the_largest_size(name: str, double: dict[str, int]) -> None:
    model, data, loss, growth = grown(name)
    predicted = growth.predict(**double)
    real = torchfmri.cost(model, data_of_size(data, None, SIZES, double).data, loss, rounds=0)
    assert predicted.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert predicted.saved_bytes == pytest.approx(real.total.saved_bytes, rel=0.05)
    assert predicted.forward_flops == pytest.approx(real.total.forward_flops, rel=0.01)
    assert growth.measured[4, 32] < predicted.peak_bytes


def test_the_quadratic_term_of_attention_is_a_number() -> None:
    model, data, loss = build("qwen3-eager")
    cost = torchfmri.cost(model, data, loss, sizes=SIZES, rounds=0)
    assert cost.growth is not None
    law = cost.growth["model.layers.0.self_attn"].forward_flops
    assert law.coefficients[1, 2] == 4 * 4 * 4  # scores and weighted sum: 4 x heads x head size
    assert cost.growth["lm_head"].forward_flops.coefficients == {
        **dict.fromkeys(law.coefficients, 0.0),
        (1, 1): 2.0 * 16 * 67,
    }
    assert "64·b·s²" in cost.table(width=160)


class Switch(nn.Module):
    """The peak is in the first part where data is short, in the second where it is long."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(2, 2000), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.wide(x).sum() * 0
        scores = (x @ x.mT).exp()
        return self.narrow(x).sum() + scores.sum() * 0 + first


def test_a_peak_that_moves_is_predicted() -> None:
    sizes = {"length": (64, 128, 256)}
    cost = torchfmri.cost(Switch(), torch.randn(1, 64, 2), sizes=sizes, rounds=0)
    growth = cost.growth
    assert growth is not None
    big = torchfmri.cost(Switch(), torch.randn(1, 4096, 2), rounds=0)
    assert growth.predict(length=4096).peak_bytes == pytest.approx(big.peak_bytes, rel=1e-3)
    # The law of the measured peaks alone would be far off.
    points = [Size(b, s) for b, s in growth.measured]
    naive = fit_law(choose_terms(points), points, np.array([*growth.measured.values()], float))
    assert abs(naive(1, 4096) / big.peak_bytes - 1) > 0.05


def test_data_made_by_a_function() -> None:
    asked = []

    def data(batch: int) -> Tensor:
        asked.append(batch)
        return torch.randn(batch, 3, 8, 8)

    cost = torchfmri.cost(nn.Conv2d(3, 4, 3), data, sizes={"batch": (2, 4, 8)}, rounds=0)
    assert cost.growth is not None
    assert asked == [8, 2, 4, 8]
    assert cost.growth.total.forward_flops.coefficients == {(0, 0): 0.0, (1, 0): 2.0 * 36 * 108}
    assert cost.total.forward_flops == 8 * 2 * 36 * 108
    assert cost.growth.predict(batch=16).forward_flops == 16 * 2 * 36 * 108


def test_targets_are_resized_too() -> None:
    cost = torchfmri.cost(
        nn.Linear(4, 3),
        torch.randn(5, 4),
        nn.CrossEntropyLoss(),
        target=torch.tensor([0, 1, 2, 0, 1]),
        sizes={"batch": (2, 4, 16)},
        rounds=0,
    )
    assert cost.growth is not None
    assert cost.growth.predict(batch=100).forward_flops == 2 * 100 * 12


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bach": (1, 2)}, "write sizes="),
        ({}, "write sizes="),
        ({"batch": (2,)}, "two sizes or more"),
        ({"batch": (0, 2)}, "positive"),
        ({"length": (2, 4, 8)}, "has no length"),
    ],
)
def test_bad_sizes(sizes: Any, message: str) -> None:
    if not sizes:
        sizes = {"": ()}
    with pytest.raises(InspectionError, match=message):
        torchfmri.cost(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), sizes=sizes, rounds=0)


def test_two_lengths_are_said_to_be_few() -> None:
    layer, data, loss = build("encoder")
    sizes = {"length": (8, 16)}
    growth = torchfmri.cost(layer, data, loss, sizes=sizes, rounds=0).growth
    assert growth is not None
    assert any("quadratic" in note for note in growth.notes)
    assert growth.check is None


def test_result_reads_as_table_page_and_json() -> None:
    layer, data, loss = build("encoder")
    cost = torchfmri.cost(layer, data, loss, sizes=SIZES, rounds=0)
    growth = cost.growth
    assert growth is not None
    assert "64·b·s²" in repr(growth)
    assert "64·b·s²" in growth._repr_html_()
    assert growth._repr_html_() in cost._repr_html_()
    loaded = json.loads(json.dumps(growth.to_dict()))
    assert loaded["layers"]["self_attn"]["forward_flops"]["terms"]["b*s^2"] == 64
    assert str(growth.predict(batch=2, length=64)).startswith("batch 2, length 64: peak ")
    with pytest.raises(InspectionError, match="is not a layer with FLOPs"):
        growth["self_atn"]
    with pytest.raises(InspectionError, match="give a whole number from 1"):
        growth.predict(batch=0)


@pytest.mark.parametrize(("given", "other"), [("length", "batch"), ("batch", "length")])
def test_an_axis_of_one_size_has_no_law(given: str, other: str) -> None:
    layer, data, loss = build("encoder")
    growth = torchfmri.cost(layer, data, loss, sizes={given: (2, 4, 8)}, rounds=0).growth
    assert growth is not None
    ((own,),) = [{size[("batch", "length").index(other)] for size in growth.measured}]
    whole = growth.predict(**{given: 16})
    assert growth.predict(**{given: 16, other: own}) == whole
    for size in (own + 1, 2 * own):
        with pytest.raises(InspectionError, match=f"{other}={size} .*{other} {own} alone was"):
            growth.predict(**{given: 16, other: size})


Pair = namedtuple("Pair", ["ids", "mask"])


@dataclass
class Bundle:
    ids: Tensor


def test_named_tuples_are_brought_to_a_size() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    made = data_of_size(Pair(ids, [ids]), ids[:, 0], SIZES, {"batch": 4, "length": 16})
    assert type(made.data) is Pair
    assert made.data.ids.shape == made.data.mask[0].shape == (4, 16)
    assert made.target.shape == (4,)


def test_data_of_another_class_has_one_size() -> None:
    with pytest.raises(InspectionError, match="A Bundle cannot be brought to another size"):
        data_of_size(Bundle(torch.zeros(2, 8, dtype=torch.long)), None, SIZES, {"batch": 4})
