"""Pair each tensor of side a with its partner in b and measure their distance: `pair_up`.

`entry_point` calls it with two sides and the matched layers, and gets one `Pair` per tensor, in the
order in which a computes them; "first difference" means first in this order. `_threshold` decides
what is allowed, from the measured noise of both sides or from `_ROUNDING`, which is only used where
neither side can be run again. Tensors that cannot be compared because the two batches are laid out
differently are left out with a note, never counted as equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchfmri._compare.arrangement import axes_of, in_other_order
from torchfmri._compare.causes import own_tensors, partner_names
from torchfmri._compare.difference import FACTOR, Pair
from torchfmri._compare.left_out import (
    note_left_out,
    without_details,
    without_frozen,
    without_positions,
    without_uncalled,
)
from torchfmri._compare.matching import Matching
from torchfmri._compare.recording import (
    BACKWARD,
    FORWARD,
    PARAMETERS,
    WHAT,
    Axes,
    RecordedPlace,
    RecordedRows,
    Recording,
    relative,
)
from torchfmri._compare.repetition import LEAST_UNITS, LEAST_VALUES, Repetition, repetition_of
from torchfmri._compare.side import Partners, Side
from torchfmri._records import Value

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What is allowed where no side can be run again: about the square root of a typical depth times
the rounding unit, with an order of magnitude to spare."""
_ROUNDING_GRADIENTS = 4.0
"""... times this for gradients, which have gone through more layers. Between scans of `tiny` in
float32 and in bfloat16, those of keys and queries differed by up to 0.14, and outputs by 0.014."""
_NOTHING_ELSE = 10 * FACTOR
"""How many units in the last place of its terms a sum may be to count as nothing but rounding."""


def pair_up(a: Side, b: Side, matching: Matching, tolerance: float | None) -> list[Pair]:
    """Return all pairs, direction by direction, in the order in which a computes its tensors."""
    found, left_out = [], []
    same_layout = a.recording.layout == b.recording.layout
    trained = (
        _trained_layers(a, matching.pairs),
        _trained_layers(b, {other: one for one, other in matching.pairs.items()}),
    )
    same_trained = None in trained or trained[0] == trained[1]
    for direction, what in WHAT.items():
        if not (a.recording.places(direction) and b.recording.places(direction)):
            continue
        partners = _partners(b.recording, direction)
        for place in a.recording.places(direction):
            layer = matching.pairs.get(place.layer)
            if layer is None or what not in b.recording.inspection[layer].what:
                continue  # listed as unmatched, or not watched there
            element = place.element
            if direction == PARAMETERS:
                element = _parameter_name(a.recording, b.recording, place, layer)
            partner = partners.get(layer, {}).pop((place.call, element), None)
            if not (same_layout or _is_comparable(a, b, place, partner)):
                # Experts are called as often as tokens reach them, and attention weights have a
                # unit for each padded position.
                left_out.append(place.layer)
            elif partner is not None:
                found.append(_pair(direction, Partners(a, b, place, partner), tolerance))
            elif reason := _absent(b, direction, layer, place):
                found.append(_lonely(direction, place, reason))
        back = {
            other: one
            for one, other in matching.pairs.items()
            if one not in left_out and what in a.recording.inspection[one].what
        }
        rest = [each for several in partners.values() for each in several.values()]
        _add_only_b(found, direction, [each for each in rest if each.layer in back], a, b, back)
        if direction == BACKWARD and not same_trained:
            # Gradients reach other layers where other layers are trained.
            found = [pair for pair in found if pair.direction != BACKWARD or pair.partner]
        if direction == PARAMETERS and not same_trained:
            found = without_frozen(found, a, b, matching.pairs)
    found = without_details(without_uncalled(found, a, b, matching), a)
    if not same_layout:
        found = without_positions(found, a)
    note_left_out(a, b, left_out)
    return found


def _trained_layers(side: Side, names: Mapping[str, str]) -> set[str | None] | None:
    """Return the layers with trained parameters by the name of their partner; None if unknown."""
    if side.run is None:
        return None
    return {
        names.get(layer)
        for layer, module in side.modules.items()
        if any(each.requires_grad for each in module.parameters(recurse=False))
    }


def _add_only_b(
    found: list[Pair],
    direction: str,
    rest: Sequence[RecordedPlace],
    a: Side,
    b: Side,
    back: Mapping[str, str],
) -> None:
    """Add the tensors that only b has and that count, where b computes them.

    Args:
        found: The pairs so far.
        direction: That of `rest`.
        rest: The tensors of b without a partner.
        a: One side.
        b: The other.
        back: Layer of b -> layer of a.
    """
    order = {place: index for index, place in enumerate(b.recording.places(direction))}
    for place in rest:
        ours = place._replace(layer=back[place.layer])
        reason = _absent(a, direction, ours.layer, ours, ("b", "a"))
        if reason:
            at = next(
                (
                    index
                    for index, pair in enumerate(found)
                    if pair.direction == direction
                    and pair.partner is not None
                    and order[pair.partner] > order[place]
                ),
                len(found),
            )
            found.insert(at, _lonely(direction, ours, reason))


