"""Collect the `Kind`s of the first difference, the surest first.

`entry_point` calls `explain` once for the first direction that differs. The tests themselves are in
`causes` (modules), `choices` (routers), `changes` (data), `matching` (layers without a partner),
`origin` and `kinds` (values); this file only decides which of them apply. Facts about the modules
must come before guesses from values, because users read the first kind as the reason. A new kind
belongs in one of those files and in the table of `docs/compare.md`.
"""

from __future__ import annotations

import torch

from torchfmri._compare.causes import causes_of, mode_kinds, tensor_kinds, tied_kinds
from torchfmri._compare.changes import data_changes
from torchfmri._compare.choices import routing_kind
from torchfmri._compare.difference import Kind, Pair
from torchfmri._compare.kinds import kinds_of
from torchfmri._compare.matching import Matching, missing_layers, unmatched_before
from torchfmri._compare.origin import Origin
from torchfmri._compare.recording import BACKWARD, FORWARD, PARAMETERS
from torchfmri._compare.side import Side


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
    if one.run is not None and two.run is not None and pair.direction == PARAMETERS:
        tied = tied_kinds(one.run.model, two.run.model, matching.pairs)
        found += [tied[layer]] if layer in tied else []
    seen = pair.place.layer if pair.direction == FORWARD else None
    routing = routing_kind(one.recording, two.recording, matching.pairs, pair.place.layer, seen)
    found += [routing] if routing is not None else []
    if pair.direction == FORWARD:
        if not matching.doubt:
            found += missing_layers(modules_a, modules_b, matching, layer)
        elif layer != pair.place.layer:
            found += unmatched_before(one.recording, two.recording, matching, pair.place.layer)
    if layer in modules_a and partner in modules_b:
        found += causes_of(modules_a[layer], modules_b[partner])
        found += mode_kinds(modules_a[layer], modules_b[partner])
        called = {each.layer for each in one.recording.inspection.values() if each.calls}
        inside = [each for each in modules_a if layer and each.startswith(f"{layer}.")]
        for each in (name for name in inside if name not in called):  # its weights are used as such
            child = matching.pairs.get(each, f"{partner}{each.removeprefix(layer)}")
            if child in modules_b:
                name = each.removeprefix(f"{layer}.")
                found += [
                    Kind(kind.name, f"{name}.{kind.text}")
                    for _, kind in tensor_kinds(modules_a[each], modules_b[child])
                ]
    if pair.direction == FORWARD and one.run is not None and two.run is not None:
        found += [Kind(each.name, each.text) for each in data_changes(one.run, two.run)]
    found += origin.kinds
    if pair.partner is not None and not (pair.direction == BACKWARD and origin.kinds):
        a, b = one.recording.rows(pair.place), two.recording.rows(pair.partner)
        if a is not None and b is not None:
            dtypes = {one.recording.dtype(pair.place), two.recording.dtype(pair.partner)}
            unit = max(torch.finfo(each).eps / 2 for each in dtypes)
            found += kinds_of(a, b, pair.threshold, same_dtype=len(dtypes) == 1, unit=unit)
    return tuple(dict.fromkeys(found))
