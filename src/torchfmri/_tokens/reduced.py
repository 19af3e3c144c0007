"""RESULT: numbers per token that norms and probes follow from, once somebody asks.

A call is reduced to a few tensors of numbers while the backward pass runs. What is left to be done
with them is the same for all calls of a kind and works entry by entry, so that the numbers of many
parameters are stacked and finished together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """How numbers become what is asked for; both take the tensors of a `Reduced`.

    Attributes:
        squares: The squared norms, (t,), or by voxel (t, voxels).
        probes: The gradients between the check's random vectors, (t,).
    """

    squares: Callable[..., Tensor]
    probes: Callable[..., Tensor]


class Reduced(NamedTuple):
    """What is left of a parameter's gradients.

    Attributes:
        kind: What the tensors are.
        tensors: Numbers per token, (t,), and the first of them by voxel where that is kept.
    """

    kind: Kind
    tensors: tuple[Tensor, ...]

    def squares(self) -> Tensor:
        """The squared norms, (t,), or by voxel (t, voxels)."""
        return self.kind.squares(*self.tensors)

    def probes(self) -> Tensor:
        """The gradients between the check's random vectors, (t,)."""
        return self.kind.probes(*self.tensors)


SQUARES = Kind(lambda squares, probe: squares, lambda squares, probe: probe)
OUTER = Kind(
    lambda squares, probe, x_squares, x_probe: squares * x_squares,
    lambda squares, probe, x_squares, x_probe: probe * x_probe,
)
OUTER_BY_VOXEL = Kind(
    lambda squares, probe, x_squares, x_probe: squares * x_squares[..., None], OUTER.probes
)


def summed_squares(several: Iterable[Reduced]) -> tuple[Tensor, torch.dtype]:
    """The squared norms of several parameters added up, (t,), in float64, and their own dtype."""
    alike: dict[object, list[Reduced]] = defaultdict(list)
    for each in several:
        first = each.tensors[0]
        alike[each.kind, first.shape, first.dtype, first.device].append(each)
    found = []
    for same in alike.values():
        columns = zip(*(each.tensors for each in same), strict=True)
        squares = same[0].kind.squares(*map(torch.stack, columns))
        axes = (0,) if squares.ndim == 2 else (0, 2)
        found.append(squares.sum(axes, dtype=torch.float64))
    dtype = reduce(torch.promote_types, (same[0].tensors[0].dtype for same in alike.values()))
    return torch.stack(found).sum(0), dtype
