"""Whether the rows of a layer's output are the tokens in their order.

A shape says where the rows are, not whose they are: a mixture of experts sorts the rows of all
tokens by expert. One short pass is followed operation by operation, which tells the token of every
row. Where an operation cannot be followed, tokens are changed one by one: in a causal model, a
change must not move an earlier row.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._scan.run.token_axis import Resolved
from torchfmri._tokens import NOBODY, Origins, TokenTrace, given_origins

_ROUNDING = 1e-5  # relative to the largest value of an output


class Doubt(NamedTuple):
    """Why the rows of a layer may not be the tokens in their order.

    Attributes:
        reason: In words.
        is_certain: They are not; otherwise they could not be followed.
    """

    reason: str
    is_certain: bool


class FollowedPass:
    """Follows the tokens through the operations of one pass, while it is entered.

    Args:
        model: Whose parameters are told from data.
        ids: (b, s), handed to the model as they are.
        mask: (b, s), likewise.
    """

    def __init__(self, model: nn.Module, ids: Tensor, mask: Tensor) -> None:
        self._b, self._s = ids.shape
        self._trace = TokenTrace()
        for name, parameter in model.named_parameters():
            self._trace.set_leaves(parameter, frozenset({name}))
        given = {"input_ids": ids, "attention_mask": mask}
        for tensor, origins in given_origins(self._trace.sources, (), given):
            self._trace.set(tensor, origins)
        self._calls: dict[str, list[Origins]] = defaultdict(list)

    def __enter__(self) -> FollowedPass:
        self._trace.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._trace.__exit__(*error)
        self._trace.close()

    def called(self, layer: str, output: Tensor) -> None:
        """Keep the tokens of what a layer returned; constants have none."""
        origins = self._trace.origins(output)
        if origins is not None:
            self._calls[layer].append(origins)

    def doubt(self, layer: str, axis: Resolved) -> Doubt | None:
        """Why the rows of a layer may be in another order; None where they are in order."""
        found = [self._doubt(each, axis) for each in self._calls.get(layer, ())]
        doubts = [each for each in found if each is not None]
        return max(doubts, key=lambda each: each.is_certain, default=None)

    def _doubt(self, origins: Origins, axis: Resolved) -> Doubt | None:
        if origins.second is None or origins.is_decided:
            is_ordered = self._is_ordered(origins.first, axis)
        else:  # two readings: one that is in order will do
            both = (self._is_ordered(each, axis) for each in (origins.first, origins.second))
            is_ordered = True if any(both) else None
        if is_ordered is None:
            through = origins.reason or "its operations"
            return Doubt(f"its rows cannot be followed through {through}", is_certain=False)
        if is_ordered:
            return None
        why = ": they were chosen by the data" if origins.is_dynamic else " than the tokens"
        return Doubt(f"its rows are in another order{why}", is_certain=True)

    def _is_ordered(self, numbers: Tensor, axis: Resolved) -> bool | None:
        """Whether the rows are in the order of their tokens; None where some cannot be told.

        All of them may be so many positions late, as in a layer that hands on the token before.
        """
        rows = axis.rows(numbers, self._b, self._s)
        if rows is None:  # a further call, whose shape is not looked at
            return True
        samples = torch.arange(self._b, device=rows.device).view(-1, 1, 1)
        positions = torch.arange(self._s, device=rows.device).view(1, -1, 1)
        is_known = bool((rows >= NOBODY).all())
        for source in self._trace.sources.present(rows):
            if source.grid != (self._b, self._s):
                is_known = False
                continue
            local = self._trace.sources.local(source, rows)
            inside = local >= 0
            away = (local % self._s - positions)[inside]
            others = (local // self._s != samples) & inside
            # Where samples share their rows, those of one sample stand for all.
            if bool((away != away[0]).any()) or (not axis.axis.shared and bool(others.any())):
                return False
        return True if is_known else None


def first_early(rows: Tensor) -> int | None:
    """The first position whose change moves an earlier row of (s + 1, s, w); None for none."""
    tolerance = max(_ROUNDING, 16 * torch.finfo(rows.dtype).eps)
    moved = (rows[1:] - rows[:1]).abs().amax(-1) > tolerance * rows.abs().amax()
    early = moved.tril(-1).any(1).nonzero()
    return int(early[0]) if len(early) else None
