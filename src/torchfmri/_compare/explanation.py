"""Collect the `Kind`s of the first difference, the surest first.

`entry_point` calls `explain` once for the first direction that differs. The tests themselves are in
`causes` (modules), `choices` (routers), `changes` (data), `matching` (layers without a partner),
`origin` and `kinds` (values); this file only decides which of them apply. Facts about the modules
must come before guesses from values, because users read the first kind as the reason. A new kind
belongs in one of those files and in the table of `docs/compare.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchfmri._compare.causes import (
    causes_of,
    dropout_kinds,
    mode_kinds,
    replaced_classes,
    tensor_kinds,
    tied_kinds,
    transposing_classes,
)
from torchfmri._compare.changes import changes_of, data_changes
from torchfmri._compare.choices import routing_kind
from torchfmri._compare.difference import Kind, Pair
from torchfmri._compare.kinds import kinds_of
from torchfmri._compare.matching import Matching, alone_before, missing_layers, other_order
from torchfmri._compare.origin import Origin
from torchfmri._compare.recording import BACKWARD, FORWARD
from torchfmri._compare.side import Partners, Side


def explain(
    pair: Pair, origin: Origin, matching: Matching, one: Side, two: Side
) -> tuple[Kind, ...]:
    """Return the kinds of the first difference, the surest first.

    Args:
        pair: The tensor that is the first to differ.
        origin: Where the difference comes from.
        matching: Which layers are partners.
        one: Side a.
        two: Side b.
    """
    found: list[Kind] = []
    layer, modules_a, modules_b = origin.layer, one.modules, two.modules
    partner = matching.pairs.get(layer, layer)
    if one.run is not None and two.run is not None and pair.direction != BACKWARD:
        tied = tied_kinds(one.run.model, two.run.model, matching.pairs)
        found += [tied[layer]] if layer in tied else []
    seen = pair.place.layer if pair.direction == FORWARD else None
    routing = routing_kind(one.recording, two.recording, matching.pairs, seen)
    found += [routing] if routing is not None else []
    if one.is_compiled or two.is_compiled:  # no layer in it can be told to be the origin
        found += [
            Kind(each.name, str(each)) for each in changes_of(one.run, two.run, matching.pairs)
        ]
    elif pair.direction == FORWARD:
        if not matching.doubt and modules_a and modules_b:
            found += missing_layers(modules_a, modules_b, matching, layer)
        if layer != pair.place.layer:
            found += other_order(one.recording, two.recording, matching, layer)
        if not any(side.run is not None and side.run.hidden for side in (one, two)):
            found += alone_before(one.recording, two.recording, matching, pair.place, layer)
    if layer in modules_a and partner in modules_b:
        others = {each: matching.pairs[each] for each in matching.pairs if each != layer}
        turned = transposing_classes(modules_a, modules_b, others)
        replaced = replaced_classes(modules_a, modules_b, matching.pairs)
        found += causes_of(modules_a[layer], modules_b[partner], turned, replaced)
        modes = mode_kinds(modules_a[layer], modules_b[partner])
        found += modes or dropout_kinds(modules_a[layer], modules_b[partner])
        found += _uncalled_kinds(layer, matching, one, two)
    if one.run is not None and two.run is not None:
        found += [Kind(each.name, each.text) for each in data_changes(one.run, two.run)]
    found += origin.kinds
    if pair.partner is not None and not any(each.name != "mask" for each in origin.kinds):
        a, b = Partners(one, two, pair.place, pair.partner).rows(pair.axes)
        if a is not None and b is not None:
            dtypes = {one.recording.dtype(pair.place), two.recording.dtype(pair.partner)}
            found += kinds_of(a, b, pair.threshold, dtypes)
    return tuple(dict.fromkeys(found))


def _uncalled_kinds(layer: str, matching: Matching, one: Side, two: Side) -> Iterator[Kind]:
    """Yield how the weights of layers differ that a layer uses as such, without calling them."""
    partner = matching.pairs.get(layer, layer)
    called = [
        {each.layer for each in side.recording.inspection.values() if each.calls}
        for side in (one, two)
    ]
    for each, module in one.modules.items():
        name = each.removeprefix(f"{layer}.")
        theirs = matching.pairs.get(each, f"{partner}.{name}")
        if not layer or name == each or (each in called[0] and theirs in called[1]):
            continue
        other = two.modules.get(theirs)
        for _, kind in tensor_kinds(module, other) if other is not None else ():
            yield Kind(kind.name, f"{name}.{kind.text}")
