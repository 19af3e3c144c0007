# mypy: disable-error-code="no-untyped-def"
"""Numbers per row of many tensors in one launch, in Triton; imported only where it is installed.

A program reads one row (of a product: the rows of one token) of one pass, whose addresses and sizes
it finds in a table, and writes its numbers. Everything is added up in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weights(job, k, width, TYPE: tl.constexpr):
    """The vector's entries that meet the values `k` of a row; zero where there are none."""
    vector = tl.load(job + 4).to(tl.pointer_type(TYPE))
    place = k - tl.load(job + 5)
    met = (place >= 0) & (place < tl.load(job + 6)) & (k < width)
    return tl.load(vector + place, mask=met, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _write_groups(
    squares,
    token,
    inside,
    width,
    begin,
    values,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write the sums of squares of the groups that begin in these values, of ROWS tokens."""
    sums = tl.sum(tl.reshape(values * values, (ROWS, BLOCK // SIZE, SIZE)), axis=2)
    groups = tl.cdiv(width, SIZE)
    group = begin // SIZE + tl.arange(0, BLOCK // SIZE)
    place = squares + token[:, None] * groups + group[None, :]
    tl.store(place, sums, mask=inside[:, None] & (group < groups)[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_rows(
    table,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Squares, by groups of SIZE values (0: of all), and the inner product of ROWS rows.

    With PRODUCT they are rows of g * x / rms(x), without groups; what is divided by comes last.
    """
    job = table + tl.program_id(1) * FIELDS
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = tl.load(job + 7)
    if tl.program_id(0) * ROWS < tokens:
        inside = token < tokens
        width = tl.load(job + 8)
        values = tl.load(job).to(tl.pointer_type(TYPE)) + token[:, None] * width
        squares = tl.load(job + 2).to(tl.pointer_type(tl.float32))
        products = tl.load(job + 3).to(tl.pointer_type(tl.float32))
        first = tl.load(job + 5)
        last = first + tl.load(job + 6)
        others = tl.load(job + 1).to(tl.pointer_type(TYPE)) + token[:, None] * width
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        product = tl.zeros((ROWS, BLOCK), tl.float32)
        power = tl.zeros((ROWS, BLOCK), tl.float32)
        for begin in range(0, width, BLOCK):
            k = begin + lanes
            mask = inside[:, None] & (k < width)[None, :]
            rows = tl.load(values + k[None, :], mask=mask, other=0.0).to(tl.float32)
            if PRODUCT:
                other = tl.load(others + k[None, :], mask=mask, other=0.0).to(tl.float32)
                power += other * other
                rows = rows * other
            if (begin < last) & (begin + BLOCK > first):
                product += rows * _weights(job, k, width, TYPE)[None, :]
            if SIZE > 0:
                _write_groups(squares, token, inside, width, begin, rows, ROWS, BLOCK, SIZE)
            else:
                total += rows * rows
        square = tl.sum(total, axis=1)
        dot = tl.sum(product, axis=1)
        if PRODUCT:
            small = tl.load(job + 17).to(tl.int32).to(tl.float32, bitcast=True)
            mean = tl.sum(power, axis=1) / width.to(tl.float32) + small
            square = square / mean
            dot = dot / tl.sqrt(mean)
        if SIZE == 0:
            tl.store(squares + token, square, mask=inside)
        tl.store(products + token, dot, mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_products(
    table,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write sums of g * x / rms(x), added up over the rows of one token; a row fits into BLOCK."""
    token = tl.program_id(0).to(tl.int64)
    job = table + tl.program_id(1) * FIELDS
    if token < tl.load(job + 7):
        width = tl.load(job + 8)
        positions = tl.load(job + 9)
        count = tl.load(job + 10)
        sample = token // positions
        position = token % positions
        at_g = tl.load(job) + (sample * tl.load(job + 11) + position * tl.load(job + 12)) * ITEM
        at_x = tl.load(job + 1) + (sample * tl.load(job + 14) + position * tl.load(job + 15)) * ITEM
        small = tl.load(job + 17).to(tl.int32).to(tl.float32, bitcast=True)
        k = tl.arange(0, BLOCK)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for begin in range(0, count, ROWS):
            row = begin + tl.arange(0, ROWS)
            mask = (row < count)[:, None] & (k < width)[None, :]
            g = at_g.to(tl.pointer_type(TYPE)) + row[:, None] * tl.load(job + 13) + k[None, :]
            x = at_x.to(tl.pointer_type(TYPE)) + row[:, None] * tl.load(job + 16) + k[None, :]
            one = tl.load(g, mask=mask, other=0.0).to(tl.float32)
            other = tl.load(x, mask=mask, other=0.0).to(tl.float32)
            power = tl.sum(other * other, axis=1) / width.to(tl.float32) + small
            total += one * other / tl.sqrt(power)[:, None]
        whole = tl.sum(total, axis=0)
        squares = tl.load(job + 2).to(tl.pointer_type(tl.float32))
        products = tl.load(job + 3).to(tl.pointer_type(tl.float32))
        if SIZE > 0:
            here = token + tl.arange(0, 1)
            rows = whole[None, :]
            _write_groups(squares, here, here >= 0, width, 0, rows, 1, BLOCK, SIZE)
        else:
            tl.store(squares + token, tl.sum(whole * whole))
        tl.store(products + token, tl.sum(whole * _weights(job, k, width, TYPE)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def bilinear_forms(
    table,
    found,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows of a matrix between two vectors; what they add up to is written."""
    part = tl.program_id(0).to(tl.int64)
    job = table + tl.program_id(1) * FIELDS
    width = tl.load(job + 2)
    left = tl.load(job + 4).to(tl.pointer_type(tl.float32))
    right = tl.load(job + 5).to(tl.pointer_type(tl.float32))
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * ROWS, tl.minimum(tl.load(job + 1), (part + 1) * ROWS)):
        values = (tl.load(job) + row * tl.load(job + 3) * ITEM).to(tl.pointer_type(TYPE))
        weight = tl.load(left + row)
        for begin in range(0, width, BLOCK):
            k = begin + lanes
            value = tl.load(values + k, mask=k < width, other=0.0).to(tl.float32)
            total += weight * value * tl.load(right + k, mask=k < width, other=0.0)
    tl.store(found + tl.program_id(1) * tl.num_programs(0) + part, tl.sum(total))
