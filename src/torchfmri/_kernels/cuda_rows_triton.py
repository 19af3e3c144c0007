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
def _write_groups(squares, token, width, begin, values, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Write the sums of squares of the groups that begin in these values."""
    sums = tl.sum(tl.reshape(values * values, (BLOCK // SIZE, SIZE)), axis=1)
    groups = tl.cdiv(width, SIZE)
    group = begin // SIZE + tl.arange(0, BLOCK // SIZE)
    tl.store(squares + token * groups + group, sums, mask=group < groups)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_rows(
    table,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Squares, by groups of SIZE values (0: of all), and the inner product of one row."""
    token = tl.program_id(0).to(tl.int64)
    job = table + tl.program_id(1) * FIELDS
    if token < tl.load(job + 7):
        width = tl.load(job + 8)
        values = (tl.load(job) + token * width * ITEM).to(tl.pointer_type(TYPE))
        squares = tl.load(job + 2).to(tl.pointer_type(tl.float32))
        products = tl.load(job + 3).to(tl.pointer_type(tl.float32))
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        product = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, width, BLOCK):
            k = begin + lanes
            row = tl.load(values + k, mask=k < width, other=0.0).to(tl.float32)
            product += row * _weights(job, k, width, TYPE)
            if SIZE > 0:
                _write_groups(squares, token, width, begin, row, BLOCK, SIZE)
            else:
                total += row * row
        if SIZE == 0:
            tl.store(squares + token, tl.sum(total))
        tl.store(products + token, tl.sum(product))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_products(
    table,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The same of g * x / rms(x), added up over the rows of one token; a row fits into BLOCK."""
    token = tl.program_id(0).to(tl.int64)
    job = table + tl.program_id(1) * FIELDS
    if token < tl.load(job + 7):
        width = tl.load(job + 8)
        positions = tl.load(job + 9)
        sample = token // positions
        position = token % positions
        at_g = tl.load(job) + (sample * tl.load(job + 11) + position * tl.load(job + 12)) * ITEM
        at_x = tl.load(job + 1) + (sample * tl.load(job + 14) + position * tl.load(job + 15)) * ITEM
        small = tl.load(job + 17).to(tl.int32).to(tl.float32, bitcast=True)
        k = tl.arange(0, BLOCK)
        inside = k < width
        total = tl.zeros((BLOCK,), tl.float32)
        for row in range(tl.load(job + 10)):
            g = (at_g + row * tl.load(job + 13) * ITEM).to(tl.pointer_type(TYPE))
            x = (at_x + row * tl.load(job + 16) * ITEM).to(tl.pointer_type(TYPE))
            one = tl.load(g + k, mask=inside, other=0.0).to(tl.float32)
            other = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
            power = tl.sum(other * other) / width.to(tl.float32) + small
            total += one * other / tl.sqrt(power)
        squares = tl.load(job + 2).to(tl.pointer_type(tl.float32))
        products = tl.load(job + 3).to(tl.pointer_type(tl.float32))
        if SIZE > 0:
            _write_groups(squares, token, width, 0, total, BLOCK, SIZE)
        else:
            tl.store(squares + token, tl.sum(total * total))
        tl.store(products + token, tl.sum(total * _weights(job, k, width, TYPE)))
