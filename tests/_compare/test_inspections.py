"""Two inspections: the first layer where they part, and by how much."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Difference, InspectionError, Inspector, compare


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def inspect(each: nn.Module, keep: str = "tensors", x: Tensor | None = None) -> Any:
    inspector = Inspector(each, keep=keep)
    inspector.watch("*", ["inputs", "activations", "gradients", "input_gradients"])
    parameter = next(each.parameters())
    x = torch.linspace(-1, 1, 12).reshape(3, 4) if x is None else x
    return inspector.run_inspection(x.to(parameter.dtype), loss="sum")


def first_difference(
    a: Any, b: Any, what: str = "activations", **options: Any
) -> Difference | None:
    """The first difference in one direction; statistics of inputs are not compared."""
    direction = {"activations": "forward", "gradients": "backward"}[what]
    return compare(a, b, **options).differences.get(direction)


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_equal_runs_do_not_part(keep: str) -> None:
    for what in ("activations", "gradients"):
        assert first_difference(inspect(model(), keep), inspect(model(), keep), what) is None
    assert first_difference(inspect(model()), inspect(model()), tolerance=0) is None


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_first_layer_that_parts_is_named(keep: str) -> None:
    port = model()
    with torch.no_grad():
        port[2].weight[0, 0] += 1
    found = first_difference(inspect(model(), keep), inspect(port, keep))
    assert found is not None
    assert (found.layer, found.call, found.what, found.element) == ("2", 0, "activations", "")
    assert found.compared == 2
    assert found.relative > found.threshold
    assert "'2'" in str(found)


def test_how_much_is_what_was_put_in() -> None:
    one, two = model().double(), model().double()
    with torch.no_grad():
        two[0].bias[3] += 0.5
    found = first_difference(inspect(one), inspect(two))
    assert found.layer == "0"
    assert found.largest == pytest.approx(0.5, rel=1e-12)
    output = one[0](torch.linspace(-1, 1, 12).reshape(3, 4).double())
    other = output.clone()
    other[:, 3] += 0.5
    sizes = torch.maximum(output.norm(dim=1), other.norm(dim=1))
    sizes = torch.maximum(sizes, 0.1 * sizes.median())
    assert found.relative == pytest.approx(0.5 / sizes[0].item(), rel=1e-9), "of the first row"


def test_gradients_part_in_backward_order() -> None:
    port = model()
    with torch.no_grad():
        port[4].weight[0, 0] += 1
    found = first_difference(inspect(model()), inspect(port), "gradients")
    assert found.layer == "3"  # the gradient at the output of 4 is all ones in both


def test_precision_is_allowed_for() -> None:
    reference = inspect(model())
    assert first_difference(reference, inspect(model().bfloat16())) is None
    assert first_difference(reference, inspect(model().double())) is None
    found = first_difference(reference, inspect(model().bfloat16()), tolerance=1e-6)
    assert found.layer == "0"
    assert 1e-4 < found.relative < 5e-2
    assert found.threshold == 1e-6


def test_statistics_against_tensors() -> None:
    assert first_difference(inspect(model(), "statistics"), inspect(model(), "tensors")) is None
    other = model()
    with torch.no_grad():
        other[2].bias += 3
    found = first_difference(inspect(model(), "statistics"), inspect(other, "tensors"))
    assert found.layer == "2"
    assert math.isnan(found.largest)
    assert "statistics only" in found.reason


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_not_a_number_in_one_run_only(keep: str) -> None:
    bad = model()
    with torch.no_grad():
        bad[2].weight[0, 0] = float("nan")
    for pair in ((model(), bad), (bad, model())):
        found = first_difference(*(inspect(each, keep) for each in pair))
        assert found.layer == "2"
        assert found.relative == math.inf
    twin = copy.deepcopy(bad)
    assert first_difference(inspect(bad, keep), inspect(twin, keep)) is None, "NaN in both"


def test_shapes_that_differ() -> None:
    wide = model()
    wide[2], wide[4] = nn.Linear(6, 7), nn.Linear(7, 2)
    found = first_difference(inspect(model()), inspect(wide))
    assert found.layer == "2"
    assert "(3, 6)" in found.reason
    assert "(3, 7)" in found.reason


def test_zero_against_something() -> None:
    zero, other = model(), model()
    with torch.no_grad():
        zero[0].weight.zero_()
        zero[0].bias.zero_()
    found = first_difference(inspect(zero), inspect(other))
    assert found.layer == "0"
    assert found.relative == 1.0


def test_names_that_differ() -> None:
    class Port(nn.Module):
        def __init__(self, each: nn.Sequential) -> None:
            super().__init__()
            self.first, self.second, self.third = each[0], each[2], each[4]

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x).tanh()).tanh())

    port = Port(model())
    names = {"0": "first", "2": "second", "4": "third"}
    assert first_difference(inspect(model()), inspect(port), names=names) is None
    with torch.no_grad():
        port.second.bias += 1
    assert first_difference(inspect(model()), inspect(port), names=names).layer == "2"
    guessed = compare(inspect(model()), inspect(port))
    assert any("order and shape alone" in note for note in guessed.notes), "the doubt is stated"


def test_execution_order_counts_not_model_order() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    one, two = Backwards(), Backwards()
    with torch.no_grad():
        two.first.bias += 1
    assert first_difference(inspect(one), inspect(two)).layer == "first"


def test_later_call_of_a_shared_layer() -> None:
    class Shared(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.shift = nn.Linear(4, 4), shift

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x) + self.shift)

    found = first_difference(inspect(Shared(0)), inspect(Shared(1)))
    assert (found.layer, found.call) == ("layer", 1)
    assert "call 1" in str(found)


def test_element_of_a_tuple() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.pair(self.layer(x)).values())

    class Pair(nn.Module):
        factor = 2.0

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"same": x * 1, "other": x * self.factor}

    one, two = Two(), Two()
    two.pair.factor = 3.0
    found = first_difference(inspect(one), inspect(two))
    assert (found.layer, found.element) == ("pair", "other")


def test_a_layer_that_one_run_calls_more_often_is_a_difference() -> None:
    """Equal as far as both go, but they part."""

    class Loop(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.times = nn.Linear(4, 4), times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = self.layer(x)
            return x

    for times in ((2, 3), (3, 2)):
        found = first_difference(*(inspect(Loop(each)) for each in times))
        assert found is not None
        assert (found.layer, found.call) == ("layer", 2)


class Keyed(nn.Module):
    """The gradient of the bias of its keys is zero but for rounding."""

    def __init__(self, turned: bool, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.turned, self.factor = turned, factor

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.k(x), self.v(x)
        if self.turned:  # the same sum, added up in another order
            keys, values = keys.flip(0), values.flip(0)
        found: Tensor = (self.q(x) @ keys.T).softmax(-1) @ values * self.factor
        return found.square()


@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_a_gradient_that_is_nothing_but_rounding_is_no_difference(tolerance: float | None) -> None:
    def recorded(*given: Any) -> Any:
        inspector = Inspector(Keyed(*given), keep="tensors")
        inspector.watch("*", ["activations", "gradients", "parameter_gradients"])
        return inspector.run_inspection(torch.linspace(-1, 1, 24).reshape(6, 4), loss="sum")

    one, two = recorded(False), recorded(True)
    biases = [each["k"].parameter_gradients["bias"] for each in (one, two)]
    assert not torch.equal(*biases), "rounding made them differ"
    assert compare(one, two, tolerance=tolerance).agree
    assert not compare(one, two, tolerance=0).agree
    assert "parameters" in compare(one, recorded(False, 1.01), tolerance=tolerance).differences


def test_gradient_present_in_one_run_only() -> None:
    frozen = model()
    frozen[0].requires_grad_(False)
    found = first_difference(inspect(model()), inspect(frozen), "gradients")
    assert found.layer == "1"  # the last, going back, that has a gradient in one of them
    assert "in a only" in found.reason


def test_watched_in_one_run_only_is_an_error_not_a_difference() -> None:
    """Nothing is known about the layers of b: that is not where two runs part."""
    inspector = Inspector(model())
    inspector.watch("*", "inputs")
    other = inspector.run_inspection(torch.linspace(-1, 1, 12).reshape(3, 4))
    with pytest.raises(InspectionError, match=r"no layer in common|nothing to compare"):
        compare(inspect(model()), other)


def test_several_recordings_of_one_run_are_its_noise() -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    near, far = inspect(model(), x=x + 1e-3), inspect(model(), x=x + 1e-1)
    assert not compare(inspect(model(), x=x), near, tolerance=None).agree
    assert compare([inspect(model(), x=x), near], near).agree, "it was seen to differ by that"
    assert not compare([inspect(model(), x=x), near], far).agree
