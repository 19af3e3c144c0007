"""One computation laid out otherwise: other axes, other nesting, padding counted as positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_origins import Turned
from torch import Tensor, nn

from benchmarks._compare_models import batch, build, padded
from torchfmri import Comparison, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = {"input_ids": torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(0))}


def names(found: Comparison) -> list[str]:
    assert found.first is not None
    return [kind.name for kind in found.first.kinds]


class Positions(nn.Module):
    """Adds positions, looked up as (s, w) or as (1, s, w)."""

    def __init__(self, *, leading: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.inner, self.head, self.leading = nn.Linear(16, 16), nn.Linear(16, 20), leading

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        x = self.words(input_ids) + self.places(places[None] if self.leading else places)
        return self.head(self.inner(x).tanh())


@pytest.mark.parametrize("turned", [False, True])
def test_an_axis_of_length_1_in_front_is_no_difference_and_hides_none(turned: bool) -> None:
    a, b = Positions(leading=not turned), Positions(leading=turned)
    found = compare(a, b, data=IDS, loss=lambda y: y.square().mean())
    assert found.agree, str(found)
    (pair,) = (p for p in found.pairs if (p.direction, p.place.layer) == ("backward", "places"))
    assert pair.worst < 1e-5
    with torch.no_grad():
        b.inner.weight[0] *= 1.01
    first = compare(a, b, data=IDS).first
    assert first is not None
    assert first.layer == "inner"
    with torch.no_grad():
        b.places.weight[5] *= 1.01
    first = compare(a, b, data=IDS).first
    assert first is not None
    assert (first.layer, first.token) == ("places", 5)


class Pointwise(nn.Module):
    """Two layers on each token, as Linear (b, s, w) or as convolutions (b, w, s)."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.first = nn.Linear(8, 16), nn.Linear(16, 8), first
        if first:
            self.one, self.two = (_convolution(each) for each in (self.one, self.two))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT if self.first else x
        y = self.two(self.one(x).relu())
        return y.mT if self.first else y


def _convolution(linear: nn.Linear) -> Any:
    found = nn.Conv1d(linear.in_features, linear.out_features, 1)
    with torch.no_grad():
        found.weight.copy_(linear.weight[..., None])
        found.bias.copy_(linear.bias)
    return found


def test_channels_first_and_last_agree_and_hide_no_mistake() -> None:
    data = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    a, b = Pointwise(first=False), Pointwise(first=True)
    found = compare(a, b, data=data, loss="sum")
    assert found.agree, str(found)
    assert {pair.place.layer for pair in found.pairs} == {"", "one", "two"}
    changes = [change.text for change in found.changes]
    assert changes == ["first is False in a and True in b"], "the weights hold the same numbers"
    with torch.no_grad():
        b.two.bias[2] += 0.1
    found = compare(a, b, data=data, loss="sum")
    assert found.first is not None
    assert found.first.layer == "two"
    assert "parameter" in names(found)


