"""One set of hooks on a model and its loss module, for all who listen to a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from torchfmri import Monitor
from torchfmri._model.step_calls import CallListener, StepCalls


class Log(CallListener):
    """Writes down what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[str] = []
        self.fails = fails
        self.left_out, self.failed = lambda: self._tell("left out"), self._failed

    def _failed(self, error: Exception) -> None:
        self.told.append(f"failed: {error}")

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if self.fails:
            raise ValueError(what)

    def entered(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self._tell("entered")

    def left(self, keywords: Mapping[str, Any], output: Any) -> None:
        self._tell("left")

    def left_loss(self, arguments: tuple[Any, ...], output: Any) -> None:
        self._tell("left loss")


class Scaler:
    """As much of a GradScaler as is asked."""

    def __init__(self) -> None:
        self._scale = torch.ones(())
        self._per_optimizer_states: dict[int, Any] = {}


@pytest.fixture
def make_calls() -> Iterator[Callable[..., StepCalls]]:
    """Make StepCalls whose models other threads may have again when the test is over."""
    made: list[StepCalls] = []

    def make(model: nn.Module, loss: nn.Module | None = None, scaler: Any = None) -> StepCalls:
        made.append(StepCalls(model, loss, scaler))
        return made[-1]

    yield make
    for each in made:
        each.trained.release()


def hooks_on(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def test_two_listeners_share_the_hooks_which_go_with_the_last(
    make_calls: Callable[..., StepCalls],
) -> None:
    model, loss = nn.Linear(2, 2), nn.MSELoss()
    calls, first, second = make_calls(model, loss), Log(), Log()
    for listener in (first, second, first):
        calls.attach(listener)
    assert (hooks_on(model), hooks_on(loss)) == (2, 1)
    loss(model(torch.ones(1, 2)), torch.ones(1, 2))
    calls.detach(first)
    model(torch.ones(1, 2))
    calls.detach(second)
    calls.detach(second)
    assert (hooks_on(model), hooks_on(loss)) == (0, 0)
    model(torch.ones(1, 2))
    assert first.told == ["entered", "left", "left loss"]
    assert second.told == [*first.told, "entered", "left"]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_guard_brings_no_hooks_of_its_own_to_a_watched_step(guarded: bool) -> None:
    model, loss = nn.Sequential(nn.Linear(2, 2)), nn.MSELoss()
    monitor = Monitor(model, loss=loss, on_nonfinite="skip" if guarded else None)
    with monitor.step():
        assert (hooks_on(model), hooks_on(loss)) == (2, 1)
    assert (hooks_on(model), hooks_on(loss)) == (0, 0)


def test_evaluation_and_our_own_calls_are_not_told(make_calls: Callable[..., StepCalls]) -> None:
    model, loss = nn.Linear(2, 2), nn.MSELoss()
    calls, log = make_calls(model, loss), Log()
    calls.attach(log)
    with torch.no_grad():
        loss(model(torch.ones(1, 2)), torch.ones(1, 2))
    with calls.resting():
        assert not calls.counts()
        loss(model(torch.ones(1, 2)), torch.ones(1, 2))
    assert not log.told
    assert calls.counts()
    loss(model(torch.ones(1, 2)), torch.ones(1, 2))
    assert log.told == ["entered", "left", "left loss"]


def test_what_counts_is_whether_gradients_were_on_where_the_model_was_entered(
    make_calls: Callable[..., StepCalls],
) -> None:
    class Inside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                seen.append(calls.counts())
            with torch.enable_grad():
                seen.append(calls.counts())
            return x

    seen: list[bool] = []
    model = Inside()
    calls = make_calls(model)
    calls.attach(Log())
    model(torch.ones(1))
    with torch.no_grad():
        model(torch.ones(1))
    assert seen == [True, True, False, False]


def test_the_error_of_one_listener_is_its_own(make_calls: Callable[..., StepCalls]) -> None:
    model = nn.Linear(2, 2)
    calls, bad, good = make_calls(model), Log(fails=True), Log()
    calls.attach(bad)
    calls.attach(good)
    model(torch.ones(1, 2))
    assert bad.told == ["entered", "failed: entered", "left", "failed: left"]
    assert good.told == ["entered", "left"]


def test_after_an_error_of_the_model_the_call_is_over(make_calls: Callable[..., StepCalls]) -> None:
    model = nn.Linear(2, 2)
    calls, log = make_calls(model), Log()
    calls.attach(log)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert log.told == ["entered", "left"]
    with torch.no_grad():  # the call above would still count
        assert not calls.counts()


def test_a_scaler_that_went_on_is_told_once_and_before_the_call(
    make_calls: Callable[..., StepCalls],
) -> None:
    model, scaler = nn.Linear(2, 2), Scaler()
    calls, log = make_calls(model, None, scaler), Log()
    calls.attach(log)
    calls.begin()
    model(torch.ones(1, 2))
    assert not calls.scaler_went_on()
    scaler._scale.mul_(0.5)
    assert calls.scaler_went_on()
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert log.told == ["entered", "left", "left out", *["entered", "left"] * 2]
    scaler._scale.mul_(0.5)
    calls.begin()  # the optimizer has stepped
    model(torch.ones(1, 2))
    assert log.told.count("left out") == 1


def test_a_scale_that_cannot_be_read_is_told_to_all(make_calls: Callable[..., StepCalls]) -> None:
    class Broken:
        @property
        def _scale(self) -> object:
            raise KeyError("no scale")

    model = nn.Linear(2, 2)
    calls, logs = make_calls(model, None, Broken()), [Log(), Log()]
    for log in logs:
        calls.attach(log)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert [log.told for log in logs] == [["failed: 'no scale'", "left"]] * 2
