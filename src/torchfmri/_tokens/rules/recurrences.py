"""Uses of parameters in a recurrence: to which step does each belong?

A state takes in one position after the other. Each such join is a step, at the position that is
new. A parameter may be used before it, on the state alone (`w(h) + x[:, t]`), or after it
(`w(h + x[:, t])`). A single step does not tell the two apart, because the use in one step is
followed by the join of the next. The ends of the recurrence do: a first use on constants belongs
to the state, and so does a last use that a step still takes in. A last use that nothing takes in is
at its own position, and so are all uses before it. A use that is not repeated has no ends: if a
step takes it in, it is refused, unless it makes the state to begin with.

So uses are collected while a pass is followed, and placed when it is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import SEVERAL, compact, rows_of, unique
from torchfmri._tokens.rules.sources import Sources, TokenSource

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
    """

    shift: int
    is_step: bool = False
    is_all: bool = False

    @property
    def is_open(self) -> bool:
        """Whether this may be a whole recurrence, in either direction, or none."""
        return self.is_all and not self.is_step


@dataclass(slots=True, eq=False)
class StepUse:
    """One use of parameters whose result has one position per sample.

    Attributes:
        own: The token of each entry of the result.
        leaves: The parameters.
        is_first: It takes in what the parameters make of constants: a state to begin with.
        has_begun: This use, or one before it, is such a first one.
        is_fresh: No step was taken on the way to it.
        pair: The two positions of which it was computed, where these are all.
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
        is_on_state: It is a use on a state; None where that cannot be told.
        is_lost: Nothing tells whose it is: it was joined with a state of another position, or has
            several rows of one token, of which each was added to another position.
        place: The token of each entry in the end.
    """

    own: Tensor
    leaves: frozenset[str] = frozenset()
    is_first: bool = False
    has_begun: bool = False
    is_fresh: bool = True
    pair: TwoPositions | None = None
    past: tuple[StepUse, ...] = ()
    before: tuple[StepUse, ...] = ()
    after: list[StepUse] = field(default_factory=list)
    is_direct: bool = False
    follows_step: bool = False
    shift: Tensor | None = None
    joined: TwoPositions | None = None
    through: tuple[StepUse, ...] = ()
    is_fixed: bool = False
    is_new: bool = False
    is_passed: bool = False
    is_again: bool = False
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


