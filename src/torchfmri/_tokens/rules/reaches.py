"""The rows that every row of a recurrence was computed from, followed operation by operation.

`trace` asks for the reach of every result beside its origins. `Proof` judges a recurrence by these
reaches alone, so a row that is forgotten here makes a wrong place look proved. An operation that
mixes rows and is not known to `_MIXES`, `MOVES` or the products has to join all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.moves import MOVES
from torchfmri._tokens.rules.numbers import NOBODY, compact, rows_of
from torchfmri._tokens.rules.operations import PRODUCTS, WRITES
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.proof import Proof
from torchfmri._tokens.rules.row_reach import NONE, VERSION, Rests, RowReach
from torchfmri._tokens.rules.steps import Steps

# These mix rows of one operand, or of two.
_MIXES = frozenset(
    {
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "softmax",
        "_softmax",
        "_safe_softmax",
        "log_softmax",
        "_log_softmax",
    }
)


class Reaches:
    """Finds the reach of the rows of a result.

    Args:
        proof: Is told of rows that meet.
        steps: Tells what is a step.
        grids: Tells what has all positions.
    """

    def __init__(self, proof: Proof, steps: Steps, grids: Grids) -> None:
        self._proof, self._steps, self._grids = proof, steps, grids
        self._versions: dict[Rests, int] = {NONE: 0}

    def of_result(
        self, found: Origins, operands: Sequence[Origins], name: str, by_entry: bool, count: int
    ) -> Mapping[int, RowReach]:
        """The reaches of a result, by token; none for rows that are data, or sums over a sample.

        Args:
            found: The origins of the result.
            operands: Those of the operands.
            name: The operation.
            by_entry: Whether it works entry by entry.
            count: Its number.
        """
        is_known = any(each.reach for each in operands)
        is_step = (is_known or len(operands) > 1) and self._steps.is_step(found)
        has_steps = any(map(self._steps.is_step, operands)) if name in PRODUCTS else True
        if not has_steps and self._is_summary(found):
            self._proof.mix(self._position(token_of(found), found))
        if not (is_known or is_step or self._is_open(found, operands)):
            return {}
        if not is_step:  # a summary of the sample that is spread over it adds no rows
            others = [each for each in operands if not self._is_summary(each)]
            if any(token >= 0 for each in others for token in _tokens(each)):
                operands = others
        by_row = by_entry or name in MOVES or name in WRITES
        by_row |= len(operands) == 1 and name not in _MIXES
        if is_step:
            token = token_of(found)
            if self._proof.is_sample(token) and all(map(self._is_whole, operands)):
                return {}
            parts = [part for each in operands for part in self._parts(each, token, by_row)]
            return {} if not parts else self._joined(token, parts, found, count)
        return self._of_sequence(found, operands, name, by_entry, by_row, count)

    def _of_sequence(
        self,
        found: Origins,
        operands: Sequence[Origins],
        name: str,
        by_entry: bool,
        by_row: bool,
        count: int,
    ) -> Mapping[int, RowReach]:
        """The reaches of the rows of a sequence."""
        if self.is_over(found, operands, name):
            return {}
        if by_entry:
            operands = self._without_spread(operands)
        made: dict[int, RowReach] = {}
        tokens = _tokens(found)
        known = {token for each in operands for token in each.reach}
        plain = {token for each in operands for token in _tokens(each)} - known if by_row else set()
        if name in WRITES:  # places that were left out are filled
            plain = {token for token in tokens if token >= 0} - known
        for token in [e for e in tokens if (e not in plain or e < NOBODY) and e != NOBODY]:
            rows = [
                each
                for each in operands
                if not self._steps.is_step(each)
                or token_of(each) == token
                or token_of(each) not in tokens
            ]
            parts = [part for each in rows for part in self._parts(each, token, by_row)]
            if parts:
                made |= self._joined(token, parts, found, count)
            if name in WRITES and token in made and self._has(operands[0], token):
                made[token] = replace(made[token], is_placed=True)
        return made

    def _without_spread(self, operands: Sequence[Origins]) -> list[Origins]:
        """The operands without states that are spread over a sequence, whose rows stay its own."""
        states = [each for each in operands if self._steps.is_step(each)]
        others = [each for each in operands if each not in states]
        if not any(token >= 0 for each in others for token in _tokens(each)):
            return [*operands]
        for state in states:
            for reach in state.reach.values():
                self._proof.spread(reach)
        return others

    def _is_open(self, found: Origins, operands: Sequence[Origins]) -> bool:
        """Whether rows were joined of which nothing tells whose the result is."""
        is_open = len(operands) > 1 and bool((compact(found.first) < NOBODY).any())
        return is_open and all(map(self._steps.is_step, operands))

    def _is_whole(self, operand: Origins) -> bool:
        """Whether this is data, or a walk that is over."""
        is_step = self._steps.is_step(operand)
        return not is_step and (not operand.reach or self._grids.has_all(operand.first))

    def _is_summary(self, operand: Origins) -> bool:
        """Whether this is one row for each whole sample."""
        return self._steps.is_step(operand) and self._proof.is_sample(token_of(operand))

    def is_side_by_side(self, found: Origins, operands: Sequence[Origins]) -> bool:
        """Whether this is a product of one row for each sample, with positions side by side."""
        if not self._is_summary(found) or len(operands) != 1:
            return False
        (operand,) = operands
        is_row = operand.first.shape[1:-1].numel() == 1
        return is_row and not self._steps.is_step(operand)

    def is_over(self, found: Origins, operands: Sequence[Origins], name: str) -> bool:
        """Whether a walk is over, so that its rows are data for another one.

        They are all put together, or computed with, and not with one of them.
        """
        if not any(each.reach for each in operands) or self._steps.is_step(found):
            return False
        known = {token for each in operands for token in each.reach}
        tokens = {*_tokens(found)}
        read = {token for each in operands for token in _tokens(each)}
        if read.isdisjoint(tokens) and all(map(self._proof.is_sample, known)):
            return True  # a grid of its own, of whole samples and parameters
        if name not in ("cat", "stack"):
            states = [e for e in operands if self._steps.is_step(e) and not self._is_summary(e)]
            if name in MOVES or name in WRITES or states:
                return False
        return self._grids.has_all(found.first) and known <= tokens

    def _joined(
        self, token: int, parts: Sequence[RowReach], found: Origins, count: int
    ) -> dict[int, RowReach]:
        reach = parts[0] if len(parts) == 1 else self._proof.joined(parts, count)
        is_data = reach.positions == {self._position(token, found)}
        is_data &= not (reach.uses or reach.has_begun or reach.again)
        return {} if is_data else {token: reach}

    def _parts(self, operand: Origins, token: int, by_row: bool) -> list[RowReach]:
        """What a row at `token` takes from an operand."""
        if self._steps.is_step(operand):
            token = token_of(operand)
            return [operand.reach.get(token) or self.data(operand)]
        if by_row and token in operand.reach:
            return [operand.reach[token]]
        if by_row and self._has(operand, token):
            return [RowReach(frozenset({self._position(token, operand)}))]
        return [*operand.reach.values()]

    def written(
        self, whole: Mapping[int, RowReach], value: Origins, old: Tensor, place: Tensor
    ) -> dict[int, RowReach]:
        """The reaches of a tensor into which a value was written.

        Args:
            whole: Those of the tensor before.
            value: What was written.
            old: The tokens of the rows that it was written over.
            place: Those that they have now.
        """
        if not self._steps.is_step(value):
            return {**whole, **value.reach}
        token = int(rows_of(place)[0])
        rest = {key: each for key, each in whole.items() if key != token}
        reach = value.reach.get(token_of(value)) or self.data(value)
        is_data = reach.positions == {self._position(token, value)} and not reach.uses
        if bool((compact(old) == compact(place)).all()):
            reach = replace(reach, is_placed=True)
        return rest if is_data else {**rest, token: reach}

    def data(self, origins: Origins) -> RowReach:
        """The reach of a row that is data: no recurrence has made it, or one that is over."""
        position = self._position(token_of(origins), origins)
        return RowReach(frozenset({position}), born=origins.born)

    def _position(self, token: int, origins: Origins) -> int:
        """The number of a row; rows that an earlier walk has made have others than its data."""
        version = self._versions.setdefault(origins.rests, len(self._versions))
        return token + version * VERSION if token >= 0 else token

    def _has(self, operand: Origins, token: int) -> bool:
        return bool((compact(operand.first) == token).any())

    def rests(self, found: Origins, operands: Sequence[Origins], name: str) -> Rests:
        """What a result takes for granted: what its operands do, and rows that are data now."""
        some = {each.rests for each in operands}
        rests = next(iter(some)) if len(some) == 1 else NONE.union(*some)
        if self.is_over(found, operands, name):
            made = [item for each in operands for item in each.reach.items()]
            rests = rests.union(made) if made else rests
        return rests


def _tokens(origins: Origins) -> list[int]:
    return torch.unique(compact(origins.first)).tolist()  # type: ignore[no-any-return]


def token_of(origins: Origins) -> int:
    """The token of the first row."""
    return int(rows_of(origins.first)[0])
