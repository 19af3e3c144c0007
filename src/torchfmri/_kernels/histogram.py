"""Two sparse histograms that add exactly: one over the bits of a float, one over a dyadic grid.

The bit histogram needs no range in advance: a bin is the sign, the exponent and the first five
bits of the mantissa of a float32, so it is at most 1/32 of its value wide. Data that sits far from
zero (mean 10 000, std 1) falls into one such bin; the grid, whose width is a power of two, sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchfmri._kernels.frozen_dict import FrozenDict

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MANTISSA_BITS = 5
CODE_SHIFT = 23 - MANTISSA_BITS
NEGATIVE = 1 << (8 + MANTISSA_BITS)
"""The code of -0.0: the sign bit. Codes below it are of positive values."""
CODES = 2 * NEGATIVE
OVERFLOW = 255 << MANTISSA_BITS
"""The code of finite values beyond float32 (and, where they are not left out, of infinity)."""
GRID_BINS = 512
VALUE_ERROR = 2.0**-6


class Pieces(NamedTuple):
    """Intervals in ascending order that each hold `counts` values; a width of 0 is one value."""

    low: Floats
    high: Floats
    counts: Integers


@dataclass(frozen=True, eq=False)
class Histogram(FrozenDict):
    """Counts per float32 bit pattern truncated to sign, exponent and five mantissa bits.

    Only occupied bins are kept. Values are truncated toward zero, so the bin of 1.0 is
    [1, 1.03125) and that of -1.0 is (-1.03125, -1].

    Attributes:
        codes: The upper 14 bits of the float32, ordered by value ascending.
        counts: How many finite values fell into each.

    As a dict, which JSON can hold, it has the two as lists.

    Examples:
        >>> from torchfmri.statistics import Histogram
        >>> histogram = Histogram.from_codes([127 << 5], [3])
        >>> [edge.tolist() for edge in histogram.edges]
        [[1.0], [1.03125]]
    """

    KEYS = ("codes", "counts")

    codes: Integers
    counts: Integers

    def __getitem__(self, key: str) -> list[int]:
        if key not in self.KEYS:
            raise KeyError(key)
        numbers: list[int] = getattr(self, key).tolist()
        return numbers

    @classmethod
    def from_codes(cls, codes: npt.ArrayLike, counts: npt.ArrayLike) -> Histogram:
        """The histogram of these codes, in any order; codes may repeat."""
        ranks, counts = _add_repeated(_rank(np.asarray(codes, np.int64)), counts)
        return cls(_code(ranks), counts)

    @classmethod
    def from_table(cls, table: Integers) -> Histogram:
        """The histogram of counts per code, up to any code; infinity and NaN are left out."""
        codes = np.flatnonzero(table != 0)
        first = np.searchsorted(codes, (OVERFLOW, NEGATIVE, NEGATIVE + OVERFLOW))
        codes = np.concatenate((codes[first[1] : first[2]][::-1], codes[: first[0]]))
        return cls(codes, table[codes])

    @property
    def edges(self) -> tuple[Floats, Floats]:
        """The low and the high edge of every bin, in float64; the overflow bins end at infinity."""
        magnitude = self.codes & (NEGATIVE - 1)
        near, far = _magnitude(magnitude), _magnitude(magnitude + 1)
        negative = self.codes >= NEGATIVE
        return np.where(negative, -far, near), np.where(negative, -near, far)

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both, exactly."""
        return Histogram.from_codes(
            np.concatenate((self.codes, other.codes)), np.concatenate((self.counts, other.counts))
        )

    def shifted(self, exponent: int) -> Histogram:
        """The histogram of the same values times 2**exponent, exactly but for subnormal ones."""
        magnitude = np.ldexp(_magnitude(self.codes & (NEGATIVE - 1)), exponent)
        with np.errstate(over="ignore"):
            bits = magnitude.astype(np.float32).view(np.uint32)
        codes = (bits >> CODE_SHIFT).astype(np.int64)
        return Histogram.from_codes(codes + (self.codes & NEGATIVE), self.counts)

    def pieces(self) -> Pieces:
        """The bins as intervals with their counts."""
        return Pieces(*self.edges, self.counts)

    def quantile(self, q: float) -> float:
        """The value below which the share `q` lies, within 2**-6 of it; nan when empty."""
        return quantile_of(self.pieces(), q, relative=True)

    def to_linear(
        self,
        bins: int = 64,
        range: tuple[float, float] | None = None,  # noqa: A002 (NumPy's name)
    ) -> tuple[Floats, Floats]:
        """Counts in `bins` equal bins and their edges; mass is spread evenly within a bit bin."""
        return linear_of(self.pieces(), bins, range)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return np.array_equal(self.codes, other.codes) and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Histogram({self.total:,} values in {len(self.codes)} bins)"


