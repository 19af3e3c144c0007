"""Numbers per row of many CUDA tensors, a few launches for all of them.

Passes are queued: what a launch is told about each of them is one row of a table of numbers, which
is uploaded once for all. The tensors stay alive until then, so a queue that has become long or
heavy is launched at once.
"""

from __future__ import annotations

import importlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels.cuda_plan import upload

if TYPE_CHECKING:
    from torchfmri._kernels.rows import Form

MOST = 128
"""Passes that wait at most."""
WIDEST = 1 << 13
"""Values in a row of a product at most: a program holds all of them at a time."""
BLOCK = 512
"""Values of a row that a program reads at a time; with 4 rows the fastest on an H200."""
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_ROWS = 4  # that a program reads at a time
_TOKENS = 7  # where a job says how many tokens it has
_ROWS_JOB, _PRODUCT_JOB = 9, 18  # numbers of a job, without and with a second tensor
_FORM_ROWS = 8  # rows of a matrix that a program adds up


@lru_cache(maxsize=64)
def heaviest(device: torch.device) -> int:
    """Bytes that may be kept alive for a queue: little of what the device has."""
    if device.type != "cuda":
        return 1 << 26
    return int(torch.cuda.get_device_properties(device).total_memory) // 128


class _Kind(NamedTuple):
    """Passes of one launch: products or not, and what is constant while compiling."""

    is_product: bool
    dtype: torch.dtype
    block: int
    size: int


@dataclass(slots=True)
class _Jobs:
    """Passes of one kind that wait.

    Attributes:
        tokens: The most that one of them may have.
        numbers: Of all of them, in a row.
    """

    tokens: int = 0
    numbers: array[int] = field(default_factory=lambda: array("q"))


@lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    """The module of Triton kernels, or None where Triton is missing or broken."""
    try:
        return importlib.import_module("torchfmri._kernels.cuda_rows_triton")
    except Exception:
        return None


def can_read(values: Tensor, size: int, is_product: bool) -> bool:
    """Whether the kernels read such tensors, and a program can hold their rows and groups."""
    width = values.shape[-1] if values.ndim else 1
    groups = not size or size >= width or (size & (size - 1) == 0 and size <= BLOCK)
    if not groups or (is_product and width > WIDEST):
        return False
    return values.dtype in DTYPES and _triton() is not None


class RowQueue:
    """Passes over rows of one device that wait to be launched together."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._heaviest = device, heaviest(device)
        self._jobs: dict[_Kind, _Jobs] = defaultdict(_Jobs)
        self._alive: list[object] = []
        self._count = self._bytes = 0

    def sender(
        self, like: Tensor, size: int, rest: tuple[int, ...], behind: int
    ) -> Callable[[Tensor, Tensor | None, int], None]:
        """What queues a pass over tensors like this one, told of them and where to write.

        Args:
            like: One of the tensors; of a product its g.
            size: Of a group; 0 for the whole row.
            rest: The numbers of a job that are the same for all of them.
            behind: Bytes from the squares to the inner products.
        """
        is_product = len(rest) + 4 > _ROWS_JOB
        width = like.shape[-1]
        block = 1 << (width - 1).bit_length() if is_product else BLOCK
        jobs = self._jobs[_Kind(is_product, like.dtype, block, 0 if size >= width else size)]
        jobs.tokens = max(jobs.tokens, rest[_TOKENS - 4])
        rest += (0,) * (_PRODUCT_JOB - 4 - len(rest))
        return partial(self._add, jobs, rest, behind, like.nbytes * (1 + is_product))

    def _add(
        self,
        jobs: _Jobs,
        rest: tuple[int, ...],
        behind: int,
        size: int,
        values: Tensor,
        other: Tensor | None,
        written: int,
    ) -> None:
        second = 0
        if other is not None:
            second = other.data_ptr()
            self._alive.append(other)
        jobs.numbers.extend((values.data_ptr(), second, written, written + behind, *rest))
        self._alive.append(values)
        self._count += 1
        self._bytes += size
        if self._count >= MOST or self._bytes >= self._heaviest:
            self.flush()

    def keep(self, alive: object) -> None:
        """Keep something alive until the next launch."""
        self._alive.append(alive)

    def flush(self) -> None:
        """Launch everything that waits."""
        if not self._count:
            return
        self._count = self._bytes = 0
        alive, self._alive = self._alive, []
        try:
            with _on(self._device):
                _launch(self._jobs, self._device)
        finally:
            for jobs in self._jobs.values():
                jobs.numbers = array("q")
            del alive


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _launch(waiting: dict[_Kind, _Jobs], device: torch.device) -> None:
    kernels = _triton()
    assert kernels is not None
    filled = {kind: jobs for kind, jobs in waiting.items() if jobs.numbers}
    whole = upload(np.concatenate([np.asarray(jobs.numbers) for jobs in filled.values()]), device)
    start = 0
    for kind, jobs in filled.items():
        tokens, numbers = jobs.tokens, jobs.numbers
        if kind.is_product:  # a program takes one token, some rows of it at a time
            kernel, rows, programs = kernels.reduce_products, max(1, 256 // kind.block), tokens
        else:
            kernel, rows, programs = kernels.reduce_rows, _ROWS, -(-tokens // _ROWS)
        kernel[(programs, len(numbers) // _PRODUCT_JOB)](
            whole[start:],
            FIELDS=_PRODUCT_JOB,
            TYPE=kernels.TYPES[kind.dtype],
            ITEM=kind.dtype.itemsize,
            ROWS=rows,
            BLOCK=kind.block,
            SIZE=kind.size,
            num_warps=1 if rows * kind.block <= 256 else 4 if kind.block <= 4096 else 8,
        )
        start += len(numbers)


def launch_forms(forms: Sequence[Form], dtype: torch.dtype, device: torch.device) -> Tensor:
    """left^T matrix right of each, (n,), of matrices of one dtype on one device.

    Neighbours with as many rows go in one launch.
    """
    kernels = _triton()
    assert kernels is not None
    found, start = [], 0
    with _on(device):
        table = upload(np.array(forms, np.int64), device)
        for programs, alike in groupby(-(-each.rows // _FORM_ROWS) for each in forms):
            count = sum(1 for _ in alike)
            parts = torch.empty(count, programs, device=device)
            kernels.bilinear_forms[(programs, count)](
                table[start:],
                parts,
                FIELDS=table.shape[1],
                TYPE=kernels.TYPES[dtype],
                ITEM=dtype.itemsize,
                ROWS=_FORM_ROWS,
                BLOCK=BLOCK,
            )
            found.append(parts.sum(1, dtype=torch.float64))
            start += count
    return torch.cat(found)
