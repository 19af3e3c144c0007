"""Reductions where the tensor lies (CUDA), with torch operations and one transfer at the end.

`_kernels.reduce_values` calls it for floats on an accelerator. A row holds the numbers of one chunk
in the order of the fields of `Reduction` and then the histogram; it is read by position. `CHUNK`
may be changed freely. Keep it at one transfer: each one waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchfmri._kernels.cpu import smallest_normal
from torchfmri._kernels.histogram import CODE_SHIFT, CODES, Histogram
from torchfmri._kernels.reduction import Reduction

CHUNK = 1 << 24
"""Values per step, to bound the float64 copies that a step makes."""


def reduce_values(flat: Tensor, histogram: bool) -> Reduction:
    """The reduction of a one-dimensional contiguous tensor of at most 32-bit floats."""
    if not flat.numel():
        return Reduction(histogram=Histogram.from_codes([], []) if histogram else None)
    normal = smallest_normal(flat.dtype)
    rows = [_reduce_chunk(chunk, normal, histogram) for chunk in torch.split(flat, CHUNK)]
    result = Reduction(histogram=Histogram.from_codes([], []) if histogram else None)
    for row in torch.stack(rows).cpu():
        numbers = row[:10].tolist()
        table = Histogram.from_table(row[10:].to(torch.int64).numpy()) if histogram else None
        # In the order of the fields of a Reduction, six of which are counts.
        fields: tuple[Any, ...] = (*map(int, numbers[:6]), *numbers[6:], table)
        result = result.add(Reduction(*fields))
    return result


def _reduce_chunk(chunk: Tensor, normal: float, histogram: bool) -> Tensor:
    """The ten numbers of a Reduction and the table of codes, as float64 in one tensor."""
    values = chunk.float().double()
    finite = values.isfinite()
    kept = torch.where(finite, values, 0.0)
    count = finite.sum()
    mean = kept.sum() / count.clamp(min=1)
    deviations = torch.where(finite, kept - mean, 0.0)
    zero = (values == 0).sum()
    numbers = [
        torch.full_like(count, chunk.numel()),
        values.isnan().sum(),
        (values == math.inf).sum(),
        (values == -math.inf).sum(),
        zero,
        (values.abs() < normal).sum() - zero,
        mean,
        deviations.square_().sum(),
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
    ]
    row = torch.stack([number.double() for number in numbers])
    if not histogram:
        return row
    bits = chunk.float().view(torch.int32)
    codes = (bits >> CODE_SHIFT).bitwise_and_(CODES - 1)
    return torch.cat((row, torch.bincount(codes, minlength=CODES).double()))
