"""Numbers per row of matrices: sums of squares by group, and the inner product with a vector.

One pass over memory instead of one per number, written into tables that are made ahead: by numba
for float32 on the CPU (`compiled_rows`), by Triton on CUDA (`cuda_rows`), where passes are queued
and launched together. Tensors of one shape go through one `Lane`, which knows everything about them
but their addresses. Without numba a `TorchLane` writes whole rows of float32 on the CPU into the
same tables by torch's operations. Otherwise there is no lane, and the caller computes the same with
torch. `_tokens` makes one `RowLanes` per block and calls `flush` before it reads numbers.

The limits below are measured and free. Kernels read a job by position: `rest` and the four numbers
before it in `QueuedLane.read` are in the order of `cuda_rows` and `compiled_rows`; `queue_works`
writes the same records by hand. The fields of `Form` are read by position too.

**Who keeps what alive.** Kernels are told addresses (`data_ptr()`), which keep nothing alive. A
pass reads up to two tensors and a vector, and writes one line of a `Table`. Each must exist until
the kernel has been started, and none may be written to in the meantime:

- The vectors are held by `RowLanes._vectors`, as long as the `RowLanes` exist.
- The table that has free lines is held by `_Lines.table`. A full one is held by every `Numbers`
  that was read from it, whose tensors are views of its memory.
- On the CPU the pass runs inside `Lane.read`. The caller's references to the tensors are enough.
- On CUDA a pass only waits after `QueuedLane.read`. `RowQueue.alive` holds its tensors, and the
  tables that became full (somebody may have dropped their `Numbers`), until `RowQueue.flush` has
  launched the kernels. They may go before the kernels have run: the caching allocator hands their
  memory out again to later work of the same stream only. Where a pass was queued on another stream
  than that of the flush (`RowQueue.streams`), the flush waits for that stream first and tells the
  allocator of its own (`record_stream`).
- The numbers that a launch is told lie in a tensor of `_launch`, which goes when it returns: it was
  made on the stream of the launch.
- `flush` comes before the numbers are read, and at once when many passes wait or much is held. The
  stream that is current then waits for the streams of earlier launches.
- `bilinear_forms` is told addresses by its caller (`_tokens`), which holds the matrices and vectors
  until it returns. On CUDA they must have been computed on the current stream.

Whoever adds a field to a job adds its owner here.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchfmri._kernels.accelerator import compiled_rows
from torchfmri._kernels.cuda_rows import MOST, RowQueue, can_read, launch_forms
from torchfmri._kernels.row_tables import Numbers, Table

SMALLEST = 1 << 14
"""Values from which on numba is asked: for less it is not worth its import."""
Send: TypeAlias = Callable[[Tensor, "Tensor | None", int], None]


class Asked(NamedTuple):
    """What is wanted of each row.

    Attributes:
        size: Neighbouring values that are one group; 0 for the whole row, without an axis of
            groups.
        start: From which value on the vector meets a row.
        vector: Of the dtype of the values, contiguous.
        address: Of the vector.
        length: Of the vector.
    """

    size: int
    start: int
    vector: Tensor
    address: int
    length: int


class Product(NamedTuple):
    """Rows of g * x / rms(x), added up within each token, where both have 1 as their last stride.

    Attributes:
        shape: (b, s, rows of a token, values of a row).
        g_strides: Of g along the first three of these; `x_strides` likewise.
        small: What is added to the mean square of x.
    """

    shape: tuple[int, int, int, int]
    g_strides: tuple[int, int, int]
    x_strides: tuple[int, int, int]
    small: float


class _Lines:
    """The lines that are free, of one length."""

    __slots__ = ("_keep", "_what", "line", "table")

    def __init__(
        self, tokens: int, groups: int, device: torch.device, keep: Callable[[object], None] | None
    ) -> None:
        self._what, self._keep = (tokens, groups, device), keep
        self.table = Table(*self._what)
        self.line = 0

    def renew(self) -> Table:
        if self._keep is not None:
            self._keep(self.table)  # a pass that waits will write into it
        self.table, self.line = Table(*self._what, self.table.lines), 0
        return self.table


class Lane:
    """Passes over tensors of one shape and kind."""

    __slots__ = ("_lines", "_send")

    def __init__(self, lines: _Lines, send: Send) -> None:
        self._lines, self._send = lines, send

    def read(self, values: Tensor, other: Tensor | None = None) -> Numbers:
        """The numbers of `values`, or of its product with another; on CUDA `flush` fills them."""
        lines = self._lines
        table, line = lines.table, lines.line
        if line == table.lines:
            table, line = lines.renew(), 0
        lines.line = line + 1
        self._send(values, other, table.address + line * table.step)
        return Numbers(table.squares, table.products, line)


class QueuedLane(Lane):
    """A lane whose reductions wait in a queue; `read` is one function because it runs often."""

    __slots__ = ("_behind", "_bytes", "_jobs", "_queue", "_rest")

    def __init__(
        self, lines: _Lines, queue: RowQueue, like: Tensor, size: int, rest: tuple[int, ...]
    ) -> None:
        self._lines, self._queue, self._behind = lines, queue, lines.table.behind
        self._jobs, rest, self._bytes = queue.jobs(like, size, rest)
        self._rest = array("q", rest).tobytes()

    def read(self, values: Tensor, other: Tensor | None = None) -> Numbers:
        lines, queue = self._lines, self._queue
        table, line = lines.table, lines.line
        if line == table.lines:
            table, line = lines.renew(), 0
        lines.line = line + 1
        written = table.address + line * table.step
        second = 0
        if other is not None:
            second = other.data_ptr()
            queue.alive.append(other)
        numbers = self._jobs.numbers
        numbers.extend((values.data_ptr(), second, written, written + self._behind))
        numbers.frombytes(self._rest)
        queue.alive.append(values)
        queue.note_stream()
        queue.count += 1
        queue.bytes += self._bytes
        if queue.count >= MOST or queue.bytes >= queue.heaviest:
            queue.flush()
        return Numbers(table.squares, table.products, line)


class TorchLane(Lane):
    """A lane of torch's own passes. Numbers that share a table are later read by few operations."""

    __slots__ = ("_asked", "_width")

    def __init__(self, lines: _Lines, width: int, asked: Asked) -> None:
        self._lines, self._width, self._asked = lines, width, asked

    def read(self, values: Tensor, other: Tensor | None = None) -> Numbers:
        lines, asked = self._lines, self._asked
        table, line = lines.table, lines.line
        if line == table.lines:
            table, line = lines.renew(), 0
        lines.line = line + 1
        rows = values.detach().view(-1, self._width)
        some = rows if asked.length == self._width else rows.narrow(1, asked.start, asked.length)
        torch.linalg.vector_norm(rows, 2, -1, out=table.squares[line]).square_()
        torch.mv(some, asked.vector, out=table.products[line])
        return Numbers(table.squares, table.products, line)


