"""The origin of a difference: the innermost layer with equal inputs and different outputs.

The first tensor that differs is that of a layer with a name. If the layer was given something that
differs already, though all layers before it agree, the code of a layer around it did it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._compare.difference import FACTOR, Pair
from torchfmri._compare.recording import BACKWARD, FORWARD, Recording, relative
from torchfmri._compare.repetition import LEAST_UNITS
from torchfmri._compare.run import Run, record, record_rounded
from torchfmri._compare.side import Side
from torchfmri._model import named_layers, whole_restorations
from torchfmri._torch import flatten

_LATER_LAYERS = 12
_ALIKE = 0.7
"""The cosine from which on the difference of an input repeats where that of the output does."""


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
        if wrong:
            return min(wrong, key=lambda each: -each.count("."))
        # Code between layers did it, of the module around them whose own gradient agrees.
        differing = {each.place.layer for each in pairs if each.differs}
        outer = (each for each in _around(layer)[1:] if each in before)
        return next((each for each in outer if each not in differing), layer)
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


def _takes_gradients(side: Side, layer: str) -> bool:
    """Whether a layer is given a tensor that requires grad; if not, the code around it cut it."""
    assert side.run is not None
    found = False

    def look(_: nn.Module, arguments: Any, keywords: Any) -> None:
        nonlocal found
        found |= any(each.tensor.requires_grad for each in flatten((arguments, keywords)))

    module = named_layers(side.run.model)[layer]
    with whole_restorations(), ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
        record(side.run, layers=[layer])
    return found


def _agreeing(
    pair: Pair, layers: Sequence[str], a: Side, b: Side, names: dict[str, str], what: str
) -> dict[str, bool]:
    """Return for each layer whether its inputs, or the gradients of its inputs, agree."""
    if not layers:
        return {}
    recorded = [*_recorded(a, layers, what), *_recorded(b, [names[each] for each in layers], what)]
    found: dict[str, bool] = {}
    for layer in layers:
        at = [(layer, each) for each in recorded[:2]] + [(names[layer], e) for e in recorded[2:]]
        if not all(side.inspection[name].calls for name, side in at):
            continue
        given = [_inputs(side.tensors(name, pair.place.call, what)) for name, side in at]
        found[layer] = True
        if what == "input_gradients" and bool(given[0]) != bool(given[2]):
            cut, name = (b, names[layer]) if given[0] else (a, layer)
            found[layer] = not _takes_gradients(cut, name)
        for several in _matched(given):
            tables = [
                side.as_rows(each, what).values for (_, side), each in zip(at, several, strict=True)
            ]
            if len({each.shape for each in tables}) == 1 and _differs(tables, pair):
                found[layer] = False
    return found


def _recorded(side: Side, layers: Sequence[str], what: str) -> tuple[Recording, Recording]:
    """Record what some layers are given, and again with every layer rounding anew."""
    assert side.run is not None
    watched = (what, "gradients") if "gradients" in what else (what,)
    passes = (
        record(side.run, layers=layers, what=watched),
        record_rounded(side.run, None, layers=layers, what=watched),
    )
    found = tuple(Recording(each, parts=side.recording.parts) for each in passes)
    for each in found:
        each.grids = side.recording.grids
    return found[0], found[1]


def _differs(tables: Sequence[Tensor], pair: Pair) -> bool:
    """Whether a layer is given something that differs, where its output does.

    An input that passes the difference on differs by as much as the output, in units of noise. It
    counts from half of that on: just below what counts alone, it would be taken for noise.

    Args:
        tables: The rows of a, of a with new rounding, of b, and of b with new rounding.
        pair: The output, or its gradient.
    """
    one, one_again, two, two_again = tables
    rows = torch.from_numpy(pair.counting)
    if len(rows) == len(one):  # few may differ, and the others would hide them
        one, one_again, two, two_again = (each[rows] for each in tables)
    if pair.repeats:
        before, after = two - one, two_again - one_again
        return float((before * after).sum()) > _ALIKE * float(before.norm() * after.norm())
    gap = float(relative(one, two).max()) if len(one) else 0.0
    if math.isnan(pair.spread_a) and math.isnan(pair.spread_b):
        return gap > pair.threshold
    noise = max(
        float(relative(tables[at], tables[at + 1]).max()) if len(tables[at]) else 0.0
        for at in (0, 2)
    )
    allowed = min(FACTOR, pair.worst / pair.noise * FACTOR / 2)
    return gap > max(allowed * noise, LEAST_UNITS * torch.finfo(torch.float32).eps)


def _matched(given: Sequence[dict[str, Tensor]]) -> list[tuple[Tensor, ...]]:
    """Match the inputs of a, twice, and of b, twice: by path, or by order in a renamed port."""
    if any(path in given[2] for path in given[0]):
        common = [path for path in given[0] if all(path in each for each in given)]
        return [tuple(each[path] for each in given) for path in common]
    return list(zip(*(each.values() for each in given), strict=False))


def _inputs(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers that a layer is given, by path, without masks.

    Whole numbers count for a layer that is given nothing else, such as a table of positions. Beside
    others they may be choices of an earlier layer, which rounding can change.
    """
    found = {p: x for p, x in given.items() if "mask" not in p and x.dtype != torch.bool}
    floating = {path: x for path, x in found.items() if x.is_floating_point()}
    return floating or found
