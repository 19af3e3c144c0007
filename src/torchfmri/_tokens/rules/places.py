"""The tokens of rows that are written over others or put beside them (`cat`, `stack`, writes).

`operations` calls `put_beside` and `written`, `trace` the second for writes in place. A recurrent
model collects its states in this way, and a state can be put at its own position or at one that it
has merely taken in. Where the place and the tokens contradict each other, rows become `SEVERAL` and
their uses are marked lost, so that parameters used on them are refused. Loosening a condition here
gives gradients at the wrong position that still add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import SEVERAL, compact, rows_of
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import Sources
from torchfmri._tokens.rules.steps import Steps

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def put_beside(
    steps: Steps, several: Sequence[Origins | None], lengths: Sequence[int]
) -> list[Tensor | None]:
    """The tokens of operands that are put one after the other; None for constants.

    Steps are put beside others when their recurrence is over: what is no step by then was
    computed from two positions. A whole sequence has each position once. Where it has one
    twice, a state in the place of another position that it has taken in is refused.

    Args:
        steps: Tells what is a step.
        several: The operands.
        lengths: How many places each of them has.
    """
    known = [None if each is None else compact(each.first) for each in several]
    lost_rows = _summaries(steps, several, lengths)
    found: list[Tensor | None] = []
    for at, each in enumerate(several):
        if each is None:
            found.append(None)
            continue
        lost = at in lost_rows
        if lost:
            steps.lose(each)
        if each.pair is not None and not each.pair.is_step:
            lost = True  # and the next step may take it from there
            each.pair.is_followed |= each.pair.leaves is not None
        lost |= steps.walks.is_second(each.walk)
        if len(each.seen) > 1 and not lost and steps.is_step(each):
            row = rows_of(each.first)[0]
            place, whole = sum(lengths[:at]), sum(lengths)
            others = [e for e in (*known[:at], *known[at + 1 :]) if e is not None]
            is_twice = any(bool((other == row).any()) for other in others)
            lost = is_twice and _is_place_of_another(steps, each, int(row), place, whole)
        found.append(torch.full_like(each.first, SEVERAL) if lost else each.first)
    return found


def _summaries(steps: Steps, several: Sequence[Origins | None], lengths: Sequence[int]) -> set[int]:
    """The places of rows made of several positions that stand in a sequence of positions.

    What a layer made of two positions side by side may be a step, and so may each of as many
    rows as there are positions.
    """
    if any(each is None for each in several) or {*lengths} != {1}:
        return set()
    rows = [rows_of(each.first)[:1] for each in several if each is not None]
    is_sample = [bool(steps.sources.is_sample(each)) for each in rows]
    if all(is_sample) or any(bool((each < 0).any()) for each in rows):
        return set()
    (source,) = steps.sources.present(rows[is_sample.index(False)])
    is_whole = len(rows) == source.grid[1]
    made = [is_whole or (each is not None and each.reason in PRODUCTS) for each in several]
    return {
        at for at, (one, other) in enumerate(zip(is_sample, made, strict=True)) if one and other
    }


def _is_place_of_another(steps: Steps, state: Origins, row: int, place: int, whole: int) -> bool:
    """Whether a state at token `row` stands where a sequence has one that it has taken in."""
    (source,) = steps.sources.present(rows_of(state.first)[:1])
    (b, s), local = source.grid, row - source.start
    here = local % s + place * s if state.is_sample else local - local % s + place
    is_whole = whole == (b if state.is_sample else s)
    return is_whole and here != local and source.start + here in state.seen


def written(value: Origins, whole: Tensor, old: Tensor, new: Tensor, sources: Sources) -> Tensor:
    """The tokens of rows that were written over others, which had the tokens `old`.

    What was computed from two positions and is written to one of them belongs to that one. A
    state that has taken in more is refused there, if its own position has another row.

    Args:
        value: What was written, as one step.
        whole: The tokens of the tensor before.
        old: Those of the places, or of the whole tensor.
        new: What they have now.
        sources: The tokens of the pass.
    """
    if value.reason in PRODUCTS and bool(sources.is_sample(compact(value.first)).all()):
        tokens = compact(whole)
        is_beside = bool(((tokens >= 0) & ~sources.is_sample(tokens)).any())
        for each in (each for uses in value.chain.values() for each in uses if is_beside):
            each.is_lost = True
        return torch.where(new >= 0, SEVERAL, new) if is_beside else new
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
