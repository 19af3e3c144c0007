"""Numbers per row of many CUDA tensors, a few launches for all of them.

Passes are queued: what a launch is told about each of them is one row of a table of numbers, which
is uploaded once for all. The tensors stay alive until then, so a queue that has become long or
heavy is launched at once.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels.cuda_plan import upload

if TYPE_CHECKING:
    from torchfmri._kernels.rows import Asked, Product

MOST = 64
"""Passes that wait at most."""
WIDEST = 1 << 13
"""Values in a row of a product at most: a program holds all of them at a time."""
BLOCK = 1024
"""Values of a row that a program reads at a time."""
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


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


@lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    """The module of Triton kernels, or None where Triton is missing or broken."""
    try:
        return importlib.import_module("torchfmri._kernels.cuda_rows_triton")
    except Exception:
        return None


class RowQueue:
    """Passes over rows that wait to be launched together."""

    def __init__(self) -> None:
        self._waiting: dict[_Kind, list[tuple[int, ...]]] = defaultdict(list)
        self._alive: list[Any] = []
        self._count = self._bytes = 0

    def can_read(self, values: Tensor, size: int, is_product: bool) -> bool:
        """Whether the kernels read such tensors, and a program can hold their rows and groups."""
        width = values.shape[-1]
        groups = size >= width or (size & (size - 1) == 0 and size <= BLOCK)
        if not groups or (is_product and width > WIDEST):
            return False
        return values.dtype in DTYPES and _triton() is not None

    def rows(self, values: Tensor, rows: int, width: int, asked: Asked, found: Any) -> None:
        """Queue `Rows.reduce`."""
        size = 0 if asked.size >= width else asked.size
        kind = _Kind(False, values.dtype, BLOCK, size)
        job = (values.data_ptr(), 0, *self._results(found, asked), rows, width)
        self._add(kind, job, values, (values, asked.vector, found))

    def product(self, product: Product, asked: Asked, found: Any) -> None:
        """Queue `Rows.reduce_product`."""
        b, s, rows, width = product.shape
        block = 1 << (width - 1).bit_length()
        kind = _Kind(True, product.g.dtype, block, 0 if asked.size >= width else asked.size)
        small = int(np.float32(product.small).view(np.int32))
        g, x = product.g, product.x
        job = (
            *(g.data_ptr(), x.data_ptr(), *self._results(found, asked), b * s, width),
            *(s, rows, *product.g_strides, *product.x_strides, small),
        )
        self._add(kind, job, g, (g, x, asked.vector, found))

    def _results(self, found: Any, asked: Asked) -> tuple[int, ...]:
        return found[0].data_ptr(), found[1].data_ptr(), asked.address, asked.start, asked.length

    def _add(self, kind: _Kind, job: tuple[int, ...], values: Tensor, alive: Any) -> None:
        self._waiting[kind].append(job)
        self._alive.append(alive)
        self._count += 1
        self._bytes += values.nbytes * (1 + kind.is_product)
        if self._count >= MOST or self._bytes >= heaviest(values.device):
            self.flush()

    def flush(self) -> None:
        """Launch everything that waits."""
        if not self._count:
            return
        waiting, self._waiting = self._waiting, defaultdict(list)
        alive, self._alive = self._alive, []
        self._count = self._bytes = 0
        device = alive[0][0].device
        if device.type == "cuda":
            with torch.cuda.device(device):
                _launch(waiting, device)
        else:
            _launch(waiting, device)


def _launch(waiting: dict[_Kind, list[tuple[int, ...]]], device: torch.device) -> None:
    kernels = _triton()
    assert kernels is not None
    for kind, jobs in waiting.items():
        table = upload(np.array(jobs, np.int64), device)
        tokens = max(job[7] for job in jobs)
        kernel = kernels.reduce_products if kind.is_product else kernels.reduce_rows
        kernel[(tokens, len(jobs))](
            table,
            FIELDS=table.shape[1],
            TYPE=kernels.TYPES[kind.dtype],
            ITEM=kind.dtype.itemsize,
            BLOCK=kind.block,
            SIZE=kind.size,
            num_warps=4 if kind.block <= 1024 else 8,
        )
