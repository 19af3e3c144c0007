"""Learning rates of the groups of parameters and over the steps, in numbers and in words.

The files about the optimizer read them. Rates are compared with the nearest other group, not with
the mean: layer-wise decay is a ladder of rates without a wide step. Rates come from the run if
there was one, because a scheduler's first rate may be 0. The advice may be reworded freely; how far
groups may be apart is a cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Floats, Observation, layers_of
from torchfmri._diagnosis.signals import LEAST_STEPS, median, update_ratios

# Advice that several diagnoses give.
SET_RATE = (
    "Set lr; if a scheduler sets it, see that scheduler.step() is called and where its warm-up "
    "begins."
)
TRAIN_LENGTH = "Give the scheduler the number of steps that you train for (steps, not epochs)."
FINER_WEIGHTS = (
    "Keep the weights in float32 (autocast computes in bfloat16 all the same), or raise the "
    "learning rate."
)


@dataclass(frozen=True)
class FarGroup:
    """A group whose learning rate is far from that of every other.

    Attributes:
        rate: Its learning rate.
        nearest: The learning rate of the group that is nearest to it.
        parameters: The names of its parameters.
        layers: The layers that own them.
    """

    rate: float
    nearest: float
    parameters: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def above(self) -> bool:
        """Whether it is larger than the nearest."""
        return self.rate > self.nearest


def far_groups(seen: Observation) -> list[FarGroup]:
    """Return the groups that are far from all others; a ladder of rates has none."""
    rates = np.array([_usual_rate(seen, place) for place in range(len(seen.structure.groups))])
    facts = seen.structure.parameters
    found = []
    for place, group in enumerate(seen.structure.groups):
        others = np.delete(rates, place)
        others = others[others > 0]
        if not len(others) or not math.isfinite(rates[place]) or rates[place] < 0:
            continue
        with np.errstate(divide="ignore"):
            gaps = np.abs(np.log(others) - np.log(rates[place]))
        if not gaps.min() >= math.log(cuts.GROUP_GAP):
            continue
        names = tuple(name for name in group["parameters"] if name in facts)
        layers = layers_of(facts[name] for name in names)
        nearest = float(others[int(gaps.argmin())])
        found.append(FarGroup(float(rates[place]), nearest, names, layers))
    return found


def _usual_rate(seen: Observation, place: int) -> float:
    """Return the largest rate that a group had in the run; without a run, that of its settings."""
    if seen.steps is not None and seen.steps.rates.shape[1] == len(seen.structure.groups):
        column = seen.steps.rates[:, place]
        return float(column.max()) if len(column) else math.nan
    return float(seen.structure.groups[place]["lr"])


def low_groups(seen: Observation) -> list[tuple[FarGroup, float]]:
    """Return the groups far below the others that hardly move, with their update / weight."""
    found = []
    for group in far_groups(seen):
        ratios = update_ratios(seen, group.parameters)
        typical = median(ratios)
        enough = int(np.isfinite(ratios).sum()) >= LEAST_STEPS
        if not group.above and (group.rate == 0 or (enough and typical < cuts.UPDATE_LOW)):
            found.append((group, typical))
    return found


def rate_fell(seen: Observation) -> int | None:
    """Return the place since which the learning rate is a tiny part of its largest; or None.

    That is for a quarter of the steps, and after its largest: a warm-up comes before.
    """
    rates: Floats = np.zeros(0) if seen.steps is None else seen.steps.learning_rate
    if not len(rates) or not np.isfinite(rates).all() or not rates.max() > 0:
        return None
    low = rates < cuts.RATE_LEFT * np.maximum.accumulate(rates)
    if not low[-1]:
        return None
    high = np.flatnonzero(~low)
    first = int(high[-1]) + 1
    return first if len(rates) - first >= max(1, len(rates) // 4) else None


def rate_in_words(seen: Observation) -> str:
    """Return the largest learning rate in brackets; "" if there is none."""
    rates = {group["lr"] for group in seen.structure.groups if math.isfinite(group["lr"])}
    return f" ({max(rates):g})" if rates else ""
