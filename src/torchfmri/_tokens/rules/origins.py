"""Where the entries of a tensor come from: the tokens that they are computed for.

Tokens are numbered over the whole pass. Each `Source`, an argument of the model or a grid of
positions that a layer makes (a strided convolution), has a range of numbers, so a number says which
source, sample and position it stands for. Every entry of a tensor has one number, or one of the
codes below. Entries that are computed from two positions at once, such as attention scores, have
two candidates until an operation sums one of them away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

NOBODY = -1  # a constant, or a value that all samples share
UNKNOWN = -2  # the result of an operation without a rule
SEVERAL = -3  # computed from several positions, none of which takes precedence
CHANNELS_FIRST = "channels first"  # the name of an argument's tokens when read that way


@dataclass(slots=True)
class Layout:
    """What the uses of an argument say about its layout: (b, s, d), or (b, d, s).

    Attributes:
        last: A layer sums over its last axis with a parameter: the features are last.
        second: One sums over its second axis: the features are second.
        by_channel: One is made for features that are second, such as a convolution.
        is_used: A parameter was used on it entry by entry, before any layer had decided.
        per_second: Such a parameter has an entry for each entry of the second axis, and one for the
            whole last axis.
        is_mixed: A square parameter that is no layer's sums over its second axis, as in w @ x. It
            mixes the positions of (b, s, d) or the features of (b, d, s): this tells nothing.
        is_followed: The argument is also followed with its features second, beside this.
    """

    last: bool = False
    second: bool = False
    by_channel: bool = False
    is_used: bool = False
    per_second: bool = False
    is_mixed: bool = False
    is_followed: bool = False

    @property
    def is_told(self) -> bool:
        """Whether a layer has said anything."""
        return self.last or self.second or self.by_channel

    @property
    def is_second(self) -> bool:
        """Whether the features are second, without anything against it."""
        return (self.second or self.by_channel) and not self.last

    @property
    def is_assumed(self) -> bool:
        """Whether the features are taken to be last, and the layers do not say so."""
        either = self.last and self.second and not self.by_channel
        return either or (self.is_mixed and not self.is_told)

    @property
    def is_unclear(self) -> bool:
        """Whether a parameter suggests features second, and no layer says so or otherwise."""
        return self.per_second and not self.is_told

    @property
    def is_settled(self) -> bool:
        """Whether the reading with features second will not be asked for."""
        return self.last or (self.by_channel and not self.is_used)


@dataclass(slots=True, eq=False)
class Source:
    """A grid of tokens.

    Attributes:
        grid: (b, s).
        start: The number of its first token.
        name: The argument or layer that it comes from; "" for what the model was handed first.
        stack: "encoder" or "decoder" where the model has both.
        is_given: Whether it is an argument of the model.
        members: For tokens that others were merged into: by number, the token that it is part of.
        same_as: The source whose tokens these are, found out later.
        layout: What layers say about the layout of the argument; None where there is no question.
    """

    grid: tuple[int, int]
    start: int
    name: str = ""
    stack: str = ""
    is_given: bool = False
    members: Tensor | None = None
    same_as: Source | None = None
    layout: Layout | None = None

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.grid)

    @property
    def true(self) -> Source:
        """The source itself, or the one whose tokens these are."""
        return self if self.same_as is None else self.same_as.true

    def numbers(self, device: torch.device) -> Tensor:
        """The numbers of its tokens, (b, s)."""
        return torch.arange(self.start, self.stop, device=device).view(self.grid)


class Sources:
    """All sources of one pass, and which sample and position a number stands for."""

    def __init__(self) -> None:
        self.all: list[Source] = []
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._samples: dict[int, Source] = {}

    def add(
        self, grid: tuple[int, int], name: str = "", stack: str = "", is_given: bool = False
    ) -> Source:
        """A new source."""
        start = self.all[-1].stop if self.all else 0
        source = Source(grid, start, name, stack, is_given)
        self.all.append(source)
        self._tables.clear()
        return source

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the arguments that can be read in two ways, each once."""
        found = {id(each.layout): each.layout for each in self.all if each.layout is not None}
        return list(found.values())

    def copy(self) -> Sources:
        """The same sources, to which others can be added."""
        found = Sources()
        found.all, found._samples = list(self.all), dict(self._samples)
        return found

    def whole_samples(self, b: int) -> Source:
        """The source whose tokens are whole samples."""
        if b not in self._samples:
            self._samples[b] = self.add((b, 1), "samples")
        return self._samples[b]

    def sample_of(self, numbers: Tensor) -> Tensor:
        """The sample of each number; the codes stay as they are."""
        return torch.where(numbers < 0, numbers, self._table(numbers.device)[0][numbers.clamp(0)])

    def is_sample(self, numbers: Tensor) -> Tensor:
        """Whether each number stands for a whole sample, without a position."""
        return (numbers >= 0) & self._table(numbers.device)[1][numbers.clamp(0)]

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            samples = [torch.arange(e.grid[0]).repeat_interleave(e.grid[1]) for e in self.all]
            whole = [torch.full((math.prod(e.grid),), e.grid[1] == 1) for e in self.all]
            tables = torch.cat([*samples, torch.zeros(1, dtype=torch.int64)]).to(device)
            self._tables[device] = tables, torch.cat([*whole, torch.zeros(1).bool()]).to(device)
        return self._tables[device]

    def present(self, numbers: Tensor) -> list[Source]:
        """The sources that these numbers belong to."""
        found = compact(numbers)
        if not found.numel():  # no tokens are of the first source without any
            return [each for each in self.all if not math.prod(each.grid)][:1]
        return [
            each for each in self.all if bool(((found >= each.start) & (found < each.stop)).any())
        ]

    def local(self, source: Source, numbers: Tensor) -> Tensor:
        """The numbers as those of one source alone, from 0; -1 for tokens of other sources."""
        inside = (numbers >= source.start) & (numbers < source.stop)
        return torch.where(inside, numbers - source.start, -1)


