"""Ratios to the plain run that hold on a noisy machine.

All contestants run in one process. Every round runs each of them once, in random order, together
with the plain run and a second plain run; a contestant's ratio is taken within the round, so slow
drifts of the machine cancel. The figure is the median over rounds with a 95 % bootstrap interval.
The second plain run (`plain_again`) is the noise floor: a difference smaller than its distance
from 1 means nothing.
"""

import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

PLAIN = "plain"
PLAIN_AGAIN = "plain_again"

Run = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """A median ratio to the plain run, with its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: how often each contestant runs.
        warm_up: untimed runs of each before the first round.
        slow_seconds: a contestant whose run takes longer than this is slow.
        slow_rounds: a slow contestant takes part in the first so many rounds only.
        seed: of the order within the rounds and of the bootstrap.
        clock: `time.process_time` counts what this process alone computes, on a machine that others
            use; it does not see a GPU, nor what is waited for.
    """

    rounds: int = 40
    warm_up: int = 3
    slow_seconds: float = 2.0
    slow_rounds: int = 5
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter


def measure_ratios(
    plain: Run,
    contestants: Mapping[str, Run],
    effort: Effort = Effort(),  # noqa: B008 - frozen
    on_error: Callable[[str, Exception], None] | None = None,
) -> dict[str, Figure]:
    """Ratios of all contestants to the plain run, interleaved; contains `plain_again` too.

    Args:
        plain: the run everyone is compared with.
        contestants: a run per name. What it returns is dropped after the clock has stopped.
        effort: rounds, warm-up and seed.
        on_error: called with the name and the exception of a contestant that fails while warming
            up; it is then left out. Without it the exception comes through.
    """
    rounds = dict.fromkeys((PLAIN, PLAIN_AGAIN), effort.rounds)
    runs: dict[str, Run] = {PLAIN: plain, PLAIN_AGAIN: plain}
    _warm_up(plain, effort)
    for name, run in contestants.items():
        try:
            slow = _warm_up(run, effort)
        except Exception as error:
            if on_error is None:
                raise
            on_error(name, error)
            continue
        runs[name] = run
        rounds[name] = min(effort.slow_rounds, effort.rounds) if slow else effort.rounds

    seconds = _run_rounds(runs, rounds, effort)
    return {
        name: summarise_ratios(
            # A slow contestant has fewer rounds than the plain run: the first ones.
            [own / base for own, base in zip(seconds[name], seconds[PLAIN], strict=False)],
            effort.seed,
        )
        for name in runs
        if name != PLAIN
    }


def summarise_ratios(ratios: list[float], seed: int = 0, resamples: int = 4000) -> Figure:
    """The median of per-round ratios with its 95 % bootstrap interval."""
    values = numpy.asarray(ratios)
    generator = numpy.random.default_rng(seed)
    picks = generator.integers(len(values), size=(resamples, len(values)))
    low, high = numpy.quantile(numpy.median(values[picks], axis=1), [0.025, 0.975])
    return Figure(statistics.median(ratios), float(low), float(high), len(ratios))


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the figures: processor kind, threads, versions. No names."""
    machine: dict[str, Any] = {
        "processor": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        machine["accelerator"] = torch.cuda.get_device_name()
    return machine


def report(text: str) -> None:
    """Print progress where it does not disturb the result: on stderr."""
    print(text, file=sys.stderr, flush=True)


def _warm_up(run: Run, effort: Effort) -> bool:
    """Run untimed; whether the run is slow. A slow one is run twice at most."""
    slow = False
    for number in range(max(1, effort.warm_up)):
        if slow and number >= 2:
            break
        slow = time_once(run) > effort.slow_seconds
    return slow


def _run_rounds(
    runs: Mapping[str, Run], rounds: Mapping[str, int], effort: Effort
) -> dict[str, list[float]]:
    order = random.Random(effort.seed)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.freeze()  # what lives now is not looked at again, so the collections below are short
    try:
        for number in range(effort.rounds):
            names = [name for name in runs if number < rounds[name]]
            order.shuffle(names)
            for name in names:
                seconds[name].append(time_once(runs[name], effort.clock))
            if (number + 1) % max(1, effort.rounds // 4) == 0:
                report(f"  round {number + 1}/{effort.rounds}")
    finally:
        gc.unfreeze()
    return seconds


def time_once(run: Run, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run. The collector rests meanwhile, and cleans up before the clock starts."""
    gc.collect()
    gc.disable()
    try:
        _synchronize()
        start = clock()
        kept = run()
        _synchronize()
        elapsed = clock() - start
        del kept
    finally:
        gc.enable()
    return elapsed


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
