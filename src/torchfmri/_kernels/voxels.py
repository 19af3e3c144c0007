"""Norms and statistics of groups of neighbouring units (voxels), token by token, on CUDA.

All layers of a model side by side are read once: one launch for any number of layers and tokens.
The statistics add up on the device, per voxel, and nothing is waited for.
"""

from __future__ import annotations

import importlib
import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels.cuda_plan import DTYPES, upload
from torchfmri._kernels.histogram import Floats, Integers

FIELDS = 8
"""Numbers per voxel: finite, mean, squared deviations, low, high, nan, infinite, zero."""
WIDEST = 1 << 13
"""Units of a voxel at most: a program holds one at a time."""
_TILE = 1 << 10  # values that a program reads at a time


@lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    """The module of Triton kernels, or None where Triton is missing or broken."""
    try:
        return importlib.import_module("torchfmri._kernels.voxels_triton")
    except Exception:
        return None


def voxels_reducible(like: Tensor, size: int) -> bool:
    """Whether `reduce_voxels` reads values of this kind, in voxels of this size."""
    known = like.is_cuda and like.dtype in DTYPES and size <= WIDEST
    return known and _triton() is not None


class VoxelTable(NamedTuple):
    """Where some voxels stand in a row of values, and which columns of the results are theirs.

    Attributes:
        starts: The first unit of each, int32 on the device.
        counts: How many units each has.
        columns: Its column.
        size: The largest count.
    """

    starts: Tensor
    counts: Tensor
    columns: Tensor
    size: int

    @staticmethod
    def of(
        starts: Integers, counts: Integers, columns: Integers, device: torch.device
    ) -> VoxelTable:
        """Upload such a table."""
        table = np.stack([starts, counts, columns]).astype(np.int32)
        first, number, place = upload(table, device)
        return VoxelTable(first, number, place, int(counts.max()))


class VoxelSums:
    """The statistics of every voxel of every row, on the device, (8, b, voxel)."""

    def __init__(self, b: int, voxels: int, device: torch.device) -> None:
        self.numbers = torch.zeros(FIELDS, b, voxels, dtype=torch.float64, device=device)
        self.numbers[3] = math.inf
        self.numbers[4] = -math.inf

    def by_group(self, groups: Tensor, number: int) -> Floats:
        """The statistics of groups of voxels together, (b, group, 8); waits for the device.

        Args:
            groups: (voxel,) the group of each.
            number: How many groups there are.
        """
        finite, mean, deviations, low, high, *counts = self.numbers
        shape = (finite.shape[0], number)

        def add(values: Tensor) -> Tensor:
            return values.new_zeros(shape).index_add_(1, groups, values)

        total = add(finite)
        means = add(finite * mean) / total.clamp(min=1)
        # Of the voxels, and of the voxels' means around that of the group.
        spread = add(deviations + finite * (mean - means[:, groups]) ** 2)
        places = groups.expand(shape[0], -1)
        lowest = low.new_full(shape, math.inf).scatter_reduce_(1, places, low, "amin")
        highest = high.new_full(shape, -math.inf).scatter_reduce_(1, places, high, "amax")
        found = torch.stack([total, means, spread, lowest, highest, *map(add, counts)], -1)
        return found.cpu().numpy()


def reduce_voxels(
    values: Tensor,
    table: VoxelTable,
    norms: Tensor,
    sums: VoxelSums | None = None,
    kept: Tensor | None = None,
    *,
    added: bool = False,
) -> None:
    """Queue the norms of voxels at every token, and the update of their statistics.

    Args:
        values: (b, t, w) with w contiguous, of a kind that is `voxels_reducible`.
        table: The voxels in w.
        norms: (b, t, voxel) of float32, with voxels contiguous; its columns in the table are
            written.
        sums: Takes the statistics.
        kept: (b, t) which tokens count for the statistics; None for all.
        added: Add the norms to those that are there: another call of the same layers.
    """
    b, tokens, _ = values.shape
    kernels = _triton()
    assert kernels is not None
    if sums is None:
        flags, numbers = values, values  # not read
    else:
        whole = values.new_ones((b, tokens), dtype=torch.uint8) if kept is None else kept
        flags, numbers = whole.to(torch.uint8).contiguous(), sums.numbers
    size = 1 << (table.size - 1).bit_length()
    block = max(1, _TILE // size)
    number = len(table.starts)
    with _on(values.device):
        kernels.reduce_voxels[(-(-number // block), b)](
            *(values, table.starts, table.counts, table.columns, number, tokens),
            *(values.stride(0), values.stride(1), norms, norms.stride(0), norms.stride(1)),
            *(flags, numbers, numbers.stride(0), numbers.stride(1)),
            STATISTICS=sums is not None,
            ADDED=added,
            SIZE=size,
            BLOCK=block,
            num_warps=4,
        )


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