@dataclass(slots=True, eq=False)
class Origins:
    """The tokens of the entries of one tensor.

    Attributes:
        first: A number or code for every entry, of the tensor's shape. Axes along which nothing
            changes have stride 0, so that most tensors of this kind are small.
        second: The other candidate, where an entry is computed from two positions.
        is_decided: Whether `first` is the answer where there are two candidates, as for attention
            scores, which belong to their queries.
        is_raw: The two candidates are two ways to read an argument of the model: with its features
            last, or second.
        is_doubtful: A further argument whose first axis is as long as the batch. It may have a row
            for each sample, or be something else, such as a change of a weight.
        is_dynamic: The numbers depend on data (rows chosen by a router): another pass has others.
        reason: The operation after which the tokens cannot be told.
        chain: The last use of each parameter on the way here, and `seen`, the tokens of a sample
            that were taken in: what a recurrence looks like from inside.
        born: When the entries were last moved, as a number of operations.
        is_slice: Made of one position of each row, as x[:, t] is.
        is_sample: Made of one entry of the first axis, as x[t] is: a sample, or a step.
        landed: Of what a layer made of constants: the data over which it was spread.
    """

    first: Tensor
    second: Tensor | None = None
    is_decided: bool = True
    is_raw: bool = False
    is_dynamic: bool = False
    reason: str = ""
    chain: dict[str, Origins] = field(default_factory=dict)
    seen: frozenset[int] = frozenset()
    born: int = 0
    is_doubtful: bool = False
    is_slice: bool = False
    is_sample: bool = False
    landed: Origins | None = None
    _shift: Tensor | None = None
    _before: Tensor | None = None
    _is_open: bool = False
    _recurs: bool = False

    def like(self, first: Tensor, second: Tensor | None = None) -> Origins:
        """The same for a tensor whose entries are those of this one, moved."""
        return self.but(first=first, second=second)

    def but(self, **changes: Any) -> Origins:
        """A copy with other values; a use of its own is not part of it."""
        return replace(self, _shift=None, _before=None, _is_open=False, _recurs=False, **changes)

    def moved(self, move: object) -> Origins:
        """The same after `move`, a function from numbers to numbers."""
        first = move(self.first)  # type: ignore[operator]
        second = None if self.second is None else move(self.second)  # type: ignore[operator]
        return self.like(first, second)

    # -- recurrences -------------------------------------------------------------------------

    @property
    def is_step(self) -> bool:
        """Whether this is one use of several on a state: it belongs to the step that follows."""
        return self._recurs

    def use_of(self, leaves: Iterable[str]) -> Origins:
        """The use of one of these parameters that this is the result of, in another shape maybe.

        A Linear on (b, 1, i) or (i,) returns a view of its product. Where a use belongs is found
        out after it, and is noted there.
        """
        for use in (self.chain[each] for each in leaves if each in self.chain):
            ours, theirs = compact(self.first), compact(use.first)
            same = self.first.numel() == use.first.numel() and use is not self
            if same and torch.equal(_unique(ours), _unique(theirs)):
                flat = self.first.reshape(-1) == use.first.reshape(-1)
                return use if bool(flat.all()) else self
        return self

    def used_by(self, leaves: frozenset[str], has_arrived: bool) -> None:
        """Note that this is the result of a use of parameters.

        A parameter that is used again on what its last use has led to is used step by step. Each of
        these uses belongs to the step that it contributes to.

        Args:
            leaves: The parameters.
            has_arrived: Whether this is the step itself, which takes in a first state.
        """
        for leaf in leaves:
            earlier = self.chain.get(leaf)
            if earlier is not None and earlier is not self:
                self._recurs = True
                earlier._is_open = False  # without a step in between it belongs where it is
                earlier._settle()
        self._is_open = not has_arrived
        self.chain = {**self.chain, **dict.fromkeys(leaves, self)}

    def joined_at(self, shift: Tensor) -> None:
        """A step so many positions away takes in what the uses on the way here have computed.

        Args:
            shift: For each row, (n,), or one for all.
        """
        for use in self.chain.values():
            if use._is_open:
                use._is_open = False
                use._shift = shift
                if use._recurs:
                    use._settle()

    def collected(self) -> None:
        """A step is put beside others: what was computed at its own position belongs there.

        A layer after the step that takes a position in, such as a norm, looks to the next step like
        a layer on the state. What the step returns tells them apart.
        """
        # What is collected may be such a use itself, shifted by the step that came after it.
        own = compact(self.first if self._before is None else self._before).amin()
        for use in list(self.chain.values()):
            here = use.first if use._before is None else use._before
            if bool(compact(here).amin() == own):
                use.first, use._before, use._shift = here, None, None
                use._is_open = False

    def taken_in(self) -> None:
        """The uses on the way here belong to the step that takes them in."""
        for use in self.chain.values():
            use._is_open = False

    def _settle(self) -> None:
        self._recurs = True
        if self._shift is not None:
            shift, lead = self._shift, self.first.ndim - 1
            if bool((shift == shift[0]).all()):  # the rows may have another shape since
                shift = shift[:1]
            shift = shift.view(-1, *[1] * lead) if self.first.ndim else shift
            self._before = self.first
            if len(shift) in (1, self.first.shape[0] if self.first.ndim else 1):
                self.first = torch.where(self.first >= 0, self.first + shift, self.first)
            else:
                self.first = torch.full_like(self.first, SEVERAL)
            self._shift = None


