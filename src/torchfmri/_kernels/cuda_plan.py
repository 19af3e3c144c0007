"""Which program of a launch reads which part of which tensor; made once per set of sizes.

`cuda.reduce_many` uploads only addresses at each step. A plan may hold sizes and dtypes, but no
tensor and no address: it outlives the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchfmri._kernels.histogram import Integers

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the passes read."""
LONGEST = 1 << 30
"""Values per row of the result; a longer tensor has several, so that 32 bits hold every count."""
CHUNKS = (1 << 13, 1 << 18)
"""The fewest and the most values that a program of the moments reads."""
CODE_CHUNKS = (1 << 15, 1 << 19)
"""The same for the histogram, whose programs first clear and finally add 16,384 counters."""


@dataclass(frozen=True)
class Programs:
    """Which program reads which chunk.

    Attributes:
        chunk: Values per program.
        rows: The row of every program, int32 on the device.
        firsts: The first program of every row, and the number of programs.
        groups: (dtype, first program, number of programs) of every launch.
        number: Of programs.
    """

    chunk: int
    rows: Tensor
    firsts: Tensor
    groups: tuple[tuple[torch.dtype, int, int], ...]
    number: int


@dataclass(frozen=True)
class LaunchPlan:
    """All that depends on sizes and dtypes alone.

    Attributes:
        tensors: How many there are.
        owners: The tensor of every row.
        sizes: The number of values of every row.
        skipped: Bytes of the tensor before every row.
        lengths: `sizes` on the device.
        moments: Programs of the pass for moments, extremes and counts.
        codes: Programs of the pass for the histogram.
    """

    tensors: int
    owners: Integers
    sizes: Integers
    skipped: Integers
    lengths: Tensor
    moments: Programs
    codes: Programs


def current_plan(tensors: Sequence[Tensor], device: torch.device) -> LaunchPlan:
    """The plan for these contiguous tensors on the current stream."""
    # A plan's arrays were uploaded on one stream, and only there are they known to have arrived.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    sizes = tuple([tensor.numel() for tensor in tensors])
    return make_plan(sizes, tuple([tensor.dtype for tensor in tensors]), device, stream)


def upload_addresses(plan: LaunchPlan, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The address of every row, on the device."""
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    return upload(addresses[plan.owners] + plan.skipped, device)


@lru_cache(maxsize=32)
def make_plan(
    lengths: tuple[int, ...], types: tuple[torch.dtype, ...], device: torch.device, stream: int
) -> LaunchPlan:
    """The plan for tensors of these sizes and dtypes."""
    owners: list[int] = []
    sizes: list[int] = []
    skipped: list[int] = []
    dtypes: list[torch.dtype] = []
    for dtype in DTYPES:
        for tensor, size in enumerate(lengths):
            if types[tensor] != dtype:
                continue
            for start in range(0, size, LONGEST):
                owners.append(tensor)
                sizes.append(min(LONGEST, size - start))
                skipped.append(start * dtype.itemsize)
                dtypes.append(dtype)
    units = 1
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    return LaunchPlan(
        tensors=len(lengths),
        owners=np.array(owners, np.int64),
        sizes=np.array(sizes, np.int64),
        skipped=np.array(skipped, np.int64),
        lengths=upload(np.array(sizes, np.int64), device),
        moments=_programs(sizes, dtypes, CHUNKS, 16 * units, device),
        codes=_programs(sizes, dtypes, CODE_CHUNKS, 8 * units, device),
    )


def _programs(
    sizes: list[int],
    dtypes: list[torch.dtype],
    limits: tuple[int, int],
    wanted: int,
    device: torch.device,
) -> Programs:
    """Chunks of equal size: as large as `limits` allows, but about `wanted` of them."""
    chunk = min(max(1 << (sum(sizes) // wanted).bit_length(), limits[0]), limits[1])
    parts = np.array([-(-size // chunk) for size in sizes], np.int64)
    firsts = np.concatenate(([0], np.cumsum(parts)))
    groups = []
    for dtype in dict.fromkeys(dtypes):
        # Rows are ordered by dtype, so those of one stand together.
        start = dtypes.index(dtype)
        first, stop = firsts[start], firsts[start + dtypes.count(dtype)]
        groups.append((dtype, int(first), int(stop - first)))
    rows = np.repeat(np.arange(len(sizes), dtype=np.int32), parts)
    first_programs = upload(firsts.astype(np.int32), device)
    return Programs(chunk, upload(rows, device), first_programs, tuple(groups), int(firsts[-1]))


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, through pinned memory so that nobody waits."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