def _partners(side: Recording, direction: str) -> dict[str, dict[tuple[int, str], RecordedPlace]]:
    found: dict[str, dict[tuple[int, str], RecordedPlace]] = {}
    for place in side.places(direction):
        found.setdefault(place.layer, {})[place.call, place.element] = place
    return found


def _parameter_name(a: Recording, b: Recording, place: RecordedPlace, layer: str) -> str:
    """Return the name that a parameter of a has in b."""
    shapes = [
        {
            name: value.shape
            for name, value in side.inspection[name_].parameter_values(place.what).items()
        }
        for side, name_ in ((a, place.layer), (b, layer))
    ]
    return partner_names(*shapes).get(place.element, place.element)


def _is_comparable(a: Side, b: Side, place: RecordedPlace, partner: RecordedPlace | None) -> bool:
    """Whether a tensor can be compared though the two batches are laid out differently."""
    known = [(a.recording, place), *([(b.recording, partner)] if partner is not None else [])]
    # Generation computes the logits of the last token alone, and one pass those of all tokens.
    tables = [rows for side, each in known if (rows := side.rows(each)) is not None]
    if len({rows.grid is None for rows in tables}) > 1:
        return False
    apart = [(side, each) for side, each in known if not side.is_whole(each)]
    if len(apart) == len(known):
        return _has_rows(a.recording, place)
    # Embeddings of positions are one for all rows, and their gradient is a sum over rows.
    shapes = [side.value(each) for side, each in apart]
    shared = any(value is not None and value.shape[:1] == (1,) for value in shapes)
    return not (place.what == WHAT[BACKWARD] and shared and a.recording.batch > 1)


def _has_rows(side: Recording, place: RecordedPlace) -> bool:
    """Whether the rows of a tensor are tokens, or do not depend on how the batch is laid out."""
    rows, value = side.rows(place), side.value(place)
    if place.what == WHAT[PARAMETERS] or rows is None:
        return True
    if rows.grid is not None:
        return not side.has_keys(place)
    # One row for each sample, such as the logits of the next token or a pooled output.
    shape = value.shape if value is not None else ()
    return shape[:1] == (side.batch,) and (len(shape) == 2 or shape[1:-1] == (1,))


def _absent(
    side: Side,
    direction: str,
    layer: str,
    place: RecordedPlace,
    names: tuple[str, str] = ("a", "b"),
) -> str:
    """Return why a tensor that a side lacks counts as a difference; empty if it does not count.

    A layer may return more in one implementation than in another, such as attention weights.

    Args:
        side: The side that lacks it.
        direction: The direction.
        layer: The layer on that side.
        place: The tensor on the other side.
        names: The name of the side that has it, and of the one that lacks it.
    """
    has, lacks = names
    calls = side.recording.inspection[layer].calls
    if (layer, place.element) in side.recording.left_out:
        return ""
    if direction == PARAMETERS:
        module = side.modules.get(layer)
        held = module is None or place.element in own_tensors(module)
        return f"{lacks} has no gradient of {place.element!r}" if held else ""
    if place.call >= len(calls):
        return f"call {place.call} happens in {has} only" if calls else f"{lacks} never calls it"
    if side.run is not None and layer in side.run.compiled_layers:
        return ""  # what is computed of it may be compiled as well, such as the loss
    has_output = place.element in calls[place.call].elements(WHAT[FORWARD])
    return f"a gradient arrives in {has} only" if direction == BACKWARD and has_output else ""


def _lonely(direction: str, place: RecordedPlace, reason: str) -> Pair:
    return Pair(direction=direction, place=place, gaps=np.array([math.inf]), reason=reason)


def _pair(direction: str, both: Partners, tolerance: float | None) -> Pair:
    a, b, place, partner = both
    spread_a, spread_b = (math.nan if each is None else each.worst for each in both.spreads)
    threshold = _threshold(both, tolerance, (spread_a, spread_b))
    one, two, axes = _alike(both, threshold)
    grid, largest, reason, nonfinite = None, math.nan, "", ""
    repetition = Repetition()
    if one is None or two is None:
        value = a.recording.value(place)
        gap, reason = _statistics_gap(value, b.recording.value(partner))
        gaps = np.array([gap])
        if value is not None and gap < math.inf:
            bad = value.statistics
            nonfinite = "NaN" if bad.nan else "infinite" if bad.inf else ""
    elif one.values.shape != two.values.shape:
        shapes = [side.recording.value(each) for side, each in ((a, place), (b, partner))]
        said = " against ".join(str(each.shape) for each in shapes if each is not None)
        gaps, reason = np.array([math.inf]), f"shape {said}"
    else:
        gaps = relative(one.values, two.values).numpy()
        grid = one.grid if two.grid is not None else None
        if (tolerance or (math.isnan(spread_a) and math.isnan(spread_b))) and threshold > 0:
            nothing = _is_rounding(a, place, one) and _is_rounding(b, partner, two)
            gaps = np.zeros_like(gaps) if nothing else gaps
        apart = (one.values - two.values).abs()
        largest = float(apart[apart.isfinite()].max()) if apart.isfinite().any() else 0.0
        # A scan has NaN where a gradient was not measured.
        measured = not a.recording.reduced or direction == FORWARD
        if measured and not apart.isfinite().all():
            nonfinite = _nonfinite_in_both(one.values, two.values)
        if tolerance is None:
            repetition = repetition_of(both, gaps, axes)
            if gaps.max(initial=0.0) <= threshold:
                threshold = min(threshold, repetition.threshold)
    return Pair(
        direction=direction, place=place, partner=partner, gaps=gaps, grid=grid,
        spread_a=spread_a, spread_b=spread_b, threshold=threshold, largest=largest, reason=reason,
        repeating=repetition.rows, alike=repetition.alike, nonfinite=nonfinite, axes=axes,
    )  # fmt: skip


