"""What is not finite in a tensor: how much of it, and where it begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_ROWS = 65_536
"""Where more rows than these are concerned, they are not listed."""


@dataclass(frozen=True)
class Content:
    """The non-finite values of one tensor.

    Attributes:
        nan: How many are NaN.
        pos_inf: How many are +inf.
        neg_inf: How many are -inf.
        count: How many values there are.
        shape: Of the tensor.
        dtype: Such as "float32".
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

    Waits for the device. Of a sharded tensor this process's shard is read.
    """
    values = readable(tensor)
    if values is None or bool(torch.isfinite(values).all()):
        return None
    parts = torch.view_as_real(values) if values.is_complex() else values
    bad = ~torch.isfinite(values)
    first = int(bad.reshape(-1).to(torch.uint8).argmax())
    rows = bad.reshape(len(bad), -1).any(1).nonzero()[:, 0] if bad.dim() else torch.empty(0)
    return Content(
        nan=int(torch.isnan(parts).sum()),
        pos_inf=int((parts == torch.inf).sum()),
        neg_inf=int((parts == -torch.inf).sum()),
        count=values.numel(),
        shape=tuple(values.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        element=tuple(int(each) for each in torch.unravel_index(torch.tensor(first), values.shape)),
        rows=tuple(rows.tolist()) if len(rows) <= MOST_ROWS else (),
    )


def readable(tensor: Tensor) -> Tensor | None:
    """Return the floating-point numbers of a tensor in readable form; None if it has none."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_meta or tensor.is_quantized:
        return None
    detached = tensor.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    if local.is_nested:
        local = local.values()
    elif local.layout == torch.sparse_coo:
        local = local.coalesce().values()
    elif local.layout != torch.strided:
        local = local.values()
    if local.numel() == 0:
        return None
    # No operation but the conversion is known for numbers of eight bits.
    return local.float() if local.dtype.itemsize == 1 else local
