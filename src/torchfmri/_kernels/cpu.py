"""Reductions on the CPU with torch alone: blocks that stay in the cache, fast kernels only.

Three passes, by how wide a value is. Values of at most 16 bits are counted by bit pattern, and
everything else is read from the counts, exactly. float32 is reduced in blocks in float32, which
are added up in float64. The rest (float64, wide integers) is reduced in float64.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels import accelerator
from torchfmri._kernels.histogram import (
    CODE_SHIFT,
    CODES,
    MANTISSA_BITS,
    NEGATIVE,
    CodeGrid,
    Floats,
    Histogram,
    Integers,
    float64_codes,
    grid_code,
    grid_exponent,
)
from torchfmri._kernels.reduction import LARGE_VALUE, SMALL_SPREAD, Reduction

BLOCK = 1 << 18
"""Values per block: large enough that calls cost nothing, small enough to stay in the cache."""
PATTERN_MINIMUM = 1 << 18
"""Below so many values of a half type, a table of 65,536 counts costs more than it saves."""
SHORT = 1 << 15
"""Blocks of at most so many values are added in float64 one by one."""
FLOAT32_NORMAL = 2.0**-126


def reduce_values(flat: Tensor, histogram: bool) -> Reduction:
    """The reduction of a one-dimensional contiguous CPU tensor of any real dtype."""
    if not flat.numel():
        return Reduction(histogram=Histogram.from_codes([], []) if histogram else None)
    half = flat.dtype in (torch.float16, torch.bfloat16)
    if flat.dtype.itemsize <= 2 and not (
        half and (not histogram or flat.numel() < PATTERN_MINIMUM)
    ):
        return _reduce_patterns(flat, histogram)
    if half or flat.dtype == torch.float32:
        return _reduce_floats(flat, histogram)
    return _reduce_wide(flat, histogram)


# ---------------------------------------------------------------- 8 and 16 bits


def _reduce_patterns(flat: Tensor, histogram: bool) -> Reduction:
    """The reduction from the number of times each of the 256 or 65,536 values occurs."""
    table = _count_patterns(flat)
    patterns = np.flatnonzero(table)
    counts, values = table[patterns], _pattern_values(flat.dtype)[patterns]
    result = Reduction(count=flat.numel())
    finite = np.isfinite(values)
    if not finite.all():
        result.nan = int(counts[np.isnan(values)].sum())
        result.pos_inf = int(counts[values == math.inf].sum())
        result.neg_inf = int(counts[values == -math.inf].sum())
        counts, values = counts[finite], values[finite]
    if histogram:
        result.histogram = Histogram.from_codes(_float32_codes(values), counts)
    if not len(values):
        return result
    result.zero = int(counts[values == 0].sum())
    if flat.is_floating_point():
        tiny = np.abs(values) < smallest_normal(flat.dtype)
        result.subnormal = int(counts[tiny].sum()) - result.zero
    result.mean = float(counts @ values) / result.finite
    result.squared_deviations = float(counts @ (values - result.mean) ** 2)
    convert = float if flat.is_floating_point() else int
    result.low, result.high = convert(values.min()), convert(values.max())
    return result


def _count_patterns(flat: Tensor) -> Integers:
    """How often each bit pattern occurs, one count per pattern."""
    bits = flat.view(torch.uint8 if flat.dtype.itemsize == 1 else torch.uint16)
    size = 256**flat.dtype.itemsize
    compiled = accelerator.compiled()
    if compiled is not None:
        counted: Integers = compiled.count_patterns(bits.numpy(), size)
        return counted
    table = torch.zeros(size, dtype=torch.int64, device="cpu")
    for block in torch.split(bits, BLOCK):
        table += torch.bincount(block.to(torch.int32), minlength=size)
    return table.numpy()


@lru_cache(maxsize=32)
def _pattern_values(dtype: torch.dtype) -> Floats:
    """The value of every bit pattern of a dtype of 8 or 16 bits, in float64."""
    bits = torch.arange(256**dtype.itemsize, dtype=torch.int32, device="cpu")
    if dtype == torch.bool:
        return (bits != 0).to(torch.float64).numpy()
    narrow = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    values = narrow.view(dtype)
    return values.to(torch.float32).to(torch.float64).numpy()


def _float32_codes(values: Floats) -> Integers:
    """Histogram codes of values that a float32 holds exactly."""
    return (values.astype(np.float32).view(np.uint32) >> CODE_SHIFT).astype(np.int64)


# ---------------------------------------------------------------- float32, and halves in blocks


def _reduce_floats(flat: Tensor, histogram: bool) -> Reduction:
    """The reduction of float32, or of a half type converted block by block."""
    normal = smallest_normal(flat.dtype)
    compiled = accelerator.compiled()
    blocks = (flat,) if flat.numel() <= BLOCK else torch.split(flat, BLOCK)
    result: Reduction | None = None
    table: Integers | None = None
    for block in blocks:
        part = None if compiled is None else _reduce_compiled(block, normal, compiled)
        # A compiled pass over bfloat16 without a histogram needs no float32 at all.
        values = block if part is not None and not histogram else _as_float32(block)
        tiny = None
        if histogram:
            counts = _count_codes(values)
            tiny = _count_exponent_zero(counts) if normal == FLOAT32_NORMAL else None
            table = counts if table is None else _add_tables(table, counts)
        if part is None:
            part = _reduce_block(values, normal, tiny)
        result = part if result is None else result.add(part)
    assert result is not None
    if table is not None:
        result.histogram = Histogram.from_table(table)
    return result


def _reduce_block(block: Tensor, normal: float, tiny: int | None) -> Reduction:
    """The reduction of a float32 block.

    Args:
        block: The values.
        normal: The smallest magnitude that is neither zero nor subnormal.
        tiny: How many values are smaller, where the histogram has told already.
    """
    smallest, largest = torch.aminmax(block)
    low, high = smallest.item(), largest.item()
    if not (math.isfinite(low) and math.isfinite(high)):
        return _reduce_carefully(block, normal)
    scratch = _SCRATCH.floats
    if block.numel() < BLOCK:
        scratch = scratch[: block.numel()]
    zero = subnormal = 0
    if tiny != 0 and low < normal and high > -normal:
        zero, subnormal = _count_tiny(torch.abs(block, out=scratch), normal, tiny)
    mean, squares = _block_moments(block, low, high, scratch)
    return Reduction(
        count=block.numel(),
        zero=zero,
        subnormal=subnormal,
        mean=mean,
        squared_deviations=squares,
        low=low,
        high=high,
    )


def _as_float32(block: Tensor) -> Tensor:
    """A block as float32; a converted one lies in memory that the next block overwrites."""
    if block.dtype == torch.float32:
        return block
    return _SCRATCH.converted[: block.numel()].copy_(block)


def _reduce_compiled(block: Tensor, normal: float, compiled: ModuleType) -> Reduction | None:
    """The reduction of a block by numba; None where it needs more care than that."""
    if block.dtype == torch.bfloat16:
        bits, shift = block.view(torch.uint16).numpy(), 16
    else:
        bits, shift = _as_float32(block).numpy().view(np.uint32), 0
    found = compiled.reduce_block(bits, np.int32(shift), _bits_of(normal))
    mean, squares, least, most, zero, tiny = found
    low, high = compiled.float_of(least), compiled.float_of(most)
    # False for NaN and infinity too, whose ordered integers lie outside all others.
    if not (high - low > SMALL_SPREAD and max(high, -low) < LARGE_VALUE):
        return None
    return Reduction(
        count=block.numel(),
        zero=zero,
        subnormal=tiny - zero,
        mean=mean,
        squared_deviations=squares,
        low=low,
        high=high,
    )


@lru_cache(maxsize=8)
def _bits_of(value: float) -> Any:
    return np.float32(value).view(np.int32)


def _block_moments(block: Tensor, low: float, high: float, scratch: Tensor) -> tuple[float, float]:
    """Mean and sum of squared deviations of a finite float32 block; `scratch` is overwritten."""
    spread, largest = high - low, max(high, -low)
    if spread == 0:
        return low, 0.0
    if spread < SMALL_SPREAD or largest > LARGE_VALUE:
        # Squares would vanish or overflow in float32; scaling by a power of two is exact.
        scale = 2.0 ** min(-math.frexp(spread if spread < SMALL_SPREAD else largest)[1], 126)
        mean, squares = _block_moments(block * scale, low * scale, high * scale, scratch)
        return mean / scale, squares / scale**2
    count = block.numel()
    mean = _sum(block) / count
    # The kernel rounds the scalar to float32, so it is rounded here too.
    center = float(np.float32(mean))
    torch.sub(block, center, out=scratch)
    squares = torch.mul(scratch, scratch, out=scratch).sum().item()
    return mean, max(squares - count * (mean - center) ** 2, 0.0)


def _sum(block: Tensor) -> float:
    """The sum of a float32 block; in float64, since a mean near zero is what cancelling leaves.

    Long blocks are first added in float32 by runs of 256: one by one in float64 they would take
    several times as long. What that costs is relative to the spread, not to the mean.
    """
    if block.numel() > SHORT and block.numel() % 256 == 0:
        block = block.view(-1, 256).sum(1)
    return block.sum(dtype=torch.float64).item()


def _count_tiny(magnitude: Tensor, normal: float, tiny: int | None) -> tuple[int, int]:
    """How many float32 magnitudes are zero, and how many others below `normal`; overwrites them."""
    if tiny is None and magnitude.amin().item() >= normal:
        return 0, 0
    # Integers, because comparisons of subnormal floats depend on torch.set_flush_denormal.
    bits = magnitude.view(torch.int32)
    zero = bits.numel() - int(torch.count_nonzero(bits))
    if tiny is None:
        limit = int(np.float32(normal).view(np.int32)) - 1
        # Zeros become the largest integer, so that the smallest tells whether others are tiny.
        others = bits.sub_(1).bitwise_and_(0x7FFFFFFF)
        tiny = zero
        if others.amin().item() < limit:
            tiny += int(torch.count_nonzero(others < limit))
    return zero, tiny - zero


def _count_codes(block: Tensor) -> Integers:
    """How often each histogram code occurs in a float32 block, up to the last that does."""
    compiled = accelerator.compiled()
    if compiled is not None:
        counted: Integers = compiled.count_codes(block.numpy().view(np.uint32))
        return counted
    codes = _SCRATCH.integers[: block.numel()]
    torch.bitwise_right_shift(block.view(torch.int32), CODE_SHIFT, out=codes)
    return torch.bincount(codes.bitwise_and_(CODES - 1)).numpy()


def _add_tables(one: Integers, two: Integers) -> Integers:
    """The sum of two tables, of which one may end earlier; the longer one is overwritten."""
    short, long = sorted((one, two), key=len)
    long[: len(short)] += short
    return long


def _count_exponent_zero(counts: Integers) -> int:
    """How many float32 values are zero or subnormal, from their codes."""
    first = 1 << MANTISSA_BITS
    return int(counts[:first].sum() + counts[NEGATIVE : NEGATIVE + first].sum())


class _Scratch(threading.local):
    """Memory that every block overwrites, kept per thread so that no call waits for its pages."""

    def __init__(self) -> None:
        # A tensor made in inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            self.floats = torch.empty(BLOCK, dtype=torch.float32, device="cpu")
            self.integers = self.floats.view(torch.int32)
            self.converted = torch.empty(BLOCK, dtype=torch.float32, device="cpu")


_SCRATCH = _Scratch()


# ---------------------------------------------------------------- float64 and wide integers


def _reduce_wide(flat: Tensor, histogram: bool) -> Reduction:
    """The reduction of float64 or of integers of 32 and 64 bits, in float64."""
    result = Reduction(histogram=Histogram.from_codes([], []) if histogram else None)
    for block in torch.split(flat, BLOCK):
        values = block if block.is_floating_point() else _truncated_float64(block)
        part = _reduce_carefully(values, smallest_normal(flat.dtype))
        if histogram:
            part.histogram = _wide_histogram(values)
        if not block.is_floating_point():
            part.low, part.high = _integer_extremes(block)
            part.subnormal = 0
        result = result.add(part)
    return result


def _reduce_carefully(block: Tensor, normal: float) -> Reduction:
    """The reduction of a block that may hold anything, in float64."""
    nan = int(block.isnan().sum())
    pos_inf, neg_inf = int(block.isposinf().sum()), int(block.isneginf().sum())
    finite = block[block.isfinite()].double() if nan or pos_inf or neg_inf else block.double()
    result = Reduction(block.numel(), nan, pos_inf, neg_inf)
    if not finite.numel():
        return result
    smallest, largest = torch.aminmax(finite)
    result.low, result.high = float(smallest), float(largest)
    result.zero = finite.numel() - int(torch.count_nonzero(finite))
    result.subnormal = int((finite.abs() < normal).sum()) - result.zero
    mean = finite.mean()
    result.mean = float(mean)
    result.squared_deviations = float((finite - mean).square_().sum())
    return result


def _truncated_float64(block: Tensor) -> Tensor:
    """Integers as float64, rounded toward zero so that none moves to the next histogram bin."""
    if block.dtype == torch.uint64:
        numbers = block.numpy()
        numbers = np.where(numbers > 1 << 53, numbers & ~np.uint64(0x7FF), numbers)
        return torch.from_numpy(numbers.astype(np.float64))
    if block.dtype == torch.int64:
        wide = (block > 1 << 53) | (block < -(1 << 53))
        block = torch.where(wide, block - block.fmod(1 << 11), block)
    return block.to(torch.float64)


def _integer_extremes(block: Tensor) -> tuple[int, int]:
    """The smallest and the largest integer, exactly."""
    offset = 0
    if block.dtype == torch.uint64:
        # Flipping the sign bit orders unsigned numbers as signed ones.
        block, offset = block.view(torch.int64).bitwise_xor(-(1 << 63)), 1 << 63
    elif block.dtype == torch.uint32:
        block = block.to(torch.int64)
    smallest, largest = torch.aminmax(block)
    return int(smallest) + offset, int(largest) + offset


def _wide_histogram(values: Tensor) -> Histogram:
    """The bit histogram of float64 values."""
    upper = (values.view(torch.int64) >> (52 - MANTISSA_BITS)).bitwise_and_(0x1FFFF)
    table = torch.bincount(upper, minlength=0x20000).numpy()
    patterns = np.flatnonzero(table)
    patterns = patterns[patterns & 0xFFFF < 0x7FF << MANTISSA_BITS]
    return Histogram.from_codes(float64_codes(patterns), table[patterns])


# ---------------------------------------------------------------- other passes


def count_grid(flat: Tensor, low: float, high: float, *, finite: bool) -> CodeGrid:
    """The counts of the finite values, which lie in [low, high], on the grid for that range.

    Args:
        flat: One-dimensional values.
        low: The smallest finite one.
        high: The largest.
        finite: Whether all of them are finite.
    """
    exponent = grid_exponent(low, high)
    first = grid_code(low, exponent)
    table = torch.zeros(grid_code(high, exponent) - first + 1, dtype=torch.int64, device="cpu")
    for block in torch.split(flat, BLOCK):
        codes = _grid_codes(block, exponent, first, finite)
        table += torch.bincount(codes, minlength=len(table)).cpu()
    bins = np.flatnonzero(table.numpy())
    return CodeGrid(exponent, bins + first, table.numpy()[bins])


def _grid_codes(block: Tensor, exponent: int, first: int, finite: bool) -> Tensor:
    """Grid codes of the finite values of a block, minus `first`."""
    if not block.is_floating_point():
        if block.dtype == torch.uint64:
            shifted = (block.cpu().numpy() >> np.uint64(exponent)) - np.uint64(first)
            return torch.from_numpy(shifted.astype(np.int64))
        return (block.to(torch.int64) >> exponent) - first
    if block.dtype != torch.float64:
        block = block.to(torch.float32)
    if not finite:
        block = block[block.isfinite()]
    if block.dtype == torch.float32 and -100 < exponent <= 0:
        # Scaling up by a power of two is exact, and so is the difference of near integers.
        return (block * 2.0**-exponent).floor_().sub_(float(first)).to(torch.int32)
    codes = torch.div(block.double(), math.ldexp(1.0, exponent), rounding_mode="floor")
    return codes.to(torch.int64) - first


@lru_cache(maxsize=32)
def smallest_normal(dtype: torch.dtype) -> float:
    """The smallest normal number of a floating dtype; 0 for others, which have no subnormals."""
    return torch.finfo(dtype).smallest_normal if dtype.is_floating_point else 0.0
