"""Any tensor as one flat run of real numbers, without copying where that is possible.

`statistics` and `number_table` call `read_values` before a pass on the CPU, which reads contiguous
memory only. The order of the values is lost, so no pass may depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FlatValues(NamedTuple):
    """The numbers of a tensor.

    Attributes:
        flat: One-dimensional, contiguous and real; the order is not that of the tensor.
        repeat: How often each value stands in the tensor (expanded tensors).
        implicit_zeros: Zeros of a sparse tensor that are not in `flat`.
        note: What a reader of the statistics has to know, or "".
    """

    flat: Tensor
    repeat: int = 1
    implicit_zeros: int = 0
    note: str = ""


def read_values(tensor: Tensor) -> FlatValues:
    """The values of a detached tensor of any layout and dtype."""
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return _real(torch.cat(parts) if parts else empty)
    if tensor.layout == torch.strided:
        if tensor.is_contiguous():
            return _real(tensor.reshape(-1))
        dense, repeat = _without_repetition(tensor)
        return _real(dense.reshape(-1))._replace(repeat=repeat)
    if tensor.is_mkldnn:
        return _real(tensor.to_dense().reshape(-1))
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
    stored = tensor.values()
    values = _real(stored.reshape(-1))
    return values._replace(
        implicit_zeros=tensor.numel() - stored.numel(),
        note=join_notes(values.note, "sparse: implicit zeros counted"),
    )


def join_notes(*notes: str) -> str:
    """All different notes, in order of appearance, separated by semicolons."""
    parts = [part for note in notes for part in note.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


def _without_repetition(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor with its dimensions in memory order and expanded ones reduced to one entry."""
    repeat = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
            repeat *= size
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order), repeat


def _real(flat: Tensor) -> FlatValues:
    """One-dimensional values as real numbers of a dtype that the passes read."""
    if flat.is_quantized:
        return FlatValues(flat.dequantize(), note="quantized: read as float32")
    if flat.is_complex():
        # One transform at a time: hypot has no kernel for half precision everywhere.
        parts = torch.view_as_real(flat.resolve_conj())
        parts = parts.float() if parts.dtype == torch.float16 else parts
        note = "complex: statistics of the absolute value"
        return FlatValues(torch.hypot(*parts.unbind(-1)), note=note)
    flat = flat.resolve_neg().contiguous()
    if flat.is_floating_point() and flat.dtype.itemsize == 1:
        return FlatValues(flat, note="fp8 read as float32")
    return FlatValues(flat)
