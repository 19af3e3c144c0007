"""Moments, extremes and counts of single tensors, as an operation that compiled graphs may hold.

The compiler does not look into it: a tensor that is watched exists in memory anyway, and is read
once. The numbers are written into a place that stays where it is (a slot), column by column: one
column per program of the launch. `combine` adds the columns of many slots up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels import cpu, cuda
from torchfmri._kernels.cuda_plan import DTYPES
from torchfmri._kernels.histogram import Floats
from torchfmri._torch import set_to_zero

FIELDS = 11
"""finite, nan, +inf, -inf, zero, below the smallest normal number, mean, squared deviations, low,
high, and how many rows a mask let through: values of the others are counted as nan."""
_PROGRAMS = 528
_CHUNK = 1 << 12
"""How many programs read a tensor at most, and of what their shares are a multiple."""


class Label(NamedTuple):
    """The facts about a tensor that its numbers do not tell.

    Attributes:
        dtype: Its name.
        shape: Of the tensor as it came.
        rows: How many rows a mask chose from; 0 without a mask.
        calls: How often the slot was written since it was emptied.
    """

    dtype: str
    shape: tuple[int, ...]
    rows: int
    calls: int


_labels: dict[int, Label] = {}
"""By the number of the slot, what was written into it last. Not by its address: some backends run
the operation on a copy of the slot, which they copy back."""
_numbers = count()


def summarisable(device: torch.device) -> bool:
    """Whether `summarise` works for tensors there."""
    return device.type == "cpu" or (device.type == "cuda" and cuda.triton_kernels() is not None)


def reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `summarise` reads such values."""
    return dtype in DTYPES or (device.type == "cpu" and dtype == torch.float64)


class Slot(NamedTuple):
    """A place for the numbers of one tensor, with memory of its own, and the number it goes by."""

    values: Tensor
    number: int


def make_slots(number: int, device: torch.device) -> list[Slot]:
    """Places for the numbers of so many tensors."""
    shape = (FIELDS, _PROGRAMS if device.type == "cuda" else 1)
    return [
        Slot(torch.zeros(shape, dtype=torch.float64, device=device), next(_numbers))
        for _ in range(number)
    ]


# Not by `torch.library.custom_op`, whose wrapper takes as long as the launch.
_library: Any = torch.library.Library("torchfmri", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("summarise(Tensor values, Tensor? kept, Tensor(a!) slot, int number) -> ()")


def _summarise(values: Tensor, kept: Tensor | None, slot: Tensor, number: int) -> None:
    """Write the numbers of a tensor into a slot.

    Args:
        values: Of a kind that it `reads`.
        kept: Which rows count, over the leading dimensions of `values`; None for all.
        slot: The values of a Slot on the same device.
        number: That of the slot.
    """
    rows = 0 if kept is None else kept.numel()
    calls = _labels[number].calls + 1 if number in _labels else 1
    _labels[number] = Label(_name(values.dtype), tuple(values.shape), rows, calls)
    if values.is_cuda:
        _launch(values, kept, slot)
        return
    chosen = values if kept is None else values[kept]
    found = cpu.reduce_values(chosen.contiguous().reshape(-1), histogram=False)
    slot[:, 0] = torch.tensor([
        found.finite, found.nan + values.numel() - chosen.numel(), found.pos_inf, found.neg_inf,
        found.zero, found.subnormal + found.zero, found.mean, found.squared_deviations, found.low,
        found.high, 0 if kept is None else int(kept.sum()),
    ], dtype=torch.float64, device="cpu")  # fmt: skip


def _summarise_nothing(values: Tensor, kept: Tensor | None, slot: Tensor, number: int) -> None:
    """What tracing runs, on tensors without values."""


_library.impl("summarise", _summarise, "CPU")
_library.impl("summarise", _summarise, "CUDA")
torch.library.register_fake("torchfmri::summarise", _summarise_nothing, lib=_library)
summarise = torch.ops.torchfmri.summarise


def _launch(values: Tensor, kept: Tensor | None, slot: Tensor) -> None:
    if kept is not None:
        # Selecting would wait for the device. NaN is counted apart, and subtracted later.
        over = kept.reshape(*kept.shape, *[1] * (values.ndim - kept.ndim))
        values = torch.where(over, values, torch.nan)
        slot[-1, 0] = kept.sum()
    values = values.contiguous()
    if values.data_ptr() % 16:
        values = values.clone()
    size = values.numel()
    launch, settings = _launcher(values.dtype)
    with on_device(values.device):
        chunk = _CHUNK * -(-size // (_CHUNK * _PROGRAMS))
        launch(values, slot, size, chunk, _PROGRAMS, **settings)


@lru_cache(maxsize=8)
def _launcher(dtype: torch.dtype) -> tuple[Callable[..., object], dict[str, Any]]:
    """What starts the kernel for values of a dtype, and its constants.

    A step has hundreds of launches, and the GPU may wait for the Python before each of them.
    """
    kernels, shape = cuda.triton_kernels(), cuda.SHAPES[dtype.itemsize]
    assert kernels is not None
    settings = {
        "NORMAL": cpu.smallest_normal(dtype),
        "BLOCK": shape.lanes,
        "UNROLL": shape.rows,
        "WIDTH": 16 // dtype.itemsize,
        "CAREFUL": 128 * shape.warps,
        "num_warps": shape.warps,
    }
    return kernels.reduce_single[(_PROGRAMS,)], settings


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one; most often it is already, which is quickly seen."""
    is_current = torch.cuda.current_device() == device.index
    return nullcontext() if is_current else torch.cuda.device(device)


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def take_labels(slots: Sequence[Slot]) -> list[Label | None]:
    """What was written into each slot; None where nothing was, or a CUDA graph ran again."""
    return [_labels.pop(each.number, None) for each in slots]


def empty(slots: Sequence[Slot]) -> None:
    """Forget what was written into the slots."""
    take_labels(slots)
    set_to_zero([each.values for each in slots])


def combine(slots: Sequence[Slot]) -> Tensor:
    """The numbers of each slot, (slot, FIELDS); waits for nothing. The slots are empty then."""
    written = [each.values for each in slots]
    found = torch.stack(written)
    set_to_zero(written)
    finite, *_, means, deviations, low, high, rows = found.unbind(1)
    totals = found[:, :6].sum(-1)
    number = totals[:, 0]
    mean = (finite * means).sum(-1) / number.clamp(min=1)
    # Of the columns, and of the columns' means around that of all (Chan, Golub, LeVeque 1979).
    away = torch.where(finite > 0, means - mean[:, None], 0.0)
    squares = (deviations + finite * away * away).sum(-1)
    some = finite > 0
    lowest = torch.where(some, low, torch.inf).amin(-1)
    highest = torch.where(some, high, -torch.inf).amax(-1)
    moments = torch.stack([mean, squares, lowest, highest, rows.sum(-1)], 1)
    return torch.cat([totals, moments], 1)


def table_of(numbers: Floats) -> Floats:
    """(slot, FIELDS) as a table of count, mean, squared deviations, low, high, and five counts.

    In the order of `DeviceReductions.read_table`; nan without finite values.
    """
    table = np.empty((len(numbers), 10))
    table[:, 0] = numbers[:, :4].sum(1)
    table[:, 1:5] = np.where(numbers[:, :1] > 0, numbers[:, 6:10], np.nan)
    table[:, 5:9] = numbers[:, 1:5]
    table[:, 9] = numbers[:, 5] - numbers[:, 4]
    return table
