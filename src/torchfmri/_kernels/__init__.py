"""Passes over memory: what a flat tensor is reduced to, on the CPU and on a GPU.

`reduce_values` picks the pass: `cpu` (torch alone), `compiled` (numba, where installed) for large
floats on the CPU, `device` for floats on an accelerator. All give the same `Reduction`, which
`torchfmri.statistics` turns into statistics. `rows` and its relatives reduce the rows of matrices
for token gradients, `voxels` groups of units for scans, `summaries` single tensors inside compiled
graphs. A new statistic needs a number here, made by every pass.
"""

from __future__ import annotations

from torch import Tensor

from torchfmri._kernels import cpu, cuda, device, summaries
from torchfmri._kernels.accelerator import accelerator_name, use_accelerator
from torchfmri._kernels.channels import ChannelStatistics, reduce_channels
from torchfmri._kernels.cpu import count_grid
from torchfmri._kernels.cuda_plan import upload
from torchfmri._kernels.cuda_rows import heaviest
from torchfmri._kernels.frozen_dict import FrozenDict
from torchfmri._kernels.histogram import (
    NEGATIVE,
    CodeGrid,
    Floats,
    Histogram,
    Integers,
    Pieces,
    constant_grid,
    grid_exponent,
    linear_of,
    quantile_of,
    refine,
)
from torchfmri._kernels.number_table import (
    NumberTable,
    merge_numbers,
    no_numbers,
    numbers_of_layers,
    reduction_of,
)
from torchfmri._kernels.reduction import Reduction, combine_moments
from torchfmri._kernels.row_tables import Numbers
from torchfmri._kernels.rows import (
    Asked,
    Form,
    Lane,
    Product,
    RowLanes,
    bilinear_forms,
    can_read_forms,
    written_product,
)
from torchfmri._kernels.values import join_notes, read_values
from torchfmri._kernels.voxels import VoxelSums, VoxelTable, reduce_voxels, voxels_reducible


def reduce_values(flat: Tensor, *, histogram: bool = True) -> Reduction:
    """The reduction of a real, dense, one-dimensional, contiguous tensor."""
    if flat.device.type == "cuda" and flat.is_floating_point() and flat.dtype.itemsize <= 4:
        return device.reduce_values(flat, histogram)
    if flat.device.type != "cpu":
        flat = flat.cpu()
    return cpu.reduce_values(flat, histogram)
