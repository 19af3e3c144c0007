# mypy: disable-error-code="no-untyped-def"
"""The passes over many tensors in one launch, in Triton; imported only where Triton is installed.

A program reads one chunk of one tensor, whose address it finds in a table, and writes one column
of numbers; a second kernel adds the columns of each tensor up in a fixed order. Nothing depends on
the order in which programs run: the only atomics are integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _locate(pointers, sizes, rows, firsts, chunk, program, ITEM: tl.constexpr):
    """The address of a program's chunk, rounded down to 16 bytes, and where it starts and ends."""
    row = tl.load(rows + program)
    part = program - tl.load(firsts + row)
    size = tl.load(sizes + row)
    address = tl.load(pointers + row)
    head = (address & 15) // ITEM
    last = part == (size - 1) // chunk
    base = part.to(tl.int64) * chunk
    start = tl.where(part == 0, head, 0)
    stop = tl.where(last, head + size - base, chunk)
    return row, (address & -16) + base * ITEM, start.to(tl.int32), stop.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_chunks(
    pointers,
    sizes,
    rows,
    firsts,
    partial,
    chunk,
    offset,
    programs,
    NORMAL: tl.constexpr,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDTH: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Write one column of `partial` (10, programs) per program."""
    program = tl.program_id(0) + offset
    _row, address, start, stop = _locate(pointers, sizes, rows, firsts, chunk, program, ITEM)
    # Without this hint, loads from an address out of a table are one element wide.
    base = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
    where = partial + program
    _reduce_chunk(base, start, stop, where, programs, NORMAL, BLOCK, UNROLL, WIDTH, CAREFUL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduce_single(
    values,
    partial,
    size,
    chunk,
    programs,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDTH: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Write one column of `partial` per program that finds anything of one aligned tensor."""
    program = tl.program_id(0)
    offset = program.to(tl.int64) * chunk
    left = size - offset
    if left > 0:
        base = tl.multiple_of(values + offset, 16)
        stop = tl.minimum(left, chunk).to(tl.int32)
        where = partial + program
        _reduce_chunk(base, stop * 0, stop, where, programs, NORMAL, BLOCK, UNROLL, WIDTH, CAREFUL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _reduce_chunk(
    base,
    start,
    stop,
    where,
    programs,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDTH: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Write the column of one chunk: ten numbers, which are `programs` apart.

    Each lane subtracts the first value that it meets, so that sums stay in float32 and no value
    has to be known in advance: the lanes' shifts are a sample of the data, which on average
    doubles the rounding error and no more. A chunk for which that is not good enough (not
    finite, extreme range, shifts that are no sample of it) is read again in float64.
    """
    lanes = tl.arange(0, BLOCK)
    inside = (lanes >= start) & (lanes < stop)
    shift = tl.load(base + lanes, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    low = tl.full((BLOCK // WIDTH,), float("inf"), tl.float32)
    high = tl.full((BLOCK // WIDTH,), float("-inf"), tl.float32)
    # Counted in float32, which has an instruction for it; a lane sees far less than 2**24 values.
    zero = tl.zeros((BLOCK // WIDTH,), tl.float32)
    tiny = tl.zeros((BLOCK // WIDTH,), tl.float32)

    # Several rows of lanes at once, because that many loads have to be under way.
    positions = tl.arange(0, UNROLL)[:, None] * BLOCK + lanes[None, :]
    step = UNROLL * BLOCK
    head = (start > 0).to(tl.int32)
    full = stop // step
    for tile in range(head, full):
        x = tl.load(base + tile * step + positions).to(tl.float32)
        difference = x - shift[None, :]
        total += tl.sum(difference, axis=0)
        squares += tl.sum(difference * difference, axis=0)
        # One accumulator per thread is enough for these: fewer registers, more loads under way.
        x = tl.reshape(x, (UNROLL, BLOCK // WIDTH, WIDTH))
        low = tl.minimum(low, tl.min(tl.min(x, axis=2), axis=0))
        high = tl.maximum(high, tl.max(tl.max(x, axis=2), axis=0))
        zero += tl.sum(tl.sum(tl.where(x == 0, 1.0, 0.0), axis=2), axis=0)
        tiny += tl.sum(tl.sum(tl.where(tl.abs(x) < NORMAL, 1.0, 0.0), axis=2), axis=0)
    number = tl.zeros((BLOCK,), tl.int32) + tl.maximum(full - head, 0) * UNROLL
    # What is left: the first tile of an unaligned tensor and what follows the last full tile.
    before = head * UNROLL
    after = tl.maximum(full, head) * UNROLL
    for index in range(before + tl.maximum(tl.cdiv(stop, BLOCK) - after, 0)):
        place = tl.where(index < before, index, index - before + after) * BLOCK + lanes
        valid = (place >= start) & (place < stop)
        x = tl.load(base + place, mask=valid, other=0.0).to(tl.float32)
        difference = tl.where(valid, x - shift, 0.0)
        total += difference
        squares += difference * difference
        number += valid.to(tl.int32)
        x = tl.reshape(x, (BLOCK // WIDTH, WIDTH))
        valid = tl.reshape(valid, (BLOCK // WIDTH, WIDTH))
        low = tl.minimum(low, tl.min(tl.where(valid, x, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(valid, x, float("-inf")), axis=1))
        zero += tl.sum(tl.where(valid & (x == 0), 1.0, 0.0), axis=1)
        tiny += tl.sum(tl.where(valid & (tl.abs(x) < NORMAL), 1.0, 0.0), axis=1)

    count = (stop - start).to(tl.float64)
    shifts = shift.to(tl.float64)
    totals = total.to(tl.float64)
    numbers = number.to(tl.float64)
    mean = tl.sum(shifts * numbers + totals) / count
    away = shifts - mean
    deviations = tl.sum(squares.to(tl.float64) + away * (2 * totals + away * numbers))
    raw = tl.sum(squares.to(tl.float64))
    least = tl.min(low)
    most = tl.max(high)
    spread = most - least
    tl.store(where + 4 * programs, tl.sum(zero).to(tl.float64))
    tl.store(where + 5 * programs, tl.sum(tiny).to(tl.float64))
    if spread == 0:
        mean = least.to(tl.float64)
        deviations = 0.0 * mean
    # Comparisons with NaN are false, so whatever is not finite fails here.
    sound = (spread < 1125899906842624.0) & (spread > 8.881784197001252e-16)
    sound = (sound | (spread == 0)) & (raw <= 32 * deviations + 1e38 * (spread == 0).to(tl.float64))
    if sound:
        tl.store(where, count)
        tl.store(where + programs, 0.0)
        tl.store(where + 2 * programs, 0.0)
        tl.store(where + 3 * programs, 0.0)
        tl.store(where + 6 * programs, mean)
        tl.store(where + 7 * programs, deviations)
        tl.store(where + 8 * programs, least.to(tl.float64))
        tl.store(where + 9 * programs, most.to(tl.float64))
    else:
        middle = least.to(tl.float64) / 2 + most.to(tl.float64) / 2
        middle = tl.where(tl.abs(middle) < 1e39, middle, 0.0)
        _reduce_carefully(base, start, stop, middle, where, programs, CAREFUL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _reduce_carefully(base, start, stop, middle, where, programs, BLOCK: tl.constexpr):
    """Write the column of a chunk that may hold anything, in float64."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    nan = tl.zeros((BLOCK,), tl.int32)
    infinite = tl.zeros((BLOCK,), tl.int32)
    negative = tl.zeros((BLOCK,), tl.int32)
    for tile in range(tl.cdiv(stop, BLOCK)):
        position = tile * BLOCK + lanes
        inside = (position >= start) & (position < stop)
        x = tl.load(base + position, mask=inside, other=0.0).to(tl.float32)
        finite = inside & (tl.abs(x) < float("inf"))
        difference = tl.where(finite, x.to(tl.float64) - middle, 0.0)
        total += difference
        squares += difference * difference
        low = tl.where(finite & (x < low), x, low)
        high = tl.where(finite & (x > high), x, high)
        nan += (inside & (x != x)).to(tl.int32)
        infinite += (inside & (x == float("inf"))).to(tl.int32)
        negative += (inside & (x == float("-inf"))).to(tl.int32)
    others = tl.sum(nan) + tl.sum(infinite) + tl.sum(negative)
    count = (stop - start - others).to(tl.float64)
    offset = tl.sum(total) / tl.maximum(count, 1.0)
    deviations = tl.sum(squares) - offset * offset * count
    tl.store(where, count)
    tl.store(where + programs, tl.sum(nan).to(tl.float64))
    tl.store(where + 2 * programs, tl.sum(infinite).to(tl.float64))
    tl.store(where + 3 * programs, tl.sum(negative).to(tl.float64))
    tl.store(where + 6 * programs, tl.where(count > 0, middle + offset, 0.0))
    tl.store(where + 7 * programs, tl.maximum(deviations, 0.0))
    tl.store(where + 8 * programs, tl.min(low).to(tl.float64))
    tl.store(where + 9 * programs, tl.max(high).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def merge_chunks(partial, firsts, merged, programs, BLOCK: tl.constexpr):
    """Write one row of `merged` (rows, 10) from the columns of each tensor, in float64."""
    row = tl.program_id(0)
    first = tl.load(firsts + row)
    last = tl.load(firsts + row + 1)
    lanes = tl.arange(0, BLOCK)
    center = tl.load(partial + 6 * programs + first)
    count = tl.zeros((BLOCK,), tl.float64)
    nan = tl.zeros((BLOCK,), tl.float64)
    infinite = tl.zeros((BLOCK,), tl.float64)
    negative = tl.zeros((BLOCK,), tl.float64)
    zero = tl.zeros((BLOCK,), tl.float64)
    tiny = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    low = tl.full((BLOCK,), float("inf"), tl.float64)
    high = tl.full((BLOCK,), float("-inf"), tl.float64)
    for begin in range(first, last, BLOCK):
        inside = begin + lanes < last
        column = partial + begin + lanes
        number = tl.load(column, mask=inside, other=0.0)
        count += number
        nan += tl.load(column + programs, mask=inside, other=0.0)
        infinite += tl.load(column + 2 * programs, mask=inside, other=0.0)
        negative += tl.load(column + 3 * programs, mask=inside, other=0.0)
        zero += tl.load(column + 4 * programs, mask=inside, other=0.0)
        tiny += tl.load(column + 5 * programs, mask=inside, other=0.0)
        away = tl.load(column + 6 * programs, mask=inside, other=0.0) - center
        total += number * away
        squares += tl.load(column + 7 * programs, mask=inside, other=0.0) + number * away * away
        low = tl.minimum(low, tl.load(column + 8 * programs, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(column + 9 * programs, mask=inside, other=float("-inf")))
    finite = tl.sum(count)
    offset = tl.sum(total) / tl.maximum(finite, 1.0)
    out = merged + row * 10
    tl.store(out, finite)
    tl.store(out + 1, tl.sum(nan))
    tl.store(out + 2, tl.sum(infinite))
    tl.store(out + 3, tl.sum(negative))
    tl.store(out + 4, tl.sum(zero))
    tl.store(out + 5, tl.sum(tiny))
    tl.store(out + 6, tl.where(finite > 0, center + offset, 0.0))
    tl.store(out + 7, tl.maximum(tl.sum(squares) - offset * offset * finite, 0.0))
    tl.store(out + 8, tl.min(low))
    tl.store(out + 9, tl.max(high))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def count_codes(
    pointers,
    sizes,
    rows,
    firsts,
    tables,
    chunk,
    offset,
    length,
    copies,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add to `tables` (copies, rows, 16384) how often each code occurs, +0.0 left out.

    Counters that many programs wait for are slow, hence the copies; zeros are what whole tensors
    are made of, and their number is what is missing in the end.
    """
    program = tl.program_id(0) + offset
    row, address, start, stop = _locate(pointers, sizes, rows, firsts, chunk, program, ITEM)
    base = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
    table = tables + ((program % copies) * length + row).to(tl.int64) * 16384
    lanes = tl.arange(0, BLOCK)
    for tile in range(tl.cdiv(stop, BLOCK)):
        position = tile * BLOCK + lanes
        inside = (position >= start) & (position < stop)
        x = tl.load(base + position, mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        tl.atomic_add(table + (bits >> 18).to(tl.int32), 1, mask=bits != 0, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def compact_tables(
    tables, codes, counts, occupied, HALF: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the occupied codes of each row of `tables` and their counts, by value ascending.

    At most `LIMIT` of them; `occupied` (rows) says how many there are. Infinity and NaN, whose
    codes start at `HALF` of either sign, are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    found = 0
    for begin in range(0, 2 * HALF, BLOCK):
        rank = begin + lanes
        code = tl.where(rank < HALF, 8191 + HALF - rank, rank - HALF)
        number = tl.load(tables + row * 16384 + code, mask=rank < 2 * HALF, other=0)
        some = (number != 0).to(tl.int32)
        place = found + tl.cumsum(some, 0) - 1
        keep = (number != 0) & (place < LIMIT)
        tl.store(codes + row * LIMIT + place, code.to(tl.int16), mask=keep)
        tl.store(counts + row * LIMIT + place, number, mask=keep)
        found += tl.sum(some)
    tl.store(occupied + row, found)
