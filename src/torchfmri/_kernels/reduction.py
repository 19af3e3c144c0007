"""What a pass over a tensor leaves: sums that add, and nothing derived from them.

All passes return a `Reduction`, and `torchfmri.statistics` makes statistics of it. Parts have to
add up to the whole, so a field that cannot be merged (a median) does not belong here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchfmri._kernels.histogram import Histogram

SMALL_SPREAD, LARGE_VALUE = 2.0**-40, 2.0**50
"""Ranges below the one vanish when squared in float32, sums of squares of the other overflow."""


@dataclass(slots=True)
class Reduction:
    """Counts, extremes and moments of some values; those that are not finite are only counted.

    Attributes:
        count: All values.
        nan: Those that are NaN.
        pos_inf: Those that are +infinity.
        neg_inf: Those that are -infinity.
        zero: Those that are zero, of either sign.
        subnormal: Those that are subnormal in their own dtype.
        mean: Of the finite values; 0 where there are none.
        squared_deviations: Sum of squares of finite values minus their mean.
        low: The smallest finite value (an int for integers), inf where there are none.
        high: The largest, -inf where there are none.
        histogram: Over the bits of the finite values, where asked for.
    """

    count: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zero: int = 0
    subnormal: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    histogram: Histogram | None = None

    @property
    def finite(self) -> int:
        """How many values are finite."""
        return self.count - self.nan - self.pos_inf - self.neg_inf

    def add(self, other: Reduction) -> Reduction:
        """The reduction of both sets of values; a histogram only where both have one."""
        mean, squared_deviations = combine_moments(
            *(self.finite, self.mean, self.squared_deviations),
            *(other.finite, other.mean, other.squared_deviations),
        )
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            histogram = self.histogram.merge(other.histogram)
        return Reduction(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            pos_inf=self.pos_inf + other.pos_inf,
            neg_inf=self.neg_inf + other.neg_inf,
            zero=self.zero + other.zero,
            subnormal=self.subnormal + other.subnormal,
            mean=mean,
            squared_deviations=squared_deviations,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            histogram=histogram,
        )

    def repeat(self, times: int) -> Reduction:
        """The reduction of the same values, each taken `times` times."""
        histogram = self.histogram
        if histogram is not None:
            histogram = Histogram(histogram.codes, histogram.counts * times)
        return replace(
            self,
            count=self.count * times,
            nan=self.nan * times,
            pos_inf=self.pos_inf * times,
            neg_inf=self.neg_inf * times,
            zero=self.zero * times,
            subnormal=self.subnormal * times,
            squared_deviations=self.squared_deviations * times,
            histogram=histogram,
        )


def combine_moments(
    count_a: int, mean_a: float, squares_a: float, count_b: int, mean_b: float, squares_b: float
) -> tuple[float, float]:
    """Mean and sum of squared deviations of two sets together (Chan, Golub, LeVeque 1979)."""
    if not count_a or not count_b:
        return (mean_b, squares_b) if count_b else (mean_a, squares_a)
    share = count_b / (count_a + count_b)
    delta = mean_b - mean_a
    return mean_a + delta * share, squares_a + squares_b + delta * delta * (count_a * share)
