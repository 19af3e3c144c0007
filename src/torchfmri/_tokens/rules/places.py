"""The tokens of rows that are written over others, or put beside them: is this their place?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.joins import Joins
from torchfmri._tokens.rules.numbers import SEVERAL, compact, rows_of
from torchfmri._tokens.rules.origins import Origins


def put_beside(
    joins: Joins, several: Sequence[Origins | None], lengths: Sequence[int]
) -> list[Tensor | None]:
    """The tokens of operands that are put one after the other; None for constants.

    Steps are put beside others when their recurrence is over: what is no step by then was
    computed from two positions. A whole sequence has each position once. Where it has one
    twice, a state in the place of another position that it has taken in is refused.

    Args:
        joins: Tells what is a step.
        several: The operands.
        lengths: How many places each of them has.
    """
    known = [None if each is None else compact(each.first) for each in several]
    found: list[Tensor | None] = []
    for at, each in enumerate(several):
        if each is None:
            found.append(None)
            continue
        lost = each.pair is not None and not each.pair.is_step
        if len(each.seen) > 1 and not lost and joins.is_step(each):
            row = rows_of(each.first)[0]
            place, whole = sum(lengths[:at]), sum(lengths)
            others = [e for e in (*known[:at], *known[at + 1 :]) if e is not None]
            is_twice = any(bool((other == row).any()) for other in others)
            lost = is_twice and _is_place_of_another(joins, each, int(row), place, whole)
        found.append(torch.full_like(each.first, SEVERAL) if lost else each.first)
    return found


def _is_place_of_another(joins: Joins, state: Origins, row: int, place: int, whole: int) -> bool:
    """Whether a state at token `row` stands where a sequence has one that it has taken in."""
    (source,) = joins.sources.present(rows_of(state.first)[:1])
    (b, s), local = source.grid, row - source.start
    here = local % s + place * s if state.is_sample else local - local % s + place
    is_whole = whole == (b if state.is_sample else s)
    return is_whole and here != local and source.start + here in state.seen


def written(value: Origins, whole: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The tokens of rows that were written over others, which had the tokens `old`.

    What was computed from two positions and is written to one of them belongs to that one. A
    state that has taken in more is refused there, if its own position has another row.

    Args:
        value: What was written, as one step.
        whole: The tokens of the tensor before.
        old: Those of the places, or of the whole tensor.
        new: What they have now.
    """
    differs = (old != new) & (old >= 0) & (new >= 0)
    if len(value.seen) < 2 or not bool(differs.any()):
        return new
    before, now = old[differs], new[differs]
    shift = now - before
    is_taken = int(before[0]) in value.seen and bool((shift == shift[0]).all())
    if value.pair is not None and not value.pair.is_step:
        for each in (each for uses in value.chain.values() for each in uses):
            each.pair = each.pair or value.pair  # the step may be one in the other direction
        return torch.where(differs, old if is_taken else SEVERAL, new)
    is_twice = is_taken and bool((whole == now[0]).any())
    return torch.where(differs, SEVERAL, new) if is_twice else new
