"""Seconds go to the layer that spent them: with a clock that only the layers themselves move."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchfmri
from torchfmri._cost import layer_times

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    """Stands still unless somebody moves it."""

    def __init__(self, cost_of_mark: float = 0.0) -> None:
        self.now, self.cost_of_mark = 0.0, cost_of_mark

    def mark(self) -> float:
        self.now += self.cost_of_mark
        return self.now

    def lengths(self, marks: list[Any]) -> list[float]:
        return [later - earlier for earlier, later in pairwise(marks)]


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        clock.now += forward
        ctx.clock, ctx.backward_seconds = clock, backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.clock.now += ctx.backward_seconds
        return gradient, None, None, None


class Slow(nn.Module):
    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(x * self.weight, self.clock, *self.seconds)


class Outer(nn.Module):
    def __init__(self, clock: Clock, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.inner = Slow(clock, 2, 5)
        self.clock, self.checkpointed = clock, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is not None:
            return checkpoint(self.inner, x, use_reentrant=self.checkpointed)
        return Spend.apply(self.inner(x), self.clock, 1.0, 3.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(layer_times, "make_clock", lambda device: clock)
    return clock


def test_own_time_and_time_with_what_is_inside(clock: Clock) -> None:
    model = nn.Sequential(Slow(clock, 4, 8), Outer(clock))
    cost = torchfmri.cost(model, torch.randn(3), loss="sum", rounds=2)
    assert (cost["0"].forward_seconds, cost["0"].backward_seconds) == (4, 8)
    assert (cost["1"].forward_seconds, cost["1"].backward_seconds) == (3, 8)
    own = cost["1"].own
    assert own is not None
    assert (own.forward_seconds, own.backward_seconds) == (1, 3)
    assert (cost["1.inner"].forward_seconds, cost["1.inner"].backward_seconds) == (2, 5)
    assert cost.plain_seconds == cost.total.seconds == 23


@pytest.mark.parametrize("reentrant", [True, False])
def test_time_of_a_replay_is_backward_time(clock: Clock, reentrant: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    cost = torchfmri.cost(Outer(clock, reentrant), x, loss="sum", rounds=1)
    assert cost["inner"].forward_seconds == 2
    # Only what a reentrant checkpoint replays runs to the end; the other stops once it has all
    # tensors, here at the last operation.
    assert cost["inner"].backward_seconds in (5, 7)
    assert cost.total.seconds == cost.plain_seconds


def test_the_loss_is_apart(clock: Clock) -> None:
    def loss(output: Tensor) -> Tensor:
        return Spend.apply(output, clock, 6.0, 7.0).sum()

    cost = torchfmri.cost(Slow(clock, 1, 1), torch.randn(3), loss=loss, rounds=1)
    assert (cost["(loss)"].forward_seconds, cost["(loss)"].backward_seconds) == (6, 7)
    assert cost[""].seconds == 2


def test_what_marks_cost_is_taken_off(clock: Clock) -> None:
    clock.cost_of_mark = 0.5
    model = nn.Sequential(Slow(clock, 40, 80), Slow(clock, 20, 40))
    cost = torchfmri.cost(model, torch.randn(3), loss="sum", rounds=2)
    # Of the plain pass only the two marks at its ends are left in.
    assert cost.plain_seconds == pytest.approx(180, abs=2.1)
    assert cost.total.seconds == pytest.approx(cost.plain_seconds)
    assert cost["0"].forward_seconds == pytest.approx(40, abs=0.6)
    assert cost["1"].backward_seconds == pytest.approx(40, abs=1.1)


def test_no_rounds_no_time() -> None:
    cost = torchfmri.cost(nn.Linear(3, 2), torch.randn(4, 3), rounds=0)
    assert cost.plain_seconds != cost.plain_seconds
    assert cost.total.forward_seconds != cost.total.forward_seconds
    assert "forward" not in cost.table().splitlines()[2].replace("FLOPs fwd", "")
