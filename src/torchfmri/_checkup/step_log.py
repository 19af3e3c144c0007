"""What happened in each step of a run between backward and the end of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from torchfmri._checkup.gradient_watch import GradientWatch
from torchfmri._checkup.watcher import Watcher
from torchfmri._checkup.weights import noise_scale
from torchfmri._diagnosis import StepFacts


class StepLog:
    """Collects what each step of a run did between backward and its end."""

    def __init__(self) -> None:
        self._numbers: list[tuple[float, float]] = []
        self._flags: list[tuple[bool, bool, bool, bool, bool]] = []
        self._rates: list[Sequence[float]] = []
        self._passes: list[int] = []

    def __len__(self) -> int:
        return len(self._rates)

    def add(self, seen: GradientWatch, rates: Sequence[float], trains: bool | None) -> None:
        """Take in a step: what its gradients did, each group's rate, and the mode it ran in."""
        self._numbers.append((seen.clip, seen.norm))
        self._flags.append((seen.stale, seen.stepped, seen.cleared, seen.early, trains is False))
        self._rates.append(rates)
        if seen.stepped:
            self._passes.append(seen.passes)

    def facts(self, watcher: Watcher, samples: int) -> StepFacts:
        """Return the facts about all steps.

        Args:
            watcher: What was seen of the layers.
            samples: How many samples all batches had.
        """
        gradients = watcher.gradients
        half = {name: small / some for name, (small, some) in gradients.half.items() if some}
        clip, norm = np.array(self._numbers, np.float64).reshape(-1, 2).T
        stale, stepped, cleared, early, evaluated = np.array(self._flags, bool).reshape(-1, 5).T
        groups = max((len(each) for each in self._rates), default=0)
        rates = np.full((len(self), groups), math.nan)
        for row, each in zip(rates, self._rates, strict=True):
            row[: len(each)] = each
        largest = np.array([max(each, default=math.nan) for each in self._rates])
        return StepFacts(
            clip=clip,
            norm=norm,
            stale=stale,
            learning_rate=largest,
            stepped=stepped,
            half_gradients=half,
            flushed=tuple(gradients.flushed) if any(half.values()) or gradients.flushed else (),
            spread=dict(watcher.spread),
            noise_scale=noise_scale(gradients.samples, samples / max(1, len(self))),
            cleared=cleared,
            growth=dict(watcher.growth),
            rates=rates,
            early=early,
            evaluated=evaluated,
            signal=dict(watcher.signal),
            passes=int(np.median(self._passes)) if self._passes else 0,
            idle=watcher.idle_parameters(),
            scaled_clip=gradients.scaled_clip,
        )
