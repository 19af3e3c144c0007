"""The passes over memory: what a flat tensor is reduced to, on whatever machine it lies.

`reduce_values` picks the pass: `cpu` (torch alone), `compiled` (numba, where installed) for large
floats on the CPU, `device` for floats on an accelerator. All give the same `Reduction`.
"""

from __future__ import annotations

from torch import Tensor

from torchfmri._kernels import cpu, device
from torchfmri._kernels.accelerator import accelerator_name, use_accelerator
from torchfmri._kernels.cpu import block_squares, count_grid
from torchfmri._kernels.reduction import Reduction

__all__ = [
    "Reduction",
    "accelerator_name",
    "block_squares",
    "count_grid",
    "reduce_values",
    "use_accelerator",
]


def reduce_values(flat: Tensor, *, histogram: bool = True) -> Reduction:
    """The reduction of a real, dense, one-dimensional, contiguous tensor."""
    if flat.device.type == "cuda" and flat.is_floating_point() and flat.dtype.itemsize <= 4:
        return device.reduce_values(flat, histogram)
    if flat.device.type != "cpu":
        flat = flat.cpu()
    return cpu.reduce_values(flat, histogram)
