"""One use of parameters that may be a step of a recurrence, and what was seen of it.

`trace` makes a `StepUse` for every use with one position per sample. `Steps` and `Recurrences` fill
it in while the pass goes on, and set its `place` when the pass is over. Uses are told apart by
identity, not by what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from torch import Tensor

from torchfmri._tokens.rules.second_walks import SecondWalk

REASON = "the steps of a recurrence that does not tell whether it uses them before or after"

# The latest uses of each parameter on the way to a tensor, by name.
Chain = Mapping[str, "tuple[StepUse, ...]"]


@dataclass(slots=True, eq=False)
class TwoPositions:
    """Two positions that were joined without any step before: which of them came first?

    It was told from the order in which they were selected. If a third position continues in the
    same direction, this was the beginning of a recurrence. Otherwise nothing is known.

    Attributes:
        shift: How far apart they are.
        is_step: This was the beginning of a recurrence.
        is_all: There are no other positions, so this may be a whole recurrence.
        leaves: If both were selected at once, the parameters that were used on the newer one: the
            positions that follow have to go through the same ones.
        is_followed: A third position was taken in, or may be.
    """

    shift: int
    is_step: bool = False
    is_all: bool = False
    leaves: frozenset[str] | None = None
    is_followed: bool = False

    def go_on(self, shift: int, leaves: Set[str]) -> None:
        """Note a third position, that far away, and the parameters that were used on it."""
        self.is_followed = True
        self.is_step |= shift == self.shift and self.leaves in (None, leaves)

    @property
    def is_open(self) -> bool:
        """Whether this may be a whole recurrence, in either direction, or none."""
        return self.is_all and not self.is_step


@dataclass(slots=True, eq=False)
class Begun:
    """A walk whose rows may be of several positions at once: where it began.

    Both directions of a sequence in one state are such a walk. Its uses are no steps, because a
    step has one position per sample.

    Attributes:
        leaves: The parameters that made its first state.
        is_split: Its states meet others than their own positions.
        is_again: These parameters are used on its states.
    """

    leaves: frozenset[str]
    is_split: bool = False
    is_again: bool = False

    @property
    def is_open(self) -> bool:
        """Whether nothing tells at which positions the parameters are used."""
        return self.is_split and self.is_again


@dataclass(slots=True, eq=False)
class StepUse:
    """One use of parameters whose result has one position per sample.

    Attributes:
        own: The token of each entry of the result.
        leaves: The parameters.
        is_first: It takes in what the parameters make of constants: a state to begin with.
        is_start: It reads what the parameters make of constants; `is_first`, again, or hoisted.
        has_begun: This use, or one before it, is such a first one.
        is_fresh: No step was taken on the way to it.
        pair: The two positions of which it was computed, where these are all.
        walk: The positions that its state has met again.
        begun: The walks of several positions at once that led here.
        past: The latest uses of all parameters that led to it.
        before: Those of the same parameters.
        after: The uses of the same parameters to which it leads.
        is_direct: One of those is at the same position: no step lies between.
        follows_step: A step lies between it and one of `before`.
        shift: How far away the step is that takes it in, for each row, (n,).
        joined: The two positions that were joined next, where no step was taken on the way.
        through: Uses at that step which do not belong there themselves, but to the next one.
        is_fixed: It was made of the position that a step took in, and belongs there.
        is_new: In the first step that it takes part in, it is part of what is new.
        is_passed: A further step followed the one that took it in.
        is_again: Before a step took it in, it met a position that it had taken in already.
        is_met: Before a step took it in, it met the row of its own position.
        is_spread: Before a step took it in, it met a whole sequence, as a query does.
        is_on_state: It is a use on a state; None where that cannot be told.
        is_lost: Nothing tells whose it is: it was joined with a state of another position, or has
            several rows of one token, of which each was added to another position.
        place: The token of each entry in the end.
    """

    own: Tensor
    leaves: frozenset[str] = frozenset()
    is_first: bool = False
    is_start: bool = False
    has_begun: bool = False
    is_fresh: bool = True
    pair: TwoPositions | None = None
    walk: SecondWalk | None = None
    past: tuple[StepUse, ...] = ()
    before: tuple[StepUse, ...] = ()
    after: list[StepUse] = field(default_factory=list)
    is_direct: bool = False
    follows_step: bool = False
    begun: frozenset[Begun] = frozenset()
    shift: Tensor | None = None
    joined: TwoPositions | None = None
    through: tuple[StepUse, ...] = ()
    is_fixed: bool = False
    is_new: bool = False
    is_passed: bool = False
    is_again: bool = False
    is_met: bool = False
    is_spread: bool = False
    is_on_state: bool | None = False
    is_lost: bool = False
    place: Tensor | None = None

    @property
    def begins(self) -> bool:
        """Whether it makes the state that the next use reads out of constants."""
        return self.is_first and self.is_direct

    @property
    def is_moved(self) -> bool:
        """Whether it belongs to another step than the one whose state it reads."""
        return self.place is not None and self.place is not self.own


def united(one: Chain, other: Chain) -> Chain:
    """The latest uses of parameters on the ways to two operands."""
    if not one or not other:
        return one or other
    found: dict[str, tuple[StepUse, ...]] = dict(one)
    for leaf, uses in other.items():
        both = dict.fromkeys((*found.get(leaf, ()), *uses))
        earlier = {before for each in both for before in each.before}
        found[leaf] = tuple(each for each in both if each not in earlier)
    return found


def without_fixed(chain: Chain) -> Chain:
    """The uses that may still be those of a state."""
    kept = {leaf: tuple(e for e in uses if not e.is_fixed) for leaf, uses in chain.items()}
    return {leaf: uses for leaf, uses in kept.items() if uses}
