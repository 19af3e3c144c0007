"""Where a difference comes from: the innermost layer that is given the same and does another thing.

The first tensor that differs is that of a layer with a name. If the layer was given something that
differs already, though all layers before it agree, the code of a layer around it did it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchfmri._compare.difference import Pair
from torchfmri._compare.recording import BACKWARD, FORWARD, Recording, relative
from torchfmri._compare.run import record
from torchfmri._compare.side import Side

_LATER_LAYERS = 12


def origin_of(pair: Pair, pairs: Sequence[Pair], a: Side, b: Side, names: dict[str, str]) -> str:
    """The layer that a difference comes from; that of the pair itself where it cannot be told.

    Args:
        pair: The first that differs.
        pairs: All pairs of that direction, in order.
        a: One side.
        b: The other.
        names: Layer of a -> layer of b.
    """
    layer = pair.place.layer
    if a.run is None or b.run is None or a.run.is_compiled or b.run.is_compiled:
        return layer
    if pair.direction == FORWARD:
        around = [each for each in _around(layer) if each in names]
        same = _agreeing(pair, around, a, b, names, "inputs")
        return next((each for each in around if same.get(each)), around[-1] if around else layer)
    if pair.direction == BACKWARD:
        before = [each.place.layer for each in pairs[: pairs.index(pair)]][-_LATER_LAYERS:]
        later = list(dict.fromkeys(reversed(before)))
        same = _agreeing(pair, later, a, b, names, "input_gradients")
        wrong = [each for each in later if same.get(each) is False]
        return min(wrong, key=lambda each: -each.count("."), default=layer)
    return layer


def _around(layer: str) -> list[str]:
    """The layer, what it is in, and so on up to the model."""
    parts = layer.split(".") if layer else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _agreeing(
    pair: Pair, layers: Sequence[str], a: Side, b: Side, names: dict[str, str], what: str
) -> dict[str, bool]:
    """Whether what goes into layers (or their gradients with respect to it) agrees."""
    if not layers:
        return {}
    assert a.run is not None
    assert b.run is not None
    watched = (what, "gradients") if "gradients" in what else (what,)
    one = record(a.run, layers=layers, what=watched)
    two = record(b.run, layers=[names[each] for each in layers], what=watched)
    sides = Recording(one), Recording(two)
    found: dict[str, bool] = {}
    for layer in layers:
        gaps = _gaps(layer, names[layer], pair.place.call, sides, what)
        if gaps is not None:  # a layer that is given whole numbers alone is an origin itself
            found[layer] = max(gaps, default=0.0) <= pair.threshold
    return found


def _gaps(
    layer: str, partner: str, call: int, sides: tuple[Recording, Recording], what: str
) -> list[float] | None:
    calls = [
        side.inspection[name].calls for side, name in zip(sides, (layer, partner), strict=True)
    ]
    if not all(calls):
        return None
    ours, theirs = (each[min(call, len(each) - 1)] for each in calls)
    values = dict(zip(theirs.elements(what), theirs.values(what), strict=False))
    found = []
    for path, value in zip(ours.elements(what), ours.values(what), strict=False):
        other = values.get(path)
        if value is None or other is None or "mask" in path:
            continue
        if not value.dtype.is_floating_point:
            continue
        rows = [
            side.as_rows(each.tensor, what)
            for side, each in zip(sides, (value, other), strict=True)
        ]
        if rows[0].values.shape == rows[1].values.shape:
            found.append(float(relative(rows[0].values, rows[1].values).max()))
    return found