def _chains(one: Origins, other: Origins) -> dict[str, Origins]:
    """The last uses of parameters on the ways to two operands; one that is still open is later."""
    found = {**other.chain, **one.chain}
    for leaf, use in other.chain.items():
        if use._is_open and not found[leaf]._is_open:
            found[leaf] = use
    return found


def compact(numbers: Tensor) -> Tensor:
    """The numbers with one entry along each axis of stride 0."""
    for axis, (size, stride) in enumerate(zip(numbers.shape, numbers.stride(), strict=True)):
        if size > 1 and stride == 0:
            numbers = numbers.narrow(axis, 0, 1)
    return numbers


def is_constant_along(numbers: Tensor, axis: int) -> bool:
    """Whether the numbers do not change along an axis."""
    small = compact(numbers)
    return small.shape[axis] <= 1 or bool((small == small.narrow(axis, 0, 1)).all())


def _agrees_along(numbers: Tensor, axis: int) -> bool:
    """The same where constants have no say."""
    small = compact(numbers)
    if small.shape[axis] <= 1:
        return True
    highest = small.amax(axis, keepdim=True)
    return bool(((small == highest) | (small == NOBODY)).all())


_MOST_PIECES = 8  # of features of different grids, side by side
_broadcast: Any = torch.broadcast_tensors  # without types in torch
_unique: Any = torch.unique


