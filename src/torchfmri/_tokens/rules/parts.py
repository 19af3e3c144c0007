"""Uses of parameters on some positions, such as a frame, whose results are mixed before a step.

In `A @ w(h) + x[:, t]` the product mixes the rows of a frame, so that it has no positions any more,
and the sum is at those of `x[:, t]`. It is a step all the same: the use may belong to the positions
that it read or to these. Two frames that are all there are, `a * x[:, 1] + x[:, 0]`, tell no more.
`trace` hands every `PartUse` on, `Joins` has `take` look for steps, and `Recurrences` refuses the
use. It is right where the same parameters are used on several frames and always on data alone, or
after each step, as in `w(x[:, t] + h.mean(1, keepdim=True))`: nothing takes in the last of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import NOBODY, compact, unique
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import Layout, Sources
from torchfmri._tokens.rules.step_uses import Begun


@dataclass(slots=True, eq=False)
class PartUse:
    """A use of parameters on some positions of a sequence.

    Attributes:
        rows: Their tokens.
        is_step: There is one for each sample; `Steps` takes care of those that are not mixed.
        uses: Those of the same parameters; none for a state, which is the result of a step.
        is_start: The parameters made a state to begin with.
        is_on_state: They are used on a state.
        is_taken: Something was added to them that may be a step.
        layout: How the argument is read, where the rows are right only if its features are last.
    """

    rows: Tensor
    is_step: bool
    uses: list[PartUse] = field(default_factory=list)
    is_start: bool = False
    is_on_state: bool = False
    is_taken: bool = False
    layout: Layout | None = None

    def has(self, numbers: Tensor) -> bool:
        """Whether all these numbers are among its tokens."""
        return bool(torch.isin(numbers, self.rows).all())

    @property
    def is_open(self) -> bool:
        """Whether it may be a use at the step that took it in."""
        if not self.is_taken or (self.layout is not None and self.layout.is_second):
            return False
        if len(self.uses) == 1 or any(each.is_start for each in self.uses):
            return True
        on_states = [each for each in self.uses if each.is_on_state]
        return bool(on_states) and all(each.is_taken for each in on_states)


class Parts:
    """Finds uses on some positions, and the steps that take them in.

    Args:
        sources: The tokens of the pass.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._uses: dict[frozenset[str], list[PartUse]] = {}
        self._beside: dict[frozenset[str], list[tuple[Begun, Tensor]]] = {}

    def kept(self, found: Origins, read: Sequence[Origins]) -> frozenset[PartUse]:
        """The uses of the operands that still are those of a result."""
        parts = frozenset(part for each in read for part in each.parts)
        if not parts or self._is_mixed(found):
            return parts
        numbers = compact(found.first)
        return frozenset(each for each in parts if each.has(numbers))

    def used(
        self, found: Origins, leaves: frozenset[str], is_step: bool, is_start: bool
    ) -> frozenset[PartUse]:
        """The uses on the way to a result, and this one.

        Args:
            found: The origins of the result.
            leaves: The parameters.
            is_step: Whether the result has one position for each sample.
            is_start: Whether the parameters made a state to begin with.
        """
        rows = self._rows(found)
        sources = self._sources.present(rows)
        if len(sources) != 1 or len(rows) == math.prod(sources[0].grid):
            return found.parts
        uses = self._uses.setdefault(leaves, [])
        is_on_state = any(not each.uses for each in found.parts)
        uses.append(PartUse(rows, is_step, uses, is_start, is_on_state))
        return found.parts | {uses[-1]}

    def take(self, one: Origins, other: Origins) -> frozenset[PartUse]:
        """The states that two operands make, of which one may be a step that takes in the other."""
        made = set[PartUse]()
        for state, new in ((one, other), (other, one)):
            open_ = [each for each in state.parts if each.uses]
            is_mixed = bool(open_) and self._is_mixed(state)
            open_ = [each for each in open_ if is_mixed or not each.is_step]
            rows = self._rows(new)
            sources = self._sources.present(rows)
            for each in open_:
                if len(sources) != 1 or self._sources.present(each.rows) != sources:
                    continue
                is_all = is_mixed or len(rows) * 2 == math.prod(sources[0].grid)
                is_like = len(rows) == len(each.rows) and not bool(
                    torch.isin(rows, each.rows).any()
                )
                if is_all and is_like:
                    each.is_taken = True
                    each.layout = sources[0].layout if new.is_raw else None
                    made.add(PartUse(rows, is_step=False))
        return frozenset(made)

    def side_by_side(self, begun: Begun, read: Origins) -> None:
        """Refuse parameters that are used on some positions side by side, and on others as well.

        Each of these uses is a step, `u(torch.cat([x[:, t], x[:, t - 1]], -1))`, but the sample has
        one token for all of them.
        """
        rows = self._rows(read)
        if len(rows) == sum(math.prod(each.grid) for each in self._sources.present(rows)):
            return
        others = self._beside.setdefault(begun.leaves, [])
        for other, known in others:
            if not torch.equal(rows, known):
                for each in (begun, other):
                    each.is_split = each.is_again = True
        others.append((begun, rows))

    def _is_mixed(self, origins: Origins) -> bool:
        """Whether rows are at no positions, but of whole samples or of all of them."""
        small = compact(origins.first)
        return bool(((small == NOBODY) | self._sources.is_sample(small)).all())

    def _rows(self, origins: Origins) -> Tensor:
        small = compact(origins.first)
        found: Tensor = unique(small[(small >= 0) & ~self._sources.is_sample(small)])
        return found


def is_open(origins: Origins) -> bool:
    """Whether nothing tells at which positions the parameters were used that made these rows."""
    return any(each.is_open and each.has(compact(origins.first)) for each in origins.parts)
