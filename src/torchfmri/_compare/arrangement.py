"""Recognize values that both sides hold in another arrangement.

`pairing` asks here for two tensors in orders in which they may agree (rows of experts sorted, the
experts of a token by number), and in which order b keeps the axes of a. Rows are sorted by one
random projection, drawn with a fixed seed: both sides must use the same one, or equal rows would
not meet. A square weight has the same shape when it is transposed, and a batch with as many rows as
positions if time comes first, so the values are looked at too. Another arrangement to recognize is
another `yield`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from torchfmri._compare.causes import own_tensors
from torchfmri._compare.kinds import is_same
from torchfmri._compare.recording import (
    PARAMETERS,
    WHAT,
    Axes,
    RecordedPlace,
    RecordedRows,
    relative,
)
from torchfmri._compare.side import Partners, Side

_MOST_AXES = 4
_ALIKE = 0.5
"""Axes in another order count if the median row then differs by less than this, or, in equal
shapes, by less than this share of what it differs by as it is."""


def axes_of(both: Partners) -> Axes:
    """Return in which order b keeps the axes of a; empty if it keeps them alike, or if none fits.

    An implementation may keep channels first or last, time before the batch, or a weight the other
    way round, as Conv1D does. What the model itself returns in equal shapes is never turned.
    """
    if both.place.what == WHAT[PARAMETERS]:
        return (1, 0) if _is_transposed(both) else ()
    first, second = both.tensors
    if first is None or second is None or not first.ndim == second.ndim <= _MOST_AXES:
        return ()
    if first.shape != second.shape:
        orders = itertools.permutations(range(second.ndim))
        known = [each for each in orders if second.permute(each).shape == first.shape]
    else:
        time_first = both.place.layer and first.ndim > 2 and len(set(first.shape[:2])) == 1
        known = [(1, 0, *range(2, first.ndim))] if time_first and len(first) > 1 else []

    def gap(axes: Axes) -> float:
        one, two = both.rows(axes)
        assert one is not None
        assert two is not None
        return float(relative(one.values, two.values).median())

    best = min(known, key=gap, default=())
    most = _ALIKE if first.shape != second.shape else _ALIKE * gap(()) if best else 0.0
    return best if best and gap(best) < most else ()


def in_other_order(both: Partners) -> Iterator[tuple[RecordedRows, RecordedRows]]:
    """Yield two tensors in orders in which they may agree though they do not agree as they are.

    An implementation may sort the rows of tokens by expert, and may list the experts of a token,
    whose scores are nearly equal, in another order. What becomes of each token is compared further
    on.
    """
    a, b, place, partner = both
    first, second = both.tensors
    if first is None or second is None or place.what == WHAT[PARAMETERS]:
        return
    one, two = a.recording.as_rows(first, place.what), b.recording.as_rows(second, place.what)
    if one.values.shape != two.values.shape:
        return
    if one.grid is None and a.recording.grids and first.ndim == 2 and len(one.values) == 1:
        yield _sorted_rows(first), _sorted_rows(second)
    ours, theirs = _chosen(a, place, one), _chosen(b, partner, two)
    if ours is not None and theirs is not None:
        yield _by_expert(one, ours), _by_expert(two, theirs)


def _by_expert(rows: RecordedRows, chosen: Tensor) -> RecordedRows:
    return rows._replace(values=rows.values.gather(1, chosen.argsort(1)))


def _sorted_rows(tensor: Tensor) -> RecordedRows:
    """Return a table as one row, with its rows sorted by a random sum of their values."""
    table = tensor.detach().double().cpu()
    generator = torch.Generator().manual_seed(0)
    key = table @ torch.rand(table.shape[1], generator=generator, dtype=table.dtype, device="cpu")
    return RecordedRows(values=table[key.argsort()].reshape(1, -1), grid=None)


def _chosen(side: Side, place: RecordedPlace, rows: RecordedRows) -> Tensor | None:
    """Return the experts that a layer chose for each token, where it has a value for each."""
    for (layer, call, _), chosen in side.recording.choices().items():
        if (layer, call) == (place.layer, place.call) and chosen.shape == rows.values.shape:
            return chosen
    return None


def _is_transposed(both: Partners) -> bool:
    """Whether a parameter is kept transposed in b, as the weight of a Conv1D is in a Linear."""
    a, b, place, partner = both
    values = a.recording.value(place), b.recording.value(partner)
    shapes = [() if each is None else each.shape for each in values]
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
