"""Numbers per token that norms and probes follow from, once somebody asks.

A call is reduced to a few lines of numbers while the backward pass runs. What is left to be done
with them is the same for all calls of a kind and works entry by entry, so that the numbers of many
parameters are gathered and finished together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels import Numbers, upload


class ReducedKind(NamedTuple):
    """How numbers become what is asked for.

    Attributes:
        squares: Takes the squares of each `Numbers` of a `Reduced`: the squared norms, (..., t), or
            by voxel (..., t, voxels).
        probes: Takes the inner products: the gradients between the check's random vectors, (t,).
    """

    squares: Callable[..., Tensor]
    probes: Callable[..., Tensor]


class Reduced(NamedTuple):
    """What is left of a parameter's gradients.

    Attributes:
        kind: What the numbers are.
        numbers: Numbers per token, the squares of the first by voxel where that is kept.
    """

    kind: ReducedKind
    numbers: tuple[Numbers, ...]

    @staticmethod
    def of(squares: Tensor, probes: Tensor) -> Reduced:
        """What is left where both were computed."""
        return Reduced(SQUARES, (Numbers.of(squares, probes),))

    def squares(self) -> Tensor:
        """The squared norms, (t,), or by voxel (t, voxels)."""
        return self.kind.squares(*(each.squares for each in self.numbers))

    def probes(self) -> Tensor:
        """The gradients between the check's random vectors, (t,)."""
        return self.kind.probes(*(each.products for each in self.numbers))

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.numbers[0].all_products.shape[1]

    @property
    def is_by_voxel(self) -> bool:
        """Whether the squares of each voxel were kept."""
        return self.numbers[0].all_squares.ndim == 3


SQUARES = ReducedKind(lambda squares: squares, lambda probe: probe)
OUTER = ReducedKind(lambda squares, x: squares * x, lambda probe, x: probe * x)
OUTER_BY_VOXEL = ReducedKind(lambda squares, x: squares * x[..., None], OUTER.probes)
WEIGHTED_PROBE = ReducedKind(lambda squares, weights: squares, OUTER.probes)


def summed_squares(several: Sequence[Reduced]) -> tuple[Tensor, torch.dtype]:
    """The squared norms of several parameters added up, (t,), in float64, and their own dtype."""
    found: list[Tensor] = []
    dtypes = []
    for _, squares in squares_together(several):
        total = squares.sum((0,) if squares.ndim == 2 else (0, 2), dtype=torch.float64)
        found.append(total.to(found[0].device) if found else total)
        dtypes.append(squares.dtype)
    return torch.stack(found).sum(0), reduce(torch.promote_types, dtypes)


def squares_together(several: Sequence[Reduced]) -> list[tuple[list[int], Tensor]]:
    """The squared norms of many parameters in few operations.

    Those whose numbers stand in the same tables come together: their places in `several`, and
    (n, t) or by voxel (n, t, voxels).
    """
    return _together(several, lambda numbers: numbers.all_squares, lambda kind: kind.squares)


def probes_together(several: Sequence[Reduced]) -> list[tuple[list[int], Tensor]]:
    """The probes, (n, t), in the same order as `squares_together`."""
    return _together(several, lambda numbers: numbers.all_products, lambda kind: kind.probes)


def _together(
    several: Sequence[Reduced],
    table_of: Callable[[Numbers], Tensor],
    finish_of: Callable[[ReducedKind], Callable[..., Tensor]],
) -> list[tuple[list[int], Tensor]]:
    alike: dict[object, list[int]] = defaultdict(list)
    for place, each in enumerate(several):
        alike[(each.kind, *(id(number.all_squares) for number in each.numbers))].append(place)
    columns = [
        column
        for same in alike.values()
        for column in zip(*(several[place].numbers for place in same), strict=True)
    ]
    gathered = iter(_gathered(columns, table_of))
    return [
        (
            same,
            finish_of(several[same[0]].kind)(*(next(gathered) for _ in several[same[0]].numbers)),
        )
        for same in alike.values()
    ]


def _gathered(
    columns: Sequence[Sequence[Numbers]], table_of: Callable[[Numbers], Tensor]
) -> list[Tensor]:
    """Lines of one table for each column, (lines, t) or (lines, t, voxels)."""
    lines: dict[torch.device, list[int]] = defaultdict(list)
    for column in columns:
        lines[table_of(column[0]).device] += [each.line for each in column]
    places = {device: upload(np.array(each), device) for device, each in lines.items()}
    found, starts = [], dict.fromkeys(places, 0)
    for column in columns:
        table = table_of(column[0])
        start = starts[table.device]
        starts[table.device] = end = start + len(column)
        found.append(table.index_select(0, places[table.device][start:end]))
    return found
