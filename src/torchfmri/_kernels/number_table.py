"""Moments, extremes and counts of many tensors on the CPU, one row of a table for each.

A training step of a small model spends more time in the Python around a pass over memory than in
the pass. Here a tensor costs one call: numba is handed addresses, and writes the numbers where the
table has its row. `Collector` of the Monitor adds tensors while a step runs, and reads the table
when it is over.

`numbers_of_layers` does the same for a batch of sequences with many layers side by side, for scans:
one call for all of them, so that a batch costs what its bytes cost.

Who keeps memory alive: the caller holds the tensor until `add` has returned, and numba has read all
of it by then. The table holds its rows until `read`. No address outlives the call it was taken for.
"""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn

from torchfmri._kernels import accelerator, cpu
from torchfmri._kernels.histogram import Floats, Integers
from torchfmri._kernels.reduction import Reduction
from torchfmri._kernels.values import read_values

FIELDS = 10
"""Count, mean, squared deviations, low, high (nan without finite values), nan, +inf, -inf, zero,
subnormal: as in `DeviceReductions.read_table`."""
_ROWS = 256  # that are made at a time
_PLAIN = (Tensor, nn.Parameter)  # subclasses may keep their values elsewhere
_READABLE = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
_NORMAL = {
    dtype: np.float32(cpu.smallest_normal(dtype)).view(np.int32)
    for dtype in (torch.float32, torch.bfloat16)
}
"""What numba reads by itself, with the bits of the smallest number that is not subnormal."""


class NumberTable:
    """The numbers of many tensors; several threads may add to it."""

    def __init__(self) -> None:
        self._next = count()
        self._rows: dict[int, tuple[Floats, int]] = {}  # some rows each, and where they begin

    def add(self, tensor: Tensor) -> int | None:
        """Read a detached tensor now.

        Returns:
            The number of its row. None for tensors that are read in another way: on a device,
            without values, of subclasses, or of dtypes that are counted exactly.
        """
        dtype = tensor.dtype
        if dtype not in _READABLE or type(tensor) not in _PLAIN or not tensor.is_cpu:
            return None
        size = tensor.numel()
        if not size or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside torch.func
            return None
        number = next(self._next)
        block, place = divmod(number, _ROWS)
        known = self._rows.get(block) or self._rows.setdefault(block, _make_rows())
        normal = _NORMAL.get(dtype)
        # A large tensor is read block by block, so that one NaN costs one block a second pass.
        if (
            normal is not None
            and size <= cpu.BLOCK
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            kernels = accelerator.compiled()
            row = known[1] + 8 * FIELDS * place
            if kernels is not None and kernels.write_row(
                address, size, dtype.itemsize, normal, row
            ):
                return number
        known[0][place] = _read(tensor)
        return number

    def read(self, numbers: list[int]) -> Floats:
        """(row, 10) of these rows, in this order."""
        if not numbers:
            return np.empty((0, FIELDS))
        whole = np.concatenate([self._rows[block][0] for block in sorted(self._rows)])
        chosen: Floats = whole[numbers]
        return chosen


def numbers_of_layers(values: Tensor, edges: Integers, kept: Tensor | None) -> Floats:
    """The numbers of layers side by side, in each row of a batch: (b, layer, 10).

    Args:
        values: (b, n, units) of float32, a half type or float64. From a device they are copied.
        edges: (layer + 1,) where each layer begins among the units, and the last one ends.
        kept: (b, n) which tokens count; None for all.
    """
    values = values.detach().cpu()
    values = values.float() if values.dtype == torch.float16 else values
    if values.stride(-1) != 1 or values.is_neg():
        values = values.resolve_neg().contiguous()
    b, n, _ = values.shape
    flags = np.ones((b, n), np.bool_) if kept is None else kept.cpu().numpy()
    found = np.empty((b, len(edges) - 1, FIELDS))
    normal, kernels = _NORMAL.get(values.dtype), accelerator.compiled()
    if normal is None or kernels is None:
        found[..., 0] = -1
    else:
        strides, width = values.stride()[:2], values.dtype.itemsize
        kernels.write_layers(values.data_ptr(), (b, n), strides, width, normal, edges, flags, found)
    for row, layer in np.argwhere(found[..., 0] < 0).tolist():
        own = values[row, :, edges[layer] : edges[layer + 1]]
        chosen = own if flags[row].all() else own[torch.from_numpy(flags[row])]
        found[row, layer] = _read(chosen) if chosen.numel() else _nothing()
    return found


def no_numbers(*shape: int) -> Floats:
    """Numbers of no values, to which others are merged: (*shape, 10)."""
    return np.tile(_nothing(), (*shape, 1))


def merge_numbers(one: Floats, other: Floats) -> Floats:
    """The numbers of both (..., 10) together, as of all values at once (Chan, Golub, LeVeque)."""
    (first, mean, squares), (second, other_mean, other_squares) = map(_moments, (one, other))
    both = first + second
    share = second / np.maximum(both, 1)
    delta = other_mean - mean
    merged: Floats = one + other
    merged[..., 1] = mean + delta * share
    merged[..., 2] = squares + other_squares + delta * delta * first * share
    merged[..., 3] = np.fmin(one[..., 3], other[..., 3])
    merged[..., 4] = np.fmax(one[..., 4], other[..., 4])
    merged[..., 1:5] = np.where(both[..., None] > 0, merged[..., 1:5], math.nan)
    return merged


def _moments(numbers: Floats) -> tuple[Floats, Floats, Floats]:
    """How many values are finite, and their mean and squared deviations; 0 where there are none."""
    finite = numbers[..., 0] - numbers[..., 5:8].sum(-1)
    some = finite > 0
    return finite, np.where(some, numbers[..., 1], 0.0), np.where(some, numbers[..., 2], 0.0)


def _nothing() -> Floats:
    return np.array([0.0, math.nan, math.nan, math.nan, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0])


def reduction_of(row: Floats) -> Reduction:
    """The Reduction that a row was made of."""
    size, mean, squares, low, high, *counts = row.tolist()
    nan, positive, negative, zero, subnormal = map(int, counts)
    some = size > nan + positive + negative
    return Reduction(
        count=int(size),
        nan=nan,
        pos_inf=positive,
        neg_inf=negative,
        zero=zero,
        subnormal=subnormal,
        mean=mean if some else 0.0,
        squared_deviations=squares if some else 0.0,
        low=low if some else math.inf,
        high=high if some else -math.inf,
    )


def _make_rows() -> tuple[Floats, int]:
    rows = np.empty((_ROWS, FIELDS))
    return rows, rows.ctypes.data


def _read(tensor: Tensor) -> tuple[float, ...]:
    """The numbers of any tensor of these dtypes, with torch where numba is missing or gives up."""
    flat, repeat, *_ = read_values(tensor.detach())
    found = cpu.reduce_values(flat, histogram=False)
    if repeat > 1:
        found = found.repeat(repeat)
    moments = (found.mean, found.squared_deviations, found.low, found.high)
    return (
        found.count,
        *(moments if found.finite else (math.nan,) * 4),
        *(found.nan, found.pos_inf, found.neg_inf, found.zero, found.subnormal),
    )
