"""Student's t over prompts: mean, interval, t and p of paired differences."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_STEPS = 200_000


class Paired(NamedTuple):
    """Differences over prompts; NaN where there are fewer than two prompts.

    Attributes:
        mean: (n,)
        low: (n,) the lower end of the interval.
        high: (n,) its upper end.
        t: (n,) Student's t; infinite where all differences are equal.
        p: (n,) its two-sided p, not corrected for how many there are.
    """

    mean: Floats
    low: Floats
    high: Floats
    t: Floats
    p: Floats


def paired(differences: Floats, level: float = 0.95) -> Paired:
    """What differences (prompts, n) tell, column by column."""
    count = len(differences)
    mean = differences.mean(0)
    if count < 2:
        unknown = np.full(mean.shape, np.nan)
        return Paired(mean=mean, low=unknown, high=unknown, t=unknown, p=unknown)
    error = differences.std(0, ddof=1) / np.sqrt(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, 0.0, mean / error)
    reach = quantile(level, count - 1) * error
    inside = probability_inside(np.abs(t), count - 1)
    return Paired(mean=mean, low=mean - reach, high=mean + reach, t=t, p=1.0 - inside)


def probability_inside(t: Any, freedom: int) -> Floats:
    """The probability that Student's t lies between -t and t."""
    angles, inside = _inside(freedom)
    return np.asarray(np.interp(np.arctan(np.asarray(t) / np.sqrt(freedom)), angles, inside))


def quantile(level: float, freedom: int) -> float:
    """The t that Student's t stays below in size with probability `level`."""
    angles, inside = _inside(freedom)
    return float(np.sqrt(freedom) * np.tan(np.interp(level, inside, angles)))


@lru_cache(maxsize=64)
def _inside(freedom: int) -> tuple[Floats, Floats]:
    """With t = sqrt(freedom) tan(a), the density over a is cos(a) ** (freedom - 1)."""
    angles = np.linspace(0.0, np.pi / 2, _STEPS + 1)
    density = np.cos(angles) ** (freedom - 1)
    steps = (density[1:] + density[:-1]) / 2
    total = np.concatenate([[0.0], np.cumsum(steps)])
    return angles, total / total[-1]
