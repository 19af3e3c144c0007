"""The loss before and after a step, and whether it got worse."""

from __future__ import annotations

import math

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Floats
from torchfmri._diagnosis.signals import median


def loss_around(loss: Floats, place: int) -> tuple[float, float]:
    """The loss before a step, and the typical loss at the end."""
    after = loss[place + 1 :]
    third = max(1, len(after) // 3)
    earlier = loss[max(0, place - 4) : place + 1]
    return median(earlier), median(after[-third:])


def is_worse(before: float, after: float) -> bool:
    """Whether the loss did not fall; also where it was not seen before."""
    if not math.isfinite(before) or not math.isfinite(after):
        return not math.isfinite(before)
    if before <= 0:
        return after > before
    return after > cuts.LOSS_NOT_BETTER.value * before
