"""Reductions of many CUDA tensors at once, never waiting for the device.

`reduce_many` launches one kernel per dtype over all tensors and a small one that merges; the
result stays on the device until it is read. What depends on sizes and dtypes alone is planned once
and kept, so that a training step uploads nothing but addresses.

The pass itself is Triton (`cuda_triton`). The histogram is counted in shared memory, which Triton
cannot address: by `histogram.cu`, which torch compiles at run time (`cuda_native`). Where that is
impossible a Triton pass gives the same counts, many times slower.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels import cuda_native
from torchfmri._kernels.cpu import smallest_normal
from torchfmri._kernels.cuda_plan import LaunchPlan, current_plan, upload_addresses
from torchfmri._kernels.histogram import CODES, OVERFLOW, Floats, Histogram
from torchfmri._kernels.reduction import Reduction

FIELDS = 10
"""Numbers per row: finite, nan, +inf, -inf, zero, tiny, mean, squared deviations, low, high."""
MERGED = 1024
"""Columns that the merge reads at a time."""
OCCUPIED = 4096
"""Histogram bins per row that are copied to the host; a row with more is fetched when read."""
TABLES = 512
"""Tables that the Triton pass for the histogram spreads its counts over, at least."""


class Shape(NamedTuple):
    """How a program of the Triton pass reads: `rows` times `lanes` values at a time."""

    lanes: int
    rows: int
    warps: int


SHAPES = {2: Shape(1024, 4, 4), 4: Shape(512, 8, 4)}
"""By the size of a value in bytes: 16 bytes per thread and load, four loads under way."""


@lru_cache(maxsize=1)
def triton_kernels() -> ModuleType | None:
    """The module of Triton kernels, or None where Triton is missing or broken."""
    try:
        return importlib.import_module("torchfmri._kernels.cuda_triton")
    except Exception:
        return None


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether `reduce_many` works here: a CUDA device and Triton."""
    return torch.cuda.is_available() and triton_kernels() is not None


class Bins(NamedTuple):
    """The histograms of all rows, on the device.

    Attributes:
        tables: How often each of the 16,384 codes occurs, int32 (rows, 16384).
        codes: The occupied codes, by value ascending, int16 (rows, 4096).
        counts: How often each of those occurs, int32 (rows, 4096).
        occupied: How many codes are occupied, int32 (rows,).
        with_zero: Whether +0.0 was counted; else it is what the counts lack.
    """

    tables: Tensor
    codes: Tensor
    counts: Tensor
    occupied: Tensor
    with_zero: bool


DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What the kernels read."""


class DeviceReductions:
    """What one launch found, on the device; nothing has been waited for."""

    def __init__(self, plan: LaunchPlan, rows: Tensor, bins: Bins | None) -> None:
        self._plan = plan
        self._rows = rows
        self._bins = bins
        self._copies: list[Tensor] | None = None
        self._event: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        """Begin to copy the numbers to pinned host memory, on the current stream."""
        if self._copies is not None:
            return
        found = [self._rows]
        if self._bins is not None:
            found += [self._bins.codes, self._bins.counts, self._bins.occupied]
        if not self._rows.is_cuda:
            self._copies = found
            return
        self._copies = [torch.empty_like(part, device="cpu", pin_memory=True) for part in found]
        with torch.cuda.device(self._rows.device):
            for copy, part in zip(self._copies, found, strict=True):
                copy.copy_(part, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        if self._copies is None:
            return False
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read_table(self) -> Floats | None:
        """The numbers of every tensor at once, (tensor, 10); waits for the device.

        In this order: count, mean, squared deviations, low, high (nan without finite values), nan,
        +inf, -inf, zero, subnormal. None where there are histograms, or a tensor has several rows.
        """
        plan = self._plan
        whole = len(plan.owners) == plan.tensors and bool((np.diff(plan.owners) == 1).all())
        if self._bins is not None or not whole:
            return None
        self.start_copy()
        assert self._copies is not None
        if self._event is not None:
            self._event.synchronize()
        found = self._copies[0].numpy()
        table = np.empty((plan.tensors, FIELDS))
        table[:, 0] = plan.sizes
        table[:, 1:5] = np.where(found[:, :1] > 0, found[:, 6:], np.nan)
        table[:, 5:9] = found[:, 1:5]
        table[:, 9] = found[:, 5] - found[:, 4]
        return table

    def read(self) -> list[Reduction]:
        """One Reduction per tensor, in the order of the tensors; waits for the device."""
        self.start_copy()
        assert self._copies is not None
        if self._event is not None:
            self._event.synchronize()
        numbers = self._copies[0]
        counts = numbers[:, :6].to(torch.int64).tolist()
        moments = numbers[:, 6:].tolist()
        parts: list[Reduction] = []
        for size, (_, *not_finite, zero, tiny), others in zip(
            self._plan.sizes.tolist(), counts, moments, strict=True
        ):
            # In the order of the fields of a Reduction.
            fields: tuple[Any, ...] = (size, *not_finite, zero, tiny - zero, *others)
            parts.append(Reduction(*fields))
        if self._bins is not None:
            for part, histogram in zip(parts, self._histograms(self._bins), strict=True):
                part.histogram = histogram
                if not self._bins.with_zero and histogram.total < part.finite:
                    zeros = Histogram.from_codes([0], [part.finite - histogram.total])
                    part.histogram = histogram.merge(zeros)
        return self._add_rows(parts)

    def _histograms(self, bins: Bins) -> list[Histogram]:
        """The histogram of every row."""
        assert self._copies is not None
        codes, counts, occupied = (part.numpy() for part in self._copies[1:])
        return [
            Histogram(codes[row, :number].astype("int64"), counts[row, :number].astype("int64"))
            if number <= OCCUPIED
            else Histogram.from_table(bins.tables[row].to("cpu", torch.int64).numpy())
            for row, number in enumerate(occupied.tolist())
        ]

    def _add_rows(self, parts: list[Reduction]) -> list[Reduction]:
        """The rows of every tensor put together; most have one, empty ones none."""
        results: list[Reduction | None] = [None] * self._plan.tensors
        for tensor, part in zip(self._plan.owners.tolist(), parts, strict=True):
            whole = results[tensor]
            results[tensor] = part if whole is None else whole.add(part)
        nothing = None if self._bins is None else Histogram.from_codes([], [])
        return [Reduction(histogram=nothing) if found is None else found for found in results]


def reduce_many(tensors: Sequence[Tensor], *, histogram: bool = False) -> DeviceReductions:
    """The reductions of CUDA tensors of one device, as work that has been queued.

    The tensors may be of different sizes and dtypes (bfloat16, float16, float32). A dense tensor
    is read where it lies, in the order of its memory; one with gaps or repetitions is copied
    first. They must not be written, nor freed on another stream, before the current stream has
    passed this point.

    Args:
        tensors: What to reduce; empty ones are fine.
        histogram: Whether to count the 16,384 histogram codes as well.

    Raises:
        TypeError: A tensor is of another dtype.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise TypeError(f"The kernels read bfloat16, float16 and float32, not {tensor.dtype}.")
    dense = [
        tensor if tensor.is_contiguous() and not tensor.is_neg() else _in_memory_order(tensor)
        for tensor in tensors
    ]
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type != "cuda":
        return _launch(dense, device, histogram)
    with torch.cuda.device(device):
        return _launch(dense, device, histogram)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same values: a view where the tensor is dense, else a copy."""
    tensor = tensor.detach().resolve_neg()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous()


def _launch(dense: list[Tensor], device: torch.device, histogram: bool) -> DeviceReductions:
    """Queue all kernels."""
    plan = current_plan(dense, device)
    rows = torch.empty((len(plan.sizes), FIELDS), dtype=torch.float64, device=device)
    if not len(plan.sizes):
        return DeviceReductions(plan, rows, _empty_bins(rows, True) if histogram else None)
    pointers = upload_addresses(plan, dense, device)
    kernels = triton_kernels()
    assert kernels is not None
    moments = plan.moments
    partial = torch.empty((FIELDS, moments.number), dtype=torch.float64, device=device)
    where = (pointers, plan.lengths, moments.rows, moments.firsts)
    for dtype, first, number in moments.groups:
        shape = SHAPES[dtype.itemsize]
        kernels.reduce_chunks[(number,)](
            *(*where, partial, moments.chunk, first, moments.number),
            NORMAL=smallest_normal(dtype),
            TYPE=kernels.TYPES[dtype],
            ITEM=dtype.itemsize,
            BLOCK=shape.lanes,
            UNROLL=shape.rows,
            WIDTH=16 // dtype.itemsize,
            CAREFUL=128 * shape.warps,
            num_warps=shape.warps,
        )
    kernels.merge_chunks[(len(rows),)](
        *(partial, moments.firsts, rows, moments.number), BLOCK=MERGED, num_warps=8
    )
    return DeviceReductions(plan, rows, _count(plan, pointers, rows) if histogram else None)


def _empty_bins(rows: Tensor, with_zero: bool) -> Bins:
    """Bins for as many rows; only the tables are initialized."""
    number = len(rows)
    return Bins(
        rows.new_zeros((number, CODES), dtype=torch.int32),
        rows.new_empty((number, OCCUPIED), dtype=torch.int16),
        rows.new_empty((number, OCCUPIED), dtype=torch.int32),
        rows.new_empty((number,), dtype=torch.int32),
        with_zero,
    )


def _count(plan: LaunchPlan, pointers: Tensor, rows: Tensor) -> Bins:
    """Queue the kernels that count and compact the histograms."""
    kernels = triton_kernels()
    assert kernels is not None
    bins = _empty_bins(rows, cuda_native.usable(plan, rows.device))
    if bins.with_zero:
        cuda_native.count_codes(plan, pointers, bins.tables)
    else:
        _count_slowly(kernels, plan, pointers, bins.tables)
    kernels.compact_tables[(len(rows),)](
        *(bins.tables, bins.codes, bins.counts, bins.occupied),
        HALF=OVERFLOW,
        LIMIT=OCCUPIED,
        BLOCK=1024,
    )
    return bins


def _count_slowly(kernels: ModuleType, plan: LaunchPlan, pointers: Tensor, tables: Tensor) -> None:
    """Queue the Triton pass for the histogram."""
    copies = max(1, TABLES // len(tables))
    spread = tables.new_zeros((copies, *tables.shape))
    codes = plan.codes
    for dtype, first, number in codes.groups:
        kernels.count_codes[(number,)](
            *(pointers, plan.lengths, codes.rows, codes.firsts, spread, codes.chunk, first),
            *(len(tables), copies),
            TYPE=kernels.TYPES[dtype],
            ITEM=dtype.itemsize,
            BLOCK=SHAPES[dtype.itemsize].lanes,
        )
    torch.sum(spread, 0, dtype=torch.int32, out=tables)
