"""The tokens of a result that is computed entry by entry from operands with tokens of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.numbers import (
    NOBODY,
    SEVERAL,
    UNKNOWN,
    broadcast,
    compact,
    is_constant_along,
    rows_of,
)
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.recurrences import (
    Chain,
    Recurrences,
    TwoPositions,
    united,
    without_fixed,
)
from torchfmri._tokens.rules.sources import MadeOf, Sources


class Joins:
    """Decides whose the result of an operation entry by entry is.

    Args:
        sources: The tokens of the pass.
        grids: Compares grids.
        recurrences: Are told of the steps that are found.
    """

    def __init__(self, sources: Sources, grids: Grids, recurrences: Recurrences) -> None:
        self.sources, self._grids, self._recurrences = sources, grids, recurrences
        self._pairs: dict[tuple[int, int], TwoPositions] = {}

    def join(self, several: Sequence[Origins], shape: torch.Size, name: str) -> Origins | None:
        """The origins of the result of an operation entry by entry on these operands."""
        if not several:
            return None
        result = self._spread(several[0], shape)
        for each in several[1:]:
            seen, born = result.seen | each.seen, max(result.born, each.born)
            doubtful = result.is_doubtful and each.is_doubtful
            slices = result.is_slice and each.is_slice
            samples = result.is_sample and each.is_sample
            pair = result.pair or each.pair
            result = self._join(result, self._spread(each, shape), name)
            result.seen, result.born = result.seen | seen, born
            result.pair = result.pair or pair
            result.is_doubtful = doubtful
            result.is_slice, result.is_sample = slices, samples
        return result

    def _spread(self, origins: Origins, shape: torch.Size) -> Origins:
        return origins.moved(lambda numbers: numbers.expand(shape))

    def _join(self, one: Origins, other: Origins, name: str) -> Origins:
        chain = united(one.chain, other.chain)
        a, b = self.promoted(compact(one.first), compact(other.first))
        shape = one.first.shape
        if bool((a == b).all()):
            return self._join_alike(one, other, a.expand(shape), chain)
        dynamic = one.is_dynamic or other.is_dynamic
        for known, new in ((one, other), (other, one)):
            may_decide = known.second is not None and (known.is_decided or new.second is None)
            if not may_decide or not self._is_among(new, known):
                continue
            kept = known.but(is_dynamic=dynamic, chain=chain)
            if new.second is None and not known.is_decided:
                kept.first, kept.second = new.first, None
                kept.is_decided, kept.is_raw = True, False
            return kept
        if one.second is not None and other.second is not None and self._is_among(one, other):
            return one.but(is_dynamic=dynamic, chain=chain)
        found = self._by_position(one, other)
        if found is not None:
            return found.but(is_dynamic=dynamic)
        if one.second is None and other.second is None:
            first, second = self._ordered(a.expand(shape), b.expand(shape))
            return Origins(
                first=first,
                second=second,
                is_decided=False,
                is_raw=False,
                is_dynamic=dynamic,
                reason=name,
                chain=chain,
            )
        mixed = torch.where(a == b, a, SEVERAL).expand(shape)
        return Origins(
            first=mixed,
            second=None,
            is_decided=True,
            is_raw=False,
            is_dynamic=dynamic,
            reason=name,
            chain=chain,
        )

    def _join_alike(self, one: Origins, other: Origins, first: Tensor, chain: Chain) -> Origins:
        """Join operands whose entries have the same first token."""
        self._begun(one, other)
        keeps = one if one.second is not None else other
        second, decided, raw = keeps.second, keeps.is_decided, keeps.is_raw
        if one.second is not None and other.second is not None:
            decided = one.is_decided or other.is_decided
            raw = one.is_raw and other.is_raw
            if not self.equal(one.second, other.second):
                second, decided = (one.second, True) if decided else (None, True)
        elif second is not None and not decided:
            second, decided, raw = None, True, False  # the other operand has decided
        dynamic = (one.is_dynamic or other.is_dynamic) and not (
            self.equal(one.first, other.first) and one.is_dynamic != other.is_dynamic
        )
        reason = "" if bool((compact(first) >= NOBODY).all()) else one.reason or other.reason
        return Origins(
            first=first,
            second=second,
            is_decided=decided,
            is_raw=raw,
            is_dynamic=dynamic,
            reason=reason,
            chain=chain,
        )

    def _ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two candidates in an order that does not depend on the order of operands."""
        small_a, small_b = broadcast(compact(a), compact(b))
        different = (small_a != small_b).flatten().nonzero()
        at = int(different[0])
        swap = int(small_a.flatten()[at]) > int(small_b.flatten()[at])
        return (b, a) if swap else (a, b)

    def equal(self, a: Tensor, b: Tensor) -> bool:
        return bool((compact(a) == compact(b)).all())

    def _is_among(self, new: Origins, known: Origins) -> bool:
        """Whether the candidates of `new` are candidates of `known`, entry by entry."""
        assert known.second is not None
        candidates = (compact(known.first), compact(known.second))
        for each in (new.first, new.second):
            if each is None:
                continue
            small = compact(each)
            weak = (small < 0) & (small > SEVERAL) | self.sources.is_sample(small)
            if not bool((weak | (small == candidates[0]) | (small == candidates[1])).all()):
                return False
        return True

    def promoted(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two sets of numbers; where one says less than the other, the other's is taken."""
        a, b = broadcast(a, b)
        if a is b or bool((a == b).all()):
            return a, b
        same = self.sources.sample_of(a) == self.sources.sample_of(b)
        weak_a, weak_b = self._weakness(a), self._weakness(b)
        fits = same | (a < 0) | (b < 0)
        take_b = (weak_a > weak_b) & fits
        take_a = (weak_b > weak_a) & fits
        a, b = torch.where(take_b, b, a), torch.where(take_a, a, b)
        a, b = self._members(a, b), self._members(b, a)
        twins = self._twins(a, b)
        if bool(twins.any()) and bool((twins | (a == b)).all()):
            lower = torch.minimum(a, b)  # that of the argument, or of the layer that ran first
            return lower, lower
        return a, b

    def _members(self, a: Tensor, b: Tensor) -> Tensor:
        """The numbers `a`; where one stands for several tokens and `b` is one of these, `b`."""
        for source in self.sources.present(a):
            members = source.members
            if members is not None:
                known = (b >= 0) & (b < len(members))
                part = torch.where(known, members.to(b.device)[b.clamp(0, len(members) - 1)], -1)
                a = torch.where((part == a) & (part >= 0), b, a)
        return a

    def _weakness(self, numbers: Tensor) -> Tensor:
        """How little a number says: nothing (3), the sample alone (2), unknown (1), or a token."""
        found = torch.zeros_like(numbers)
        found[self.sources.is_sample(numbers)] = 2
        found[numbers == UNKNOWN] = 1
        found[numbers == NOBODY] = 3
        return found

    def _twins(self, a: Tensor, b: Tensor) -> Tensor:
        """Tokens of two sources of one size, at the same position of the same sample.

        Arguments of the model that are added place by place are aligned. So are the grids that two
        layers have made of the same tokens, as the two branches of a residual block: from here on
        they are one. Grids of different tokens of one argument (frames) are not aligned.
        """
        result = torch.zeros_like(a, dtype=torch.bool)
        for one in self.sources.present(a):
            for other in self.sources.present(b):
                roots = one.made_of, other.made_of
                is_same = None in roots or roots[0] == roots[1]
                is_aligned = is_same or _are_apart(*roots)
                if one is not other and one.grid == other.grid and is_aligned:
                    inside = (a >= one.start) & (a < one.stop) & (b >= other.start)
                    found = inside & (b < other.stop) & (a - one.start == b - other.start)
                    made = is_same and not (one.is_given or other.is_given)
                    if made and bool((found | (a == b)).all()) and one.true is not other.true:
                        early, late = sorted((one.true, other.true), key=lambda e: e.start)
                        late.same_as = early
                    result |= found
        return result

    def _by_position(self, one: Origins, other: Origins) -> Origins | None:
        """One of two operands at different positions, where one of these rules decides.

        Some rows of a sequence that are added to the whole of it (a shifted copy, every second row
        twice), or one position that is added to all, belong to the positions of the sequence. Where
        both have one position per sample, this may be a step of a recurrence, which belongs to the
        position that it takes in.
        """
        a, b = broadcast(compact(one.first), compact(other.first))
        both = (a >= 0) & (b >= 0)
        if bool(((a == SEVERAL) | (b == SEVERAL)).any()) or not bool(both.any()):
            return None
        samples_a, samples_b = self.sources.sample_of(a), self.sources.sample_of(b)
        if not bool((samples_a == samples_b)[both].all()):
            return self._by_first_axis(one, other)
        one, other = self._without_constants(one), self._without_constants(other)
        single_a, single_b = self._is_position(one), self._is_position(other)
        if single_a != single_b:
            many, one_position = (other, one) if single_a else (one, other)
            self._recurrences.spread(one_position.chain)
            return many if self._grids.is_single(one_position.first) else None
        if single_a:
            return self._stepped(one, other)
        finer = self._grids.finer(one.first, other.first)
        if finer is not None:
            return one if self.equal(finer, one.first) else other
        whole_a, whole_b = (self._grids.is_whole(each) for each in (one.first, other.first))
        ours, theirs = ({e.true.start for e in self.sources.present(each)} for each in (a, b))
        if whole_a != whole_b and ours == theirs:
            return one if whole_a else other
        return None

    # -- steps of recurrences ----------------------------------------------------------------

    def _by_first_axis(self, one: Origins, other: Origins) -> Origins | None:
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
        return self._stepped(one, other)

    def _stepped(self, one: Origins, other: Origins) -> Origins | None:
        """The result of a step of a recurrence, at the operand that is new; None if it is none."""
        newer = self._newer(one, other)
        if newer is None:
            return None
        older = other if newer is one else one
        if self._is_again(newer, older):
            return newer.but(first=torch.full_like(newer.first, SEVERAL), reason="a second pass")
        seen, rows = self._seen(newer), rows_of(newer.first)
        shift = rows - rows_of(older.first)
        is_fresh = len(seen) == 1
        pair = None
        if is_fresh and len(self._seen(older)) == 1:
            pair = self._pair(rows, shift, older)
        elif older.pair is not None and newer.pair is None:
            older.pair.is_step |= int(shift[0]) == older.pair.shift
        self._recurrences.step(newer.chain, older.chain, rows, shift, is_fresh, pair=pair)
        if self._seen(older) < seen:
            for each in (each for uses in newer.chain.values() for each in uses):
                each.is_again |= each.shift is None
        chain = united(newer.chain, without_fixed(older.chain))
        return newer.but(seen=seen | self._seen(older), pair=pair, chain=chain)

    def _is_again(self, state: Origins, step: Origins) -> bool:
        """Whether a state that has taken in a step meets it again, in another walk over the steps.

        A decoder that begins with the last state of an encoder of the same sequence does. The steps
        were taken apart after the state was made; those of one walk were before.
        """
        is_fresh = len(self._seen(step)) == 1
        return is_fresh and self._seen(step) < self._seen(state) and step.born > state.born > 0

    def _pair(self, rows: Tensor, shift: Tensor, older: Origins) -> TwoPositions:
        """Two positions, of which one is new; steps for sure where a state came first."""
        key = int(rows[0]), int(shift[0])
        pair = self._pairs.setdefault(key, TwoPositions(key[1]))
        sources = self.sources.present(rows[:1])
        others = self.sources.present(rows_of(older.first)[:1])
        if not sources or sources != others or _has_begun(older.chain):
            pair.is_step = True
        else:
            grid = sources[0].grid
            pair.is_all = 2 in grid if older.is_sample else grid[1] == 2
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
        states = [_has_begun(each.chain) for each in (one, other)]
        if states[0] != states[1]:
            return other if states[0] else one
        if one.born != other.born:
            return one if one.born > other.born else other
        return one if ours > theirs else other

    def _begun(self, one: Origins, other: Origins) -> None:
        """Note the first step of a recurrence whose state was made of the whole sample."""
        for state, new in ((one, other), (other, one)):
            if state.chain and self._is_position(state) and self._is_position(new):
                small = compact(state.first)
                is_summary = bool(self.sources.is_sample(small).all())
                if is_summary and not bool(self.sources.is_sample(compact(new.first)).any()):
                    rows = rows_of(new.first)
                    shift = rows - rows_of(state.first)
                    is_fresh = len(self._seen(new)) == 1
                    self._recurrences.step(new.chain, state.chain, rows, shift, is_fresh)

    def are_steps(self, *several: Origins) -> bool:
        """Whether each of these may be a step, beside constants (states to begin with) maybe."""
        return all(self.is_step(self._without_constants(each)) for each in several)

    def _without_constants(self, origins: Origins) -> Origins:
        """The origins of a step that stands beside constants, which have no say."""
        small = compact(origins.first)
        if small.ndim < 2 or not bool((small == NOBODY).any()) or not self._grids.is_single(small):
            return origins
        highest = small.amax(tuple(range(1, small.ndim)), keepdim=True)
        first = torch.where(small == NOBODY, highest, small).expand(origins.first.shape)
        return origins.but(first=first)

    def is_step(self, origins: Origins) -> bool:
        """Whether this may be a step of a recurrence, along the positions or the first axis."""
        if not origins.is_sample:
            return self._is_position(origins)
        first = origins.first
        is_told = bool((compact(first) >= 0).all()) and first.numel() > 0
        return is_told and all(is_constant_along(first, axis) for axis in range(1, first.ndim))

    def _is_position(self, origins: Origins) -> bool:
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


def _are_apart(one: MadeOf | None, other: MadeOf | None) -> bool:
    """Whether two grids were made of different arguments."""
    return one is None or other is None or one.given.isdisjoint(other.given)


def _has_begun(chain: Chain) -> bool:
    """Whether a use on the way has made a state of constants."""
    return any(each.has_begun for uses in chain.values() for each in uses)
