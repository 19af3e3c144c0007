# mypy: disable-error-code="no-untyped-def"
"""Norms and running statistics of voxels, in Triton; imported only where it is installed.

A program takes some voxels of one row of a batch and goes through the row's tokens in order, so
that nobody else writes where it does and the result does not depend on the schedule. For the
statistics it goes through them twice, first for the mean, then for the deviations from it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add(sums, numbers, inside):
    """Add numbers to those that are there."""
    tl.store(sums, tl.load(sums, mask=inside, other=0.0) + numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_voxels(
    values,
    starts,
    counts,
    columns,
    number,
    tokens,
    row_stride,
    token_stride,
    norms,
    norm_row,
    norm_token,
    kept,
    sums,
    sum_field,
    sum_row,
    STATISTICS: tl.constexpr,
    ADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the norm of BLOCK voxels at each token; with STATISTICS update their eight sums.

    With ADDED the norms are those of another call of the same layers, and are added to what is
    there already (nan for nothing).
    """
    voxel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = voxel < number
    start = tl.load(starts + voxel, mask=inside, other=0)
    count = tl.load(counts + voxel, mask=inside, other=0)
    column = tl.load(columns + voxel, mask=inside, other=0)
    lane = tl.arange(0, SIZE)
    mask = inside[:, None] & (lane[None, :] < count[:, None])
    source = values + row * row_stride + start[:, None] + lane[None, :]
    target = norms + row * norm_row + column
    if STATISTICS:
        # Each lane adds up its own values over the tokens, and the lanes are added up once at the
        # end: reductions at every token took ten times as long as reading the values.
        finite = tl.zeros((BLOCK, SIZE), tl.int32)
        nan = tl.zeros((BLOCK, SIZE), tl.int32)
        infinite = tl.zeros((BLOCK, SIZE), tl.int32)
        zero = tl.zeros((BLOCK, SIZE), tl.int32)
        total = tl.zeros((BLOCK, SIZE), tl.float64)
        low = tl.full((BLOCK, SIZE), float("inf"), tl.float32)
        high = tl.full((BLOCK, SIZE), float("-inf"), tl.float32)
    place = source  # not `token * token_stride`, which may exceed 32 bits
    for token in range(tokens):
        x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        square = tl.sum(x * x, axis=1)
        if ADDED:
            before = tl.load(target, mask=inside, other=0.0)
            square += tl.where(before == before, before * before, 0.0)
        tl.store(target, tl.sqrt(square), mask=inside)
        if STATISTICS:
            counted = mask & (tl.load(kept + row * tokens + token) != 0)
            fine = counted & (tl.abs(x) < float("inf"))
            finite += fine.to(tl.int32)
            total += tl.where(fine, x, 0.0).to(tl.float64)
            low = tl.minimum(low, tl.where(fine, x, float("inf")))
            high = tl.maximum(high, tl.where(fine, x, float("-inf")))
            nan += (counted & (x != x)).to(tl.int32)
            infinite += (counted & (tl.abs(x) == float("inf"))).to(tl.int32)
            zero += (counted & (x == 0.0)).to(tl.int32)
        place += token_stride
        target += norm_token
    if STATISTICS:
        here = tl.sum(finite, axis=1).to(tl.float64)
        own = tl.sum(total, axis=1) / tl.maximum(here, 1.0)
        squares = tl.zeros((BLOCK, SIZE), tl.float64)
        for token in range(tokens):
            x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            counted = mask & (tl.load(kept + row * tokens + token) != 0)
            apart = x.to(tl.float64) - own[:, None]
            squares += tl.where(counted & (tl.abs(x) < float("inf")), apart * apart, 0.0)
            source += token_stride
        sums += row * sum_row + column
        before = tl.load(sums, mask=inside, other=0.0)
        mean = tl.load(sums + sum_field, mask=inside, other=0.0)
        # The two sets together (Chan, Golub, LeVeque 1979).
        share = here / tl.maximum(before + here, 1.0)
        delta = own - mean
        deviations = tl.sum(squares, axis=1) + delta * delta * before * share
        lowest = tl.min(low, axis=1).to(tl.float64)
        highest = tl.max(high, axis=1).to(tl.float64)
        tl.store(sums, before + here, mask=inside)
        tl.store(sums + sum_field, mean + delta * share, mask=inside)
        _add(sums + 2 * sum_field, deviations, inside)
        least = tl.load(sums + 3 * sum_field, mask=inside, other=0.0)
        tl.store(sums + 3 * sum_field, tl.minimum(least, lowest), mask=inside)
        most = tl.load(sums + 4 * sum_field, mask=inside, other=0.0)
        tl.store(sums + 4 * sum_field, tl.maximum(most, highest), mask=inside)
        _add(sums + 5 * sum_field, tl.sum(nan, axis=1).to(tl.float64), inside)
        _add(sums + 6 * sum_field, tl.sum(infinite, axis=1).to(tl.float64), inside)
        _add(sums + 7 * sum_field, tl.sum(zero, axis=1).to(tl.float64), inside)
