"""The rows that every row of a recurrence was computed from, followed operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.moves import MOVES
from torchfmri._tokens.rules.numbers import compact, rows_of
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.proof import Proof, Reach
from torchfmri._tokens.rules.steps import Steps

# These mix rows of one operand, or of two.
_MIXES = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "_softmax",
                    "_safe_softmax", "log_softmax", "_log_softmax"})  # fmt: skip


class Reaches:
    """Finds the reach of the rows of a result.

    Args:
        proof: Is told of rows that meet.
        steps: Tells what is a step.
        grids: Tells what has all positions.
    """

    def __init__(self, proof: Proof, steps: Steps, grids: Grids) -> None:
        self._proof, self._steps, self._grids = proof, steps, grids

    def of_result(
        self, found: Origins, operands: Sequence[Origins], name: str, by_entry: bool, count: int
    ) -> Mapping[int, Reach]:
        """The reaches of a result, by token; none for rows that are data.

        Args:
            found: The origins of the result.
            operands: Those of the operands.
            name: The operation.
            by_entry: Whether it works entry by entry.
            count: Its number.
        """
        is_known = any(each.reach for each in operands)
        is_step = (is_known or len(operands) > 1) and self._steps.is_step(found)
        if not (is_known or is_step):
            return {}
        by_row = by_entry or name in MOVES or (len(operands) == 1 and name not in _MIXES)
        if is_step:
            token = token_of(found)
            parts = [part for each in operands for part in self._parts(each, token, by_row)]
            return {} if not parts else self._joined(token, parts, count)
        if name in ("cat", "stack") and self._grids.has_all(found.first):
            return {}  # the walk is over, and its rows are data for another one
        made: dict[int, Reach] = {}
        tokens = torch.unique(compact(found.first)).tolist()
        known = {token for each in operands for token in each.reach}
        for token in [each for each in tokens if each in known] if by_row else tokens:
            rows = [
                each for each in operands
                if not self._steps.is_step(each) or token_of(each) == token
                or token_of(each) not in tokens
            ]  # fmt: skip
            parts = [part for each in rows for part in self._parts(each, token, by_row)]
            if parts:
                made |= self._joined(token, parts, count)
        return made

    def _joined(self, token: int, parts: Sequence[Reach], count: int) -> dict[int, Reach]:
        reach = parts[0] if len(parts) == 1 else self._proof.joined(parts, count)
        is_data = reach.positions == {token} and not (reach.uses or reach.has_begun or reach.again)
        is_data &= not reach.rests
        return {} if is_data else {token: reach}

    def _parts(self, operand: Origins, token: int, by_row: bool) -> list[Reach]:
        """What a row at `token` takes from an operand."""
        if self._steps.is_step(operand):
            token = token_of(operand)
            return [operand.reach.get(token) or data(operand)]
        if by_row and token in operand.reach:
            return [operand.reach[token]]
        if by_row and bool((compact(operand.first) == token).any()):
            return [Reach(frozenset({token}))]
        return [*operand.reach.values()]

    def written(self, whole: Mapping[int, Reach], value: Origins, place: Tensor) -> dict[int, Reach]:
        """The reaches of a tensor into which a value was written, whose rows are at `place` now."""
        if not self._steps.is_step(value):
            return {**whole, **value.reach}
        token = int(rows_of(place)[0])
        rest = {key: each for key, each in whole.items() if key != token}
        reach = value.reach.get(token_of(value)) or data(value)
        return rest if reach.positions == {token} and not reach.uses else {**rest, token: reach}


def token_of(origins: Origins) -> int:
    """The token of the first row."""
    return int(rows_of(origins.first)[0])


def data(origins: Origins) -> Reach:
    """The reach of a row that is data: no recurrence has made it, or one that is over."""
    token = token_of(origins)
    made = origins.ended.get(token)
    known = None if made is None else made.reach.get(token_of(made))
    rests = frozenset({(token, known)}) if known is not None else frozenset[tuple[int, Reach]]()
    return Reach(frozenset({token}), born=origins.born, rests=rests)
