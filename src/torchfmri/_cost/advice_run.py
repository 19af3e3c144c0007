"""`advise`: techniques tried on copies of a model, with what they cost and what they change.

It is public. Everything runs on copies, at most three at once, and inside `unchanged`. Every number
of the result comes from a run; nothing is estimated. A technique that fails becomes an entry of
`failures`, so that one of them does not end the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from operator import lt
from typing import Any

import torch
from torch import nn

from torchfmri._arguments import check_callable, check_number, check_real
from torchfmri._cost.advice import Advice, Option, mark_front
from torchfmri._cost.measured_step import MeasuredStep
from torchfmri._cost.techniques import (
    ACCUMULATION,
    TECHNIQUES,
    Setup,
    Technique,
    has_running_statistics,
)
from torchfmri._cost.trial import Trial, copy_setup, deviation, time_side_by_side
from torchfmri._model import (
    Loss,
    compiled_code_as_eager,
    random_state,
    spared_grad,
    unchanged,
    unwrap,
)
from torchfmri.exceptions import InspectionError

_Chosen = tuple[Technique, ...]
PLAIN = "plain"
_WORTH = 0.98
"""A technique takes part in combinations if it brings time or memory below this share."""


def advise(
    model: nn.Module,
    data: Any,
    loss: Loss = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    *,
    target: Any = None,
    rounds: int = 5,
    combine: int = 6,
    max_deviation: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Try ways to save memory or time on copies of the model, and report their effect.

    It tries activation checkpointing per block, bf16 autocast, SDPA in place of eager attention,
    channels-last, a fused optimizer, gradient accumulation, and combinations of those that helped.
    At most three copies of the model exist at once.

    Args:
        model: Any `nn.Module`; its copies run in its current mode, and it is left as it was.
        data: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        loss: As for `cost`.
        optimizer: The optimizer of the model, or a function that makes one from parameters. Without
            it a step is a forward and backward pass only.
        target: Passed to the loss, and split with the batch.
        rounds: How often each arrangement is timed, in turns with the plain model.
        combine: The largest number of combinations to try.
        max_deviation: Arrangements whose gradients deviate more are left off the front.
        progress: Called with a line of text before each arrangement.

    Raises:
        InspectionError: The loss is not finite or not differentiable, the data is empty, or the
            model, the optimizer or the loss cannot be copied.
    """
    _check_options(rounds, combine, max_deviation, progress)
    step = MeasuredStep(model, data, loss, target)
    with (
        compiled_code_as_eager(),
        unchanged(model),
        spared_grad(model.parameters()),  # a loss may refer to the model itself
        torch.enable_grad(),
    ):
        bench = _Bench(step, optimizer, rounds, progress or (lambda text: None))
        for technique in TECHNIQUES:
            bench.try_one((technique,))
        bench.try_combinations(combine)
    return Advice(
        model=type(unwrap(model)).__name__,
        device=str(step.device),
        options=mark_front(bench.options, max_deviation),
        obstacles=bench.obstacles,
        failures=bench.failures,
        noise=bench.noise,
        randomness=bench.randomness,
        notes=tuple(bench.notes()),
    )


def _check_options(rounds: Any, combine: Any, max_deviation: Any, progress: Any) -> None:
    check_number("rounds", rounds, 1, "give the times that each arrangement is timed, 1 or more")
    check_number("combine", combine, 0, "give the most combinations to try, 0 for none")
    if max_deviation is not None:
        check_real("max_deviation", max_deviation, "a relative deviation, such as 1e-3", 0.0)
    check_callable("progress", progress, "give a function of a line of text")


