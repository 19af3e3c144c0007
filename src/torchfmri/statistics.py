"""Statistics of tensors that add up: parts merged equal the whole.

Counts and histograms are integers and merge exactly; mean and variance merge in float64. Values
that are not finite are only counted; all other statistics leave them out.

Whatever describes a tensor calls `calculate_statistics`; the passes over memory are in `_kernels`.
`KEYS`, the fields and `to_dict` are public, and saved inspections and histories hold them. A new
statistic must merge: that of two parts has to be that of the whole (tests/test_statistics.py draws
parts at random), because calls, ranks and folded rows are added up everywhere.

Examples:
    >>> import torch
    >>> from torchfmri.statistics import calculate_statistics
    >>> statistics = calculate_statistics(torch.tensor([1.0, 2.0, float("nan"), 3.0]))
    >>> statistics["mean"], statistics.max, statistics.nan, statistics.finite
    (2.0, 3.0, 1, 3)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchfmri import _kernels
from torchfmri._arguments import check_number, check_tensor, is_whole, require
from torchfmri._kernels import (
    NEGATIVE,
    ChannelStatistics,
    CodeGrid,
    Floats,
    FrozenDict,
    Histogram,
    Pieces,
    Reduction,
    combine_moments,
    constant_grid,
    grid_exponent,
    join_notes,
    linear_of,
    quantile_of,
    read_values,
    reduce_channels,
    refine,
)
from torchfmri._torch import is_transformed
from torchfmri.exceptions import InspectionError

__all__ = [
    "ChannelStatistics",
    "Histogram",
    "Statistics",
    "calculate_channel_statistics",
    "calculate_statistics",
    "merge_statistics",
]

_MASK = "booleans over the leading dimensions of the tensor, such as (b, s)"
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LARGEST_SHARE = 0.02
"""If one bin holds a larger share of the values, quantiles are vague: a grid is counted as well."""
KEYS = (
    *("count", "mean", "std", "variance", "min", "max", "abs_max", "l2", "nan", "inf", "pos_inf"),
    *("neg_inf", "zero", "subnormal", "quantiles", "histogram"),
)

_COUNTS = ("count", "nan", "pos_inf", "neg_inf", "zero", "subnormal")
"""The fields that are counts of values: those of parts add up."""


@dataclass(frozen=True, eq=False, repr=False)
class Statistics(FrozenDict):
    """The statistics of one or many tensors: a dict that never changes and adds with `+`.

    It is a dict for `json.dumps` with the keys count, mean, std, variance, min, max, abs_max, l2,
    nan, inf, pos_inf, neg_inf, zero, subnormal, quantiles and histogram. Each key is also an
    attribute, except that `variance()` is a method, because there are two divisors. Mean, std and
    extremes are those of the finite values, and nan if there are none.

    Attributes:
        count: The number of all values, also those that are not finite.
        mean: Mean in float64.
        squared_deviations: Sum of squared differences from the mean, from which std is derived.
        min: The smallest value, exactly; a Python int for integer and bool tensors.
        max: The largest value.
        nan: How many are NaN.
        pos_inf: How many are +infinity.
        neg_inf: How many are -infinity.
        zero: How many are zero, of either sign.
        subnormal: How many are subnormal in the dtype of the tensor.
        histogram: Counts over the bits of the float32 values; None if it was not taken.
        grid: Counts on a linear grid, taken only if the histogram is too coarse.
        positions: (positions counted, positions seen) if a mask was applied, else None.
        dtype: Name of the dtype, such as "float32"; several are joined by "+".
        shape: The shape of the tensor; None after merging tensors of different shapes.
        note: What else the reader should know, or "".

    Examples:
        >>> first = calculate_statistics(torch.tensor([1.0, 2.0]))
        >>> second = calculate_statistics(torch.tensor([3.0, 6.0]))
        >>> (first + second)["mean"]
        3.0
    """

    KEYS = KEYS

    count: int = 0
    mean: float = math.nan
    squared_deviations: float = math.nan
    min: float = math.nan
    max: float = math.nan
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zero: int = 0
    subnormal: int = 0
    histogram: Histogram | None = None
    grid: CodeGrid | None = None
    positions: tuple[int, int] | None = None
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    note: str = ""

    @classmethod
    def empty(cls) -> Statistics:
        """Return the statistics of no values; adding them changes nothing."""
        return cls()

    @property
    def inf(self) -> int:
        """How many values are infinite, of either sign."""
        return self.pos_inf + self.neg_inf

    @property
    def finite(self) -> int:
        """How many values are finite; mean, std, extremes and histogram are about these."""
        return self.count - self.nan - self.inf

    @property
    def std(self) -> float:
        """Standard deviation of the finite values (population: divided by their number)."""
        return math.sqrt(self.variance(unbiased=False))

    @property
    def abs_max(self) -> float:
        """The largest absolute value."""
        return max(abs(self.min), abs(self.max))

    @property
    def l2(self) -> float:
        """Square root of the sum of squares: 0 if there are no finite values."""
        if not self.finite:
            return 0.0
        return math.sqrt(self.squared_deviations + self.finite * self.mean * self.mean)

    @cached_property
    def quantiles(self) -> dict[float, float] | None:
        """Quantiles 0.01, 0.05, 0.25, 0.5, 0.75, 0.95 and 0.99; None without a histogram."""
        if self.histogram is None:
            return None
        return {q: self.quantile(q) for q in QUANTILES}

    @property
    def rank_error(self) -> float | None:
        """The largest error of a quantile's rank; None without a histogram.

        It is the largest share of the values that lies in one bin of more than one value.
        """
        if self.histogram is None:
            return None
        return _rank_error(self._pieces, self.finite)

    def variance(self, unbiased: bool = True) -> float:
        """Return the variance of the finite values, by default divided by their number minus one.

        The key `statistics["variance"]` is the square of `std`: divided by their number.
        """
        divisor = self.finite - unbiased
        return self.squared_deviations / divisor if divisor > 0 else math.nan

    def quantile(self, q: float) -> float:
        """Return the value below which the share `q` of the finite values lies.

        Its relative error is at most 2**-6, and the error of its rank at most `rank_error`.

        Raises:
            InspectionError: No histogram was taken, or `q` is not between 0 and 1.
        """
        if not isinstance(q, (int, float)) or not 0 <= q <= 1:
            raise InspectionError(f"A quantile is a number between 0 and 1, not {q!r}.")
        return quantile_of(self._pieces, q, relative=True)

    def linear_histogram(
        self,
        bins: int = 64,
        range: tuple[float, float] | None = None,  # noqa: A002 (NumPy's name)
    ) -> tuple[Floats, Floats]:
        """Return counts in `bins` equal bins from min to max (or over `range`), and the edges.

        They are read from the bit histogram. The values of a bin are spread evenly over it, so
        counts are not whole numbers.

        Raises:
            InspectionError: No histogram was taken.
        """
        check_number("bins", bins, 1, "give a number of bins, such as 64")
        if range is not None:
            _check_range(range)
        elif self.finite:
            range = (float(self.min), float(self.max))  # noqa: A001
        return linear_of(self._pieces, bins, range)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the values of both."""
        meaning = "Statistics merge with Statistics, such as calculate_statistics(tensor)"
        require(isinstance(other, Statistics), "other", other, meaning)
        if not self.dtype or not other.dtype:
            return other if not self.dtype else self
        filled = [part for part in (self, other) if part.finite]
        mean, squared_deviations = combine_moments(
            *(self.finite, self.mean, self.squared_deviations),
            *(other.finite, other.mean, other.squared_deviations),
        )
        both = self.histogram is not None and other.histogram is not None
        return Statistics(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            mean=mean,
            squared_deviations=squared_deviations,
            min=min((part.min for part in filled), default=math.nan),
            max=max((part.max for part in filled), default=math.nan),
            histogram=self.histogram.merge(other.histogram) if both else None,  # type: ignore[union-attr,arg-type]
            grid=_merge_grids(filled) if both else None,
            positions=_add_positions(self.positions, other.positions),
            dtype="+".join(sorted({*self.dtype.split("+"), *other.dtype.split("+")})),
            shape=self.shape if self.shape == other.shape else None,
            note=join_notes(self.note, other.note),
        )

    def scaled(self, factor: float) -> Statistics:
        """Return the statistics of all values times a positive factor.

        The histogram is kept if the factor is a power of two, which only moves its bins.
        """
        if not 0 < factor < math.inf:
            raise InspectionError(
                f"Statistics can be scaled only by a positive number, not by {factor!r}."
            )
        exponent = math.log2(factor)
        shifted = None
        if self.histogram is not None and exponent == int(exponent):
            shifted = self.histogram.shifted(int(exponent))
        return replace(
            self,
            mean=self.mean * factor,
            squared_deviations=self.squared_deviations * factor**2,
            min=self.min * factor,
            max=self.max * factor,
            histogram=shifted,
            grid=None,
            note=join_notes(self.note, f"scaled by {factor:.6g}" if factor != 1 else ""),
        )

    def __add__(self, other: Statistics) -> Statistics:
        return self.merge(other) if isinstance(other, Statistics) else NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold: lists for arrays, None for nan."""
        result: dict[str, Any] = {name: _to_json(value) for name, value in self._state().items()}
        result["rank_error"] = self.rank_error
        derived = ("std", "variance", "abs_max", "l2", "inf")
        result |= {name: _to_json(self[name]) for name in derived}
        quantiles = self.quantiles
        result["quantiles"] = quantiles and {str(q): _to_json(v) for q, v in quantiles.items()}
        return result

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Statistics:
        """Return the statistics that `to_dict` wrote; derived numbers are computed again."""
        known = isinstance(data, Mapping) and set(cls.__dataclass_fields__) <= set(data)
        require(known, "data", data, "give what Statistics.to_dict() returned")
        values = {name: data[name] for name in cls.__dataclass_fields__}
        for name in ("mean", "squared_deviations", "min", "max"):
            values[name] = math.nan if values[name] is None else values[name]
        for name in ("positions", "shape"):
            values[name] = None if values[name] is None else tuple(values[name])
        if values["histogram"] is not None:
            values["histogram"] = Histogram.from_codes(**values["histogram"])
        if values["grid"] is not None:
            grid = values["grid"]
            codes, counts = (np.array(grid[name], np.int64) for name in ("codes", "counts"))
            values["grid"] = CodeGrid(grid["exponent"], codes, counts)
        return cls(**values)

    @cached_property
    def _pieces(self) -> Pieces:
        if self.histogram is None:
            raise InspectionError(
                "These statistics have no histogram. "
                "Take one with calculate_statistics(tensor, histogram=True)."
            )
        if not self.finite:
            return self.histogram.pieces()
        return refine(self.histogram, self.grid, self.min, self.max, self.zero)

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __getitem__(self, key: str) -> Any:
        if key not in KEYS:
            raise KeyError(f"{key!r} is not a statistic. There are: {', '.join(KEYS)}.")
        return self.std**2 if key == "variance" else getattr(self, key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Statistics):
            return NotImplemented
        mine, theirs = self._state(), other._state()
        return all(_to_json(mine[name]) == _to_json(theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counts = {"nan": self.nan, "inf": self.inf, "zero": self.zero}
        extra = "".join(f", {count:,} {name}" for name, count in counts.items() if count)
        shape = "x".join(map(str, self.shape)) + " " if self.shape else ""
        return (
            f"Statistics({self.count:,} values, {shape}{self.dtype or 'nothing seen'}: "
            f"mean {self.mean:.4g}, std {self.std:.4g}, min {self.min:.4g}, max {self.max:.4g}"
            f"{extra})"
        )


AnyStatistics = TypeVar("AnyStatistics", Statistics, ChannelStatistics)


def calculate_statistics(
    tensor: Tensor, *, mask: Tensor | None = None, histogram: bool = True
) -> Statistics:
    """Return the statistics of a tensor of any dtype, layout and device.

    Args:
        tensor: The values.
        mask: The positions that count: a boolean tensor over the leading dimensions of `tensor`,
            such as (b, s) for (b, s, o). The others are left out; `positions` has both numbers.
        histogram: Whether to take the histogram and with it the quantiles.

    Raises:
        InspectionError: The tensor has no values to read (meta, fake, inside torch.func), torch
            cannot compute with its dtype, or the mask does not fit.
    """
    _require_values(tensor)
    shape = None if tensor.is_nested else tuple(tensor.shape)
    try:
        selected, positions = _select(tensor.detach(), mask)
        values = read_values(selected)
        found = _kernels.reduce_values(values.flat, histogram=histogram)
        if values.repeat > 1:
            found = found.repeat(values.repeat)
        result = statistics_of_reduction(
            found,
            dtype=_name(tensor.dtype),
            shape=shape,
            grid=_take_grid(values.flat, found, values.repeat),
            positions=positions,
            note=values.note,
        )
        if values.implicit_zeros:
            return replace(result.merge(_zeros(values.implicit_zeros, result)), shape=shape)
        return result
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise _unreadable(tensor, error) from error


def calculate_channel_statistics(
    tensor: Tensor, axis: int, *, mask: Tensor | None = None
) -> ChannelStatistics:
    """Return the statistics of every unit along `axis` (1 for conv channels, -1 for features).

    Args:
        tensor: The values, of any real or complex dtype.
        axis: The dimension whose entries are told apart.
        mask: Which positions count, over the leading dimensions; `axis` is not one of them.

    Raises:
        InspectionError: As for `calculate_statistics`, or there is no such axis.
    """
    _require_values(tensor)
    if tensor.is_nested or not (is_whole(axis) and -tensor.dim() <= axis < tensor.dim()):
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)
        raise InspectionError(
            f"A tensor of shape {shape} has no axis {axis!r}. Choose one that it has."
        )
    axis %= tensor.dim()
    if mask is not None:
        check_tensor("mask", mask, _MASK)
    if mask is not None and axis < mask.dim():
        raise InspectionError(
            f"Axis {axis} is one of the {mask.dim()} dimensions of the mask. "
            "Choose a later axis, such as -1."
        )
    try:
        dense = tensor.detach()
        dense = dense if dense.layout == torch.strided else dense.to_dense()
        values, positions = _select(dense, mask)
        # Selecting positions turned the masked dimensions into one.
        axis_left = axis if mask is None else axis - mask.dim() + 1
        return reduce_channels(values.movedim(axis_left, -1), axis, positions)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise _unreadable(tensor, error) from error


def merge_statistics(parts: Iterable[AnyStatistics]) -> AnyStatistics:
    """Return the statistics of all parts together; of no parts, `Statistics.empty()`."""
    empty: Any = Statistics.empty()
    meaning = "give a list of Statistics, or of ChannelStatistics"
    require(isinstance(parts, Iterable), "parts", parts, meaning)
    several = list(parts) or [empty]
    kinds = (Statistics, ChannelStatistics)
    require(all(isinstance(each, kinds) for each in several), "parts", several, meaning)
    merged: AnyStatistics = reduce(lambda one, two: one.merge(two), several)
    return merged


def statistics_of_reduction(
    found: Reduction,
    *,
    dtype: str,
    shape: tuple[int, ...] | None,
    grid: CodeGrid | None = None,
    positions: tuple[int, int] | None = None,
    note: str = "",
) -> Statistics:
    """Return the statistics that a pass over a tensor found, for passes that run elsewhere."""
    some = found.finite > 0
    return Statistics(
        **{name: getattr(found, name) for name in _COUNTS},
        mean=found.mean if some else math.nan,
        squared_deviations=found.squared_deviations if some else math.nan,
        min=found.low if some else math.nan,
        max=found.high if some else math.nan,
        histogram=found.histogram,
        grid=grid,
        positions=positions,
        dtype=dtype,
        shape=shape,
        note=note,
    )


def _require_values(tensor: Tensor) -> None:
    """Raise an InspectionError that says why a tensor has nothing to read."""
    if not isinstance(tensor, Tensor):
        raise InspectionError(
            f"Statistics are calculated from a tensor, not from {type(tensor).__name__}. Give a "
            "torch.Tensor."
        )
    if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
        reason = "is not initialized yet. Run the model once first."
    elif is_transformed(tensor):
        reason = "belongs to a torch.func transform. Read it outside vmap and grad."
    elif tensor.device.type == "meta":
        reason = "is on the meta device. Move the model to a real one first."
    elif type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        reason = f"is a {type(tensor).__name__}. Run outside tracing."
    else:
        return
    raise InspectionError(f"The tensor has no values to read: it {reason}")


def _check_range(limits: Any) -> None:
    pair = isinstance(limits, (tuple, list)) and len(limits) == 2
    numbers = pair and all(isinstance(each, (int, float)) for each in limits)
    require(
        numbers and limits[0] <= limits[1], "range", limits, "give (lowest, highest), two numbers"
    )


def _unreadable(tensor: Tensor, error: Exception) -> InspectionError:
    """Return the error for a tensor that torch cannot reduce, with what torch said."""
    if isinstance(error, InspectionError):
        return error
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InspectionError(
        f"Statistics of a {type(tensor).__name__} of dtype {_name(tensor.dtype)} and layout "
        f"{tensor.layout} on {tensor.device} cannot be calculated: {first}"
    )


def _select(tensor: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[int, int] | None]:
    """Return the counted positions of a tensor along one axis, and (counted, seen)."""
    if mask is None:
        return tensor, None
    check_tensor("mask", mask, _MASK)
    if tensor.is_nested or tuple(tensor.shape[: mask.dim()]) != tuple(mask.shape):
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)
        raise InspectionError(
            f"A mask of shape {tuple(mask.shape)} does not cover the leading dimensions of a "
            f"tensor of shape {shape}."
        )
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    counted = mask.detach().to(device=tensor.device, dtype=torch.bool)
    number = int(counted.sum())
    if number == counted.numel():
        return tensor.flatten(0, max(mask.dim() - 1, 0)), (number, number)
    return tensor[counted], (number, counted.numel())


def _take_grid(flat: Tensor, found: Reduction, repeat: int) -> CodeGrid | None:
    """Return a grid of the values where one bin of the histogram holds too much of the mass."""
    if found.histogram is None or found.low >= found.high:
        return None
    if _largest_share(found) <= LARGEST_SHARE:
        return None
    whole = found.finite == found.count
    grid = _kernels.count_grid(flat, found.low, found.high, finite=whole)
    return CodeGrid(grid.exponent, grid.codes, grid.counts * repeat)


def _largest_share(found: Reduction) -> float:
    """Return the share of the values in the fullest bin that holds more than one value."""
    assert found.histogram is not None
    codes, counts = found.histogram.codes, found.histogram.counts
    if isinstance(found.low, int):
        pieces = refine(found.histogram, None, found.low, found.high, found.zero)
        return _rank_error(pieces, found.finite)
    if found.zero:
        # The two bins at zero hold zeros and next to nothing else.
        counts = counts[(codes != 0) & (codes != NEGATIVE)]
    return int(counts.max(initial=0)) / found.finite


def _rank_error(pieces: Pieces, finite: int) -> float:
    """Return the largest share of the values in one piece that is wider than one value."""
    wide = pieces.counts[pieces.high > pieces.low]
    return int(wide.max()) / finite if len(wide) else 0.0


def _zeros(count: int, like: Statistics) -> Statistics:
    """Return the statistics of `count` zeros."""
    zero = 0.0 if not isinstance(like.min, int) else 0
    histogram = None if like.histogram is None else Histogram.from_codes([0], [count])
    return Statistics(
        count=count,
        mean=0.0,
        squared_deviations=0.0,
        min=zero,
        max=zero,
        zero=count,
        histogram=histogram,
        **{name: getattr(like, name) for name in ("positions", "dtype", "note")},
    )


def _merge_grids(filled: list[Statistics]) -> CodeGrid | None:
    """Return the grid of all values, if every part has one or is a single value."""
    if len(filled) < 2:
        return filled[0].grid if filled else None
    low, high = min(part.min for part in filled), max(part.max for part in filled)
    if low == high:
        return None
    known = [part.grid.exponent for part in filled if part.grid is not None]
    one, two = (_grid_at(part, max([grid_exponent(low, high), *known])) for part in filled)
    return None if one is None or two is None else one.merge(two)


def _grid_at(part: Statistics, exponent: int) -> CodeGrid | None:
    """Return the grid of one part at a given width; None if it cannot be known exactly."""
    if part.grid is not None:
        return part.grid.coarsen(exponent)
    if part.min == part.max:
        return constant_grid(part.min, part.finite, exponent)
    return None


def _add_positions(
    one: tuple[int, int] | None, two: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the positions counted and seen in both; None if one was not masked."""
    return None if one is None or two is None else (one[0] + two[0], one[1] + two[1])


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_json(value: Any) -> Any:
    """Return a field as JSON can hold it."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Histogram):
        return dict(value)
    if isinstance(value, CodeGrid):
        arrays = {"codes": value.codes.tolist(), "counts": value.counts.tolist()}
        return {"exponent": value.exponent, **arrays}
    return list(value) if isinstance(value, tuple) else value
