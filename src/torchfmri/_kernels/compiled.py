"""Passes over memory compiled by numba, for machines that have it; imported only there.

Every loop runs over a slice of 2,048 values, which stays in the first-level cache and whose
length numba can count up to: that is what lets LLVM use vector instructions.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numba
import numpy as np
from numba import carray as _array_at

from torchfmri._kernels.addresses import pointer
from torchfmri._kernels.histogram import CODE_SHIFT, CODES, Integers
from torchfmri._kernels.reduction import LARGE_VALUE, SMALL_SPREAD

CHUNK = 2048
_INTEGER, _FLOAT = Struct("<i"), Struct("<f")
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN = np.int32(31)
# Sums may be reordered into vector lanes. Nothing is assumed about NaN and infinity.
_compile = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz", "contract"})


@_compile
def reduce_block(bits: Any, shift: Any, normal: Any) -> Any:
    """Moments, extremes and tiny values of floats, given as unsigned integers.

    Args:
        bits: The upper bits of float32 values: uint32, or uint16 for bfloat16.
        shift: How many lower bits are missing, as int32: 0 or 16.
        normal: Bits of the smallest normal number, as int32.

    Returns:
        The mean and the sum of squared deviations (both meaningless where a value is not finite
        or the range is extreme), the smallest and the largest ordered integer (`float_of`), the
        number of values that are zero, and of those whose magnitude is below `normal`.
    """
    count, mean, squares = 0, 0.0, 0.0
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    zero = tiny = np.int64(0)
    chunk = np.empty(CHUNK, np.int32)
    floats = chunk.view(np.float32)
    for start in range(0, bits.size, CHUNK):
        source = bits[start : start + CHUNK]
        words, values = chunk[: source.size], floats[: source.size]
        for i in range(words.size):
            words[i] = np.int32(source[i]) << shift
        total = np.float64(0)
        chunk_zero, chunk_tiny = np.int32(0), np.int32(0)
        for i in range(values.size):
            total += np.float64(values[i])
            word = words[i]
            # Two's complement for negative floats: integers in the order of the values.
            ordered = word ^ ((word >> _SIGN) & _MAGNITUDE)
            low, high = min(low, ordered), max(high, ordered)
            magnitude = word & _MAGNITUDE
            chunk_zero += np.int32(magnitude == 0)
            chunk_tiny += np.int32(magnitude < normal)
        number = values.size
        chunk_mean = total / number
        center = np.float32(chunk_mean)
        second = np.float32(0)
        for i in range(values.size):
            difference = values[i] - center
            second += difference * difference
        offset = chunk_mean - np.float64(center)
        delta = chunk_mean - mean
        squares += np.float64(second) - offset * offset * number
        squares += delta * delta * count * (number / (count + number))
        mean += delta * (number / (count + number))
        count += number
        zero, tiny = zero + chunk_zero, tiny + chunk_tiny
    return mean, squares, low, high, zero, tiny


@_compile
def write_row(values: Any, size: Any, width: Any, normal: Any, found: Any) -> Any:
    """Write the ten numbers of a contiguous tensor to a row of a `NumberTable`.

    Args:
        values: Its address.
        size: How many values it has.
        width: Bytes of a value: 4 for float32, 2 for bfloat16.
        normal: As for `reduce_block`.
        found: Address of the row, (10,) of float64.

    Returns:
        Whether the row was written: not for values that are not finite, or of an extreme range.
    """
    if width == 2:
        halves = _array_at(pointer(values), (size,), np.uint16)
        mean, squares, least, most, zero, tiny = reduce_block(halves, np.int32(16), normal)
    else:
        words = _array_at(pointer(values), (size,), np.uint32)
        mean, squares, least, most, zero, tiny = reduce_block(words, np.int32(0), normal)
    ends = np.empty(2, np.int32)
    ends[0] = least ^ _MAGNITUDE if least < 0 else least
    ends[1] = most ^ _MAGNITUDE if most < 0 else most
    low, high = ends.view(np.float32)
    spread = high - low
    if spread == 0:  # such as biases and gains that were never trained
        mean, squares = np.float64(low), 0.0
    # False for NaN and infinity too, whose ordered integers lie outside all others.
    elif not (spread > SMALL_SPREAD and max(high, -low) < LARGE_VALUE):
        return False
    row = _array_at(pointer(found), (10,), np.float64)
    row[0], row[1], row[2], row[3], row[4] = size, mean, squares, low, high
    row[5] = row[6] = row[7] = 0.0
    row[8], row[9] = zero, tiny - zero
    return True


@_compile
def _token_moments(values: Any, size: Any, width: Any, normal: Any, ends: Any) -> Any:
    """Moments, extremes, zeros and tiny values of one token; False in front where it needs care."""
    if width == 2:
        halves = _array_at(pointer(values), (size,), np.uint16)
        mean, squares, least, most, zero, tiny = reduce_block(halves, np.int32(16), normal)
    else:
        words = _array_at(pointer(values), (size,), np.uint32)
        mean, squares, least, most, zero, tiny = reduce_block(words, np.int32(0), normal)
    ends[0] = least ^ _MAGNITUDE if least < 0 else least
    ends[1] = most ^ _MAGNITUDE if most < 0 else most
    low, high = ends.view(np.float32)
    spread = high - low
    if spread == 0:
        return True, np.float64(low), 0.0, low, high, zero, tiny
    able = spread > SMALL_SPREAD and max(high, -low) < LARGE_VALUE
    return able, mean, squares, low, high, zero, tiny


@_compile
def write_layers(
    values: Any,
    shape: Any,
    strides: Any,
    width: Any,
    normal: Any,
    edges: Any,
    kept: Any,
    found: Any,
) -> None:
    """Write the ten numbers of each layer in each row of a batch, of layers side by side.

    Args:
        values: Address of a tensor (b, n, units), its units contiguous.
        shape: b and n.
        strides: Of these two.
        width: Bytes of a value: 4 for float32, 2 for bfloat16.
        normal: As for `reduce_block`.
        edges: (layer + 1,) where each layer begins among the units, and the last one ends.
        kept: (b, n) which tokens count.
        found: What is written, (b, layer, 10): the extremes are infinite where nothing counts, and
            the count is -1 where a token needs more care than this.
    """
    ends = np.empty(2, np.int32)
    for row in range(shape[0]):
        for layer in range(edges.size - 1):
            first, size = edges[layer], edges[layer + 1] - edges[layer]
            count, mean, squares = 0, 0.0, 0.0
            low, high = np.float64(np.inf), np.float64(-np.inf)
            zero = tiny = np.int64(0)
            able = True
            for token in range(shape[1]):
                if not kept[row, token]:
                    continue
                at = values + width * (row * strides[0] + token * strides[1] + first)
                one = _token_moments(at, size, width, normal, ends)
                able = able and one[0]
                share = size / (count + size)
                delta = one[1] - mean
                squares += one[2] + delta * delta * count * share
                mean += delta * share
                count += size
                low, high = min(low, np.float64(one[3])), max(high, np.float64(one[4]))
                zero, tiny = zero + one[5], tiny + one[6]
            numbers = found[row, layer]
            numbers[0] = count if able else -1
            numbers[1], numbers[2], numbers[3], numbers[4] = mean, squares, low, high
            numbers[5] = numbers[6] = numbers[7] = 0.0
            numbers[8], numbers[9] = zero, tiny - zero


@_compile
def _count_codes(bits: Any, table: Any) -> None:
    for i in range(bits.size):
        table[bits[i] >> CODE_SHIFT] += 1


@_compile
def _count_patterns(bits: Any, table: Any) -> None:
    for i in range(bits.size):
        table[bits[i]] += 1


def count_codes(bits: Any) -> Integers:
    """How often each histogram code occurs in the uint32 `bits` of floats."""
    table = np.zeros(CODES, np.int64)
    _count_codes(bits, table)
    return table


def count_patterns(bits: Any, size: int) -> Integers:
    """How often each of `size` patterns occurs in an array of uint8 or uint16."""
    table = np.zeros(size, np.int64)
    _count_patterns(bits, table)
    return table


def float_of(ordered: int) -> float:
    """The float32 value of an ordered integer."""
    # Not by a view of a NumPy scalar, which takes forty times as long.
    bits = _INTEGER.pack(ordered ^ 0x7FFFFFFF if ordered < 0 else ordered)
    value: float = _FLOAT.unpack(bits)[0]
    return value
