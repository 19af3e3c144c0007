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

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import SEVERAL, compact, rows_of, unique
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.parts import is_open
from torchfmri._tokens.rules.proof import Proof
from torchfmri._tokens.rules.row_reach import token_at
from torchfmri._tokens.rules.second_walks import SecondWalks
from torchfmri._tokens.rules.sources import Sources, TokenSource
from torchfmri._tokens.rules.step_rows import moved, row_of, uses_before_a_step
from torchfmri._tokens.rules.step_uses import REASON, Chain, StepUse, TwoPositions


class Recurrences:
    """All uses of a pass that may be steps of a recurrence.

    Args:
        sources: The tokens of the pass.

    Attributes:
        uses: By parameter, in order.
        walks: The positions that states have met again.
        pairs: Two positions without any step before, by the token of the newer one.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._all: list[StepUse] = []
        self.walks = SecondWalks()
        self.proof = Proof(sources)
        self.uses: dict[str, list[StepUse]] = {}
        self.pairs: dict[int, TwoPositions] = {}

    def add(self, use: StepUse, chain: Chain) -> None:
        """Note a use of parameters; `chain` holds those that led to it."""
        use.past = tuple(dict.fromkeys(each for uses in chain.values() for each in uses))
        # A parameter that makes the first state is on the way to all, with the layer used on it.
        latest = [each for leaf in sorted(use.leaves) for each in chain.get(leaf, ())]
        use.before = tuple(dict.fromkeys(latest))
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

    def lose(self, *several: Chain) -> None:
        """Note that nothing tells whose the step is that takes in these uses."""
        for each in (each for chain in several for uses in chain.values() for each in uses):
            each.is_lost |= each.shift is None and not each.is_fixed

    def spread(self, chain: Chain) -> None:
        """Note that a state is added to several positions.

        A use that had a row for each of them already may belong to the state or to these.
        """
        for each in (each for uses in chain.values() for each in uses):
            rows = each.own.shape[:-1].numel()
            each.is_lost |= each.shift is None and rows > len(unique(compact(each.own)))
        self.leave(chain)

    def leave(self, chain: Chain) -> None:
        """Note that a state meets a whole sequence, from which it may come back."""
        for each in (each for uses in chain.values() for each in uses):
            each.is_spread |= each.shift is None

    # -- placing -----------------------------------------------------------------------------

    def place(self) -> None:
        """Find out where each use belongs."""
        for each in self._all:
            each.is_lost |= self.walks.is_second(each.walk)
            pair = each.joined
            each.is_lost |= pair is not None and pair.is_followed and not pair.is_step
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
            if any(_follows(other, each) or _follows(each, other) for other in is_open):
                each.is_on_state = None  # a recurrence whose states were read out of a sequence
                continue
            self._decide(each, {role for leaf in each.leaves for role in roles.get(leaf, ())})
        for several in connected:
            _place(several)
        self._check_pairs()
        for each in self._all:
            _check_order(each)
            # What is made of a refused step may be at another one.
            if any(map(_is_lost_step, each.past)):
                each.place = torch.full_like(each.own, SEVERAL)
        for several in self.uses.values():
            _check_start(several)
        self._check_turns()
        for each in self._all:
            if not self._is_proved(each):
                each.place = torch.full_like(each.own, SEVERAL)

    def _is_proved(self, use: StepUse) -> bool:
        """Whether a use belongs to the position that was found for it."""
        if all(each.grid == (1, 1) for each in self._sources.all):
            return True  # a pass over one token, as one step of generation: there is no other
        if any(each.is_open for each in use.begun):
            return False
        place = use.own if use.place is None else use.place
        token = int(rows_of(place)[0])
        if token == int(rows_of(use.own)[0]) and self.proof.is_alone(use):
            return self.proof.holds(use)
        places = [self.proof.places(leaf, self.uses[leaf]).get(use) for leaf in use.leaves]
        is_told = all(each is not None and token_at(each) == token for each in places)
        return is_told and self.proof.holds(use)

    def settled(self, origins: Origins) -> Origins:
        """The origins of a sequence; of none, where it was put together of refused steps."""
        is_row = all(self.proof.is_row(*each) for each in (*origins.reach.items(), *origins.rests))
        if not is_row or any(each.is_open for each in origins.begun) or is_open(origins):
            return origins.but(
                first=torch.full_like(origins.first, SEVERAL),
                second=None,
                is_decided=True,
                is_raw=False,
                reason=REASON,
            )
        steps = (*origins.history.values(), *origins.ended.values())
        uses = (each for step in steps for several in step.chain.values() for each in several)
        if not any(_is_lost_step(each) and not _is_role_open(each) for each in uses):
            return origins
        first = torch.full_like(origins.first, SEVERAL)
        return origins.but(first=first, second=None, is_decided=True, is_raw=False, reason=REASON)

    def _check_turns(self) -> None:
        """Refuse layers that follow each other in one order in some steps, in the other in others.

        Such layers take turns: each belongs to every second step.
        """
        rows: dict[tuple[frozenset[str], frozenset[str]], dict[int, list[StepUse]]] = {}
        for use in self._all:
            row = int(rows_of(use.own)[0])
            for earlier in use.past:
                if use.leaves != earlier.leaves and int(rows_of(earlier.own)[0]) == row:
                    found = rows.setdefault((earlier.leaves, use.leaves), {})
                    found.setdefault(row, []).extend((earlier, use))
        for (one, other), found in rows.items():
            back = rows.get((other, one), {})
            if back and found.keys().isdisjoint(back):
                for each in (use for several in found.values() for use in several):
                    if each.is_on_state:
                        each.place = torch.full_like(each.own, SEVERAL)

    def _check_pairs(self) -> None:
        """Refuse what was used on one of two positions in all, of which nothing tells the order."""
        opened = [
            torch.tensor([row], device="cpu") for row, pair in self.pairs.items() if pair.is_open
        ]
        sources = [self._source(row) for row in opened]
        for each in self._all if sources else ():
            is_alone = not (each.is_new or each.before or each.after)
            if is_alone and self._source(rows_of(each.own)[:1]) in sources:
                each.place = torch.full_like(each.own, SEVERAL)

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
            is_told = len(roles) == 1 and not use.before
            use.is_on_state = next(iter(roles)) if is_told else None
        elif is_pair or not self._makes_state(use):
            waiting = [use]
            while waiting:
                each = waiting.pop()
                if each.is_on_state is False and self._is_open(each):
                    each.is_on_state = None
                    waiting += each.past

    def _makes_state(self, use: StepUse) -> bool:
        """Whether a layer on the first position makes the state that the steps begin with.

        So it is if nothing else was used on another row before it, and the steps have layers of
        their own, which are repeated or begin with constants.
        """
        row = rows_of(use.own)[0]
        if not use.is_fresh or any(
            each.has_begun or bool(rows_of(each.own)[0] != row) for each in use.past
        ):
            return False
        others = [each for each in self._all if each.leaves != use.leaves]
        return any(
            each.follows_step or (each.is_first and bool(rows_of(each.own)[0] == row))
            for each in others
        )

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


def _follows(one: StepUse, other: StepUse) -> bool:
    """Whether the step that takes in a use is at the state of another of the same parameters."""
    rows, others = rows_of(one.own), rows_of(other.own)
    if one is other or one.leaves != other.leaves or one.shift is None:
        return False
    return rows.shape == others.shape and bool((rows + one.shift == others).all())


def _place(several: Sequence[StepUse]) -> None:
    """Place uses: those on a state at the step that takes it in."""
    count = uses_before_a_step(several)
    is_lost = count is None or any(each.is_again and each.is_direct for each in several)
    for each in several:
        last = row_of(each, count or 1)[-1]
        is_moved = bool(count) and last.shift is not None and not last.is_direct
        is_moved = is_moved and not (each.is_fixed or each.is_first)
        is_told = each.is_on_state is not None and not (is_moved and each.is_met)
        is_told &= not (count and each.is_spread and each.shift is None)
        if is_lost or each.is_lost or not is_told:
            each.place = torch.full_like(each.own, SEVERAL)
        else:
            each.place = moved(each, last) if is_moved else each.own


def _check_start(several: Sequence[StepUse]) -> None:
    """Refuse a parameter that makes the state to begin with, and is read at that one alone.

    The state may have been read twice in the first step, or in the first two.
    """
    rows = {int(rows_of(each.own)[0]) for each in several}
    if len(rows) == 1 and all(each.is_start for each in several):
        for each in several:
            if each.is_moved:
                each.place = torch.full_like(each.own, SEVERAL)


def _is_refused(use: StepUse) -> bool:
    """Whether nothing tells where a use belongs."""
    return use.place is not None and bool((compact(use.place) == SEVERAL).any())


def _is_lost_step(use: StepUse) -> bool:
    """Whether what is made of a use may be at any step; a first state is before all of them."""
    return _is_refused(use) and not use.is_start


def _is_role_open(use: StepUse) -> bool:
    """Whether a step is known, but not whether a use belongs before or after it."""
    return use.is_on_state is None and not use.is_lost and (use.pair is None or use.pair.is_step)


def _check_order(use: StepUse) -> None:
    """Refuse a use that is placed before another one that led to it.

    Both are made of the same state, one belongs to it and the earlier one to the next step: layers
    that take turns look like this.
    """
    for earlier in use.past:
        rows, others = rows_of(earlier.own), rows_of(use.own)
        is_same = rows.shape == others.shape and bool((rows == others).all())
        if is_same and not _is_refused(earlier) and earlier.is_moved and not use.is_moved:
            for each in (earlier, use):
                each.place = torch.full_like(each.own, SEVERAL)