class Algebra:
    """What becomes of origins in operations.

    Args:
        sources: The tokens of the pass.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    # -- joining -----------------------------------------------------------------------------

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
            result = self._join(result, self._spread(each, shape), name)
            result.seen, result.born = result.seen | seen, born
            result.is_doubtful = doubtful
            result.is_slice, result.is_sample = slices, samples
        return result

    def _spread(self, origins: Origins, shape: torch.Size) -> Origins:
        return origins.moved(lambda numbers: numbers.expand(shape))

    def _join(self, one: Origins, other: Origins, name: str) -> Origins:
        chain = _chains(one, other)
        dynamic = one.is_dynamic and other.is_dynamic
        a, b = self._promoted(compact(one.first), compact(other.first))
        shape = one.first.shape
        if bool((a == b).all()):
            first = a.expand(shape)
            keeps = one if one.second is not None else other
            second, decided, raw = keeps.second, keeps.is_decided, keeps.is_raw
            if one.second is not None and other.second is not None:
                decided = one.is_decided or other.is_decided
                raw = one.is_raw and other.is_raw
                if not self._equal(one.second, other.second):
                    second, decided = (one.second, True) if decided else (None, True)
            elif second is not None and not decided:
                second, decided, raw = None, True, False  # the other operand has decided
            dynamic = (one.is_dynamic or other.is_dynamic) and not (
                self._equal(one.first, other.first) and one.is_dynamic != other.is_dynamic
            )
            reason = "" if bool((compact(first) >= NOBODY).all()) else one.reason or other.reason
            return Origins(first, second, decided, raw, dynamic, reason, chain)
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
            return found.but(is_dynamic=dynamic, chain=chain)
        if one.second is None and other.second is None:
            first, second = self._ordered(a.expand(shape), b.expand(shape))
            return Origins(first, second, False, False, dynamic, name, chain)
        mixed = torch.where(a == b, a, SEVERAL).expand(shape)
        return Origins(mixed, None, True, False, dynamic, name, chain)

    def _ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two candidates in an order that does not depend on the order of operands."""
        small_a, small_b = _broadcast(compact(a), compact(b))
        different = (small_a != small_b).flatten().nonzero()
        at = int(different[0])
        swap = int(small_a.flatten()[at]) > int(small_b.flatten()[at])
        return (b, a) if swap else (a, b)

    def _equal(self, a: Tensor, b: Tensor) -> bool:
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

    def _promoted(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two sets of numbers; where one says less than the other, the other's is taken."""
        a, b = _broadcast(a, b)
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
        layers have made, as the two branches of a residual block: from here on they are one.
        """
        result = torch.zeros_like(a, dtype=torch.bool)
        for one in self.sources.present(a):
            for other in self.sources.present(b):
                if one is not other and one.grid == other.grid:
                    inside = (a >= one.start) & (a < one.stop) & (b >= other.start)
                    found = inside & (b < other.stop) & (a - one.start == b - other.start)
                    made = not (one.is_given or other.is_given)
                    if made and bool((found | (a == b)).all()) and one.true is not other.true:
                        early, late = sorted((one.true, other.true), key=lambda e: e.start)
                        late.same_as = early
                    result |= found
        return result

    def _by_position(self, one: Origins, other: Origins) -> Origins | None:
        """One of two operands at different positions, where one of these rules decides.

        Some rows of a sequence that are added to the whole of it (a shifted copy, every second row
        twice), or one position that is added to all, belong to the positions of the sequence. Where
        both have one position per sample, this is a step of a recurrence, which belongs to the
        position that it takes in.
        """
        a, b = _broadcast(compact(one.first), compact(other.first))
        both = (a >= 0) & (b >= 0)
        if bool(((a == SEVERAL) | (b == SEVERAL)).any()) or not bool(both.any()):
            return None
        samples_a, samples_b = self.sources.sample_of(a), self.sources.sample_of(b)
        if not bool((samples_a == samples_b)[both].all()):
            return self._by_first_axis(one, other)
        single_a, single_b = self._is_position(one), self._is_position(other)
        if single_a != single_b:
            many, one_position = (other, one) if single_a else (one, other)
            return many if self.is_single(one_position.first) else None
        if single_a:
            newer = self._newer(one, other)
            return self._stepped(newer, other if newer is one else one)
        finer = self._finer(one.first, other.first)
        if finer is not None:
            return one if self._equal(finer, one.first) else other
        whole_a, whole_b = (self._is_whole(each) for each in (one.first, other.first))
        if whole_a != whole_b:
            return one if whole_a else other
        return None

    def _stepped(self, newer: Origins, older: Origins) -> Origins:
        """The result of a step of a recurrence, which takes in what the one before has led to."""
        shift = self._row(newer) - self._row(older)
        newer.taken_in()
        older.joined_at(shift)
        return newer.but(seen=self._seen(newer) | self._seen(older))

    def _by_first_axis(self, one: Origins, other: Origins) -> Origins | None:
        """The later of two steps along the first axis: a recurrence over (s, b, d).

        It has taken in the other already, or the other has gone through parameters that it has not:
        the sum of two samples is no step.
        """
        if not (one.is_sample and other.is_sample):
            return None
        seen, others = self._seen(one), self._seen(other)
        if seen < others or (not others < seen and other.chain.keys() < one.chain.keys()):
            one, other, seen, others = other, one, others, seen
        if not (others < seen or one.chain.keys() < other.chain.keys()):
            return None
        rows, before = (self._row(each) for each in (one, other))
        present = self.sources.present(torch.cat([rows, before]))
        if len(present) != 1 or rows.shape != before.shape:
            return None
        shift = rows - before
        if bool((shift % present[0].grid[1] != 0).any()) or bool((shift != shift[0]).any()):
            return None  # other places of the samples
        return self._stepped(one, other)

    def _newer(self, one: Origins, other: Origins) -> Origins:
        """Which of two steps the result belongs to.

        That is the one that has taken in the other already, or else the one with less of a history.
        """
        seen, others = self._seen(one), self._seen(other)
        if seen != others and (seen < others or others < seen):
            return other if seen < others else one
        if len(seen) != len(others):
            return one if len(seen) < len(others) else other
        if one.chain.keys() < other.chain.keys():
            return one
        if other.chain.keys() < one.chain.keys():
            return other
        if one.born != other.born:
            return one if one.born > other.born else other
        first, second = (int(compact(each.first).max()) for each in (one, other))
        return one if first > second else other

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
        rows = all(is_constant_along(first, axis) for axis in range(1, first.ndim))
        return self.is_single(first) or (rows and origins.is_slice)

    def _row(self, origins: Origins) -> Tensor:
        """The token of each row of a step, (n,)."""
        first = origins.first
        return first.reshape(first.shape[0], -1)[:, 0] if first.ndim else first.reshape(1)

    def _seen(self, origins: Origins) -> frozenset[int]:
        """The tokens of the first row that a step has taken in."""
        return origins.seen | {int(self._row(origins)[0])}

    def is_single(self, numbers: Tensor) -> bool:
        """Whether each sample has one position in a tensor."""
        small = compact(numbers)
        small = small[small >= 0]
        if not small.numel():
            return False
        found = _unique(small)
        return len(_unique(self.sources.sample_of(found))) == len(found)

    def _is_whole(self, numbers: Tensor) -> bool:
        """Whether a tensor has all tokens of a source, each at one place."""
        small = compact(numbers)
        sources = self.sources.present(small)
        if len(sources) != 1 or small.numel() % math.prod(sources[0].grid):
            return False
        found = _unique(small[small >= 0])
        return len(found) == math.prod(sources[0].grid) and bool((small >= 0).all())

    # -- summing over axes -------------------------------------------------------------------

    def layout_of(self, origins: Origins) -> Layout | None:
        """The layout of the argument that a tensor is, where that is still a question."""
        if not origins.is_raw or origins.second is None:
            return None
        layouts = [each.layout for each in self.sources.present(origins.first)]
        return layouts[0] if len(layouts) == 1 else None

    def summed_by_layer(self, origins: Origins | None, axes: Sequence[int]) -> Origins | None:
        """Note that a layer takes these axes for features, which may tell the layout.

        Returns the origins; where the other layout is followed beside this, with features last.
        """
        if origins is None:
            return None
        layout = self.layout_of(origins)
        if layout is not None:
            fits = self._fitting(origins, axes)
            layout.last |= fits == (True, False)
            layout.second |= fits == (False, True)
            if fits == (False, True) and layout.is_followed:
                return origins.but(second=None, is_decided=True, is_raw=False)
        elif origins.second is None and len(axes) == 1 and self._mixes(origins.first, axes[0]):
            self._deny(origins.first)
        return origins

    def mixed_by_parameter(self, origins: Origins | None, axis: int) -> Origins | None:
        """Note a product with a square parameter that is no layer's; see `Layout.is_mixed`."""
        layout = None if origins is None else self.layout_of(origins)
        if origins is not None and layout is not None:
            if self._fitting(origins, [axis]) == (False, True):
                layout.is_mixed = True
                return origins
        elif origins is not None and not self._is_second(origins.first):
            return origins
        return self.summed_by_layer(origins, [axis])

    def _is_second(self, numbers: Tensor) -> bool:
        """Whether these are tokens of an argument that is read with its features second."""
        return any(CHANNELS_FIRST in each.name for each in self.sources.present(numbers))

    def lengthened(self, origins: Origins, axis: int) -> None:
        """Note that a parameter is put beside data along an axis: that of positions, as a rule."""
        layout = self.layout_of(origins)
        if layout is not None:
            fits = self._fitting(origins, [axis])
            layout.last |= fits == (False, True)
            layout.second |= fits == (True, False)

    def _mixes(self, numbers: Tensor, axis: int) -> bool:
        """Whether a sum over an axis is one over positions, for each of several features."""
        rows = numbers.movedim(axis, -1).reshape(-1, numbers.shape[axis])
        if rows.shape[0] < 2 or rows.shape[1] < 2 or len(_unique(rows[0])) < rows.shape[1]:
            return False
        return len(_unique(rows, dim=0)) < len(rows)

    def used_by_entry(self, origins: Origins, shape: Sequence[int]) -> None:
        """Note that a parameter of this shape is used on an argument entry by entry."""
        layout = self.layout_of(origins)
        varies = [-1 - k for k, size in enumerate(reversed(shape)) if size > 1]
        if layout is not None:
            layout.is_used = True
            fits = self._fitting(origins, varies)
            layout.per_second |= fits == (False, True)
        elif origins.second is None and varies:
            self._used_by_position(origins.first, varies)

    def _used_by_position(self, numbers: Tensor, varies: Sequence[int]) -> None:
        """Where features were taken to be second: a parameter per position is one per feature."""
        others = {each - numbers.ndim for each in range(1, numbers.ndim)} - {*varies}
        if any(is_constant_along(numbers, axis) for axis in varies):
            return
        if any(numbers.shape[each] > 1 and is_constant_along(numbers, each) for each in others):
            self._deny(numbers)

    def _deny(self, numbers: Tensor) -> None:
        """Note that a layer sums over what was taken for positions of an argument."""
        for each in self.sources.present(numbers):
            if each.layout is not None and not each.layout.is_settled:
                is_second = CHANNELS_FIRST in each.name
                each.layout.last |= is_second
                each.layout.second |= not is_second

    def _fitting(self, origins: Origins, axes: Sequence[int]) -> tuple[bool, bool]:
        """Whether each of two candidates does not change along the axes."""
        both = (origins.first, origins.second)
        one, other = (
            each is not None and all(is_constant_along(each, axis) for axis in axes)
            for each in both
        )
        return one, other

    def settled(self, origins: Origins, axes: Sequence[int], are_features: bool = False) -> Origins:
        """Of two candidates the one that does not change along these axes, if there is one.

        Args:
            origins: The candidates.
            axes: The axes.
            are_features: Whether the axes are those that a layer takes as features; of an argument
                of the model features come last, unless a layer says otherwise.
        """
        if origins.second is None:
            return origins
        if origins.is_raw:
            fits = all(is_constant_along(origins.first, axis) for axis in axes)
            if fits or not are_features:
                return origins.but(second=None, is_decided=True, is_raw=False)
        return self._settled(origins, axes)

    def by_channel(self, origins: Origins) -> Origins:
        """The origins for a layer with the features second."""
        if origins.second is None:
            return origins
        layout = self.layout_of(origins)
        if layout is not None:
            layout.by_channel |= self._fitting(origins, [1]) == (False, True)
            layout.last |= not layout.by_channel
        found = self._settled(origins, [1])
        if found.is_raw and is_constant_along(origins.first, 1):  # the reading with more positions
            counts = [len(_unique(compact(each))) for each in (origins.first, origins.second)]
            kept = origins.first if counts[0] > counts[1] else origins.second
            found = origins.but(first=kept, second=None, is_decided=True, is_raw=False)
        elif found.is_raw:  # an argument in another form: frames of a video, one below the other
            shape = origins.first.shape
            samples = self.sources.sample_of(origins.first)
            first = self.grid_by_place(samples, [shape[0], 1, *shape[2:]]).expand(shape)
            found = origins.but(first=first, second=None, is_decided=True, is_raw=False)
        return found

    def _settled(self, origins: Origins, axes: Sequence[int]) -> Origins:
        assert origins.second is not None
        both = origins.first, origins.second
        fits = [all(_agrees_along(each, axis) for axis in axes) for each in both]
        if fits[0] == fits[1]:
            return origins
        kept = both[0] if fits[0] else both[1]
        return origins.but(first=kept, second=None, is_decided=True, is_raw=False)

    def reduced(
        self, origins: Origins, axes: Sequence[int], name: str, are_features: bool = False
    ) -> Origins:
        """The origins after a sum over some axes, which stay with length 1; see `settled`."""
        origins = self.settled(origins, axes, are_features)
        if all(is_constant_along(origins.first, axis) for axis in axes):
            return origins.moved(lambda numbers: _narrowed(numbers, axes))
        entries = None
        if origins.is_raw and origins.second is not None:
            # An argument cut into pieces: the two readings together tell its entries apart.
            most = int(compact(origins.second).max()) + 1
            entries = origins.first * most + origins.second
            entries = torch.where((origins.first < 0) | (origins.second < 0), NOBODY, entries)
        first = self._merged(origins.first, axes, entries)
        return origins.but(first=first, second=None, is_decided=True, is_raw=False, reason=name)

    def _merged(
        self, numbers: Tensor, along: Sequence[int], entries: Tensor | None = None
    ) -> Tensor:
        """New tokens for values that are summed over several old ones.

        Args:
            numbers: The old ones.
            along: The axes.
            entries: Finer numbers than those of tokens, where a row is known by these.
        """
        shape, axes = list(numbers.shape), [each % numbers.ndim for each in along]
        for axis in axes:
            shape[axis] = 1
        small = compact(numbers)
        if bool((small < NOBODY).any()):
            lost = small.amin(axes, keepdim=True)
            return lost.expand(shape)
        known, far = small != NOBODY, int(small.max()) + 1  # constants have no say
        samples = self.sources.sample_of(small)
        lowest = torch.where(known, small, far).amin(axes, keepdim=True)
        if bool(((small == lowest) | ~known).all()):
            return torch.where(lowest == far, NOBODY, lowest).expand(shape)
        least = torch.where(known, samples, far).amin(axes, keepdim=True)
        most = torch.where(known, samples, NOBODY).amax(axes, keepdim=True)
        nobody = most == NOBODY
        if bool(((least != most) & ~nobody).any()):  # of several samples
            return torch.full_like(lowest, NOBODY).expand(shape)
        finer = self._finest(small, axes)
        if finer is not None:
            return finer.expand(shape)
        rows = _rows_along(small if entries is None else compact(entries), axes)
        keys = _sets(rows)
        if keys is None:
            return torch.full_like(lowest, SEVERAL).expand(shape)
        keys = keys.view(lowest.shape)
        if bool(nobody.any()):  # rows of padding alone
            found = torch.full_like(lowest, NOBODY)
            found[~nobody] = self.fresh(keys[~nobody], most[~nobody])
            return found.expand(shape)
        found = self.fresh(keys, most)
        source = self.sources.all[-1]
        is_new = bool((found >= source.start).all()) and source.name != "samples"
        old = small[known]
        if is_new and entries is None and _sets_are_apart(old, keys.expand(small.shape)[known]):
            source.members = torch.full((source.start,), -1, device=found.device)
            source.members[old] = found.expand(small.shape)[known]
        return found.expand(shape)

    def _finest(self, small: Tensor, axes: Sequence[int]) -> Tensor | None:
        """The tokens of rows whose features come from grids of which one is finer than the others.

        A U-Net puts the features of an upsampled grid beside those of the finer one.
        """
        rows = small.movedim(tuple(axes), tuple(range(len(axes)))).flatten(0, len(axes) - 1)
        changes = (rows[1:] != rows[:-1]).flatten(1).any(1).nonzero()[:, 0] + 1
        if len(changes) > _MOST_PIECES:
            return None
        result = rows[0]
        for each in rows[changes]:
            found = self._finer(result, each)
            if found is None:
                return None
            result = found
        for axis in sorted(axes):
            result = result.unsqueeze(axis)
        return result

    def _finer(self, a: Tensor, b: Tensor) -> Tensor | None:
        """Of two grids of tokens of the same samples, place by place, the finer one.

        Every token of it meets one of the other, which has fewer or meets several.
        """
        a, b = _broadcast(compact(a), compact(b))
        ours, theirs = self.sources.present(a), self.sources.present(b)
        is_told = bool((a >= 0).all()) and bool((b >= 0).all()) and a.numel() > 0
        if not is_told or len(ours) != 1 or len(theirs) != 1 or ours[0].true is theirs[0].true:
            return None
        if not bool((self.sources.sample_of(a) == self.sources.sample_of(b)).all()):
            return None
        pairs = len(_unique(a * (int(b.max()) + 1) + b))
        counts = len(_unique(a)), len(_unique(b))
        whole = [n == math.prod(e[0].grid) for n, e in zip(counts, (ours, theirs), strict=True)]
        if whole[0] and pairs == counts[0] and (counts[1] < pairs or not whole[1]):
            return a
        if whole[1] and pairs == counts[1] and (counts[0] < pairs or not whole[0]):
            return b
        return None

    def _samples(self, samples: Tensor) -> Tensor:
        """The tokens that stand for whole samples."""
        source = self.sources.whole_samples(int(samples.max()) + 1)
        return source.start + samples.clamp(0)

    def fresh(self, keys: Tensor, samples: Tensor) -> Tensor:
        """Numbers of new tokens: one for each key, in the order of keys within each sample."""
        found, inverse = _unique(keys, return_inverse=True)
        owner = found.new_zeros(len(found)).index_put_((inverse.flatten(),), samples.flatten())
        b = int(owner.max()) + 1 if len(owner) else 1
        counts = torch.bincount(owner.clamp(0), minlength=b)
        if bool((owner < 0).any()) or int(counts.min()) != int(counts.max()):
            return torch.full_like(keys, UNKNOWN)
        s = int(counts[0])
        source = self.sources.whole_samples(b) if s == 1 else self.sources.add((b, s))
        order = torch.argsort(owner, stable=True)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order), device=order.device)
        return ranks[inverse] + source.start

    def grid_by_place(self, samples: Tensor, shape: Sequence[int]) -> Tensor:
        """Numbers of new tokens at every place of (n, 1, *positions).

        Args:
            samples: Of what is at (n, ...).
            shape: (n, 1, *positions); n is the batch, or has several rows of each sample in turn.
        """
        n, count = shape[0], math.prod(shape[2:])
        lost = torch.full((n, 1, *shape[2:]), UNKNOWN, device=samples.device)
        rows = compact(samples).reshape(compact(samples).shape[0], -1)
        first = rows.amax(1, keepdim=True) if rows.numel() else rows  # constants have no say
        if not rows.numel() or bool(((rows != first) & (rows != NOBODY) | (first < 0)).any()):
            return lost
        order = first[:, 0].expand(n) if len(rows) == 1 else first[:, 0]
        found, counts = _unique(order, return_counts=True)
        b, each = len(found), int(counts[0])
        if len(order) != n or bool((counts != each).any()) or int(found[-1]) != b - 1:
            return lost
        is_sample = count == each == 1
        source = self.sources.whole_samples(b) if is_sample else self.sources.add((b, each * count))
        turn = torch.empty_like(order)
        turn[torch.argsort(order, stable=True)] = torch.arange(n, device=order.device) % each
        place = torch.arange(count, device=samples.device)
        numbers = source.start + (order * each + turn)[:, None] * count + place
        return numbers.view(n, 1, *shape[2:])

    # -- writing -----------------------------------------------------------------------------

    def filled(self, numbers: Tensor) -> Tensor | None:
        """Rows that are back at their places, and the tokens of places that were left out.

        None where the rows are in another order.
        """
        sources = self.sources.present(numbers)
        if numbers.ndim < 2 or len(sources) != 1 or not is_constant_along(numbers, -1):
            return None
        rows, (source,) = numbers[..., 0], sources
        if rows.numel() != source.stop - source.start:
            return None
        places = torch.arange(source.start, source.stop, device=rows.device).view(rows.shape)
        if not bool(((rows == places) | (rows == NOBODY)).all()):
            return None
        return places[..., None].expand(numbers.shape)

    # -- products ----------------------------------------------------------------------------

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
            return rows.but(chain=_chains(rows, columns),
                            is_dynamic=rows.is_dynamic or columns.is_dynamic)  # fmt: skip
        a, b = self._promoted(compact(rows.first), torch.where(plain < NOBODY, NOBODY, plain))
        dynamic = rows.is_dynamic or columns.is_dynamic
        chain = _chains(rows, columns)
        if bool((a == b).all()):
            open_question = rows.second is not None and not rows.is_decided
            decides = open_question and self._equal(rows.first, columns.first)
            kept = columns if decides else rows
            return kept.but(first=a.expand(shape), is_dynamic=dynamic, chain=chain)
        if rows.second is not None and not rows.is_decided:
            return rows.but(is_dynamic=dynamic, chain=chain)
        # Scores belong to their queries. Between samples there are no queries and keys.
        same = self.sources.sample_of(a) == self.sources.sample_of(b)
        decided = bool((same | (a < 0) | (b < 0)).all())
        if bool((compact(rows.first) == NOBODY).all()):
            return columns.but(is_dynamic=dynamic, chain=chain)
        first, second = rows.first, torch.where(plain < NOBODY, NOBODY, plain).expand(shape)
        return Origins(first, second, decided, False, dynamic, name, chain)

    def _contracted(
        self, origins: Origins, axis: int, shape: torch.Size, name: str, is_alone: bool
    ) -> Origins:
        """The origins of one factor in the result, where `axis` was summed over and replaced."""
        if not origins.is_raw:
            origins = self.settled(origins, [axis])
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


