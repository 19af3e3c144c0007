"""The origin of a difference: the innermost layer with equal inputs and different outputs.

The first tensor that differs is that of a layer with a name. If the layer was given something that
differs already, though all layers before it agree, the code of a layer around it did it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._compare.difference import FACTOR, Kind, Pair
from torchfmri._compare.kinds import is_same, kinds_of
from torchfmri._compare.recording import BACKWARD, FORWARD, Recording, relative
from torchfmri._compare.repetition import LEAST_UNITS
from torchfmri._compare.run import Run, record, record_rounded
from torchfmri._compare.side import Side
from torchfmri._model import named_layers, whole_restorations
from torchfmri._torch import flatten

_LATER_LAYERS = 12
_ALIKE = 0.7
"""The cosine from which on the difference of an input repeats where that of the output does."""


Spot = tuple[str, int]
"""One call of a layer: a block that a loop calls three times has three."""


class Origin(NamedTuple):
    """Where a difference comes from.

    Attributes:
        layer: The layer.
        kinds: What the tensors that this layer is given, or gives back, tell about it.
    """

    layer: str
    kinds: tuple[Kind, ...] = ()


def origin_of(pair: Pair, pairs: Sequence[Pair], a: Side, b: Side, names: dict[str, str]) -> Origin:
    """Return the layer that a difference comes from; the pair's own layer if that is not known.

    Args:
        pair: The first that differs.
        pairs: All pairs of that direction, in order.
        a: One side.
        b: The other.
        names: Layer of a -> layer of b.
    """
    layer = pair.place.layer
    if a.run is None or b.run is None:
        return Origin(layer)
    if pair.direction == FORWARD:
        seen = _spot(pair)
        calls = _calls_around(seen, [_spot(each) for each in reversed(pairs)])
        around = [(each, calls.get(each, seen[1])) for each in _around(layer) if each in names]
        given = _Given(a, b, around, names, "inputs")
        same = _agreeing(pair, given, around)
        # Nothing agrees where the data differ: the first layer that shows it is what can be said.
        origin = next((each for each in around if same.get(each)), seen)
        found = [*given.mask_kinds(origin, pair)]
        if origin != seen:  # what the code around it computed is what it was given
            found += given.value_kinds(seen, pair)
        layer = origin[0]
        return Origin(layer, tuple(found))
    if pair.direction == BACKWARD:
        return _origin_backward(pair, pairs, a, b, names)
    return Origin(layer)


def _origin_backward(
    pair: Pair, pairs: Sequence[Pair], a: Side, b: Side, names: dict[str, str]
) -> Origin:
    assert a.run is not None
    assert b.run is not None
    seen, earlier = _spot(pair), pairs[: pairs.index(pair)]
    if pair.partner is None and (cut := _cut_on_one_side(a.run, b.run, names)) is not None:
        return Origin(cut)
    before = {_spot(each): None for each in earlier}
    # What a layer returns beside its output, it may use itself: scores of experts, attention. Then
    # the gradients of layers inside it may have arrived before.
    if any(_spot(p) == seen and not p.differs for p in pairs):
        rest = (p for p in pairs[len(earlier) :] if _spot(p) != seen)
        agreeing = itertools.takewhile(lambda p: not p.differs, rest)
        before |= dict.fromkeys([*(_spot(p) for p in agreeing), seen])
    order = list(dict.fromkeys([*before, seen]))
    nearest = list(reversed(before))[:_LATER_LAYERS]
    # A block has more layers than that, and its own gradient arrives before theirs.
    later = list(dict.fromkeys(o for n in nearest for o in _enclosing(n, order) if o in before))
    given = _Given(a, b, later, names, "input_gradients")
    same = _agreeing(pair, given, later)
    wrong = [each for each in later if same.get(each) is False]
    if wrong:
        spot = min(wrong, key=lambda each: -each[0].count("."))
        # The layers inside it may be further away: those that read what an encoder returned.
        while inside := [
            each for each in before if each not in same and _enclosing(each, order)[1:2] == [spot]
        ]:
            known = _Given(a, b, inside, names, "input_gradients")
            same |= dict.fromkeys(inside, True) | _agreeing(pair, known, inside)
            wrong = [each for each in inside if not same[each]]
            if not wrong:
                break
            spot, given = wrong[0], known
        return Origin(spot[0], tuple(given.value_kinds(spot, pair)))
    # Code between layers did it, of the module around them whose own gradient agrees.
    differing = {_spot(each) for each in pairs if each.differs}
    outer = (each for each in _enclosing(seen, order)[1:] if each in before)
    return Origin(next((each for each in outer if each not in differing), seen)[0])


def _spot(pair: Pair) -> Spot:
    return pair.place.layer, pair.place.call


def _calls_around(spot: Spot, order: Sequence[Spot]) -> dict[str, int]:
    """Return which call of each layer is the one around a call, in an order from outside in."""
    return dict(reversed(order)) | dict(order[: order.index(spot) + 1])


def _enclosing(spot: Spot, order: Sequence[Spot]) -> list[Spot]:
    """Return a call and those around it; `order` is the order in which gradients arrive."""
    calls = _calls_around(spot, order)
    return [(each, calls[each]) for each in _around(spot[0]) if each in calls]


def _around(layer: str) -> list[str]:
    """Return the layer and every module around it, up to the model itself."""
    parts = layer.split(".") if layer else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


class _Returned(NamedTuple):
    """What one call of a layer returned.

    Attributes:
        could: Whether a gradient could reach it: through an input, or to a parameter inside it.
        has: Path of a tensor -> whether it requires grad.
    """

    could: bool
    has: dict[str, bool]


def _cut_on_one_side(a: Run, b: Run, names: Mapping[str, str]) -> str | None:
    """Return the first layer that returns a tensor without a gradient on one side only.

    A layer to which no gradient can lead does not count: the code around it cut it off.
    """
    theirs = _returned(b)
    for (layer, call), ours in _returned(a).items():
        other = theirs.get((names.get(layer, layer), call))
        for path in ours.has if other is not None else ():
            if other is None or path not in other.has or ours.has[path] == other.has[path]:
                continue
            if (other if ours.has[path] else ours).could:
                return layer
    return None


def _returned(run: Run) -> dict[tuple[str, int], _Returned]:
    """(layer, call) -> what it returned, in the order in which layers finish."""
    found: dict[tuple[str, int], _Returned] = {}
    counts: dict[str, int] = {}
    with whole_restorations(), ExitStack() as stack:
        for layer, module in named_layers(run.model).items():

            def look(
                module: nn.Module, arguments: Any, keywords: Any, output: Any, layer: str = layer
            ) -> None:
                given = flatten((arguments, keywords))
                could = any(each.tensor.requires_grad for each in given)
                could |= any(each.requires_grad for each in module.parameters())
                values = [e for e in flatten(output) if e.tensor.is_floating_point()]
                call = counts[layer] = counts.get(layer, -1) + 1
                has = {each.path: each.tensor.requires_grad for each in values}
                found[layer, call] = _Returned(could=could, has=has)

            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        record(run, layers=[next(iter(named_layers(run.model)))], eager=True)
    return found


def _taken(side: Side, layer: str, call: int) -> set[str]:
    """Return the paths of what a call is given that requires grad; all else was cut before it."""
    assert side.run is not None
    found: list[set[str]] = []

    def look(_: nn.Module, arguments: Any, keywords: Any) -> None:
        elements = [*flatten(arguments), *flatten(keywords)]
        found.append({each.path for each in elements if each.tensor.requires_grad})

    module = named_layers(side.run.model)[layer]
    with whole_restorations(), ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
        record(side.run, layers=[layer], eager=True)
    return found[min(call, len(found) - 1)]


class _Given:
    """What some layers are given, or the gradients of it: of a and b, and both with new rounding.

    Args:
        a: One side.
        b: The other.
        spots: Calls of layers of a.
        names: Layer of a -> layer of b.
        what: inputs or input_gradients.
    """

    def __init__(
        self, a: Side, b: Side, spots: Sequence[Spot], names: Mapping[str, str], what: str
    ) -> None:
        self.what, self.layers = what, list(dict.fromkeys(layer for layer, _ in spots))
        self.sides, self._names = (a, b), names
        self.recorded: list[Recording] = []
        if self.layers:
            theirs = [names[each] for each in self.layers]
            self.recorded = [*_recorded(a, self.layers, what), *_recorded(b, theirs, what)]

    def at(self, spot: Spot) -> list[dict[str, Tensor]]:
        """Return it by path: of a, of a with new rounding, of b, of b with new rounding."""
        layer, call = spot
        names = [layer, layer, self._names[layer], self._names[layer]]
        both = list(zip(names, self.recorded, strict=True))
        if not all(side.inspection[name].calls for name, side in both):
            return []
        return [side.tensors(name, call, self.what) for name, side in both]

    def cut(self, spot: Spot, given: Sequence[dict[str, Tensor]]) -> bool:
        """Whether a call gives back no gradient on one side for something that requires it."""
        (layer, call), one, two = spot, given[0], given[2]
        for side, name, missing in (
            (self.sides[1], self._names[layer], one.keys() - two.keys()),
            (self.sides[0], layer, two.keys() - one.keys()),
        ):
            if missing and missing & _taken(side, name, call):
                return True
        return False

    def differ(self, several: tuple[Tensor, ...], pair: Pair) -> bool:
        """Whether the tensors of one path differ, also with the axes of b in the order of a."""
        return self._differ(several, pair) and not (
            len(pair.axes) == several[2].ndim > 2
            and not self._differ((*several[:2], *(x.permute(pair.axes) for x in several[2:])), pair)
        )

    def _differ(self, several: tuple[Tensor, ...], pair: Pair) -> bool:
        both = zip(self.recorded, several, strict=True)
        tables = [side.as_rows(each, self.what).values for side, each in both]
        return len({each.shape for each in tables}) == 1 and _differs(tables, pair)

    def mask_kinds(self, spot: Spot, pair: Pair) -> Iterator[Kind]:
        """Yield the kind `mask` if a layer is given another mask; inputs leave masks out."""
        layer, (one, two) = spot[0], (side.recording for side in self.sides)
        if layer not in self.layers or one.layout != two.layout:
            return
        given = self.at(spot)
        masks = [{p: x for p, x in each.items() if _is_mask(p, x)} for each in given[::2]]
        for path in dict.fromkeys([*masks[0], *masks[1]] if masks else ()):
            mask, other = masks[0].get(path), masks[1].get(path)
            if mask is None or other is None:
                only = "b" if mask is None else "a"
                yield Kind("mask", f"{layer!r} is given {path!r} in {only} only")
            elif (mask.dtype, mask.shape) == (other.dtype, other.shape) and not is_same(
                mask, other
            ):
                count = f"{int((mask != other).sum()):,} of {mask.numel():,} values"
                yield Kind("mask", f"{path!r} that {layer!r} is given differs in {count}")

    def value_kinds(self, spot: Spot, pair: Pair) -> list[Kind]:
        """Return how the first that differs of what a layer is given, or gives back, differs."""
        for several in _matched([_inputs(each) for each in self.at(spot)]):
            if self.differ(several, pair):
                rows = [self.recorded[at].as_rows(several[at], self.what) for at in (0, 2)]
                dtypes = {several[at].dtype for at in (0, 2)}
                return kinds_of(rows[0], rows[1], pair.threshold, dtypes)
        return []


def _agreeing(pair: Pair, given: _Given, spots: Sequence[Spot]) -> dict[Spot, bool]:
    """Return for each call whether its inputs, or the gradients of its inputs, agree."""
    found: dict[Spot, bool] = {}
    for spot in spots:
        known = given.at(spot)
        if not known:
            continue
        if given.what == "input_gradients" and given.cut(spot, known):
            found[spot] = False
            continue
        found[spot] = True
        for several in _matched([_inputs(each) for each in known]):
            if given.differ(several, pair):
                found[spot] = False
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
    if not given:
        return []
    if any(path in given[2] for path in given[0]):
        common = [path for path in given[0] if all(path in each for each in given)]
        return [tuple(each[path] for each in given) for path in common]
    return list(zip(*(each.values() for each in given), strict=False))


def _is_mask(path: str, x: Tensor) -> bool:
    return "mask" in path or x.dtype == torch.bool


def _inputs(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers that a layer is given, by path, without masks.

    Whole numbers count for a layer that is given nothing else, such as a table of positions. Beside
    others they may be choices of an earlier layer, which rounding can change.
    """
    found = {p: x for p, x in given.items() if not _is_mask(p, x)}
    floating = {p: x for p, x in found.items() if x.is_floating_point() or x.is_complex()}
    return floating or found
