"""Recognize values that both sides hold in another arrangement.

`pairing` asks three things here: whether the rows of a tensor have no fixed order (those of
experts), the two tensors with their rows sorted, and whether b keeps a weight transposed. The rows
are sorted by one random projection, drawn with a fixed seed: both sides must use the same one, or
equal rows would not meet. A square weight has the same shape when it is transposed, so
`is_transposed` looks at the values too. Another arrangement to recognize is another function here
and a branch in `pairing._pair`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchfmri._compare.causes import own_tensors
from torchfmri._compare.kinds import is_same
from torchfmri._compare.recording import PARAMETERS, WHAT, RecordedPlace
from torchfmri._compare.side import Side


def has_own_order(side: Side, place: RecordedPlace) -> bool:
    """Whether the rows of a tensor are neither tokens nor samples, such as those of experts."""
    value, grids = side.recording.value(place), side.recording.grids
    if value is None or not grids or len(value.shape) != 2 or place.what == WHAT[PARAMETERS]:
        return False
    rows = side.recording.rows(place)
    return rows is not None and rows.grid is None and len(rows.values) == 1 < value.shape[0]


def in_order(
    a: Side, b: Side, place: RecordedPlace, partner: RecordedPlace
) -> tuple[Tensor, Tensor] | None:
    """Return both tensors with their rows sorted, as one implementation may sort them by expert.

    If they hold the same rows, they agree: what becomes of each token is compared further on.
    """
    found = []
    for side, each in ((a.recording, place), (b.recording, partner)):
        value, rows = side.value(each), side.rows(each)
        if value is None or rows is None:
            return None
        table = rows.values.view(value.shape)
        generator = torch.Generator().manual_seed(0)
        key = table @ torch.rand(
            table.shape[1], generator=generator, dtype=table.dtype, device="cpu"
        )
        found.append(table[key.argsort()].reshape(1, -1))
    return found[0], found[1]


def is_transposed(a: Side, b: Side, place: RecordedPlace, partner: RecordedPlace) -> bool:
    """Whether a parameter is kept transposed in b, as the weight of a Conv1D is in a Linear."""
    if place.what != WHAT[PARAMETERS]:
        return False
    shapes = [
        each.shape if each is not None else ()
        for each in (a.recording.value(place), b.recording.value(partner))
    ]
    if len(shapes[0]) != 2 or shapes[0] != shapes[1][::-1]:
        return False
    held = [
        own_tensors(side.modules[at.layer]).get(at.element)
        for side, at in ((a, place), (b, partner))
        if at.layer in side.modules
    ]
    if len(held) < 2 or held[0] is None or held[1] is None:
        return shapes[0] != shapes[1]
    return is_same(held[0], held[1].T) and not is_same(held[0], held[1])
