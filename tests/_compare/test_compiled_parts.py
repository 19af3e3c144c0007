"""Compiled blocks of a model: what is inside them is hidden, all else is compared as ever.

The backend of the compiler is Python here, so that nothing is built and a mistake can be planted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Comparison, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")


class Norm(nn.LayerNorm):
    """It takes a mask, so that an Inspector has hooks on it to follow the padding."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = Norm(8), nn.Linear(8, 16), nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 4)).eval()


class Compiler:
    """A backend of torch.compile that runs the graph as it is, times a factor.

    Attributes:
        runs: How often its code ran.
        graphs: How many graphs it was given.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.runs, self.graphs = factor, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return tuple(each * self.factor for each in graph(*arguments))

        return run


def in_place(model: nn.Sequential, compiler: Compiler) -> None:
    model[1].compile(backend=compiler)


def wrapped(model: nn.Sequential, compiler: Compiler) -> None:
    model[1] = torch.compile(model[1], backend=compiler)  # type: ignore[assignment]


def forward_alone(model: nn.Sequential, compiler: Compiler) -> None:
    model[1].forward = torch.compile(model[1].forward, backend=compiler)


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
WAYS = pytest.mark.parametrize("way", [in_place, wrapped, forward_alone])


def compared(a: nn.Module, b: nn.Module) -> Comparison:
    found: Comparison = compare(Run(a, X, loss="sum"), Run(b, X, loss="sum"))
    return found


def state(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(each)) for each in model.modules()]


@WAYS
def test_the_other_layers_are_seen_and_the_block_runs_its_compiled_code(way: Any) -> None:
    torch.compiler.reset()
    a, compiler = model(), Compiler()
    b = copy.deepcopy(a)
    way(b, compiler)
    before = state(b)
    found = compared(a, b)
    assert found.agree, str(found)
    assert compiler.runs, "else it was run eagerly, and nothing was compared"
    assert compiler.graphs == 1, "hooks of ours would be compiled as graphs of their own"
    seen = {pair.place.layer for pair in found.pairs if pair.direction == "forward"}
    assert {"0.down", "1", "2.norm", "2", "3", ""} <= seen
    assert not {"1.norm", "1.up"} & seen
    gradients = {pair.place.layer for pair in found.pairs if pair.direction == "parameters"}
    assert {"1.norm", "1.up", "1.down"} <= gradients
    assert any("compiled code shows no layers: of '1'" in note for note in found.notes)
    for ours, theirs in zip(before, state(b), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(theirs[name] is each for name, each in ours.items()), "the model is as it was"


@WAYS
def test_a_mistake_of_the_compiler_is_named_at_its_block(way: Any) -> None:
    torch.compiler.reset()
    a = model()
    b = copy.deepcopy(a)
    way(b, Compiler(1.01))
    for found in (compared(a, b), compared(b, a)):
        assert found.first is not None
        assert (found.first.layer, found.first.direction, found.first.token) == ("1", "forward", 0)
        assert "factor" in [kind.name for kind in found.first.kinds]


@WAYS
@pytest.mark.parametrize(
    ("layer", "named"), [("0.up", "0.up"), ("1.up", "1"), ("2.down", "2.down")]
)
def test_a_mistake_beside_or_inside_a_compiled_block(way: Any, layer: str, named: str) -> None:
    torch.compiler.reset()
    a = model()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.get_parameter(f"{layer}.bias")[3] += 0.1
    way(b, Compiler())
    first = compared(a, b).first
    assert first is not None
    assert (first.layer, first.token) == (named, 0)
    kinds = [kind for kind in first.kinds if kind.name == "parameter"]
    assert kinds, first
    assert kinds[0].text.startswith("bias" if layer == named else "up.bias")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_as_a_whole_is_seen_from_outside(in_place: bool) -> None:
    def compiled(model: nn.Sequential, compiler: Compiler) -> Any:
        if in_place:
            model.compile(backend=compiler)
            return model
        return torch.compile(model, backend=compiler)

    torch.compiler.reset()
    a, compiler = model(), Compiler()
    found = compared(a, compiled(copy.deepcopy(a), compiler))
    assert found.agree, str(found)
    assert compiler.runs
    assert compiler.graphs == 1
    assert {pair.place.layer for pair in found.pairs if pair.direction == "forward"} == {""}
    gradients = {pair.place.layer for pair in found.pairs if pair.direction == "parameters"}
    assert {"0.norm", "1.up", "3"} <= gradients
    torch.compiler.reset()
    first = compared(a, compiled(copy.deepcopy(a), Compiler(1.01))).first
    assert first is not None
    assert (first.layer, first.direction) == ("", "forward")
    torch.compiler.reset()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.get_parameter("1.up.bias")[3] += 0.1
    first = compared(a, compiled(b, Compiler())).first
    assert first is not None
    assert any("bias differs" in kind.text and "1.up" in kind.text for kind in first.kinds)
