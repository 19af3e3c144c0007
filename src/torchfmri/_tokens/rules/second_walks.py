"""Positions that the state of a recurrence meets again: does it walk over them a second time?

`Steps` notes what a state meets while a pass is followed, and `Recurrences` asks when it is over,
because only the whole pass tells what other steps do. A walk that is taken for a second one is
refused, and one that is not is still subject to `Proof`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, eq=False)
class SecondWalk:
    """The positions that a state meets again while it stays at its own.

    A recurrence may read some earlier positions in every step, `h + x[:, t] + x[:, t - 1]`. Then
    other steps read alike. A position that is met again without that may be the step of a second
    walk, from the last state of the first one.

    Attributes:
        position: The token of the state, of its first row.
        before: The one from which the state came: gates read the state before as often as they
            like. None where nothing tells that state from the row of its position.
        is_row: The state before was the row of its position.
        met: Those that it has met again.
        again: How often it has met the one before again.
    """

    position: int
    before: int | None = None
    is_row: bool = True
    met: frozenset[int] = frozenset()
    again: int = 0

    @property
    def step(self) -> tuple[int, int]:
        """The position of the state, and how far away the one before is."""
        before = self.position if self.before is None else self.before
        return self.position, before - self.position


class SecondWalks:
    """All positions of a pass that states have met again."""

    def __init__(self) -> None:
        self._all: dict[int, list[SecondWalk]] = {}
        self._steps: set[tuple[int, int]] = set()
        self._again: Counter[tuple[int, int]] = Counter()
        self._begun: set[int] = set()

    def first(self, state: int, position: int | None, is_row: bool) -> SecondWalk:
        """Note that a position, `state`, takes in another one for the first time."""
        walk = SecondWalk(state, position, is_row)
        if position is not None:
            self._steps.add(walk.step)
        return walk

    def begin(self, state: int) -> None:
        """Note that a state meets constants, such as the first cell state of an LSTM."""
        self._begun.add(state)

    def meet(
        self, walk: SecondWalk | None, state: int, position: int, is_row: bool = True
    ) -> SecondWalk:
        """Note that a state, a token, meets a position again.

        Args:
            walk: The positions met before.
            state: The token of the state.
            position: The one that it meets.
            is_row: Whether it meets the row of the position, and not a state.
        """
        if walk is None or walk.position != state:
            walk = SecondWalk(state)
        if position == walk.before:
            walk = replace(walk, again=walk.again + 1)
            self._again[walk.step] = max(self._again[walk.step], walk.again)
        if position == walk.before and (walk.is_row or not is_row):
            return walk
        walk = replace(walk, met=walk.met | {position})  # what was made before has not met it
        self._all.setdefault(state, []).append(walk)
        return walk

    def united(self, one: SecondWalk | None, other: SecondWalk | None) -> SecondWalk | None:
        """The positions that either of two parts of a state has met again."""
        if one is None or other is None or one.position != other.position:
            return one or other
        if other.met <= one.met and other.again <= one.again:
            return one
        united = replace(one, met=one.met | other.met, again=max(one.again, other.again))
        self._all.setdefault(one.position, []).append(united)
        return united

    def is_second(self, walk: SecondWalk | None) -> bool:
        """Whether nothing shows that the positions were read again within one step.

        Steps of one walk read alike: the same positions, or positions as far away, or all of them.
        """
        if walk is None:
            return False
        if walk.again and self._is_alone(walk):
            return True
        if not walk.met:
            return False
        met = walk.met
        near = {each - walk.position for each in met}
        return not any(
            met <= other.met
            or near <= {each - at for each in other.met}
            or (len(met) > 1 and met <= {*other.met, at})
            for at, several in self._all.items()
            if at != walk.position
            for other in several
        )

    def _is_alone(self, walk: SecondWalk) -> bool:
        """Whether no other step has read the one before as often; the last one need not.

        Nor need a first one that has met constants in its place.
        """
        shift = walk.step[1]
        others = {
            (at, far)
            for at, far in self._steps - {walk.step}
            if far == shift and at not in self._begun and (at - shift, far) in self._steps
        }
        return bool(others) and all(self._again[each] < walk.again for each in others)