def _is_rounding(side: Side, place: RecordedPlace, rows: RecordedRows) -> bool:
    """Whether the gradient of a bias is a sum that adds up to zero, such as that of keys."""
    given = side.recording.tensors(place.layer, 0, WHAT[BACKWARD])
    if place.what != WHAT[PARAMETERS] or len(given) != 1 or "" not in given:
        return False
    terms = given[""]
    if terms.shape[-1:] != rows.values.shape[1:] or not terms.is_floating_point():
        return False
    added = float(terms.detach().double().abs().flatten(0, -2).sum(0).norm())
    return float(rows.values.norm()) <= _NOTHING_ELSE * torch.finfo(terms.dtype).eps * added


def _alike(
    both: Partners, threshold: float
) -> tuple[RecordedRows | None, RecordedRows | None, Axes]:
    """Return both as rows, in an order in which they agree if there is one, and the axes of b."""

    def agree(rows: tuple[RecordedRows, RecordedRows]) -> bool:
        one, two = (each.values for each in rows)
        return one.shape == two.shape and float(relative(one, two).max()) <= threshold

    one, two = both.rows()
    if one is None or two is None or agree((one, two)):
        return one, two, ()
    if axes := axes_of(both):
        return *both.rows(axes), axes
    others = in_other_order(both)
    return *next((rows for rows in others if agree(rows)), (one, two)), ()


def _nonfinite_in_both(one: Tensor, two: Tensor) -> str:
    """Return "NaN" or "infinite" if both sides have such a value at the same place, else ""."""
    if bool((one.isnan() & two.isnan()).any()):
        return "NaN"
    return "infinite" if bool((one.isinf() & two.isinf()).any()) else ""


def _threshold(both: Partners, tolerance: float | None, spreads: tuple[float, float]) -> float:
    if tolerance is not None:
        return tolerance
    a, b, place, _ = both
    measured = [each for each in spreads if not math.isnan(each)]
    dtypes = both.dtypes
    if not measured and (a.spread or b.spread):
        return math.inf  # the layer returned something else when it rounded anew: not to be judged
    if not measured:
        return max(_usual(place, dtype) for dtype in dtypes)
    if a.run is None and b.run is None:  # a recording of which there is one may round otherwise
        unknown = [d for d, each in zip(dtypes, spreads, strict=True) if math.isnan(each)]
        measured += [_usual(place, dtype) / FACTOR for dtype in unknown]
    units = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    least = LEAST_UNITS * max(units, default=0.0)
    value = a.recording.value(place)
    if value is not None and math.prod(value.shape) < LEAST_VALUES:
        # One number, such as the loss, hardly moves in some draws: its spread says little.
        coarsest = [dtype for side in (a, b) if (dtype := side.coarsest) is not None]
        least = max([least, *(torch.finfo(dtype).eps for dtype in coarsest)])
    return max(FACTOR * max(measured), least)


def _usual(place: RecordedPlace, dtype: torch.dtype) -> float:
    """Return what rounding to a dtype usually amounts to."""
    times = 1.0 if place.what == WHAT[FORWARD] else _ROUNDING_GRADIENTS
    return times * _ROUNDING.get(dtype, 0.0)


def _statistics_gap(value: Value | None, other: Value | None) -> tuple[float, str]:
    """Return the distance of two statistics relative to the rms, and a sentence about it."""
    assert value is not None
    assert other is not None
    if value.shape != other.shape:
        return math.inf, f"shape {value.shape} against {other.shape}"
    one, two = value.statistics, other.statistics
    bad = [(each.nan, each.pos_inf, each.neg_inf) for each in (one, two)]
    if bad[0] != bad[1]:
        return math.inf, f"NaN, +Inf, -Inf: {bad[0]} against {bad[1]}"
    size = max(one.l2 / math.sqrt(max(one.finite, 1)), 1e-300)
    names = ("mean", "std", "min", "max") if one.finite else ()
    gaps = {name: abs(float(one[name]) - float(two[name])) / size for name in names}
    worst = max(gaps, key=lambda name: gaps[name], default="")
    relative_gap = gaps.get(worst, 0.0)
    return relative_gap, f"{worst} differs by {relative_gap:.2e} of the rms (statistics only)"