@dataclass(frozen=True, eq=False)
class CodeGrid:
    """Counts in bins of width 2**exponent: bin `c` is [c, c + 1) * 2**exponent.

    Attributes:
        exponent: The power of two that is the width.
        codes: Numbers of the occupied bins, ascending; at most 512 apart.
        counts: How many finite values fell into each.
    """

    exponent: int
    codes: Integers
    counts: Integers

    def coarsen(self, exponent: int) -> CodeGrid:
        """Return the counts on a grid of at least this width."""
        if exponent == self.exponent:
            return self
        return CodeGrid(
            exponent, *_add_repeated(self.codes >> (exponent - self.exponent), self.counts)
        )

    def merge(self, other: CodeGrid) -> CodeGrid:
        """Return the exact counts of both grids together; both have the same width."""
        codes, counts = np.r_[self.codes, other.codes], np.r_[self.counts, other.counts]
        return CodeGrid(self.exponent, *_add_repeated(codes, counts))

    @property
    def edges(self) -> tuple[Floats, Floats]:
        """The low and the high edge of every bin."""
        return np.ldexp(self.codes, self.exponent), np.ldexp(self.codes + 1, self.exponent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CodeGrid):
            return NotImplemented
        same_codes = self.exponent == other.exponent and np.array_equal(self.codes, other.codes)
        return same_codes and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]


def grid_exponent(low: float, high: float) -> int:
    """The smallest k for which [low, high] spans at most 512 bins of width 2**k; 0+ for ints."""
    if isinstance(low, int) and isinstance(high, int):
        exponent = max(0, (high - low).bit_length() - 9)
    else:
        # Half the span cannot overflow; it lies in [2**(e-1), 2**e).
        exponent = max(math.frexp(float(high) / 2 - float(low) / 2)[1] - 8, -1074)
    while grid_code(high, exponent) - grid_code(low, exponent) >= GRID_BINS:
        exponent += 1
    return exponent


def grid_code(value: float, exponent: int) -> int:
    """The number of the bin of width 2**exponent that holds `value`."""
    if isinstance(value, int):
        return value >> exponent if exponent >= 0 else value << -exponent
    code = math.floor(math.ldexp(value, -exponent))
    # A tiny negative value underflows to -0.0, but belongs to the bin below zero.
    return -1 if code == 0 and value < 0 else code


def constant_grid(value: float, count: int, exponent: int) -> CodeGrid:
    """The grid of one value that occurs `count` times."""
    codes = np.array([grid_code(value, exponent)], np.int64)
    return CodeGrid(exponent, codes, np.array([count], np.int64))


def float64_codes(upper: Integers) -> Integers:
    """Float32 codes for the upper 17 bits of float64 values (sign, exponent, five of mantissa)."""
    magnitude = upper & 0xFFFF
    values = (magnitude << 47).view(np.float64)
    # A float64 bin lies within one float32 bin, so its lower edge decides; clipped to the largest
    # float32, it never rounds up to the next power of two.
    beyond = values >= 2.0**128
    bits = np.floor(np.where(beyond, 0.0, values) * 2.0**149)
    small = np.where(values < 2.0**-126, bits, 0).astype(np.int64) >> CODE_SHIFT
    normal = (magnitude >> MANTISSA_BITS) - 1023 + 127 << MANTISSA_BITS
    codes = np.where(values < 2.0**-126, small, normal | (magnitude & (1 << MANTISSA_BITS) - 1))
    signs: Integers = np.where(upper > 0xFFFF, NEGATIVE, 0)
    return signs + np.where(beyond, OVERFLOW, codes)


def refine(
    histogram: Histogram, grid: CodeGrid | None, low: float, high: float, zero: int
) -> Pieces:
    """The finest intervals whose counts are known exactly from all that is known.

    Both histograms, the extremes and the number of zeros say how much mass lies below some
    points; together they cut the axis more finely than either alone. A cut is (value, through):
    the mass below the value, or up to and including it, because bins of negative values are
    closed at their high edge and all others at their low edge.

    Args:
        histogram: The bit histogram of the values.
        grid: Their grid, if one was taken.
        low: The smallest value, a Python int for integer data.
        high: The largest value.
        zero: How many are zero.
    """
    edges, negative = histogram.edges, histogram.codes >= NEGATIVE
    cuts = [(np.array([low, high], np.float64), np.array([0, 1]), np.array([0, histogram.total]))]
    below = np.cumsum(histogram.counts)
    for values, mass in zip(edges, (below - histogram.counts, below), strict=True):
        away = values != 0
        cuts.append((values[away], negative[away], mass[away]))
    tiny = histogram.counts[np.isin(histogram.codes, (0, NEGATIVE))].sum()
    if tiny:
        before = histogram.counts[histogram.codes > NEGATIVE].sum()
        # Zeros of both signs are one value; where nothing else is so small, they are a piece.
        reach = 0.0 if tiny == zero else 2.0**-131
        cuts.append(
            (np.array([-reach, reach]), np.array([0, 1]), np.array([before, before + tiny]))
        )
    if grid is not None:
        below = np.cumsum(grid.counts)
        sides = np.zeros(len(below), np.int64)
        cuts += [(grid.edges[0], sides, below - grid.counts), (grid.edges[1], sides, below)]
    value, through, mass = (np.concatenate(parts) for parts in zip(*cuts, strict=True))
    through = np.where(value < low, 0, np.where(value > high, 1, through))
    return _between(np.clip(value, low, high), through, mass, whole=isinstance(low, int))