class RowLanes:
    """The lanes of one block, and the tables that they write into."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int, int], _Lines] = {}
        self._queues: dict[int, RowQueue] = {}
        self._vectors: list[Tensor] = []  # alive: a pass is told an address

    def lane(self, values: Tensor, asked: Asked) -> Lane | None:
        """Return the lane of contiguous tensors like this; None where the caller does the work."""
        count, width = values.numel(), values.shape[-1]
        if not self._can(values, count, asked.size, False):
            plain = values.is_cpu and values.dtype is torch.float32 and not asked.size
            if not plain or count < SMALLEST:
                return None
            return TorchLane(self._lines_of(values, count // width, 0), width, asked)
        rows = count // width
        size, start, vector, address, length = asked
        self._vectors.append(vector)
        lines = self._lines_of(values, rows, -(-width // size) if size else 0)
        rest: tuple[int, ...]
        if _is_queued(values):
            rest = (address, start, length, rows, width)
            return QueuedLane(lines, self._queue(values), values, size, rest)
        kernel: Any = compiled_rows()
        rest = (rows, width, size or width, address, start, length)
        return Lane(lines, partial(_reduce_rows, kernel.reduce_rows, rest))

    def product_lane(self, g: Tensor, product: Product, asked: Asked) -> Lane | None:
        """Return the lane of products of g and x like these, by token; None as for `lane`."""
        if not self._can(g, g.numel(), asked.size, True):
            return None
        (b, s, rows, width), g_strides, x_strides, small = product
        size, start, vector, address, length = asked
        self._vectors.append(vector)
        lines = self._lines_of(g, b * s, -(-width // size) if size else 0)
        if _is_queued(g):
            bits = int(np.float32(small).view(np.int32))
            rest = (address, start, length, b * s, width, s, rows, *g_strides, *x_strides, bits)
            return QueuedLane(lines, self._queue(g), g, size, rest)
        kernel: Any = compiled_rows()
        what = (size or width, address, start, length)
        return Lane(lines, partial(_reduce_products, kernel.reduce_products, product, what))

    def flush(self) -> None:
        """Launch the passes that wait on CUDA; their tables are filled when the device has run."""
        for queue in self._queues.values():
            queue.flush()

    def _can(self, values: Tensor, count: int, size: int, is_product: bool) -> bool:
        """Whether there is a pass for so many values of this kind, in groups of this size."""
        if not _is_queued(values):
            known = values.is_cpu and values.dtype is torch.float32 and count >= SMALLEST
            return known and compiled_rows() is not None
        able = count > 0 and can_read(values, size, is_product)
        return able and queue_works(values.device, values.dtype)

    def _queue(self, like: Tensor) -> RowQueue:
        device = like.get_device()
        if device not in self._queues:
            self._queues[device] = RowQueue(like.device)
        return self._queues[device]

    def _lines_of(self, like: Tensor, tokens: int, groups: int) -> _Lines:
        key = (tokens, groups, like.get_device())
        if key not in self._lines:
            keep = self._queue(like).alive_until_launched if _is_queued(like) else None
            self._lines[key] = _Lines(tokens, groups, like.device, keep)
        return self._lines[key]


def _is_queued(values: Tensor) -> bool:
    """Whether passes over such tensors wait for each other."""
    return values.is_cuda


def _reduce_rows(
    kernel: Callable[..., None], rest: tuple[int, ...], values: Tensor, _: object, written: int
) -> None:
    kernel(values.data_ptr(), *rest, written)


def _reduce_products(
    kernel: Callable[..., None],
    product: Product,
    what: tuple[int, ...],
    g: Tensor,
    x: Any,
    written: int,
) -> None:
    shape, g_strides, x_strides, small = product
    kernel(g.data_ptr(), g_strides, x.data_ptr(), x_strides, shape, small, *what, written)


def written_product(g: Tensor, x: Tensor, product: Product) -> Tensor | None:
    """The rows of such a product, (t, n), of float32 on the CPU; None for few or without numba."""
    kernels = compiled_rows() if g.is_cpu and g.numel() >= SMALLEST else None
    if kernels is None or not g.dtype == x.dtype == torch.float32:
        return None
    (b, s, _, width), g_strides, x_strides, small = product
    found = torch.empty(b * s, width, device="cpu")
    kernels.write_products(
        *(g.data_ptr(), g_strides, x.data_ptr(), x_strides, product.shape, small, found.data_ptr())
    )
    return found


@lru_cache(maxsize=64)
def queue_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the queued kernels run on this device and agree with torch: tried once, said once."""
    g = torch.linspace(-1, 2, 3 * 96, device="cpu").reshape(3, 96).to(device, dtype)
    x = torch.linspace(3, -1, 3 * 96, device="cpu").reshape(3, 96).to(device, dtype)
    vector = torch.linspace(1, 2, 40, device="cpu").to(device, dtype)
    asked = (vector.data_ptr(), 8, len(vector))
    queue, lines = RowQueue(device), _Lines(3, 3, device, None)
    table, strides = lines.table, (96, 96, 96)
    small = int(np.float32(1e-6).view(np.int32))
    try:
        rest: tuple[int, ...] = (*asked, 3, 96)
        QueuedLane(lines, queue, g, 32, rest).read(g)
        rest += (3, 1, *strides, *strides, small)
        QueuedLane(lines, queue, g, 32, rest).read(g, x)
        queue.flush()
        scale = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        wide = torch.stack([g.float(), g.float() * x.float() * scale])
        squares = wide.square().view(2, 3, 3, 32).sum(-1)
        dots = wide[..., 8:48] @ vector.float()
        agree = torch.allclose(table.squares[:2], squares, rtol=1e-2) and torch.allclose(
            table.products[:2], dots, rtol=1e-2, atol=1e-1
        )
        reason = "" if agree else "they disagree with torch"
    except Exception as error:  # whatever a compiler or a driver raises
        reason = f"{type(error).__name__}: {error}"
    if reason:
        warnings.warn(
            f"The Triton kernels for token gradients do not work on {device} ({reason}): torch "
            "computes the same, more slowly.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not reason


# -- matrices between vectors ----------------------------------------------------------------------


class Form(NamedTuple):
    """A matrix between two vectors of float32: three addresses, and what is read of the matrix.

    The forms that `_tokens` keeps hold an offset in bytes in `matrix`; each pass adds the address.
    """

    matrix: int
    rows: int
    width: int
    stride: int
    left: int
    right: int


def can_read_forms(like: Tensor) -> bool:
    """Whether `bilinear_forms` reads matrices of this kind."""
    if like.is_cpu:
        return like.dtype is torch.float32
    return like.is_cuda and can_read(like, 0, False) and queue_works(like.device, like.dtype)


def bilinear_forms(forms: npt.NDArray[np.int64], like: Tensor) -> Tensor | None:
    """left^T matrix right of each, (n,), in one pass; None for few values or without numba.

    Args:
        forms: A `Form` in each row, of matrices of one kind.
        like: A tensor of that kind.
    """
    if _is_queued(like):
        return launch_forms(forms, like.dtype, like.device)
    values = int((forms[:, 1] * forms[:, 2]).sum())
    kernels = compiled_rows() if values >= SMALLEST else None
    if kernels is None:
        return None
    found = torch.empty(len(forms), dtype=torch.float64, device="cpu")
    kernels.bilinear_forms(forms, found.numpy())
    return found
