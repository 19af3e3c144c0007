"""Passes over memory compiled by numba, for machines that have it; imported only there.

Every loop runs over a slice of 2,048 values, which stays in the first-level cache and whose
length numba can count up to: that is what lets LLVM use vector instructions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from torchfmri._kernels.histogram import CODE_SHIFT, CODES, Integers

CHUNK = 2048
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
    return float(np.int32(ordered ^ 0x7FFFFFFF if ordered < 0 else ordered).view(np.float32))