class Recurrences:
    """All uses of a pass that may be steps of a recurrence.

    Args:
        sources: The tokens of the pass.

    Attributes:
        uses: By parameter, in order.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._all: list[StepUse] = []
        self.uses: dict[str, list[StepUse]] = {}

    def add(self, use: StepUse, chain: Chain) -> None:
        """Note a use of parameters; `chain` holds those that led to it."""
        use.past = tuple(dict.fromkeys(each for uses in chain.values() for each in uses))
        use.before = tuple(each for each in use.past if not use.leaves.isdisjoint(each.leaves))
        use.is_first = use.is_first and not use.before
        use.has_begun = use.is_first or any(each.has_begun for each in use.before)
        for each in use.before:
            # States that are made of the whole sample have one number in all steps.
            row = rows_of(each.own)[0]
            is_step = each.shift is not None and bool(self._sources.is_sample(row))
            is_same = not is_step and bool(row == rows_of(use.own)[0])
            each.after.append(use)
            each.is_direct |= is_same
            use.follows_step |= not is_same
        if use.pair is not None and use.follows_step:  # the same layer before it and after it
            use.pair.is_step |= use.pair.is_all
        self._all.append(use)
        for leaf in use.leaves:
            self.uses.setdefault(leaf, []).append(use)

    def step(
        self,
        newer: Chain,
        older: Chain,
        rows: Tensor,
        shift: Tensor,
        is_fresh: bool,
        pair: TwoPositions | None = None,
    ) -> None:
        """Note that a position takes in a state.

        Args:
            newer: The uses that led to what is new.
            older: Those that led to the state.
            rows: The token of each row of what is new, (n,).
            shift: How far that is from the state, (n,).
            is_fresh: Whether no step was taken on the way to what is new.
            pair: The two positions, where no step was taken on the way to the state either.
        """
        held = [each for uses in newer.values() for each in uses if each.shift is None]
        for each in held:
            each.is_fixed |= is_fresh
            each.is_new, each.joined = True, pair
        # Two states are joined, of which a later step takes in both: w(h1) + v(h2) + x[:, t].
        waiting = [] if is_fresh else [e for e in held if rows_of(e.own)[0] == rows[0]]
        for each in dict.fromkeys(each for uses in older.values() for each in uses):
            if each.is_fixed:
                continue
            if each.shift is None:
                # Another state was joined with it since, and neither of them was the newer one.
                own = rows_of(each.own)
                each.is_lost |= own.shape == rows.shape and bool((own + shift != rows).any())
                each.shift, each.through = shift, tuple(e for e in waiting if e is not each)
                each.joined = pair
            elif is_fresh:
                each.is_passed |= bool(rows_of(each.own)[0] + each.shift[0] != rows[0])

    def spread(self, chain: Chain) -> None:
        """Note that a state is added to several positions.

        A use that had a row for each of them already may belong to the state or to these.
        """
        for each in (each for uses in chain.values() for each in uses):
            rows = each.own.shape[:-1].numel()
            each.is_lost |= each.shift is None and rows > len(unique(compact(each.own)))

    # -- placing -----------------------------------------------------------------------------

    def place(self) -> None:
        """Find out where each use belongs."""
        connected, is_open = self._connected(), []
        roles: dict[str, set[bool | None]] = {}
        for several in connected:
            begins = any(each.begins for each in several)
            recurs = begins or any(each.follows_step for each in several)
            on_state = begins or (recurs and self._is_taken_in(several))
            if any(each.pair is not None and not each.pair.is_step for each in several):
                on_state = None
            for each in several:
                each.is_on_state = on_state
                for leaf in each.leaves if recurs or each.is_new else ():
                    roles.setdefault(leaf, set()).add(on_state)
                if not recurs and self._is_open(each):
                    is_open.append(each)
        for each in is_open:
            self._decide(each, {role for leaf in each.leaves for role in roles.get(leaf, ())})
        for several in connected:
            _place(several)

    def _is_open(self, use: StepUse) -> bool:
        """Whether a step takes in a use that is not repeated: nothing tells whose it is."""
        if use.joined is not None and use.joined.is_open:
            return True
        return use.shift is not None and not (use.is_new or use.is_first) and self._stays(use)

    def _decide(self, use: StepUse, roles: Collection[bool | None]) -> None:
        """Decide whether an open use is one on a state; `roles` are those of its parameters.

        In other walks over the steps the parameters have the same role. Without any, a layer on the
        first position makes the state to begin with, if the steps that follow have layers of their
        own. A further one that is there in one step alone may belong before it or after it.
        """
        is_pair = use.joined is not None and use.joined.is_open
        if roles and not is_pair:
            use.is_on_state = next(iter(roles)) if len(roles) == 1 else None
        elif is_pair or not use.is_fresh or any(each.has_begun for each in use.past):
            waiting = [use]
            while waiting:
                each = waiting.pop()
                if each.is_on_state is False and self._is_open(each):
                    each.is_on_state = None
                    waiting += each.past

    def _connected(self) -> list[list[StepUse]]:
        """The uses that lead to each other, in order."""
        found: list[list[StepUse]] = []
        seen: set[StepUse] = set()
        for start in self._all:
            waiting, several = [start], []
            while waiting:
                each = waiting.pop()
                if each not in seen:
                    seen.add(each)
                    several.append(each)
                    waiting += [*each.before, *each.after]
            if several:
                found.append(several)
        return found

    def _is_taken_in(self, several: Sequence[StepUse]) -> bool | None:
        """Whether steps take in uses of which the first reads data, by what becomes of the last.

        None where that does not tell: something else may follow that takes in positions as well.
        """
        ends = [each for each in several if not each.after and not each.is_fixed]
        taken = [each for each in ends if each.shift is not None and self._stays(each)]
        if not taken:  # what was made of two positions side by side may be the first step
            samples = [bool(self._sources.is_sample(rows_of(each.own)[0])) for each in several]
            return None if len({*samples}) > 1 else False
        is_regular = len(taken) == len(ends) and not any(each.is_passed for each in ends)
        for each in several:
            is_regular &= bool(each.before) or each.is_fresh or not self._stays(each)
            is_regular &= all(
                before.shift is None or before.is_fixed
                or bool(rows_of(before.own)[0] + before.shift[0] == rows_of(each.own)[0])
                for before in each.before
            )  # fmt: skip
        return True if is_regular else None

    def _stays(self, use: StepUse) -> bool:
        """Whether the step that takes a use in is of the same sequence, if there is one."""
        if use.shift is None:
            return True
        row = rows_of(use.own)[:1]
        return self._source(row) is self._source(row + use.shift[:1])

    def _source(self, numbers: Tensor) -> TokenSource | None:
        found = self._sources.present(numbers)
        return found[0] if found else None


def _place(several: Sequence[StepUse]) -> None:
    """Place uses: those on a state at the step that takes it in.

    Several uses in a row belong to the same step, w(w(h)) + x[:, t], as many as there are in the
    other steps: the first state may have been made by one more.
    """
    most = min((_uses_in_a_row(each) for each in several if each.follows_step), default=1)
    for each in several:
        last = each
        for _ in range(most - 1):
            last = next((use for use in last.after if not use.follows_step), last)
        is_moved = each.is_on_state and last.shift is not None and not last.is_direct
        is_moved = is_moved and not (each.is_fixed or each.is_first)
        if (
            each.is_lost
            or each.is_on_state is None
            or any(e.is_again and e.is_direct for e in several)
        ):
            each.place = torch.full_like(each.own, SEVERAL)
        else:
            each.place = _moved(each, last) if is_moved else each.own


def _uses_in_a_row(use: StepUse) -> int:
    """How many uses follow each other without a step, from this one on."""
    count, waiting = 1, use
    while waiting.is_direct:
        following = next((each for each in waiting.after if not each.follows_step), None)
        if following is None:
            break
        count, waiting = count + 1, following
    return count


def _moved(use: StepUse, last: StepUse) -> Tensor:
    """The tokens of a use at the step that takes in the last one of its row."""
    shift = torch.zeros(1, dtype=torch.int64, device=use.own.device)
    seen: list[StepUse] = []
    following: StepUse | None = last
    while following is not None and following.shift is not None and following not in seen:
        seen.append(following)
        shift = shift + following.shift
        following = next((each for each in following.through if each.is_on_state), None)
    if bool((shift == shift[0]).all()):  # the rows may have another shape since
        shift = shift[:1]
    own = use.own
    if len(shift) not in (1, own.shape[0] if own.ndim else 1):
        return torch.full_like(own, SEVERAL)
    shift = shift.view(-1, *[1] * (own.ndim - 1)) if own.ndim else shift[0]
    return torch.where(own >= 0, own + shift, own)


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
