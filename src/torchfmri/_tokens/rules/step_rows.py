"""Uses of the same parameters that follow each other within one step of a recurrence.

`Recurrences` asks how many of them belong to the step before and how many to the one after. None is
the answer wherever the uses of a recurrence do not all tell the same: then they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import SEVERAL
from torchfmri._tokens.rules.step_uses import StepUse


def uses_before_a_step(several: Sequence[StepUse]) -> int | None:
    """How many uses of a row that a step takes in belong to that step, w(w(h)) + x[:, t].

    Between two steps stand the uses after the one, as many as after the last step, and those before
    the other. None if rows differ, so that nothing tells how many these are.
    """
    between, after, first = set[int](), set[int](), set[int]()
    has_begun = any(each.begins for each in several)
    for each in several:
        if each.is_fixed or (each.before and not each.follows_step):
            continue
        row = row_of(each)
        if row[-1].shift is None or row[-1].is_fixed:
            after.add(len(row))
        elif each.follows_step:
            between.add(len(row))
        else:  # the state to begin with may have been made by one more
            starts = sum(use.is_start for use in row)
            first.add(len(row) - (each.begins if starts == len(row) else starts))
    is_on_state = any(each.is_on_state for each in several)
    if max(between | after | first, default=1) == 1:
        return int(is_on_state)
    if not (between or has_begun):
        return None if is_on_state else 0
    if len(between) > 1 or len(after) > 1:
        return None
    before = max(between or first, default=0) - max(after, default=0)
    return before if before >= 0 else None


def row_of(use: StepUse, most: int | None = None) -> list[StepUse]:
    """The uses that follow each other without a step, from this one on, `most` of them."""
    row = [use]
    while row[-1].is_direct and (most is None or len(row) < most):
        following = next((each for each in row[-1].after if not each.follows_step), None)
        if following is None:
            break
        row.append(following)
    return row


def moved(use: StepUse, last: StepUse) -> Tensor:
    """The tokens of a use at the step that takes in the last one of its row."""
    shift = torch.zeros(1, dtype=torch.int64, device=use.own.device)
    seen: list[StepUse] = []
    following: StepUse | None = last
    while following is not None and following.shift is not None and following not in seen:
        seen.append(following)
        shift = shift + following.shift
        following = next((each for each in following.through if each.is_on_state), None)
    if bool((shift == shift[0]).all()):  # the rows may have another shape since
        shift = shift[:1]
    own = use.own
    if len(shift) not in (1, own.shape[0] if own.ndim else 1):
        return torch.full_like(own, SEVERAL)
    shift = shift.view(-1, *[1] * (own.ndim - 1)) if own.ndim else shift[0]
    return torch.where(own >= 0, own + shift, own)
