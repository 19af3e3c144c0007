"""Student's t over prompts: mean, interval, t and p of paired differences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast import t_quantile, t_tail

Floats = NDArray[np.float64]


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
    reach = t_quantile((1 + level) / 2, count - 1) * error
    p = t_tail(t, count - 1)
    return Paired(mean=mean, low=mean - reach, high=mean + reach, t=t, p=p)
