"""Proof that a use in a hand-written recurrence belongs to a position: what was it made of?

Every row of a step has a `RowReach`: the positions of all rows that were read on the way to it,
through every move and join. The reaches of the states of a loop form a chain, in which every step
adds one position. A use on data alone reaches one position, and belongs to it. A use on a state
reaches what the state does, and belongs to the step before or to the one after: the chain as a
whole tells which, if every step uses the parameter as often and the ends leave one reading.

Nothing else is proved. Positions that are read again when the chain has ended, two positions that
are joined once, layers that take turns: whatever was found for them, they are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torchfmri._tokens.rules.row_reach import (
    WALK,
    Positions,
    Rests,
    RowReach,
    all_of,
    kinds,
    most_of,
    rows,
    token_at,
    without,
)
from torchfmri._tokens.rules.sources import Sources
from torchfmri._tokens.rules.step_uses import StepUse

NEW = ("row", 0)  # the row that a step takes in, once more


class Proof:
    """The reaches of a pass, and what they prove.

    Args:
        sources: Tells positions from whole samples, which are no steps.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._walks: dict[Positions, int] = {}
        self._mixed: set[int] = set()
        self._rests: dict[StepUse, Rests] = {}
        self._of: dict[StepUse, RowReach] = {}
        self._grown: dict[Positions, set[Positions]] = defaultdict(set)
        self._next: dict[StepUse, set[Positions]] = defaultdict(set)
        self._again: dict[Positions, dict[Positions, int]] = defaultdict(dict)
        self._after: dict[StepUse, set[Positions]] = defaultdict(set)
        self._sides: dict[tuple[Positions, Positions], set[object]] = defaultdict(set)
        self._begun: dict[tuple[Positions, Positions], set[tuple[bool, bool]]] = defaultdict(set)
        self._of_first_row: set[StepUse] = set()
        self._born: dict[Positions, int] = {}
        self._joined: dict[Positions, int] = {}
        self._last: dict[Positions, int | None] = {}
        self._places: dict[str, dict[StepUse, int]] = {}

    # -- while a pass is followed ----------------------------------------------------------------

    def joined(self, several: Sequence[RowReach], count: int) -> RowReach:
        """The reach of a row that is computed from others, in operation number `count`."""
        positions = self._united(several)
        longest = [each for each in several if each.positions == positions]
        shorter = [each for each in several if each.positions != positions]
        uses = frozenset[StepUse]().union(*(each.uses for each in longest))
        again: dict[Positions, int] = {}
        for each in longest:
            for other, times in each.again.items():
                again[other] = max(again.get(other, 0), times)
        for each in shorter:
            self._grown[each.positions].add(positions)
            for use in each.uses:
                self._next[use].add(positions)
            if len(each.positions) == 1:
                known = self._born.get(each.positions, each.born)
                self._born[each.positions] = min(known, each.born)  # it may be read again
            if longest:
                again[each.positions] = again.get(each.positions, 0) + 1
                for use in uses:
                    self._after[use].add(each.positions)
            else:
                self._joined.setdefault(positions, count)
                self._note_sides(each, shorter)
        if again:
            most = self._again[positions]
            most |= {each: max(most.get(each, 0), times) for each, times in again.items()}
        begun = any(each.has_begun for each in longest)
        return RowReach(positions, uses, again, begun, max(each.born for each in several))

    def mix(self, token: int) -> None:
        """Note that a summary of a sample was made of positions side by side: maybe of a step."""
        self._mixed.add(token)

    def spread(self, reach: RowReach) -> None:
        """Note that a state is joined with a whole sequence: its uses may belong to any of it."""
        if len(rows(reach.positions)) > 1 or reach.has_begun:
            for use in reach.uses:
                self._next[use].add(Positions())

    def _united(self, several: Sequence[RowReach]) -> Positions:
        """The rows of several reaches, and the walk of the one that has the others in it."""
        reals = Positions().union(*(rows(each.positions) for each in several))
        if len({token_at(each) for each in reals}) == 1:
            return Positions({max(reals)})  # data and rows of an earlier walk, at one token
        whole = [each.positions for each in several if len(rows(each.positions)) > 1]
        if not whole:
            return reals | ({self._walk(reals)} if len(reals) > 1 else set())
        most = max(map(len, map(rows, whole)))
        inside = Positions().union(*(rows(e) for e in whole if len(rows(e)) == most))
        walks = [e - rows(e) for e in whole if len(rows(e)) == most or not rows(e) <= inside]
        return reals.union(*walks)

    def _walk(self, reals: Positions) -> int:
        return self._walks.setdefault(reals, WALK - len(self._walks))

    def _note_sides(self, one: RowReach, several: Sequence[RowReach]) -> None:
        """Remember by which uses two rows had come when they met."""
        ours = frozenset(leaf for use in one.uses for leaf in use.leaves)
        for other in several:
            if other.positions != one.positions:
                theirs = frozenset(leaf for use in other.uses for leaf in use.leaves)
                pair = one.positions, other.positions
                self._sides[pair].add((ours, theirs))
                self._begun[pair].add((one.has_begun, other.has_begun))

    def used(self, use: StepUse, reach: RowReach, rests: Rests) -> RowReach:
        """The reach of the result of a use."""
        self._rests[use] = rests
        self._of[use] = reach = self.begun(reach) if use.is_start else reach
        return replace(reach, uses=reach.uses | {use})

    def begun(self, reach: RowReach) -> RowReach:
        """The reach of a row beside which constants stand."""
        if not reach.has_begun:
            self._of_first_row |= reach.uses
        return replace(reach, has_begun=True)

    # -- when it is over: the order of positions ---------------------------------------------------

    def last(self, positions: Positions) -> int | None:
        """The position that a state took in last; None if that is not proved."""
        if len(positions) < 2:
            return max(positions, default=-1) if max(positions, default=-1) >= 0 else None
        reals = rows(positions)
        if min(reals) < 0 or len(positions) != len(reals) + 1:
            return None
        if positions not in self._last:
            self._last[positions] = None  # while it is looked for
            found = [
                position
                for position in reals
                if not self.is_sample(position)
                and positions in self._grown.get(without(positions, position), ())
                and self._is_state(without(positions, position), positions)
            ]
            self._last[positions] = found[0] if len(found) == 1 else None
        return self._last[positions]

    def _is_made(self, row: Positions) -> bool:
        """Whether a row is a state that parameters have made of constants, and are used on next."""
        uses = [use for use, reach in self._of.items() if reach.positions == row]
        made = {leaf for use in uses if use.is_start for leaf in use.leaves}
        read = [use for use in uses if not use.is_start and self._of[use].has_begun]
        return any(leaf in made for use in read for leaf in use.leaves)

    def is_sample(self, token: int) -> bool:
        """Whether a token is a whole sample."""
        return token >= 0 and bool(
            self._sources.is_sample(torch.tensor(token_at(token), device="cpu"))
        )

    def _is_state(self, before: Positions, after: Positions) -> bool:
        """Whether the shorter of two reaches was the state, and the position between them new."""
        if self.last(before) is None:
            return False
        if len(before) > 1:
            return True
        new = rows(after) - before
        if self.is_sample(min(before)):
            return not before & self._mixed
        pairs = (before, new), (new, before)
        has_begun = [self._begun[pair] == {(True, False)} for pair in pairs]
        if has_begun[0] and self._is_made(before):
            return True
        for longer in self._grown.get(after, ()):
            third = longer - after
            if len(third) != 1 or min(third) < 0:
                continue
            usual = self._sides[after, third]
            is_like = [self._sides[pair] == usual for pair in pairs]
            told = {both[0] for both in (is_like, has_begun) if both[0] != both[1]}
            if told:
                return told == {True}
            # Rows taken out one by one, as they are read, are read in the order in which they are.
            if self._joined.get(after, 0) < self._born.get(third, 0):
                return self._born.get(before, 0) < self._born.get(new, 0)
        return False

    def _chain(self, positions: Positions) -> tuple[Positions, ...] | None:
        """The reaches of the states of the walk that a state is part of, first to last."""
        chain = [positions]
        while len(chain[0]) > 1:
            last = self.last(chain[0])
            if last is None:
                return None
            chain.insert(0, without(chain[0], last))
        while True:
            following = [
                each
                for each in self._grown.get(chain[-1], ())
                if len(rows(each)) == len(rows(chain[-1])) + 1 and self.last(each) not in chain[-1]
            ]
            if not following:
                return tuple(chain)
            if len(following) > 1 or self.last(following[0]) is None:
                return None
            chain.append(following[0])

    def is_row(self, token: int, reach: RowReach) -> bool:
        """Whether a row that was made by a recurrence is at its own token for sure."""
        if reach.is_placed or self.is_sample(token):
            return True
        chain, last = self._chain(reach.positions), self.last(reach.positions)
        if last is None or token_at(last) != token:
            return False
        return len(reach.positions) == 1 or (chain is not None and self._is_regular(reach, chain))

    def is_alone(self, use: StepUse) -> bool:
        """Whether a row never meets two rows of one grid: no recurrence, but two inputs."""
        found = all_of([self._of[use].positions, *self._next[use]], self._grown)
        if not all(found):
            return False
        met = rows(Positions().union(*found))
        reals = {*map(token_at, met)}
        if min(reals) < 0 or met & self._mixed:
            return False
        sources = self._sources.present(torch.tensor([*reals], device="cpu"))
        # Whole samples beside positions may have been made of these.
        is_like = len({each.grid[1] == 1 for each in sources}) == 1
        return is_like and len(sources) == len(reals)

    def holds(self, use: StepUse) -> bool:
        """Whether the rows of other recurrences that were read on the way are at their tokens."""
        return all(self.is_row(token, reach) for token, reach in self._rests[use])

    def _is_regular(self, reach: RowReach, chain: Sequence[Positions]) -> bool:
        """Whether all that was joined again is joined again as often at another step."""
        usual: dict[tuple[str, int], int] = {}
        for each in chain:
            if each != reach.positions:
                for kind, times in kinds(self._again[each], chain, each).items():
                    usual[kind] = max(usual.get(kind, 0), times)
        ours = kinds(reach.again, chain, reach.positions)
        return all(most_of(usual, kind) >= times for kind, times in ours.items() if kind != NEW)

    # -- when it is over: uses ---------------------------------------------------------------------

    def places(self, leaf: str, uses: Sequence[StepUse]) -> Mapping[StepUse, int]:
        """The positions of the uses of a parameter, where they are proved."""
        if leaf not in self._places:
            self._places[leaf] = self._found(uses)
        return self._places[leaf]

    def _found(self, uses: Sequence[StepUse]) -> dict[StepUse, int]:
        found: dict[StepUse, int] = {}
        chains: dict[tuple[Positions, ...], list[StepUse]] = defaultdict(list)
        open_: list[StepUse] = []
        for use in uses:
            positions = self._of[use].positions
            if self._is_local(use):
                found[use] = min(positions)
                continue
            chain = self._chain(positions)
            if chain is not None and len(chain) > 1:
                chains[chain].append(use)
            elif len(positions) == 1:
                open_.append(use)
        is_own = len(chains) + len(open_) <= 1
        for chain, several in chains.items():
            if is_own and self._is_each_row(several, found, chain[-1]):
                found[several[0]] = min(chain[0])
            else:
                found |= self._on_states(several, chain)
        return found

    def _is_local(self, use: StepUse) -> bool:
        """Whether a use is one on data: if it meets a state, then as what is new."""
        positions = self._of[use].positions
        if len(positions) > 1 or min(positions) < 0:
            return False
        if use.is_start:
            return not self._next[use]
        if use in self._of_first_row:  # beside constants, or what parameters make of these
            return True
        if self._of[use].has_begun and self._grown.get(positions):
            return False  # a state, if nothing else was made of it as well
        return all(self.last(each) in positions for each in self._next[use])

    def _is_each_row(
        self, several: Sequence[StepUse], found: Mapping[StepUse, int], whole: Positions
    ) -> bool:
        """Whether one use on the first row is there beside one on every other row alone."""
        if len(several) > 1 or len(self._of[several[0]].positions) > 1 or several[0].is_start:
            return False
        used = sorted([*found.values(), *self._of[several[0]].positions])
        return len(used) > 2 and used == sorted(rows(whole))

    def _on_states(
        self, several: Sequence[StepUse], chain: Sequence[Positions]
    ) -> dict[StepUse, int]:
        """The positions of uses on the states of one walk."""
        starts = [each for each in several if each.is_start]
        levels = [
            [u for u in several if self._of[u].positions == e and not u.is_start] for e in chain
        ]
        if any(self._of[each].positions != chain[0] for each in starts):
            return {}
        begun = self._begun[chain[0], rows(chain[1]) - chain[0]] == {(True, False)}
        after = self._after_step(levels, bool(starts), begun)
        is_data = not starts and len(levels[0]) < max(map(len, levels))
        if after is None or not self._ends_alike(levels, chain):
            return {}
        found = {each: min(chain[0]) for each in starts}
        for level, uses in enumerate(levels):
            for number, use in enumerate(uses):
                at = level + (number >= after or (is_data and not level))
                if at == len(chain) or not self._is_taken_in(use, chain, at):
                    return {}
                place = self.last(chain[at])
                if place is None:
                    return {}
                found[use] = place
        return found

    def _after_step(
        self, levels: Sequence[Sequence[StepUse]], starts: bool, begun: bool
    ) -> int | None:
        """How many of the uses on a state belong to the step that made it; None if it is open.

        Between two steps stand the uses after the one and those before the other. Those before the
        first step are on constants, or on the first row; those after the last one are the last.
        """
        counts = [len(each) for each in levels]
        first, end, between = counts[0], counts[-1], {*counts[1:-1]}
        if starts and not any(counts):
            return 0  # it makes the first state, and nothing else
        if starts:
            usual = {*counts[:-1]}
            return end if len(usual) == 1 and end < min(usual) else None
        if len({*counts}) == 1:
            return end
        if not any(counts[:-1]):
            return end
        if begun or len(between) != 1:
            return None
        (usual_count,) = between
        if first == 0 and end == usual_count:
            return end
        return end if first == usual_count - end > 0 else None

    def _is_taken_in(self, use: StepUse, chain: Sequence[Positions], at: int) -> bool:
        """Whether what follows a use are later states of its walk, and first the one it is for."""
        following = self._next[use]
        if not following <= {*chain}:
            return False
        is_after = chain[at] == self._of[use].positions
        return is_after or (bool(following) and min(following, key=len) == chain[at])

    def _ends_alike(self, levels: Sequence[Sequence[StepUse]], chain: Sequence[Positions]) -> bool:
        """Whether the last uses meet nothing again that others of their kind do not meet."""
        usual = set[tuple[str, int]]()
        for level, uses in enumerate(levels[:-1]):
            for use in uses:
                met = dict.fromkeys(self._after[use], 1)
                usual |= kinds(met, chain, chain[level]).keys()
        for use in levels[-1]:
            met = dict.fromkeys(self._after[use], 1)
            known = dict.fromkeys(usual | {NEW}, 1)
            if not all(most_of(known, kind) for kind in kinds(met, chain, chain[-1])):
                return False
            if not self._is_regular(self._of[use], chain):
                return False
        return True