def _rows_along(small: Tensor, axes: Sequence[int]) -> Tensor:
    """The numbers as (rows, k): what is summed over comes last."""
    last = tuple(range(-len(axes), 0))
    rows = small.movedim(tuple(axes), last).flatten(-len(axes))
    return rows.reshape(-1, rows.shape[-1])


def _sets(rows: Tensor) -> Tensor | None:
    """A number for each row (n, k), the same for rows of the same tokens, in order of appearance.

    None where this does not tell rows apart: the same tokens in another order are another row, as
    in x + x.flip(1), and so are two rows among others that they overlap with.
    """
    columns = torch.arange(rows.shape[1], device=rows.device)
    unordered = torch.where(rows < 0, 0, _scrambled(rows)).sum(1)
    ordered = torch.where(rows < 0, 0, _scrambled(rows * len(columns) + columns)).sum(1)
    sets, inverse = _unique(unordered, return_inverse=True)
    if len(sets) != len(_unique(ordered)):
        return None
    first = torch.full((len(sets),), len(rows), device=rows.device)
    places = torch.arange(len(rows), device=rows.device)
    first = first.scatter_reduce(0, inverse, places, "amin")
    keys = first[inverse]
    known = rows >= 0
    apart = _sets_are_apart(rows[known], keys[:, None].expand(rows.shape)[known])
    return keys if apart or len(sets) == len(rows) else None


def _sets_are_apart(numbers: Tensor, keys: Tensor) -> bool:
    """Whether no number is in two sets, which are known by their keys."""
    pairs = _unique(numbers * (int(keys.max()) + 1) + keys)
    return len(pairs) == len(_unique(numbers))


def _scrambled(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits whose sums tell sets apart."""
    mixed = (numbers + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32)


def _narrowed(numbers: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        numbers = numbers.narrow(axis, 0, 1)
    return numbers
