"""Steps of recurrences: which of two positions takes in the other?

`Joins` asks for every result that is computed from two positions. The answer is a proposal: it
gives the result its position, by the order in which rows were selected if nothing else tells.
Whether the parameters of a recurrence are attributed there is decided by `Proof`, from the reaches
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.numbers import (
    NOBODY,
    SEVERAL,
    compact,
    constant,
    equal,
    is_constant_along,
    rows_of,
)
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.recurrences import Recurrences
from torchfmri._tokens.rules.sources import Sources
from torchfmri._tokens.rules.step_uses import TwoPositions, united, without_fixed


class Steps:
    """Decides whether a result that is computed from two positions is a step of a recurrence.

    Args:
        sources: The tokens of the pass.
        grids: Compares grids.
        recurrences: Are told of the steps that are found.

    Attributes:
        walks: The positions that states have met again.
    """

    def __init__(self, sources: Sources, grids: Grids, recurrences: Recurrences) -> None:
        self.sources, self._grids, self._recurrences = sources, grids, recurrences
        self.walks = recurrences.walks
        self._pairs: dict[tuple[int, int], TwoPositions] = {}

    def by_first_axis(self, one: Origins, other: Origins) -> Origins | None:
        """The later of two steps along the first axis: a recurrence over (s, b, d).

        It has taken in the other already, or the other has gone through parameters that it has not:
        the sum of two samples is no step.
        """
        if not (one.is_sample and other.is_sample):
            return None
        rows, before = rows_of(one.first), rows_of(other.first)
        present = self.sources.present(torch.cat([rows, before]))
        if len(present) != 1 or rows.shape != before.shape:
            return None
        shift = rows - before
        if bool((shift % present[0].grid[1] != 0).any()) or bool((shift != shift[0]).any()):
            return None  # other places of the samples
        newer = self._newer(one, other)
        older = other if newer is one else one
        if newer is None or not (
            self._seen(older) < self._seen(newer) or newer.chain.keys() < older.chain.keys()
        ):
            return None
        return self.stepped(one, other)

    def stepped(self, one: Origins, other: Origins) -> Origins | None:
        """The result of a step of a recurrence, at the operand that is new; None if it is none."""
        newer = self._newer(one, other)
        if newer is None:
            return None
        older = other if newer is one else one
        if self._is_again(newer, older) or self._has_ended(one, other):
            for state, new in ((newer, older), (older, newer)):
                if int(rows_of(new.first)[0]) in self._seen(state) or state.ended:
                    self._recurrences.lose(state.chain)
            return newer.but(first=torch.full_like(newer.first, SEVERAL), reason="a second pass")
        seen, rows = self._seen(newer), rows_of(newer.first)
        shift = rows - rows_of(older.first)
        is_fresh = len(seen) == 1
        pair = None
        if is_fresh and len(self._seen(older)) == 1:
            pair = self._pair(rows, shift, older, newer)
        elif older.pair is not None and newer.pair is None:
            older.pair.go_on(int(shift[0]), newer.chain.keys())
        self._recurrences.step(newer.chain, older.chain, rows, shift, is_fresh, pair=pair)
        walk, before = newer.walk, int(rows_of(older.first)[0])
        if self._seen(older) < seen:
            walk = self.walks.meet(walk, int(rows[0]), before, is_row=not _is_state(older))
            for each in (each for uses in newer.chain.values() for each in uses):
                each.is_again |= each.shift is None
                if each.shift is None and not each.is_fixed:
                    each.walk = walk  # this may be the step that takes it in
        elif walk is None:
            sources = self.sources.present(rows[:1])
            is_told = _has_begun(older) or all(each.grid[1] > 2 for each in sources)
            is_row = not _is_state(older)
            walk = self.walks.first(int(rows[0]), before if is_told else None, is_row)
        chain = united(newer.chain, without_fixed(older.chain))
        return newer.but(seen=seen | self._seen(older), pair=pair, walk=walk, chain=chain)

    def _is_again(self, state: Origins, step: Origins) -> bool:
        """Whether a state that has taken in a step meets it again, in another walk over the steps.

        A decoder that begins with the last state of an encoder of the same sequence does. The steps
        were taken apart after the state was made; those of one walk were before.
        """
        is_fresh = len(self._seen(step)) == 1
        return is_fresh and self._seen(step) < self._seen(state) and step.born > state.born > 0

    def _has_ended(self, *both: Origins) -> bool:
        """Whether one of two steps is a row of a finished recurrence that has taken in the other.

        Rows of the same recurrence are data for the next one, in either direction.
        """
        for state, new in (both, both[::-1]):
            row, other = (int(rows_of(each.first)[0]) for each in (state, new))
            last = state.ended.get(row) if state.ended is not new.ended else None
            if last is not None and other != row and other in self._seen(last):
                return True
        return False

    def _pair(self, rows: Tensor, shift: Tensor, older: Origins, newer: Origins) -> TwoPositions:
        """Two positions, of which one is new; steps for sure where a state came first.

        Where there are no other positions, that state has to be the one selected first as well.
        """
        key = int(rows[0]), int(shift[0])
        pair = self._pairs.setdefault(key, TwoPositions(key[1]))
        sources = self.sources.present(rows[:1])
        others = self.sources.present(rows_of(older.first)[:1])
        grid = sources[0].grid if sources else ()
        is_all = 2 in grid if older.is_sample else grid[1:] == (2,)
        has_begun = _has_begun(older) and not (is_all and older.born > newer.born)
        if not sources or sources != others or has_begun:
            pair.is_step = True
        else:
            pair.is_all = is_all
            if older.born == newer.born:
                pair.leaves = frozenset(newer.chain)
            self._recurrences.pairs[key[0]] = pair
        return pair

    def _newer(self, one: Origins, other: Origins) -> Origins | None:
        """The one of two steps to which a result that is computed from both belongs.

        That is the one that has taken in the other already, or a position that was not taken in
        before. Of two positions without any step before it is the one that has not gone through a
        state made of constants, or was selected later.
        """
        seen, others = self._seen(one), self._seen(other)
        ours, theirs = (int(rows_of(each.first)[0]) for each in (one, other))
        if (ours in others) != (theirs in seen):
            return other if ours in others else one
        if not seen.isdisjoint(others) or (len(seen) > 1 and len(others) > 1):
            return None  # two states, and both have a history
        if len(seen) != len(others):
            return one if len(seen) < len(others) else other
        states = [_has_begun(each) for each in (one, other)]
        if states[0] != states[1]:
            return other if states[0] else one
        if one.born != other.born:
            return one if one.born > other.born else other
        return one if ours > theirs else other

    def lose(self, state: Origins) -> None:
        """Note that nothing tells whose the steps are that led to a state."""
        self._recurrences.lose(state.chain)

    def spread(self, state: Origins) -> None:
        """Note that a state is added to several positions."""
        self._recurrences.spread(state.chain)

    def meet_own(self, one: Origins, other: Origins) -> None:
        """Note that a state meets its own position; uses of that belong to the step for sure."""
        for state, new in ((one, other), (other, one)):
            if len(state.seen) > 1 and len(self._seen(new)) == 1 and self.is_position(new):
                for each in (each for uses in state.chain.values() for each in uses):
                    each.is_met |= each.shift is None and not each.is_fresh
                for each in (each for uses in new.chain.values() for each in uses):
                    each.is_fixed |= each.shift is None

    def meet_constants(self, state: Origins) -> None:
        """Note that a state meets constants."""
        if len(state.seen) > 1:
            self.walks.begin(int(rows_of(state.first)[0]))

    def begin(self, one: Origins, other: Origins) -> bool:
        """Note the first step of a recurrence whose state was made of the whole sample."""
        begins = False
        for state, new in ((one, other), (other, one)):
            if state.chain and self.is_position(state) and self.is_position(new):
                small = compact(state.first)
                is_summary = bool(self.sources.is_sample(small).all())
                if is_summary and not bool(self.sources.is_sample(compact(new.first)).any()):
                    rows = rows_of(new.first)
                    shift = rows - rows_of(state.first)
                    is_fresh = len(self._seen(new)) == 1
                    self._recurrences.step(new.chain, state.chain, rows, shift, is_fresh)
                    begins = True
        return begins

    def side_by_side(self, several: Sequence[Origins], shape: torch.Size) -> Origins | None:
        """Rows of positions as the features of one row; None for a summary of the sample.

        Nothing tells the two positions that are all from the first step of a recurrence.
        """
        first = several[0]
        sources = self.sources.present(first.first)
        if not all(each.is_slice for each in several) or [e.grid[1] for e in sources] != [2]:
            return None
        if all(equal(each.first, first.first) for each in several):
            return None
        return first.but(first=constant(SEVERAL, first.first)[..., :1].expand(shape))

    def is_position_of_sample(self, several: Collection[Origins]) -> bool:
        """Whether one of these is a position, and all others are summaries of the sample."""
        whole = [bool(self.sources.is_sample(compact(each.first)).all()) for each in several]
        return whole.count(False) == 1 < len(whole)

    def is_one_step(self, value: Origins | None) -> bool:
        """Whether this is one step of several, and not the rows that a layer has chosen."""
        return value is not None and bool(value.is_slice or value.seen) and self.is_step(value)

    def are_steps(self, *several: Origins) -> bool:
        """Whether each of these may be a step, beside constants (states to begin with) maybe."""
        return all(self.is_step(self.without_constants(each)) for each in several)

    def without_constants(self, origins: Origins) -> Origins:
        """The origins of a step that stands beside constants, which have no say."""
        small = compact(origins.first)
        if small.ndim < 2 or not bool((small == NOBODY).any()) or not self._grids.is_single(small):
            return origins
        highest = small.amax(tuple(range(1, small.ndim)), keepdim=True)
        first = torch.where(small == NOBODY, highest, small).expand(origins.first.shape)
        return origins.but(first=first)

    def is_step(self, origins: Origins) -> bool:
        """Whether this may be a step of a recurrence, along the positions or the first axis."""
        if origins.second is not None and not (origins.is_decided or origins.is_raw):
            return False  # one entry for each pair of positions
        if not origins.is_sample:
            return self.is_position(origins)
        first = origins.first
        is_told = bool((compact(first) >= 0).all()) and first.numel() > 0
        return is_told and all(is_constant_along(first, axis) for axis in range(1, first.ndim))

    def is_position(self, origins: Origins) -> bool:
        """Whether each sample, or each row of a batch of windows, has one position."""
        first = origins.first
        if not bool((compact(first) >= 0).all()) or not first.numel():
            return False
        if self._grids.is_single(first):
            return True
        is_one = origins.is_slice or origins.is_sample
        return is_one and all(is_constant_along(first, axis) for axis in range(1, first.ndim))

    def _seen(self, origins: Origins) -> frozenset[int]:
        """The tokens of the first row that a step has taken in."""
        return origins.seen | {int(rows_of(origins.first)[0])}


def _is_state(origins: Origins) -> bool:
    """Whether a step has been taken on the way to a row, or constants stood at its beginning."""
    return len(origins.seen) > 1 or _has_begun(origins)


def _has_begun(state: Origins) -> bool:
    """Whether a state was made of constants to begin with."""
    uses = (each for uses in state.chain.values() for each in uses)
    return state.has_begun or any(each.has_begun for each in uses)