class Attending(nn.Module):
    """A mixing of tokens between two layers, with time or the batch as the first axis inside."""

    def __init__(self, *, time_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.before = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.after, self.head, self.time_first = nn.Linear(16, 16), nn.Linear(16, 20), time_first

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(self.words(input_ids.T if self.time_first else input_ids)).tanh()
        x = x.cumsum(0 if self.time_first else 1)
        y: Tensor = self.head(self.after(x).tanh())
        return y.transpose(0, 1) if self.time_first else y


@pytest.mark.parametrize("rows", [8, 3], ids=["as many rows as positions", "fewer rows"])
@pytest.mark.parametrize("swapped", [False, True])
def test_time_may_come_before_the_batch(rows: int, swapped: bool) -> None:
    ids = torch.randint(0, 20, (rows, 8), generator=torch.Generator().manual_seed(2))
    a, b = Attending(time_first=swapped), Attending(time_first=not swapped)
    assert torch.equal(a(ids), b(ids))

    def compared() -> Comparison:
        found: Comparison = compare(a, b, data={"input_ids": ids}, loss=lambda y: y.square().mean())
        return found

    found = compared()
    assert found.agree, str(found)
    assert {"words", "before", "after", "head", ""} <= {pair.place.layer for pair in found.pairs}
    b.after.register_forward_hook(_louder_from_5_on(first_axis=not swapped))
    first = compared().first
    assert first is not None
    assert first.layer == "after"
    if rows == 8 or not swapped:  # else a has no rows of tokens there
        assert (first.row, first.token) == (0, 5)
        assert "factor" in [kind.name for kind in first.kinds], first
    assert "relative difference" in first.reason, "a layout is not the reason"


def _louder_from_5_on(*, first_axis: bool) -> Any:
    def louder(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        late = torch.arange(8) >= 5
        shape = (8, 1, 1) if first_axis else (1, 8, 1)
        return torch.where(late.view(shape), 1.5 * output, output)

    return louder


def test_an_output_whose_axes_were_swapped_by_mistake_is_a_difference() -> None:
    ids = torch.randint(0, 20, (8, 8), generator=torch.Generator().manual_seed(2))
    a, b = Attending(time_first=False), Attending(time_first=False)
    b.register_forward_hook(lambda _, __, output: output.transpose(0, 1))
    assert not compare(a, b, data={"input_ids": ids}).agree


def test_names_that_mean_other_layers_give_way_to_weights() -> None:
    torch.manual_seed(0)
    flat = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    one, act, two, _, three = copy.deepcopy(flat)
    nested = nn.Sequential(nn.Sequential(one, act), nn.Sequential(two, nn.ReLU()), three)
    x = torch.randn(7, 6)
    found = compare(flat, nested, data=x, loss="sum")
    assert found.agree, str(found)
    assert {pair.place.layer for pair in found.pairs} == {"", "0", "1", "2", "3", "4"}
    assert any("by their weights" in note for note in found.notes), "the doubt is said"
    with torch.no_grad():
        two.weight[0, 0] += 0.01
    first = compare(flat, nested, data=x, loss="sum").first
    assert first is not None
    assert (first.layer, first.partner) == ("2", "1.0")
    # A layer of another width alone is a difference, and keeps its partner.
    wider = nn.Sequential(*copy.deepcopy(flat)[:4], nn.Linear(8, 3))
    first = compare(flat, wider, data=x).first
    assert first is not None
    assert (first.layer, first.partner) == ("4", "4")


def test_how_a_class_keeps_its_weights_is_no_mistake_and_an_exception_is_one() -> None:
    def both() -> tuple[nn.Sequential, nn.Sequential]:
        torch.manual_seed(0)
        a = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        return a, nn.Sequential(*(Turned(each) for each in a))  # type: ignore[arg-type]

    x = torch.randn(5, 12)
    a, b = both()
    with torch.no_grad():
        b[2].bias.zero_()
    found = compare(a, b, data=x)
    assert found.first is not None
    assert found.first.layer == "2"
    assert names(found)[0] == "missing_parameter"
    assert "transposed" not in names(found)
    assert [change.name for change in found.changes] == ["missing_parameter"]
    a, b = both()
    with torch.no_grad():
        b[1].weight.copy_(b[1].weight.T.clone())
    found = compare(a, b, data=x)
    assert found.first is not None
    assert found.first.layer == "1"
    assert "transposed" in names(found)


def test_layers_that_run_in_another_order_are_named() -> None:
    class Ordered(nn.Module):
        def __init__(self, order: tuple[str, ...]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.order = nn.Linear(6, 6), nn.Linear(6, 6), order

        def forward(self, x: Tensor) -> Tensor:
            for name in self.order:
                x = self.get_submodule(name)(x).tanh()
            return x

    found = compare(Ordered(("one", "two")), Ordered(("two", "one")), data=torch.randn(4, 6))
    assert found.first is not None
    assert found.first.layer == ""
    (kind,) = (kind for kind in found.first.kinds if kind.name == "order")
    assert kind.text == "'one' runs before 'two' in a, and after it in b"


@pytest.mark.parametrize(("name", "agree"), [("llama", True), ("gpt2", False)])
def test_padding_that_counts_as_positions_matters_where_positions_do(
    name: str, agree: bool
) -> None:
    """Rotations tell distances alone; a table of positions tells where a token stands."""
    sides = [padded(batch(name, None)["input_ids"], side) for side in ("right", "left")]
    for each in sides:
        each["labels"] = each["labels"].masked_fill(each.pop("position_ids") == 0, -100)
    right, left = (Run(build(name), each) for each in sides)
    found = compare(right, left)
    assert found.agree == agree, str(found)
    if agree:
        assert any("'model.rotary_emb' cannot be compared" in note for note in found.notes)
        assert "without position_ids" in found.summary()
    else:
        assert found.first is not None
        assert found.first.layer == "transformer.wpe"
        assert "data" in names(found)


def numbered(*layers: Any) -> nn.Sequential:
    torch.manual_seed(0)
    weights = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)]
    made = [weights[each] if isinstance(each, int) else each() for each in layers]
    return nn.Sequential(*made).eval()


def test_numbers_in_a_sequential_are_places_and_no_names() -> None:
    """One layer more moves all that follow, and half of the names still fit."""
    short = numbered(0, nn.ReLU, 1, nn.ReLU, 2)
    long = numbered(0, nn.ReLU, nn.Dropout, 1, nn.ReLU, nn.Dropout, 2)
    x = torch.randn(7, 6)
    found = compare(short, long, data=x, loss="sum")
    assert found.agree, str(found)
    assert any("in the order of their list" in note for note in found.notes), "the doubt is said"
    assert found.only_b == ("2", "5")
    with torch.no_grad():
        long[3].bias.add_(0.1)
    first = compare(short, long, data=x).first
    assert first is not None
    assert (first.layer, first.partner) == ("2", "3")


def test_a_difference_that_is_undone_later_says_so() -> None:
    """As where BatchNorm was folded into a convolution: another layer, the same model."""
    a, b = numbered(0, nn.ReLU, 1, nn.ReLU, 2), numbered(0, nn.ReLU, 1, nn.ReLU, 2)
    with torch.no_grad():
        b[0].weight.mul_(2)
        b[0].bias.mul_(2)
        b[2].weight.div_(2)
    first = compare(a, b, data=torch.randn(7, 6)).first
    assert first is not None
    assert first.layer == "0"
    assert "From the output of '2' on the two agree again" in first.reason
    with torch.no_grad():
        b[4].bias.add_(1)
    first = compare(a, b, data=torch.randn(7, 6)).first
    assert first is not None
    assert "agree again" not in first.reason
