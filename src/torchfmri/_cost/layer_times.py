"""Seconds per layer, forward and backward, without the cost of measuring them.

`cost_run` calls `time_layers`, `trial` takes the clock. Each round runs the step twice: once plain,
once with a mark at every change of layer. The time between two marks belongs to the layer between
them. The marks cost the difference between the fastest marked and the fastest plain round; all
marks share it equally, and it is subtracted. On CUDA a mark is an event in the stream: asking for
the time instead would wait for the device at every layer. Another kind of device needs a clock
beside `HostClock` and `CudaClock`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from torchfmri._capture import PAUSED, Position
from torchfmri._cost.live_memory import Place
from torchfmri._cost.measured_step import MeasuredStep, resting_collector
from torchfmri._model import named_layers


@dataclass(frozen=True)
class LayerTimes:
    """The seconds of each layer, forward and backward.

    Attributes:
        seconds: (phase, layer) -> the layer's own seconds, without the cost of marks.
        plain_seconds: Seconds of the fastest step without marks.
        marked_seconds: Seconds of the fastest step with marks.
        marks: How many marks there were.
        rounds: How many rounds were measured.
    """

    seconds: dict[Place, float]
    plain_seconds: float
    marked_seconds: float
    marks: int
    rounds: int


def time_layers(step: MeasuredStep, rounds: int) -> LayerTimes:
    """Time a step in plain and in marked rounds, and keep the fastest of each.

    Run the step once before: the first run chooses kernels and fills caches.
    """
    plain, best = float("inf"), None
    for _ in range(rounds):
        plain = min(plain, _time_plain(step))
        timeline = _time_marked(step)
        if best is None or timeline.total < best.total:
            best = timeline
    assert best is not None
    return _without_marks(best, plain, rounds)


def _without_marks(timeline: _Timeline, plain: float, rounds: int) -> LayerTimes:
    """Subtract the cost of the marks from every layer, in proportion to its marks.

    >>> timeline = _Timeline([("forward", "a"), ("forward", "b"), ("forward", "a")], [3, 2, 3])
    >>> _without_marks(timeline, plain=5.0, rounds=1).seconds
    {('forward', 'a'): 4.0, ('forward', 'b'): 1.0}
    """
    seconds: dict[Place, float] = {}
    marks = Counter(timeline.places)
    for place, length in zip(timeline.places, timeline.lengths, strict=True):
        seconds[place] = seconds.get(place, 0.0) + length
    each = max(timeline.total - plain, 0.0) / max(len(timeline.places), 1)
    own = {place: max(value - each * marks[place], 0.0) for place, value in seconds.items()}
    return LayerTimes(own, plain, timeline.total, len(timeline.places), rounds)


@dataclass(frozen=True)
class _Timeline:
    """The parts of one step in order, each with its layer and its seconds."""

    places: list[Place]
    lengths: list[float]

    @property
    def total(self) -> float:
        return sum(self.lengths)


def _time_plain(step: MeasuredStep) -> float:
    clock = make_clock(step.device)
    with step.prepared() as one_pass, resting_collector():
        start = clock.mark()
        loss = one_pass.forward()
        middle = clock.mark()
        if loss is None:
            return clock.lengths([start, middle])[0]
        run_backward = one_pass.backward_of(loss)
        again = clock.mark()
        run_backward()
        forward, _, backward = clock.lengths([start, middle, again, clock.mark()])
    return forward + backward


def _time_marked(step: MeasuredStep) -> _Timeline:
    clock = make_clock(step.device)
    marks: list[Any] = []
    places: list[Place] = []

    def moved() -> None:
        places.append((position.phase, position.layer))
        marks.append(clock.mark())

    position = Position(named_layers(step.model), moved)
    with step.prepared() as one_pass, position, resting_collector():
        moved()
        loss = one_pass.forward()
        if loss is not None:
            with position.paused():
                run_backward = one_pass.backward_of(loss)
            with position.backward(loss):
                run_backward()
        marks.append(clock.mark())
    parts = zip(places, clock.lengths(marks), strict=True)
    ours = [(place, length) for place, length in parts if place[0] != PAUSED]
    return _Timeline([place for place, _ in ours], [length for _, length in ours])


class HostClock:
    """A clock that measures time on the processor."""

    def mark(self) -> float:
        """Return a mark of the present moment."""
        return time.perf_counter()

    def lengths(self, marks: list[Any]) -> list[float]:
        """Return the seconds between neighbouring marks."""
        return [later - earlier for earlier, later in pairwise(marks)]


class CudaClock:
    """A clock that measures time on the device; its marks are queued and do not wait."""

    def mark(self) -> torch.cuda.Event:
        """Return a mark of the present moment on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def lengths(self, marks: list[Any]) -> list[float]:
        """Return the seconds between neighbouring marks."""
        torch.cuda.synchronize()
        pairs = pairwise(marks)
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairs]


def make_clock(device: torch.device) -> HostClock | CudaClock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
