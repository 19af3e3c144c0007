"""The tokens that two sides were given: whether they are the same, and their texts.

`entry_point` asks before anything is compared. Two sides that were given other tokens raise an
error, because every layer would differ. Only other padding is allowed: then `kept` of both sides
becomes the positions that are tokens on both, and a note says how many were left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torchfmri._compare.side import Side
from torchfmri._torch import flatten
from torchfmri.exceptions import InspectionError


def check_tokens(one: Side, two: Side, tokenizer: Any) -> None:
    """Raise an error if the two sides were given different tokens."""
    grids = [side.recording.grids[0] for side in (one, two) if side.recording.grids]
    if len(grids) < 2 or not all(grid.token_ids for grid in grids):
        return
    a, b = (grid.token_ids for grid in grids)
    if a == b or _other_padding(one, two):
        return
    one_at, two_at = (dict(zip(each.places, each.token_ids, strict=True)) for each in grids)
    place = min(each for each in {*one_at, *two_at} if one_at.get(each) != two_at.get(each))

    def said(token: int | None) -> str:
        if token is None:
            return "nothing more"
        text = f" {tokenizer.decode([token])!r}" if tokenizer is not None else ""
        return f"token {token}{text}"

    raise InspectionError(
        f"The two were given other tokens: at position {place[1]} of row {place[0]} a has "
        f"{said(one_at.get(place))} and b has {said(two_at.get(place))} ({len(a)} and {len(b)} "
        "tokens in all). Run both on the same token ids; if the text is the same, the tokenizers "
        "are not."
    )


def _other_padding(one: Side, two: Side) -> bool:
    """Whether only the padding differs; then keep the positions that are tokens on both sides."""
    a, b = one.recording.grids[0], two.recording.grids[0]
    if a.ids is None or b.ids is None or not torch.equal(a.ids, b.ids):
        return False
    kept = a.kept & b.kept
    for side, grid in ((one, a), (two, b)):
        if more := int((grid.kept & ~kept).sum()):
            side.notes.append(
                f"takes {more} positions for tokens that are padding on the other side"
            )
        side.recording.grids[0] = replace(grid, kept=kept)
    return True


def are_given_alike(one: Side, two: Side) -> bool:
    """Whether both are given tensors of one shape without token numbers.

    Then the tokens of both are the same, though layers may keep them on other axes.
    """
    if any(grid.ids is not None for side in (one, two) for grid in side.recording.grids):
        return False
    shapes = [
        [each.tensor.shape for each in flatten(side.run.data)] for side in (one, two) if side.run
    ]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def token_texts(one: Side, two: Side, tokenizer: Any) -> list[str]:
    for side in (one, two):
        if side.tokens:
            return side.tokens
        grids = side.recording.grids
        if tokenizer is not None and grids and grids[0].token_ids:
            return [tokenizer.decode([each]) for each in grids[0].token_ids]
    return []