def _between(value: Floats, through: Integers, mass: Integers, *, whole: bool) -> Pieces:
    """The occupied intervals between cuts; with `whole` numbers every cut moves to one."""
    if whole:
        value = np.where(through, np.floor(value), np.ceil(value) - 1)
        through = np.ones_like(through)
    order = np.lexsort((through, value))
    value, counts = value[order], np.diff(mass[order])
    occupied = np.flatnonzero(counts)
    return Pieces(value[occupied] + whole, value[occupied + 1], counts[occupied])


def quantile_of(pieces: Pieces, q: float, *, relative: bool) -> float:
    """The value at rank `q`, interpolated within its piece; nan when there is no mass.

    Args:
        pieces: Intervals and counts, ascending.
        q: Share between 0 and 1.
        relative: Keep so close to the middle of a piece that the error is at most 2**-6 of the
            value wherever in the piece the mass lies (bit bins are 2**-5 wide).
    """
    cumulative = np.cumsum(pieces.counts)
    if not len(cumulative) or cumulative[-1] == 0:
        return math.nan
    rank = min(max(q, 0.0), 1.0) * int(cumulative[-1])
    index = int(np.searchsorted(cumulative, rank))
    low, high, count = float(pieces.low[index]), float(pieces.high[index]), pieces.counts[index]
    value = low + (high - low) * float(rank - (cumulative[index] - count)) / float(count)
    if relative:
        sign = -1.0 if low < 0 else 1.0
        near, far = sorted((abs(low), abs(high)))
        smallest, largest = far * (1 - VALUE_ERROR), near * (1 + VALUE_ERROR)
        if smallest <= largest:
            value = sign * min(max(abs(value), smallest), largest)
    return min(max(value, low), high)


def linear_of(
    pieces: Pieces, bins: int, limits: tuple[float, float] | None = None
) -> tuple[Floats, Floats]:
    """Counts in equal bins, and the edges: every piece's mass is spread evenly over its width."""
    keep = np.isfinite(pieces.low) & np.isfinite(pieces.high)
    low, high, counts = (part[keep] for part in pieces)
    if limits is None:
        limits = (float(low[0]), float(high[-1])) if len(low) else (0.0, 1.0)
    start, stop = limits if limits[0] < limits[1] else (limits[0] - 0.5, limits[1] + 0.5)
    edges = np.linspace(start, stop, bins + 1)
    width = (high - low)[:, None]
    # The share of every piece that lies below every edge; a piece of one value jumps from 0 to 1.
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.clip((edges - low[:, None]) / width, 0.0, 1.0)
    jump = edges > low[:, None]
    jump[:, -1] |= edges[-1] == low
    below = np.where(width > 0, below, jump)
    return np.diff(counts @ below), edges


def _magnitude(code: Integers) -> Floats:
    """The smallest absolute value with this code (without sign); infinity beyond the last."""
    exponent, mantissa = code >> MANTISSA_BITS, code & (1 << MANTISSA_BITS) - 1
    normal = np.where(exponent > 0, 2.0**MANTISSA_BITS, 0.0)
    values = np.ldexp(normal + mantissa, np.maximum(exponent, 1) - 127 - MANTISSA_BITS)
    return np.where(code > OVERFLOW, np.inf, values)


def _rank(codes: Integers) -> Integers:
    """Numbers that order codes by value: -0.0 becomes -1, +0.0 becomes 0."""
    return np.where(codes >= NEGATIVE, NEGATIVE - 1 - codes, codes)


def _code(ranks: Integers) -> Integers:
    return np.where(ranks < 0, NEGATIVE - 1 - ranks, ranks)


def _add_repeated(codes: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[Integers, Integers]:
    """Ascending distinct codes with the sums of their counts."""
    codes, counts = np.asarray(codes, np.int64), np.asarray(counts, np.int64)
    if not len(codes):
        return codes, counts
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    return codes[starts], np.add.reduceat(counts[order], starts)
