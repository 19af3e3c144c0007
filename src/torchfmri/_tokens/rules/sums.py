"""The tokens of sums over axes and of matrix products: `Sums`.

`trace` makes it, and operations call `reduced` and `product`. A sum over features keeps its token;
a sum over positions makes a new one through `Grids`. A product of two tensors with tokens belongs
to its rows, which makes attention scores belong to their queries, and keeps the columns as the
second candidate. Where one operand is a state of a recurrence, `Joins` decides instead. Where an
argument still has two readings, `Layouts` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.joins import Joins
from torchfmri._tokens.rules.layouts import Layouts
from torchfmri._tokens.rules.numbers import NOBODY, compact, equal, is_constant_along
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import Sources
from torchfmri._tokens.rules.step_uses import united


class Sums:
    """Origins of sums and products.

    Args:
        sources: The tokens of the pass.
        grids: Makes new ones.
        layouts: Chooses among two readings of an argument.
        joins: Compares operands.
    """

    def __init__(self, sources: Sources, grids: Grids, layouts: Layouts, joins: Joins) -> None:
        self.sources, self._grids, self._layouts, self._joins = sources, grids, layouts, joins

    def reduced(
        self, origins: Origins, axes: Sequence[int], name: str, are_features: bool = False
    ) -> Origins:
        """The origins after a sum over some axes, which stay with length 1; see `settled`."""
        origins = self._layouts.settled(origins, axes, are_features)
        if all(is_constant_along(origins.first, axis) for axis in axes):
            return origins.moved(lambda numbers: _narrowed(numbers, axes))
        entries = None
        if origins.is_raw and origins.second is not None:
            # An argument cut into pieces: the two readings together tell its entries apart.
            most = int(compact(origins.second).max()) + 1
            entries = origins.first * most + origins.second
            entries = torch.where((origins.first < 0) | (origins.second < 0), NOBODY, entries)
        first = self._grids.merged(origins.first, axes, entries)
        return origins.but(first=first, second=None, is_decided=True, is_raw=False, reason=name)

    def product(
        self, one: Origins | None, other: Origins | None, shape: torch.Size, name: str
    ) -> Origins | None:
        """The origins of (..., m, k) @ (..., k, n): those of rows before those of columns."""
        rows = None if one is None else self._contracted(one, -1, shape, name, other is None)
        columns = None if other is None else self._contracted(other, -2, shape, name, one is None)
        if rows is None or columns is None:
            return rows or columns
        # The result is at the rows, whatever becomes of the columns.
        plain = compact(columns.first)
        tokens = compact(rows.first)
        if bool(((plain < 0) | self.sources.is_sample(plain)).all()) and bool((tokens >= 0).all()):
            return rows.but(chain=united(rows.chain, columns.chain),
                            is_dynamic=rows.is_dynamic or columns.is_dynamic)  # fmt: skip
        a, b = self._joins.promoted(compact(rows.first), torch.where(plain < NOBODY, NOBODY, plain))
        dynamic = rows.is_dynamic or columns.is_dynamic
        chain = united(rows.chain, columns.chain)
        if bool((a == b).all()):
            open_question = rows.second is not None and not rows.is_decided
            decides = open_question and equal(rows.first, columns.first)
            kept = columns if decides else rows
            return kept.but(first=a.expand(shape), is_dynamic=dynamic, chain=chain)
        if rows.second is not None and not rows.is_decided:
            return rows.but(is_dynamic=dynamic, chain=chain)
        if columns.first.shape[-1] == 1 and self._joins.steps.are_steps(rows, columns):
            # No queries and keys, but a state and the vector of another step.
            return self._joins.join([rows, columns], shape, name)
        # Scores belong to their queries. Between samples there are no queries and keys.
        same = self.sources.sample_of(a) == self.sources.sample_of(b)
        decided = bool((same | (a < 0) | (b < 0)).all())
        if bool((compact(rows.first) == NOBODY).all()):
            return columns.but(is_dynamic=dynamic, chain=chain)
        first, second = rows.first, torch.where(plain < NOBODY, NOBODY, plain).expand(shape)
        return Origins(
            first=first,
            second=second,
            is_decided=decided,
            is_raw=False,
            is_dynamic=dynamic,
            reason=name,
            chain=chain,
        )

    def _contracted(
        self, origins: Origins, axis: int, shape: torch.Size, name: str, is_alone: bool
    ) -> Origins:
        """The origins of one factor in the result, where `axis` was summed over and replaced."""
        if not origins.is_raw:
            origins = self._layouts.settled(origins, [axis])
        lead = len(shape) - origins.first.ndim
        if is_alone and not is_constant_along(origins.first, axis):
            placed = self._mixed_by_place(origins.first, axis, shape[axis])
            if placed is not None:
                first = placed[(None,) * lead].expand(shape)
                return origins.but(first=first, second=None, is_decided=True, is_raw=False)
        origins = self.reduced(origins, [axis], name, are_features=True)
        return origins.moved(lambda each: each[(None,) * lead].expand(shape))

    def _mixed_by_place(self, numbers: Tensor, axis: int, length: int) -> Tensor | None:
        """A product with a matrix along all positions of a sequence has its result there too."""
        small = compact(numbers)
        sources = self.sources.present(small)
        if len(sources) != 1 or sources[0].grid[1] != length or length == 1:
            return None
        local = self.sources.local(sources[0], small)
        axis = axis % numbers.ndim
        steps = torch.arange(length, device=numbers.device)
        steps = steps.view([-1 if each == axis else 1 for each in range(numbers.ndim)])
        if small.shape[axis] != length or not bool((local % length == steps).all()):
            return None
        return small


def _narrowed(numbers: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        numbers = numbers.narrow(axis, 0, 1)
    return numbers
