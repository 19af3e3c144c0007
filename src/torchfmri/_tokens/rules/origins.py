"""Where the entries of a tensor come from: the tokens that they are computed for.

Every entry of a tensor has the number of a token, or a code (`numbers.py`). Entries that are
computed from two positions at once, such as attention scores, have two candidates until an
operation sums one of them away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import SEVERAL, compact, unique
from torchfmri._tokens.rules.row_reach import NONE, Rests, RowReach
from torchfmri._tokens.rules.second_walks import SecondWalk
from torchfmri._tokens.rules.step_uses import REASON, Begun, Chain, StepUse, TwoPositions

if TYPE_CHECKING:
    from torchfmri._tokens.rules.parts import PartUse


@dataclass(slots=True, eq=False)
class Origins:
    """The tokens of the entries of one tensor.

    Attributes:
        first: A number or code for every entry, of the tensor's shape.
        second: The other candidate, where an entry is computed from two positions.
        is_decided: Whether `first` is the answer where there are two candidates, as for attention
            scores, which belong to their queries.
        is_raw: The two candidates are two ways to read an argument of the model: with its features
            last, or second.
        is_doubtful: A further argument whose first axis is as long as the batch. It may have a row
            for each sample, or be something else, such as a change of a weight.
        is_dynamic: The numbers depend on data (rows chosen by a router): another pass has others.
        reason: The operation after which the tokens cannot be told.
        chain: The latest uses of each parameter on the way here, and `seen`, the tokens of a sample
            that were taken in: what a recurrence looks like from inside.
        pair: The two positions that were taken in, where these are all.
        walk: The positions that a state has met again.
        history: The steps of which a sequence was put together, by the token of their first row.
        ended: The same where the recurrence is over, and its rows are data for another one.
        grown: Of what a convolution made longer: the same on a grid of its own.
        use: The use of parameters that this is the result of.
        reach: Of rows that a recurrence has made, by token: the rows of which they were computed.
        rests: What is taken for granted: rows that recurrences had made when they became data.
        begun: The walks of several positions at once that led here.
        parts: The uses of parameters on some positions that this is made of, see `parts.py`.
        born: When one position was selected, as a number of operations.
        is_slice: Made of one position of each row, as x[:, t] is.
        is_sample: Made of one entry of the first axis, as x[t] is: a sample, or a step.
        has_begun: Joined with constants that have a row for each sample: a state to begin with.
        landed: Of what a layer made of constants: the data over which it was spread.
    """

    first: Tensor
    second: Tensor | None = None
    is_decided: bool = True
    is_raw: bool = False
    is_dynamic: bool = False
    reason: str = ""
    chain: Chain = field(default_factory=dict)
    seen: frozenset[int] = frozenset()
    born: int = 0
    is_doubtful: bool = False
    is_slice: bool = False
    is_sample: bool = False
    has_begun: bool = False
    landed: Origins | None = None
    pair: TwoPositions | None = None
    walk: SecondWalk | None = None
    history: Mapping[int, Origins] = field(default_factory=dict)
    ended: Mapping[int, Origins] = field(default_factory=dict)
    grown: Origins | None = None
    use: StepUse | None = None
    reach: Mapping[int, RowReach] = field(default_factory=dict)
    rests: Rests = NONE
    begun: frozenset[Begun] = frozenset()
    parts: frozenset[PartUse] = frozenset()

    def like(self, first: Tensor, second: Tensor | None = None) -> Origins:
        """The origins of a tensor whose entries are those of this one, moved."""
        return self.but(first=first, second=second)

    def but(self, **changes: Any) -> Origins:
        """A copy with other values; a use of its own is not part of it."""
        found = object.__new__(Origins)  # `replace` takes three times as long, at every operation
        for name in _NAMES:
            setattr(found, name, getattr(self, name))
        found.use = None
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    def moved(self, move: Any) -> Origins:
        """The origins after `move`, a function from numbers to numbers."""
        second = None if self.second is None else move(self.second)
        return self.like(move(self.first), second)

    def told(self) -> Origins:
        """These origins with one candidate; entries of two between which nothing decides have none.

        For operations that cannot carry two on.
        """
        if self.second is None or self.is_decided or self.is_raw:
            return self
        first = torch.where(self.first == self.second, self.first, SEVERAL)
        return self.but(first=first, second=None, is_decided=True)

    def continued(self, step: Origins) -> Origins:
        """These origins with the past of a step, of which they are the row."""
        return self.but(chain=step.chain, seen=step.seen, born=step.born, has_begun=step.has_begun,
                        pair=step.pair, walk=step.walk)  # fmt: skip

    def placed(self, use: StepUse) -> Origins:
        """The origins of a use of a recurrence, at the step to which it belongs."""
        assert use.place is not None
        first = use.place.reshape(self.first.shape)
        return self.but(first=first, second=None, is_decided=True, is_raw=False, reason=REASON)

    def use_of(self, leaves: Iterable[str]) -> StepUse | None:
        """The use of one of these parameters that this is the result of, in another shape maybe.

        A Linear on (b, 1, i) or (i,) returns a view of its product.
        """
        for use in (each for leaf in leaves for each in self.chain.get(leaf, ())):
            if self.first.numel() == use.own.numel():
                ours, theirs = compact(self.first), compact(use.own)
                if torch.equal(unique(ours), unique(theirs)):
                    same = self.first.reshape(-1) == use.own.reshape(-1)
                    if bool(same.all()):
                        return use
        return None


_NAMES = tuple(each.name for each in fields(Origins))
