"""Statistics of every unit of a layer apart: one number per channel or feature.

`statistics.calculate_channel_statistics` calls `reduce_channels`; `ChannelStatistics` is public.
`CHANNEL_KEYS` are its keys as a mapping and `__eq__` compares them, so each is an attribute too.
`_reduce_rows` fills the fields of `ChannelStatistics` by position: the order of its two stacks is
that of the fields. `CHUNK` may be changed freely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels.histogram import Floats, Integers
from torchfmri.exceptions import InspectionError

CHANNEL_KEYS = (
    *("count", "mean", "std", "variance", "min", "max", "abs_max", "l2", "nan", "inf", "pos_inf"),
    *("neg_inf", "zero"),
)
CHUNK = 1 << 18
"""Values that are converted to float64 at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class ChannelStatistics(Mapping[str, Any]):
    """Statistics of each unit along one axis, as arrays of one value per unit; adds with `+`.

    A mapping with the keys count, mean, std, variance, min, max, abs_max, l2, nan, inf, pos_inf,
    neg_inf and zero; each is an attribute as well. Moments and extremes use finite values only;
    they are nan for a unit without any (`l2` is 0).

    Attributes:
        axis: The dimension whose entries are the units.
        count: All values of each unit, also those that are not finite.
        mean: Mean in float64.
        squared_deviations: Sum of squared differences from the mean.
        min: The smallest value.
        max: The largest value.
        nan: How many are NaN.
        pos_inf: How many are +infinity.
        neg_inf: How many are -infinity.
        zero: How many are zero.
        positions: (positions counted, positions seen) where a mask was applied, else None.

    Examples:
        >>> from torchfmri.statistics import calculate_channel_statistics
        >>> images = torch.arange(8.0).reshape(1, 2, 2, 2)
        >>> calculate_channel_statistics(images, axis=1)["mean"].tolist()
        [1.5, 5.5]
    """

    axis: int
    count: Integers
    mean: Floats
    squared_deviations: Floats
    min: Floats
    max: Floats
    nan: Integers
    pos_inf: Integers
    neg_inf: Integers
    zero: Integers
    positions: tuple[int, int] | None = None

    @property
    def inf(self) -> Integers:
        """How many values of each unit are infinite."""
        return self.pos_inf + self.neg_inf

    @property
    def finite(self) -> Integers:
        """How many values of each unit are finite."""
        return self.count - self.nan - self.inf

    @property
    def std(self) -> Floats:
        """Standard deviation of each unit (population)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sqrt(self.squared_deviations / self.finite)

    @property
    def variance(self) -> Floats:
        """Variance of each unit: the square of `std`."""
        return self.std**2

    @property
    def abs_max(self) -> Floats:
        """The largest absolute value of each unit."""
        return np.maximum(np.abs(self.min), np.abs(self.max))

    @property
    def l2(self) -> Floats:
        """Square root of the sum of squares of each unit; 0 where it has no finite values."""
        squares = self.squared_deviations + self.finite * self.mean**2
        return np.sqrt(np.where(self.finite > 0, squares, 0.0))

    def merge(self, other: ChannelStatistics) -> ChannelStatistics:
        """The statistics of the values of both, unit by unit; `axis` is this one's.

        The axes are not compared: features last are axis 1 of (b, o) and axis 2 of (b, s, o).

        Raises:
            InspectionError: The two do not have the same number of units.
        """
        if len(self.count) != len(other.count):
            raise InspectionError(
                f"{len(self.count)} units cannot be merged with {len(other.count)} units."
            )
        mine, theirs = self.finite, other.finite
        total = np.maximum(mine + theirs, 1)
        delta = np.where((mine > 0) & (theirs > 0), other.mean - self.mean, 0.0)
        base = np.where(mine > 0, self.mean, other.mean)
        squares = np.where(mine > 0, self.squared_deviations, 0.0)
        squares += np.where(theirs > 0, other.squared_deviations, 0.0)
        squares += delta**2 * (mine * (theirs / total))
        one, two = self.positions, other.positions
        return ChannelStatistics(
            axis=self.axis,
            count=self.count + other.count,
            mean=base + delta * (theirs / total),
            squared_deviations=np.where(mine + theirs > 0, squares, np.nan),
            min=np.fmin(self.min, other.min),
            max=np.fmax(self.max, other.max),
            nan=self.nan + other.nan,
            pos_inf=self.pos_inf + other.pos_inf,
            neg_inf=self.neg_inf + other.neg_inf,
            zero=self.zero + other.zero,
            positions=None if one is None or two is None else (one[0] + two[0], one[1] + two[1]),
        )

    def __add__(self, other: ChannelStatistics) -> ChannelStatistics:
        return self.merge(other) if isinstance(other, ChannelStatistics) else NotImplemented

    def __getitem__(self, key: str) -> Any:
        if key not in CHANNEL_KEYS:
            raise KeyError(f"{key!r} is not a statistic. There are: {', '.join(CHANNEL_KEYS)}.")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(CHANNEL_KEYS)

    def __len__(self) -> int:
        return len(CHANNEL_KEYS)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelStatistics):
            return NotImplemented
        alike = (self.axis, self.positions) == (other.axis, other.positions)
        return alike and all(
            np.array_equal(self[key], other[key], equal_nan=True) for key in CHANNEL_KEYS
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"ChannelStatistics({len(self.count)} units along axis {self.axis}, "
            f"{int(self.count.sum()):,} values)"
        )


def reduce_channels(
    units_last: Tensor, axis: int, positions: tuple[int, int] | None
) -> ChannelStatistics:
    """The statistics of each unit of a detached tensor (..., o)."""
    *leading, units = units_last.shape
    rows = units_last.reshape(math.prod(leading), units)  # -1 is ambiguous without units
    if rows.is_complex():
        rows = rows.abs()
    if rows.is_quantized:
        rows = rows.dequantize()
    step = max(1, CHUNK // max(1, rows.shape[1]))
    result: ChannelStatistics | None = None
    # A tensor without rows splits into one empty part, so there is always a result.
    for part in torch.split(rows, step):
        found = _reduce_rows(part, axis)
        result = found if result is None else result.merge(found)
    assert result is not None
    return replace(result, positions=positions)


def _reduce_rows(rows: Tensor, axis: int) -> ChannelStatistics:
    """The statistics of the columns of (n, o), in float64."""
    narrow = rows.is_floating_point() and rows.dtype.itemsize == 1
    values = (rows.float() if narrow else rows).double()
    finite = values.isfinite()
    number = finite.sum(0)
    kept = torch.where(finite, values, 0.0)
    mean = kept.sum(0) / number
    squares = torch.where(finite, kept - mean, 0.0).square_().sum(0)
    infinity = torch.full((1, rows.shape[1]), torch.inf, dtype=values.dtype, device=values.device)
    low = torch.cat((torch.where(finite, values, torch.inf), infinity)).amin(0)
    high = torch.cat((torch.where(finite, values, -torch.inf), -infinity)).amax(0)
    some = number > 0
    floats = torch.stack(
        [torch.where(some, found, torch.nan) for found in (mean, squares, low, high)]
    )
    apart = (values.isnan(), values.isposinf(), values.isneginf(), values == 0)
    counts = torch.stack([found.sum(0) for found in apart])
    whole = np.full(rows.shape[1], rows.shape[0], np.int64)
    return ChannelStatistics(axis, whole, *floats.cpu().numpy(), *counts.cpu().numpy())
