"""Numbers per row of float32 matrices, compiled by numba; imported only where numba is installed.

Memory is given by its address, because a call with numbers alone is several times cheaper than one
with arrays. Addresses are in bytes, strides in values.

Nothing here checks an address or keeps its memory alive. A kernel returns when it has read and
written everything, so a caller (`rows`, which says who owns what) has to hold the tensors during
the call and no longer. It also vouches for dtype (float32), sizes and strides: a wrong one writes
into memory of somebody else.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray as _array_at

from torchfmri._kernels.addresses import pointer

# Sums may be reordered into vector lanes. Nothing is assumed about NaN and infinity.
_compile = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz", "contract"})


@_compile
def _sum_squares(row: Any) -> Any:
    total = np.float32(0)
    for k in range(row.size):
        total += row[k] * row[k]
    return total


@_compile
def _write(row: Any, token: Any, size: Any, vector: Any, start: Any, squares: Any) -> Any:
    """Write the sums of squares of a row by group; returns its inner product with the vector."""
    groups = squares.shape[1]
    for group in range(groups):
        squares[token, group] = _sum_squares(row[group * size : (group + 1) * size])
    part = row[start : start + vector.size]
    total = np.float32(0)
    for k in range(part.size):
        total += part[k] * vector[k]
    return total


@_compile
def reduce_rows(
    values: Any, rows: Any, width: Any, size: Any, vector: Any, start: Any, length: Any, found: Any
) -> None:
    """Write sums of squares and inner products of each row of a contiguous matrix.

    Args:
        values: Address of the matrix (rows, width).
        rows: How many.
        width: Values per row.
        size: Neighbouring values that are one group.
        vector: Address of the vector (length,), which meets the values from `start` on.
        start: Where the vector begins.
        length: Of the vector.
        found: Address of what is written: squares (rows, groups), then inner products (rows,).
    """
    groups = (width + size - 1) // size
    matrix = _array_at(pointer(values), (rows, width), np.float32)
    weights = _array_at(pointer(vector), (length,), np.float32)
    squares = _array_at(pointer(found), (rows, groups), np.float32)
    products = _array_at(pointer(found + 4 * rows * groups), (rows,), np.float32)
    for token in range(rows):
        products[token] = _write(matrix[token], token, size, weights, start, squares)


@_compile
def _product(
    g: Any, g_stride: Any, x: Any, x_stride: Any, rows: Any, small: Any, total: Any
) -> None:
    """Write g * x / rms(x) of one token, at these addresses, added up over its rows."""
    width = total.size
    for row in range(rows):
        one = _array_at(pointer(g + 4 * row * g_stride), (width,), np.float32)
        other = _array_at(pointer(x + 4 * row * x_stride), (width,), np.float32)
        power = _sum_squares(other) / np.float32(width) + np.float32(small)
        scale = np.float32(1) / np.sqrt(power)
        if row == 0:
            for k in range(width):
                total[k] = scale * one[k] * other[k]
        else:
            for k in range(width):
                total[k] += scale * one[k] * other[k]


@_compile
def reduce_products(
    g: Any,
    g_strides: Any,
    x: Any,
    x_strides: Any,
    shape: Any,
    small: Any,
    size: Any,
    vector: Any,
    start: Any,
    length: Any,
    found: Any,
) -> None:
    """Write squares and inner products of g * x / rms(x), added up over the rows of each token.

    Args:
        g: Address of a tensor (b, s, rows of a token, width) with these strides, the last one 1.
        g_strides: Three numbers.
        x: Address of another of the same shape.
        x_strides: Its strides.
        shape: Those four numbers.
        small: What is added to the mean square of x.
        size: As for `reduce_rows`, and so are the others.
        vector: Address.
        start: Where the vector begins.
        length: Of the vector.
        found: Address.
    """
    samples, positions, rows, width = shape
    groups = (width + size - 1) // size
    tokens = samples * positions
    weights = _array_at(pointer(vector), (length,), np.float32)
    squares = _array_at(pointer(found), (tokens, groups), np.float32)
    products = _array_at(pointer(found + 4 * tokens * groups), (tokens,), np.float32)
    total = np.empty(width, np.float32)
    for sample in range(samples):
        for position in range(positions):
            at_g = sample * g_strides[0] + position * g_strides[1]
            at_x = sample * x_strides[0] + position * x_strides[1]
            _product(g + 4 * at_g, g_strides[2], x + 4 * at_x, x_strides[2], rows, small, total)
            token = sample * positions + position
            products[token] = _write(total, token, size, weights, start, squares)


@_compile
def write_products(
    g: Any, g_strides: Any, x: Any, x_strides: Any, shape: Any, small: Any, found: Any
) -> None:
    """Write g * x / rms(x), added up over the rows of each token, to (tokens, width)."""
    samples, positions, rows, width = shape
    whole = _array_at(pointer(found), (samples * positions, width), np.float32)
    for sample in range(samples):
        for position in range(positions):
            at_g = sample * g_strides[0] + position * g_strides[1]
            at_x = sample * x_strides[0] + position * x_strides[1]
            total = whole[sample * positions + position]
            _product(g + 4 * at_g, g_strides[2], x + 4 * at_x, x_strides[2], rows, small, total)


@_compile
def bilinear_forms(forms: Any, found: Any) -> None:
    """Write the number left^T matrix right of each matrix.

    Args:
        forms: (n, 6) of int64: address of the matrix, rows, width, stride of a row, addresses of
            the vector over the rows and of the one over the width.
        found: What is written, (n,) of float64.
    """
    for k in range(forms.shape[0]):
        rows, width, stride = forms[k, 1], forms[k, 2], forms[k, 3]
        left = _array_at(pointer(forms[k, 4]), (rows,), np.float32)
        right = _array_at(pointer(forms[k, 5]), (width,), np.float32)
        total = 0.0
        for i in range(rows):
            row = _array_at(pointer(forms[k, 0] + 4 * i * stride), (width,), np.float32)
            part = np.float32(0)
            for j in range(width):
                part += row[j] * right[j]
            total += part * left[i]
        found[k] = total
