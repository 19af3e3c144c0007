"""RESULT: numbers per token that norms and probes follow from, once somebody asks.

A call is reduced to a few lines of numbers while the backward pass runs. What is left to be done
with them is the same for all calls of a kind and works entry by entry, so that the numbers of many
parameters are gathered and finished together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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


def summed_squares(several: Iterable[Reduced]) -> tuple[Tensor, torch.dtype]:
    """The squared norms of several parameters added up, (t,), in float64, and their own dtype."""
    alike: dict[object, list[Reduced]] = defaultdict(list)
    for each in several:
        tables = [id(number.all_squares) for number in each.numbers]
        alike[(each.kind, *tables)].append(each)
    columns = [column for same in alike.values() for column in _columns(same)]
    gathered = iter(_gathered(columns))
    found: list[Tensor] = []
    for same in alike.values():
        squares = same[0].kind.squares(*(next(gathered) for _ in same[0].numbers))
        axes = (0,) if squares.ndim == 2 else (0, 2)
        total = squares.sum(axes, dtype=torch.float64)
        found.append(total.to(found[0].device) if found else total)
    dtype = reduce(
        torch.promote_types, (same[0].numbers[0].all_squares.dtype for same in alike.values())
    )
    return torch.stack(found).sum(0), dtype


def _columns(several: Sequence[Reduced]) -> list[tuple[Numbers, ...]]:
    """The first numbers of each, the second ones, and so on."""
    return [*zip(*(each.numbers for each in several), strict=True)]


def _gathered(columns: Sequence[Sequence[Numbers]]) -> list[Tensor]:
    """The squares of lines of one table for each column, (lines, t) or (lines, t, voxels)."""
    lines: dict[torch.device, list[int]] = defaultdict(list)
    for column in columns:
        lines[column[0].all_squares.device] += [each.line for each in column]
    places = {device: upload(np.array(each), device) for device, each in lines.items()}
    found, starts = [], dict.fromkeys(places, 0)
    for column in columns:
        table = column[0].all_squares
        start = starts[table.device]
        starts[table.device] = end = start + len(column)
        found.append(table.index_select(0, places[table.device][start:end]))
    return found
