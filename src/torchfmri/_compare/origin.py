"""The origin of a difference: the innermost layer with equal inputs and different outputs.

The first tensor that differs is that of a layer with a name. If the layer was given something that
differs already, though all layers before it agree, the code of a layer around it did it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._compare.difference import Pair
from torchfmri._compare.recording import BACKWARD, FORWARD, Recording, relative
from torchfmri._compare.run import Run, record
from torchfmri._compare.side import Side
from torchfmri._model import named_layers, whole_restorations
from torchfmri._records import Call, Value
from torchfmri._torch import flatten

_LATER_LAYERS = 12


def origin_of(pair: Pair, pairs: Sequence[Pair], a: Side, b: Side, names: dict[str, str]) -> str:
    """Return the layer that a difference comes from; the pair's own layer if that is not known.

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
        # Nothing agrees where the data differ: the first layer that shows it is what can be said.
        return next((each for each in around if same.get(each)), layer)
    if pair.direction == BACKWARD:
        if pair.partner is None and any(
            _cuts_gradients(run, name, pair)
            for run, name in ((a.run, layer), (b.run, names[layer]))
        ):
            return layer
        before = {each.place.layer: None for each in pairs[: pairs.index(pair)]}
        nearest = list(reversed(before))[:_LATER_LAYERS]
        # A block has more layers than that, and its own gradient arrives before theirs.
        later = list(dict.fromkeys(o for n in nearest for o in _around(n) if o in before))
        same = _agreeing(pair, later, a, b, names, "input_gradients")
        wrong = [each for each in later if same.get(each) is False]
        return min(wrong, key=lambda each: -each.count("."), default=layer)
    return layer


def _around(layer: str) -> list[str]:
    """Return the layer and every module around it, up to the model itself."""
    parts = layer.split(".") if layer else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _cuts_gradients(run: Run, layer: str, pair: Pair) -> bool:
    """Whether a layer returns a tensor that has no gradient, though it could have one."""
    module, found = named_layers(run.model)[layer], False

    def look(_: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        nonlocal found
        given = [each.tensor for each in flatten((arguments, keywords))]
        own = [each for each in module.parameters(recurse=False) if each.requires_grad]
        could = bool(own) or any(each.requires_grad for each in given)
        returned = [each.tensor for each in flatten(output) if each.path == pair.place.element]
        found |= could and any(not each.requires_grad for each in returned)

    with whole_restorations(), ExitStack() as stack:
        stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        record(run, layers=[layer])
    return found


def _agreeing(
    pair: Pair, layers: Sequence[str], a: Side, b: Side, names: dict[str, str], what: str
) -> dict[str, bool]:
    """Return for each layer whether its inputs, or the gradients of its inputs, agree."""
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
        if gaps is not None:
            found[layer] = all(_size(each, pair) <= pair.threshold for each in gaps)
    return found


def _size(gaps: Tensor, pair: Pair) -> float:
    """Return the distance of rows, measured as for the pair itself: the worst row, or the rms."""
    if not len(gaps):
        return 0.0
    return float(gaps.square().mean().sqrt() if pair.repeats else gaps.max())


def _gaps(
    layer: str, partner: str, call: int, sides: tuple[Recording, Recording], what: str
) -> list[Tensor] | None:
    """Return the relative differences of a layer's inputs, row by row; None without calls."""
    calls = [
        side.inspection[name].calls for side, name in zip(sides, (layer, partner), strict=True)
    ]
    if not all(calls):
        return None
    ours, theirs = (each[min(call, len(each) - 1)] for each in calls)
    found = []
    for value, other in _matched_values(ours, theirs, what):
        rows = [
            side.as_rows(each.tensor, what)
            for side, each in zip(sides, (value, other), strict=True)
        ]
        if rows[0].values.shape == rows[1].values.shape:
            found.append(relative(rows[0].values, rows[1].values))
    return found


def _matched_values(ours: Call, theirs: Call, what: str) -> list[tuple[Value, Value]]:
    """Match the tensors of two calls by path, or by order if a port renamed its arguments."""
    one, two = _inputs(ours, what), _inputs(theirs, what)
    if common := [path for path in one if path in two]:
        return [(one[path], two[path]) for path in common]
    return list(zip(one.values(), two.values(), strict=False))


def _inputs(call: Call, what: str) -> dict[str, Value]:
    """Return the numbers that a layer is given, by path, without masks.

    Whole numbers count for a layer that is given nothing else, such as a table of positions. Beside
    others they may be choices of an earlier layer, which rounding can change.
    """
    found = {
        path: value
        for path, value in zip(call.elements(what), call.values(what), strict=False)
        if value is not None and "mask" not in path and value.dtype != torch.bool
    }
    floating = {path: value for path, value in found.items() if value.dtype.is_floating_point}
    return floating or found
