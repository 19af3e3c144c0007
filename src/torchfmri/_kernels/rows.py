"""Numbers per row of matrices: sums of squares by group, and the inner product with a vector.

One pass over memory instead of one per number, written into tables that are made ahead: by numba
for float32 on the CPU (`compiled_rows`), by Triton on CUDA (`cuda_rows`), where many passes wait
for each other and are launched together. Where there is neither, None comes back, and whoever asks
computes the same with torch.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels.accelerator import compiled_rows
from torchfmri._kernels.cuda_rows import RowQueue

SMALLEST = 1 << 14
"""Values from which on numba is asked: for less it is not worth its import."""
_AHEAD = 48  # results that are made at once

Found = tuple[Tensor, Tensor]


class Asked(NamedTuple):
    """What is wanted of each row.

    Attributes:
        size: Neighbouring values that are one group.
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
    """Rows of g * x / rms(x), added up within each token.

    Attributes:
        g: A tensor whose last stride is 1, and `x`, another of its shape and dtype.
        shape: (b, s, rows of a token, values of a row).
        g_strides: Along the first three of these; `x_strides` likewise.
        small: What is added to the mean square of x.
    """

    g: Tensor
    x: Tensor
    shape: tuple[int, int, int, int]
    g_strides: tuple[int, int, int]
    x_strides: tuple[int, int, int]
    small: float


@lru_cache(maxsize=64)
def queue_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the queued kernels run on this device and agree with torch: tried once, said once."""
    g = torch.linspace(-1, 2, 3 * 96).reshape(3, 96).to(device, dtype)
    x = torch.linspace(3, -1, 3 * 96).reshape(3, 96).to(device, dtype)
    vector = torch.linspace(1, 2, 40).to(device, dtype)
    asked = Asked(32, 8, vector, vector.data_ptr(), len(vector))
    queue = RowQueue()
    rows, products = (
        (torch.zeros(3, 3, device=device), torch.zeros(3, device=device)) for _ in "12"
    )
    try:
        queue.rows(g, 3, 96, asked, rows)
        strides = (96, 96, 96)
        queue.product(Product(g, x, (1, 3, 1, 96), strides, strides, 1e-6), asked, products)
        queue.flush()
        scale = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        agree = all(
            torch.allclose(squares, wide.square().view(3, 3, 32).sum(-1), rtol=1e-2)
            and torch.allclose(dots, wide[:, 8:48] @ vector.float(), rtol=1e-2, atol=1e-1)
            for (squares, dots), wide in (
                (rows, g.float()),
                (products, g.float() * x.float() * scale),
            )
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


class Form(NamedTuple):
    """A matrix of float32 between two vectors: three addresses, and what is read of the matrix."""

    matrix: int
    rows: int
    width: int
    stride: int
    left: int
    right: int


def bilinear_forms(forms: list[Form], values: int) -> Tensor | None:
    """left^T matrix right of each, (n,), in one pass over so many values; None without numba."""
    kernels = compiled_rows() if values >= SMALLEST else None
    if kernels is None:
        return None
    found = torch.empty(len(forms), dtype=torch.float64)
    kernels.bilinear_forms(np.array(forms, dtype=np.int64), found.numpy())
    return found


class Rows:
    """The passes of one block, and the tables that they write into."""

    def __init__(self) -> None:
        self._kernels: ModuleType | None = None
        self._ahead: dict[tuple[int, int, int], list[tuple[Tensor, Tensor, int]]] = {}
        self._queue: RowQueue | None = None

    def reduce(self, values: Tensor, asked: Asked) -> Found | None:
        """Sums of squares, (t,) or (t, groups), and inner products, (t,), of the last axis.

        On CUDA they are filled by `flush`.
        """
        count, width = values.numel(), values.shape[-1]
        if not values.is_contiguous() or not self._can(values, count, asked.size, False):
            return None
        rows = count // width
        squares, products, written = self._next(values, rows, -(-width // asked.size))
        if self._kernels is not None:
            size, start, _, address, length = asked
            self._kernels.reduce_rows(
                values.data_ptr(), rows, width, size, address, start, length, written
            )
        elif self._queue is not None:
            self._queue.rows(values, rows, width, asked, (squares, products))
        return squares, products

    def reduce_product(self, product: Product, asked: Asked) -> Found | None:
        """The same of a product, by token."""
        g, x, shape, g_strides, x_strides, small = product
        if x.dtype != g.dtype or not self._can(g, g.numel(), asked.size, True):
            return None
        b, s, _, width = shape
        squares, products, written = self._next(g, b * s, -(-width // asked.size))
        if self._kernels is not None:
            size, start, _, address, length = asked
            self._kernels.reduce_products(
                *(g.data_ptr(), g_strides, x.data_ptr(), x_strides, shape, small),
                *(size, address, start, length, written),
            )
        elif self._queue is not None:
            self._queue.product(product, asked, (squares, products))
        return squares, products

    def flush(self) -> None:
        """Launch what waits."""
        if self._queue is not None:
            self._queue.flush()

    def _can(self, values: Tensor, count: int, size: int, is_product: bool) -> bool:
        """Whether there is a pass for so many values of this kind, in groups of this size."""
        if values.is_cpu:
            if values.dtype is not torch.float32 or count < SMALLEST:
                return False
            if self._kernels is None:
                self._kernels = compiled_rows()
            return self._kernels is not None
        if not values.is_cuda:
            return False
        if self._queue is None:
            self._queue = RowQueue()
        able = count > 0 and self._queue.can_read(values, size, is_product)
        return able and queue_works(values.device, values.dtype)

    def _next(self, like: Tensor, rows: int, groups: int) -> tuple[Tensor, Tensor, int]:
        """Memory for the squares and, behind them, for the inner products of some rows; where."""
        key = (rows, groups, like.get_device())
        ahead = self._ahead.get(key)
        if not ahead:
            squares = rows * groups
            table = torch.empty(_AHEAD, squares + rows, device=like.device)
            first = table[:, :squares]
            if groups > 1:
                first = first.unflatten(1, (rows, groups))  # type: ignore[no-untyped-call]
            start, step = table.data_ptr(), 4 * (squares + rows)
            addresses = range(start, start + _AHEAD * step, step)
            parts = zip(first.unbind(), table[:, squares:].unbind(), addresses, strict=True)
            ahead = self._ahead[key] = list(parts)
        return ahead.pop()
