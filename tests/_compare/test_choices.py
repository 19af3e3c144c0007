"""The kind `routing`: tokens that go to other experts by rounding, or by a mistake."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build
from benchmarks._compare_pairs import quiet, uncached_and_cached
from torchfmri import Comparison, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, TIED = 4, (3, 7)
"""At the tokens of `TIED` the first two scores are equal up to rounding."""


class Router(nn.Module):
    """Scores, and the number of the highest one, as routers of transformers return them."""

    def __init__(self, nudge: float = 0.0, bias: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("nudge", torch.tensor([1 + nudge, 1.0, 1.0, 1.0]), persistent=False)
        self.register_buffer("bias", torch.tensor([0.0, 0.0, 0.0, bias]), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x[..., :EXPERTS] * self.nudge
        return scores, (scores + self.bias).topk(1).indices


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8, 8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return torch.einsum("bsi,bsio->bso", x, self.weight[chosen[..., 0]])


class Mixture(nn.Module):
    def __init__(self, nudge: float = 0.0, bias: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = Router(nudge, bias), Experts()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, self.router(x)[1])
        return y


def compared(**changes: float) -> Comparison:
    torch.manual_seed(1)
    x = torch.randn(1, 10, 8)
    x[0, TIED, 0], x[0, TIED, 1] = 5.0, 5.0 + 2.0**-21  # one unit in the last place apart
    found: Comparison = compare(Mixture(), Mixture(**changes), data=x)
    return found


def test_rounding_that_sends_tokens_to_other_experts_is_named() -> None:
    first = compared(nudge=3e-7).first
    assert first is not None
    assert (first.layer, first.token) == ("experts", TIED[0])
    (kind,) = (each for each in first.kinds if each.name == "routing")
    assert kind.text.startswith("rounding sends 2 of 10 tokens to other experts")
    assert "'router'" in kind.text
    assert kind.text in str(first)


def test_a_choice_that_the_scores_do_not_explain_is_not_called_rounding() -> None:
    first = compared(bias=3.0).first
    assert first is not None
    (kind,) = (each for each in first.kinds if each.name == "routing")
    assert "rounding" not in kind.text
    assert kind.text.startswith("'router' chose other whole numbers for ")


def test_scores_that_differ_are_no_routing() -> None:
    first = compared(nudge=0.5).first
    assert first is not None
    assert first.layer == "router"
    assert "routing" not in [kind.name for kind in first.kinds]
    assert compared().agree


@pytest.mark.slow
def test_a_mixture_of_experts_with_and_without_a_cache() -> None:
    with quiet():
        pair = uncached_and_cached("mixtral")
        assert pair is not None
        found = compare(*pair)
    assert found.agree, str(found.first)
    grids = [each.grid for each in found.pairs if each.place.layer.endswith("mlp.gate")]
    assert len(grids) == 6
    assert all(grid is not None for grid in grids), "routers are compared token by token"


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_that_sort_their_rows_otherwise_agree(wrong: bool) -> None:
    """One implementation sorts the rows of its experts by expert, another keeps their order."""
    sides = []
    for implementation in ("grouped_mm", "batched_mm"):
        model = build("mixtral")
        model.set_experts_implementation(implementation)
        sides.append(Run(model, batch("mixtral")))
    if wrong:
        with torch.no_grad():
            sides[1].model.model.layers[1].mlp.experts.gate_up_proj[2] *= 1.1
    found = compare(*sides)
    tables = [p for p in found.pairs if p.place.layer == "model.layers.0.mlp.experts.act_fn"]
    assert tables
    assert not any(pair.differs for pair in tables if pair.direction == "forward")
    assert found.agree != wrong, found.summary()
    if wrong:
        assert found.first is not None
        assert found.first.layer == "model.layers.1.mlp.experts"
