"""By how much weights grow or shrink from one optimizer step to the next, beyond the updates."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis.observation import Floats
from torchfmri._diagnosis.trace import RunTrace

_NOTICED = 1.02
"""Growth beyond an update that is no matter of rounding."""


class WeightGrowth(NamedTuple):
    """(step, parameter) how the weights before an update compare with those before the last one.

    Attributes:
        size: Their norm / the norm at the last step that changed them; nan at the first.
        beyond: The part of that growth, or shrinking, which the updates do not explain; else 1.
        update: The last update / the weights before it.
        unwatched: How many steps since then were not watched, so that their updates are not known.
    """

    size: Floats
    beyond: Floats
    update: Floats
    unwatched: NDArray[np.int64]

    def of(self, columns: NDArray[np.int64]) -> WeightGrowth:
        """Return the growth of some of the parameters alone."""
        return WeightGrowth(
            size=self.size[:, columns],
            beyond=self.beyond[:, columns],
            update=self.update[:, columns],
            unwatched=self.unwatched[:, columns],
        )


def growth_outside(trace: RunTrace) -> WeightGrowth:
    """Compare each parameter with itself, and with the updates in between.

    A norm grows and shrinks by no more than the norm of the update. Of a large parameter the same
    sample is compared each time, so that it does not matter which rows an update concerns. Updates
    of steps that were not watched are taken to be as large as the larger one of those around them.
    """
    shape = trace.weights.shape
    size, beyond, update = np.full(shape, math.nan), np.ones(shape), np.full(shape, math.nan)
    unwatched = np.zeros(shape, np.int64)
    last = np.full(shape[1], math.nan)
    ratio, gap = last.copy(), np.zeros(shape[1], np.int64)
    steps = trace.steps
    with np.errstate(all="ignore"):
        for row, (weights, change) in enumerate(zip(trace.weights, trace.changes, strict=True)):
            gap += steps[row] - steps[row - 1] - 1 if row else 0
            known = weights > 0
            now = np.where(known, change / weights, math.nan)
            size[row] = np.where(known, weights / last, math.nan)
            bound = np.where(gap > 0, np.fmax(ratio, now), ratio)
            most, least = (1 + bound) ** (gap + 1), np.maximum(1 - bound, 0) ** (gap + 1)
            grown, shrunk = size[row] / most, size[row] / least
            beyond[row, grown > _NOTICED] = grown[grown > _NOTICED]
            beyond[row, shrunk < 1 / _NOTICED] = shrunk[shrunk < 1 / _NOTICED]
            update[row], unwatched[row] = ratio, gap
            last, ratio = np.where(known, weights, last), np.where(known, now, ratio)
            gap[known] = 0
    return WeightGrowth(size=size, beyond=beyond, update=update, unwatched=unwatched)