class _Bench:
    """The plain step, and the arrangements that are compared with it."""

    def __init__(
        self, step: MeasuredStep, optimizer: Any, rounds: int, progress: Callable[[str], None]
    ) -> None:
        self._step, self._optimizer, self._rounds = step, optimizer, rounds
        self._progress = progress
        self._state = random_state()
        self.obstacles: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self._running = False
        self._not_run = 0
        progress(PLAIN)
        self._plain = Trial(self._setup())
        self._loss, self._gradients = self._plain.gradients(self._state)
        if not math.isfinite(self._loss):
            raise InspectionError(
                f"The loss is {self._loss}: deviations of gradients would mean nothing. Find out "
                "where it comes from with Inspector(model).run_inspection(...)."
            )
        self.noise = deviation(self._plain.gradients(self._state)[1], self._gradients)
        self.randomness = deviation(self._plain.gradients(random_state())[1], self._gradients)
        self._average = self._losses_are_averaged()
        self._plain.step()
        self._plain.peak_bytes()  # the first count loads code, which keeps an output alive
        peak = self._plain.peak_bytes()
        seconds, again = time_side_by_side(self._plain, self._plain, rounds)
        plain = Option(
            name=PLAIN,
            techniques=(),
            seconds=seconds,
            spread=seconds * again.spread,
            peak_bytes=peak,
            gradient_deviation=self.noise,
            loss_deviation=0.0,
        )
        self.options = {PLAIN: plain}

    def _setup(self) -> Setup:
        step = self._step
        return copy_setup(step.model, self._optimizer, step.data, step.target, step.loss)

    def _losses_are_averaged(self) -> bool:
        """Return whether a batch's loss is the mean of its parts' losses, or their sum."""
        setup = self._setup()
        try:
            parts = Trial(setup, [ACCUMULATION]).losses()
        except Exception:  # the technique itself will say that it cannot run
            return True
        values = [float(each) for each in parts]
        mean, total = sum(values) / len(values), sum(values)
        return abs(mean - self._loss) <= abs(total - self._loss)

    def try_one(self, techniques: tuple[Technique, ...]) -> None:
        """Measure an arrangement, or note why it cannot be measured."""
        name = " + ".join(each.name for each in techniques)
        setup = self._setup()
        for technique in techniques:
            obstacle = technique.obstacle(setup)
            if obstacle is not None:
                self.obstacles[name] = obstacle
                return
        self._progress(name)
        if any(each.family == "checkpoint" for each in techniques):
            self._running = self._running or has_running_statistics(setup)
        try:
            self.options[name] = self._measure(name, techniques, setup)
        except Exception as error:
            text = " ".join(str(error).split())
            self.failures[name] = f"{type(error).__name__}: {text[:200]}"

    def _measure(self, name: str, techniques: tuple[Technique, ...], setup: Setup) -> Option:
        trial = Trial(setup, techniques, self._average)
        loss, gradients = trial.gradients(self._state)
        apart = deviation(gradients, self._gradients)
        del gradients  # before the peak is measured
        trial.step()
        peak = trial.peak_bytes()
        _, ratio = time_side_by_side(self._plain, trial, self._rounds)
        plain = self.options[PLAIN].seconds
        return Option(
            name=name,
            techniques=tuple(each.name for each in techniques),
            seconds=ratio.median * plain,
            spread=ratio.spread * plain,
            peak_bytes=peak,
            gradient_deviation=apart,
            loss_deviation=abs(loss - self._loss) / max(abs(self._loss), 1e-30),
        )

    def try_combinations(self, limit: int) -> None:
        """Combine techniques that helped; the product of their gains decides which run first."""
        plain = self.options[PLAIN]
        gains: dict[str, tuple[float, float]] = {}
        for technique in TECHNIQUES:
            option = self.options.get(technique.name)
            if option is None:
                continue
            time, memory = option.seconds / plain.seconds, option.peak_bytes / plain.peak_bytes
            if memory < _WORTH or time + option.spread / plain.seconds < _WORTH:
                gains[technique.name] = (time, memory)
        helpful = [technique for technique in TECHNIQUES if technique.name in gains]
        possible = {
            chosen: tuple(math.prod(gains[each.name][k] for each in chosen) for k in (0, 1))
            for size in range(2, len(helpful) + 1)
            for chosen in combinations(helpful, size)
            if len({each.family for each in chosen}) == size
        }
        for chosen in _spread_out(possible, limit):
            self.try_one(chosen)
        self._not_run = max(len(possible) - limit, 0)

    def notes(self) -> list[str]:
        """Return what the reader should know."""
        notes = [f"time: median of {self._rounds} rounds, each turn by turn with the plain step"]
        notes[0] += "; ± is half the range of the middle rounds"
        if self._plain.summed:
            notes.append("no loss was given: the sum of the first output was differentiated")
        if self._optimizer is None:
            notes.append("a step is forward and backward: no optimizer was given")
        if self.randomness:
            notes.append(
                f"the model is random: with other random numbers its gradient is "
                f"{self.randomness:.1e} off; arrangements that draw in another order deviate so"
            )
        if self._running:
            notes.append(
                "checkpointed blocks hold BatchNorm: a replay updates its running statistics twice"
            )
        if self._not_run:
            notes.append(f"{self._not_run} more combinations were not run (combine=...)")
        return notes


def _spread_out(possible: dict[_Chosen, tuple[float, ...]], limit: int) -> list[_Chosen]:
    """Return at most `limit` combinations, from the expected fastest to the expected lightest."""
    best = sorted(
        (
            chosen
            for chosen, gain in possible.items()
            if not any(all(map(lt, other, gain)) for other in possible.values())
        ),
        key=lambda chosen: possible[chosen],
    )
    if len(best) > limit:
        steps = [round(index * (len(best) - 1) / max(limit - 1, 1)) for index in range(limit)]
        return [best[step] for step in steps]
    rest = [chosen for chosen in possible if chosen not in best]
    rest.sort(key=lambda chosen: math.prod(possible[chosen]))
    return [*best, *rest[: limit - len(best)]]
