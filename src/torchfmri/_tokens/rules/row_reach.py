"""What a row of a recurrence was computed from.

`Reaches` makes these records, `Origins` carry them, and `Proof` reads them. They are frozen: the
same record is shared by all rows that were computed alike. Rows of data are numbers from 0 on,
walks are below `WALK`, and rows that an earlier walk has made are above `VERSION`: the three ranges
must not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchfmri._tokens.rules.step_uses import StepUse

# The numbers of rows, and below `WALK` those of walks, that is, of the rows that met first on the
# way: so that the states of two walks over the same rows are told apart.
Positions = frozenset[int]
WALK = -10
VERSION = 1 << 40  # what is added to the tokens of rows that an earlier walk has made


@dataclass(frozen=True, slots=True, eq=False)
class RowReach:
    """The rows that a row was computed from.

    Attributes:
        positions: Theirs, and the walk.
        uses: The uses of parameters on the way that reach as far.
        again: The shorter reaches that were joined with it since it reaches as far, and how often.
        has_begun: Constants stood beside it, or uses on them: a state to begin with.
        is_placed: It was written over the row of its token, and belongs there.
        born: When its row was taken out of a sequence, as a number of operations.
    """

    positions: Positions
    uses: frozenset[StepUse] = frozenset()
    again: Mapping[Positions, int] = field(default_factory=dict)
    has_begun: bool = False
    born: int = 0
    is_placed: bool = False


# Rows that walks have made before they became data, by the tokens that they have.
Rests = frozenset[tuple[int, RowReach]]
NONE: Rests = frozenset()


def rows(positions: Positions) -> Positions:
    """The positions without the walk."""
    return frozenset(each for each in positions if each > WALK)


def token_at(position: int) -> int:
    """The token of a position, whether it is one of data or of a walk."""
    return position % VERSION if position >= 0 else position


def without(positions: Positions, position: int) -> Positions:
    """What a state reached before it took in a position; one row is of no walk."""
    rest = positions - {position}
    return rows(rest) if len(rows(rest)) == 1 else rest


def all_of(
    several: Iterable[Positions], grown: Mapping[Positions, Iterable[Positions]]
) -> set[Positions]:
    """These reaches, and all that have grown out of them."""
    found, waiting = set[Positions](), [*several]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting.extend(grown.get(each, ()))
    return found


def kinds(
    again: Mapping[Positions, int], chain: Sequence[Positions], state: Positions
) -> dict[tuple[str, int], int]:
    """Return how often a state was joined with earlier ones: (kind, steps ago) -> count."""
    found: dict[tuple[str, int], int] = {}
    level = chain.index(state)
    order = [*chain[0], *(min(rows(b) - a) for a, b in pairwise(chain))]
    for each, times in again.items():
        kind = ("unknown", len(each))
        if each == chain[0] and level:
            kind = ("first", level)  # a row, or the state that it is
        elif len(each) == 1 and min(each) in order:
            kind = ("row", level - order.index(min(each)))
        elif each in chain:
            kind = ("state", level - chain.index(each))
        found[kind] = max(found.get(kind, 0), times)
    return found


def most_of(usual: Mapping[tuple[str, int], int], kind: tuple[str, int]) -> int:
    """How often a kind of row or state is joined at other steps."""
    name, level = kind
    names = ("row", "state") if name == "first" else (name, "first")
    return max(usual.get((each, level), 0) for each in names)
