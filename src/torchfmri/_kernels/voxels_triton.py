# mypy: disable-error-code="no-untyped-def"
"""Norms and running statistics of voxels, in Triton; imported only where it is installed.

A program takes some voxels of one row of a batch and goes through the row's tokens in order, so
that nobody else writes where it does and the result does not depend on the schedule.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
        sums += row * sum_row + column
        finite = tl.load(sums, mask=inside, other=0.0)
        mean = tl.load(sums + sum_field, mask=inside, other=0.0)
        deviations = tl.load(sums + 2 * sum_field, mask=inside, other=0.0)
        low = tl.load(sums + 3 * sum_field, mask=inside, other=0.0)
        high = tl.load(sums + 4 * sum_field, mask=inside, other=0.0)
        nan = tl.load(sums + 5 * sum_field, mask=inside, other=0.0)
        infinite = tl.load(sums + 6 * sum_field, mask=inside, other=0.0)
        zero = tl.load(sums + 7 * sum_field, mask=inside, other=0.0)
    for token in range(tokens):
        x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        square = tl.sum(x * x, axis=1)
        if ADDED:
            before = tl.load(target, mask=inside, other=0.0)
            square += tl.where(before == before, before * before, 0.0)
        tl.store(target, tl.sqrt(square), mask=inside)
        if STATISTICS:  # noqa: SIM102 - known when compiling, unlike the other one
            if tl.load(kept + row * tokens + token) != 0:
                is_nan = mask & (x != x)
                is_infinite = mask & (tl.abs(x) == float("inf"))
                fine = mask & (x == x) & (tl.abs(x) != float("inf"))
                wide = tl.where(fine, x, 0.0).to(tl.float64)
                here = tl.sum(fine.to(tl.int32), axis=1).to(tl.float64)
                own = tl.sum(wide, axis=1) / tl.maximum(here, 1.0)
                apart = tl.where(fine, wide - own[:, None], 0.0)
                # The two sets together (Chan, Golub, LeVeque 1979).
                share = here / tl.maximum(finite + here, 1.0)
                delta = own - mean
                deviations += tl.sum(apart * apart, axis=1) + delta * delta * finite * share
                mean += delta * share
                finite += here
                least = tl.min(tl.where(fine, x, float("inf")), axis=1)
                most = tl.max(tl.where(fine, x, float("-inf")), axis=1)
                low = tl.minimum(low, least.to(tl.float64))
                high = tl.maximum(high, most.to(tl.float64))
                nan += tl.sum(is_nan.to(tl.int32), axis=1).to(tl.float64)
                infinite += tl.sum(is_infinite.to(tl.int32), axis=1).to(tl.float64)
                zero += tl.sum((mask & (x == 0.0)).to(tl.int32), axis=1).to(tl.float64)
        source += token_stride
        target += norm_token
    if STATISTICS:
        tl.store(sums, finite, mask=inside)
        tl.store(sums + sum_field, mean, mask=inside)
        tl.store(sums + 2 * sum_field, deviations, mask=inside)
        tl.store(sums + 3 * sum_field, low, mask=inside)
        tl.store(sums + 4 * sum_field, high, mask=inside)
        tl.store(sums + 5 * sum_field, nan, mask=inside)
        tl.store(sums + 6 * sum_field, infinite, mask=inside)
        tl.store(sums + 7 * sum_field, zero, mask=inside)
