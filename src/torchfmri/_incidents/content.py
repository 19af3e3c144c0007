"""What is not finite: in one tensor, and in the loss and gradients of a step.

The guard reads `total_size` at every step, so it is one number in few launches, and nothing waits
for it here. The norm of a gradient is NaN or infinite if any of its values is, and reading each
gradient once is the cheapest exact test there is. A norm can also overflow by itself, so an alarm
is checked value by value (`is_finite`) before anything is done about it. `readable` knows the
kinds of tensors: a new one (another layout, eight bits) is added there. `MOST_ROWS` may change
freely.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfmri._torch import local_part

MOST_ROWS = 65_536
"""Rows with non-finite values are listed only up to this number."""


@dataclass(frozen=True)
class Content:
    """The non-finite values of one tensor.

    Attributes:
        nan: How many are NaN.
        pos_inf: How many are +inf.
        neg_inf: How many are -inf.
        count: How many values there are.
        shape: The shape of the tensor.
        dtype: Its dtype, such as "float32".
        element: The index of the first non-finite value.
        rows: The indices along dimension 0 under which there is one; none if there are too many.
    """

    nan: int
    pos_inf: int
    neg_inf: int
    count: int
    shape: tuple[int, ...]
    dtype: str
    element: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def inf(self) -> int:
        """How many are infinite."""
        return self.pos_inf + self.neg_inf

    @property
    def value(self) -> str:
        """The worst of them: NaN, inf or -inf."""
        return "NaN" if self.nan else "inf" if self.pos_inf else "-inf"


def read_content(tensor: Tensor) -> Content | None:
    """Return the non-finite values of `tensor`; None if it has none.

    Waits for the device. Only this process's shard of a sharded tensor is read.
    """
    values = readable(tensor)
    if values is None or is_finite(values):
        return None
    parts = torch.view_as_real(values) if values.is_complex() else values
    bad = ~torch.isfinite(values)
    first = int(bad.reshape(-1).to(torch.uint8).argmax())
    rows = (
        bad.reshape(len(bad), -1).any(1).nonzero()[:, 0]
        if bad.dim()
        else torch.empty(0, device="cpu")
    )
    return Content(
        nan=int(torch.isnan(parts).sum()),
        pos_inf=int((parts == torch.inf).sum()),
        neg_inf=int((parts == -torch.inf).sum()),
        count=values.numel(),
        shape=tuple(values.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        element=tuple(map(int, np.unravel_index(first, values.shape))),
        rows=tuple(rows.tolist()) if len(rows) <= MOST_ROWS else (),
    )


def readable(tensor: Tensor) -> Tensor | None:
    """Return the floating-point numbers of a tensor in readable form; None if it has none."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_meta or tensor.is_quantized:
        return None
    local = local_part(tensor)
    if local.layout == torch.sparse_coo:
        local = local.coalesce()
    if local.is_nested or local.layout != torch.strided:
        local = local.values()
    if local.numel() == 0:
        return None
    # No operation but the conversion is known for numbers of eight bits.
    return local.float() if local.dtype.itemsize == 1 else local


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that an optimizer is about to apply, as this process holds them."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                values = readable(parameter.grad)
                if values is not None:
                    found.append(values)
    return found


def total_size(losses: Iterable[Tensor], gradients: Sequence[Tensor]) -> Tensor | None:
    """Return a number, not yet read, that is finite only if all of these are; or None.

    It may be infinite though all are finite, if a norm overflows.
    """
    # Gradients first: the number is on the device of the first tensor, and nothing waits for it.
    tensors = [*gradients, *(loss.detach().float() for loss in losses)]
    with torch.no_grad():
        return torch.nn.utils.get_total_norm(tensors) if tensors else None


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of a tensor is finite, exactly; waits for the device."""
    values = readable(tensor)
    return values is None or bool(torch.isfinite(values).all())
