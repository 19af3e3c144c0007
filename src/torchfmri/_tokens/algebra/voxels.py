"""Squared gradient norms by voxel, a group of neighbouring output units.

`TokenGradient.norm(by="voxel")` calls `voxel_squares` on terms, and `calls/norms.py` both functions
during the backward pass. Both must group in the same way, from unit 0 on with a smaller last group,
because results of either kind are compared and added. `grouped_squares` computes in float32 at
least: squares overflow or vanish in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._tokens.algebra import factors
from torchfmri._tokens.algebra.factors import Term
from torchfmri._tokens.algebra.parameter import ParameterInfo


def voxel_squares(terms: Sequence[Term], info: ParameterInfo) -> Tensor:
    """The squared norms of a parameter's gradients by voxel, (t, voxels)."""
    by_unit = factors.marginal_squares(terms, *info.output.steps(info.shape))
    return _summed(by_unit, info.voxel)


def grouped_squares(rows: Tensor, size: int) -> Tensor:
    """The squared norms over groups of `size` neighbours, (t, groups), in float32 at least."""
    wide = rows.dtype in (torch.float32, torch.float64)
    dtype = None if wide else torch.float32
    if rows.shape[1] % size:
        return _summed(rows.to(dtype or rows.dtype).square(), size)
    groups = rows.reshape(len(rows), rows.shape[1] // size, size)
    found: Tensor = torch.linalg.vector_norm(groups, 2, -1, dtype=dtype)
    return found.square_()


def _summed(numbers: Tensor, size: int) -> Tensor:
    """Sums over groups of `size` neighbours; the last group may be smaller."""
    whole = F.pad(numbers, (0, -numbers.shape[1] % size))
    return whole.view(len(numbers), whole.shape[1] // size, size).sum(-1)
