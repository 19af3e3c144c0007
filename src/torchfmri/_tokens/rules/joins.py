"""The tokens of a result computed entry by entry from operands that have their own: `Joins`.

`trace` makes it, and operations such as addition or multiplication call `join`; `sums` uses
`promoted` for products of matrices. The rules are tried from certain to doubtful: equal tokens, one
operand that says less, one grid that is finer, a step of a recurrence. The result must not depend
on the order of the operands. What no rule decides keeps both candidates, or is `SEVERAL`, and is
refused when a parameter is used on it. The marks that recurrences need (`seen`, `walk`, `pair`) are
united in `join`.
"""

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
    equal,
)
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.parts import Parts
from torchfmri._tokens.rules.sources import MadeOf, Sources
from torchfmri._tokens.rules.step_uses import Chain, united
from torchfmri._tokens.rules.steps import Steps


class Joins:
    """Decides whose the result of an operation entry by entry is.

    Args:
        sources: The tokens of the pass.
        grids: Compares grids.
        steps: Decides where both operands have one position per sample.
    """

    def __init__(self, sources: Sources, grids: Grids, steps: Steps) -> None:
        self.sources, self._grids, self.steps = sources, grids, steps
        self.parts = Parts(sources)

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
            pair, walk = result.pair or each.pair, self.steps.walks.united(result.walk, each.walk)
            ended, has_begun = result.ended or each.ended, result.has_begun or each.has_begun
            parts = self.parts.take(result, each)
            result = self._join(result, self._spread(each, shape), name)
            result.seen, result.born = result.seen | seen, born
            result.pair, result.walk = result.pair or pair, result.walk or walk
            result.ended, result.has_begun = result.ended or ended, has_begun
            result.is_doubtful, result.parts = doubtful, result.parts | parts
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
        has_begun = self.steps.begin(one, other)
        self.steps.meet_own(one, other)
        keeps = one if one.second is not None else other
        second, decided, raw = keeps.second, keeps.is_decided, keeps.is_raw
        if one.second is not None and other.second is not None:
            decided = one.is_decided or other.is_decided
            raw = one.is_raw and other.is_raw
            if not equal(one.second, other.second):
                second, decided = (one.second, True) if decided else (None, True)
        elif second is not None and not decided:
            second, decided, raw = None, True, False  # the other operand has decided
        dynamic = (one.is_dynamic or other.is_dynamic) and not (
            equal(one.first, other.first) and one.is_dynamic != other.is_dynamic
        )
        reason = "" if bool((compact(first) >= NOBODY).all()) else one.reason or other.reason
        return Origins(
            first=first,
            second=second,
            is_decided=decided,
            is_raw=raw,
            is_dynamic=dynamic,
            reason=reason,
            has_begun=has_begun,
            chain=chain,
        )

    def _ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two candidates in an order that does not depend on the order of operands."""
        small_a, small_b = broadcast(compact(a), compact(b))
        different = (small_a != small_b).flatten().nonzero()
        at = int(different[0])
        swap = int(small_a.flatten()[at]) > int(small_b.flatten()[at])
        return (b, a) if swap else (a, b)

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
            return self.steps.by_first_axis(one, other)
        one, other = self.steps.without_constants(one), self.steps.without_constants(other)
        single_a, single_b = self.steps.is_position(one), self.steps.is_position(other)
        shapes = (compact(one.first).shape, compact(other.first).shape)
        is_alike = a.shape in shapes  # no scores of pairs
        for each in one.begun | other.begun if is_alike and not (single_a and single_b) else ():
            each.is_split = True
        if any(map(self._has_gaps, (one, other))):
            for step in (one, other, *one.history.values(), *other.history.values()):
                self.steps.lose(step)
            return None
        if single_a != single_b:
            many, one_position = (other, one) if single_a else (one, other)
            self.steps.spread(one_position)
            if not self._grids.is_single(one_position.first):
                return None
            first = torch.where(many.first == NOBODY, one_position.first, many.first)
            return many.but(first=first)
        if single_a:
            return self.steps.stepped(one, other)
        finer = self._grids.finer(one.first, other.first)
        if finer is not None:
            return one if equal(finer, one.first) else other
        whole_a, whole_b = (self._grids.is_whole(each) for each in (one.first, other.first))
        ours, theirs = ({e.true.start for e in self.sources.present(each)} for each in (a, b))
        if whole_a != whole_b and ours == theirs:
            return one if whole_a else other
        return None

    def _has_gaps(self, origins: Origins) -> bool:
        """Whether samples have one position each, and there are rows of constants beside them.

        Added to another position, only some rows take it in: their sum is of two positions.
        """
        has_constants = bool((compact(origins.first) == NOBODY).any())
        return has_constants and self._grids.is_single(origins.first)


def _are_apart(one: MadeOf | None, other: MadeOf | None) -> bool:
    """Whether two grids were made of different arguments."""
    return one is None or other is None or one.given.isdisjoint(other.given)
