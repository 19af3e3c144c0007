"""Numbers per row of many CUDA tensors, a few launches for all of them.

Passes are queued: what a launch is told about each of them is one row of a table of numbers, which
is uploaded once for all. The tensors stay alive until then, so a queue that has become long or
heavy is launched at once.
"""

from __future__ import annotations

import importlib
from array import array
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchfmri._kernels.cuda_plan import upload
from torchfmri._torch import stream_of

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
    return int(torch.cuda.get_device_properties(device).total_memory) // 64


class _Kind(NamedTuple):
    """Passes of one launch, and what is constant while compiling.

    Attributes:
        is_product: There are two tensors; with `is_flat` both are contiguous, a row for each token.
        size: Values of a group; 0 for the whole row.
    """

    is_product: bool
    is_flat: bool
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
    """Passes over rows of one device that wait to be launched together.

    Attributes:
        count: How many wait; `MOST` of them at most.
        bytes: What is kept alive for them; `heaviest` at most.
        alive: Tensors and tables, until the next launch.
        streams: The numbers of the streams that were current when the passes were queued: their
            tensors are computed there. Most often it is one, that of the launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.heaviest = device, heaviest(device)
        self._jobs: dict[_Kind, _Jobs] = defaultdict(_Jobs)
        self.alive: list[object] = []
        self.streams: set[int] = set()
        self._launched: set[int] = set()  # where results are being computed
        self.count = self.bytes = 0

    def jobs(
        self, like: Tensor, size: int, rest: tuple[int, ...]
    ) -> tuple[_Jobs, tuple[int, ...], int]:
        """Return where passes over such tensors wait, the end of a job, and the bytes of a pass.

        Args:
            like: One of the tensors; of a product its g.
            size: Of a group; 0 for the whole row.
            rest: The numbers of a job that are the same for all of them, after four addresses: of
                the two tensors, of the squares and of the inner products.
        """
        is_product = len(rest) + 4 > _ROWS_JOB
        width = like.shape[-1]
        size = 0 if size >= width else size
        flat = (rest[_TOKENS - 4], 1, 0, width, 0, 0, width, 0)  # positions, rows, strides
        is_flat = is_product and not size and rest[_ROWS_JOB - 4 : -1] == flat
        block = 1 << (width - 1).bit_length() if is_product and not is_flat else BLOCK
        jobs = self._jobs[_Kind(is_product, is_flat, like.dtype, block, size)]
        jobs.tokens = max(jobs.tokens, rest[_TOKENS - 4])
        rest += (0,) * (_PRODUCT_JOB - 4 - len(rest))
        return jobs, rest, like.nbytes * (1 + is_product)

    def alive_until_launched(self, each: object) -> None:
        """Keep something alive until the next launch."""
        self.alive.append(each)

    def note_stream(self) -> None:
        """Remember the current stream, on which the tensors of a pass are computed."""
        self.streams.add(stream_of(self._device))

    def flush(self) -> None:
        """Launch everything that waits, and let later work of the current stream see all results.

        Where tensors are computed on other streams the launch waits for these, and the allocator
        is told not to hand their memory out before the launch has read it.
        """
        now = stream_of(self._device)
        others = (self.streams | self._launched) - {now}
        for number in others:
            _wait_for(self._device, number)
        self.streams, self._launched = set(), {now}
        if not self.count:
            return
        self.count = self.bytes = 0
        alive, self.alive = self.alive, []
        try:
            with _on(self._device):
                _launch(self._jobs, self._device)
                if others:
                    _keep_from_others(alive, self._device)
        finally:
            for jobs in self._jobs.values():
                jobs.numbers = array("q")
            del alive


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wait_for(device: torch.device, number: int) -> None:
    """Have the current stream wait for what another one, given by its number, has been told."""
    # The default stream has the number 0, for which ExternalStream would make a new stream.
    external: Any = torch.cuda.ExternalStream
    other = external(number, device) if number else torch.cuda.default_stream(device)
    stream: Any = torch.cuda.current_stream(device)
    stream.wait_stream(other)


def _keep_from_others(alive: list[object], device: torch.device) -> None:
    """Have no memory of these handed out to other streams while the current one works on it."""
    stream: Any = torch.cuda.current_stream(device)
    for each in alive:
        tensor: Any = each if isinstance(each, Tensor) else getattr(each, "squares", None)
        if tensor is not None:
            tensor.record_stream(stream)


def _launch(waiting: dict[_Kind, _Jobs], device: torch.device) -> None:
    kernels = _triton()
    assert kernels is not None
    filled = {kind: jobs for kind, jobs in waiting.items() if jobs.numbers}
    whole = upload(np.concatenate([np.asarray(jobs.numbers) for jobs in filled.values()]), device)
    start = 0
    for kind, jobs in filled.items():
        tokens, numbers = jobs.tokens, jobs.numbers
        if kind.is_product and not kind.is_flat:  # a program takes one token, some rows at a time
            kernel, rows, programs = kernels.reduce_products, max(1, 256 // kind.block), tokens
            more = {}
        else:
            kernel, rows, programs = kernels.reduce_rows, _ROWS, -(-tokens // _ROWS)
            more = {"PRODUCT": kind.is_product}
        kernel[(programs, len(numbers) // _PRODUCT_JOB)](
            whole[start:],
            FIELDS=_PRODUCT_JOB,
            TYPE=kernels.TYPES[kind.dtype],
            ITEM=kind.dtype.itemsize,
            ROWS=rows,
            BLOCK=kind.block,
            SIZE=kind.size,
            **more,
            num_warps=1 if rows * kind.block <= 256 else 4 if kind.block <= 4096 else 8,
        )
        start += len(numbers)


def launch_forms(forms: npt.NDArray[np.int64], dtype: torch.dtype, device: torch.device) -> Tensor:
    """left^T matrix right of each, (n,), of matrices of one dtype on one device.

    Neighbours with as many rows go in one launch.
    """
    kernels = _triton()
    assert kernels is not None
    found, start = [], 0
    with _on(device):
        table = upload(forms, device)
        for programs, alike in groupby((-(-forms[:, 1] // _FORM_ROWS)).tolist()):
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
