"""Every tensor of one side beside its partner, and how far the two are apart."""

from __future__ import annotations

import math

import numpy as np
import torch

from torchfmri._compare.causes import partner_names
from torchfmri._compare.difference import FACTOR, Floats, Pair
from torchfmri._compare.matching import Matching
from torchfmri._compare.recording import (
    BACKWARD,
    FORWARD,
    PARAMETERS,
    WHAT,
    Place,
    Recording,
    relative,
)
from torchfmri._compare.side import Side
from torchfmri._records import Value
from torchfmri._text import listed, plural

REPEATED, REPEATED_ELSEWHERE = 1.0, 4.0
"""How many times the typical spread a difference may be if it repeats when both sides round anew:
if both compute in one precision, and if they do not. Between two precisions the rounding of the
weights themselves repeats too, so more is allowed."""
_ALIKE, _ALIKE_ROWS = 0.9, 0.7
"""The cosine between a difference and the one that comes back, over all rows and in the median row.
Rounding reached 0.4 in one precision and 0.85 between two (`python -m benchmarks compare`)."""
_LEAST_ROWS, _LEAST_VALUES = 4, 64
"""Fewer values may point the same way by chance."""
LEAST_UNITS = 4.0
"""How many units in the last place are allowed at least."""
_ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""What is allowed where no side can be run again: about the square root of a typical depth times
the rounding unit, with an order of magnitude to spare."""


def pair_up(a: Side, b: Side, matching: Matching, tolerance: float | None) -> list[Pair]:
    """Return all pairs, direction by direction, in the order in which a computes its tensors."""
    found, left_out = [], []
    same_layout = a.recording.layout == b.recording.layout
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
            if not (same_layout or _has_rows(a.recording, place)):
                left_out.append(place.layer)  # experts are called as often as tokens reach them
            elif partner is not None:
                found.append(_pair(a, b, direction, place, partner, tolerance))
            elif reason := _absent(b.recording, direction, layer, place):
                found.append(_lonely(direction, place, reason))
        back = {other: one for one, other in matching.pairs.items()}
        found += [
            _lonely(direction, place._replace(layer=back[layer]), f"call {call} happens in b only")
            for layer, rest in partners.items()
            for (call, _), place in rest.items()
            if back.get(layer, layer) not in left_out
            and layer in back
            and call >= len(a.recording.inspection[back[layer]].calls) > 0
        ]
    if left_out:
        a.notes.append(
            f"{plural(len(left_out), 'tensor')} not compared, because the two batches are laid out "
            f"differently and these have no token axis: of {listed(list(dict.fromkeys(left_out)))}"
        )
    return found


def _partners(side: Recording, direction: str) -> dict[str, dict[tuple[int, str], Place]]:
    found: dict[str, dict[tuple[int, str], Place]] = {}
    for place in side.places(direction):
        found.setdefault(place.layer, {})[place.call, place.element] = place
    return found


def _parameter_name(a: Recording, b: Recording, place: Place, layer: str) -> str:
    """Return the name that a parameter of a has in b."""
    shapes = [
        {
            name: value.shape
            for name, value in side.inspection[name_].parameter_values(place.what).items()
        }
        for side, name_ in ((a, place.layer), (b, layer))
    ]
    return partner_names(*shapes).get(place.element, place.element)


def _has_rows(side: Recording, place: Place) -> bool:
    """Whether the rows of a tensor are tokens, or do not depend on how the batch is laid out."""
    rows, value = side.rows(place), side.value(place)
    if place.what == WHAT[PARAMETERS] or rows is None or rows.grid is not None:
        return True
    # One row for each sample, such as the logits of the next token or a pooled output.
    shape = value.shape if value is not None else ()
    return shape[:1] == (side.batch,) and (len(shape) == 2 or shape[1:-1] == (1,))


def _absent(side: Recording, direction: str, layer: str, place: Place) -> str:
    """Return why a tensor that b lacks counts as a difference; empty if it does not count.

    A layer may return more in one implementation than in another, such as attention weights.
    """
    calls = side.inspection[layer].calls
    if direction == PARAMETERS:
        return f"b has no gradient of {place.element!r}"
    if place.call >= len(calls):
        return f"call {place.call} happens in a only" if calls else "b never calls it"
    has_output = place.element in calls[place.call].elements(WHAT[FORWARD])
    return "a gradient arrives in a only" if direction == BACKWARD and has_output else ""


def _lonely(direction: str, place: Place, reason: str) -> Pair:
    gaps = np.array([math.inf])
    return Pair(direction, place, None, gaps, None, math.nan, math.nan, 0.0, math.nan, reason)


def _pair(
    a: Side, b: Side, direction: str, place: Place, partner: Place, tolerance: float | None
) -> Pair:
    spreads = a.spread.get(place), b.spread.get(partner)
    spread_a, spread_b = (math.nan if each is None else each.worst for each in spreads)
    threshold = _threshold(a, b, place, partner, tolerance, (spread_a, spread_b))
    one, two = a.recording.rows(place), b.recording.rows(partner)
    grid, largest, reason = None, math.nan, ""
    if one is None or two is None:
        gap, reason = _statistics_gap(a.recording.value(place), b.recording.value(partner))
        gaps = np.array([gap])
    elif one.values.shape != two.values.shape:
        shapes = [side.recording.value(each) for side, each in ((a, place), (b, partner))]
        said = " against ".join(str(each.shape) for each in shapes if each is not None)
        gaps, reason = np.array([math.inf]), f"shape {said}"
    else:
        gaps = relative(one.values, two.values).numpy()
        grid = one.grid if two.grid is not None else None
        apart = (one.values - two.values).abs()
        largest = float(apart[apart.isfinite()].max()) if apart.isfinite().any() else 0.0
        if tolerance is None and gaps.max(initial=0.0) <= threshold:
            threshold = min(threshold, _repeated_threshold(a, b, place, partner, gaps))
    return Pair(
        direction=direction, place=place, partner=partner, gaps=gaps, grid=grid,
        spread_a=spread_a, spread_b=spread_b, threshold=threshold, largest=largest, reason=reason,
    )  # fmt: skip


def _threshold(
    a: Side, b: Side, place: Place, partner: Place, tolerance: float | None,
    spreads: tuple[float, float],
) -> float:  # fmt: skip
    if tolerance is not None:
        return tolerance
    measured = [each for each in spreads if not math.isnan(each)]
    dtypes = (a.recording.dtype(place), b.recording.dtype(partner))
    if not measured and (a.spread or b.spread):
        return math.inf  # the layer returned something else when it rounded anew: not to be judged
    if not measured:
        return max(_ROUNDING.get(dtype, 0.0) for dtype in dtypes)
    units = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    least = LEAST_UNITS * max(units, default=0.0)
    value = a.recording.value(place)
    if value is not None and math.prod(value.shape) < _LEAST_VALUES:
        # One number, such as the loss, hardly moves in some draws: its spread says little.
        coarsest = [dtype for side in (a, b) if (dtype := side.coarsest) is not None]
        least = max([least, *(torch.finfo(dtype).eps for dtype in coarsest)])
    return max(FACTOR * max(measured), least)


def _repeated_threshold(a: Side, b: Side, place: Place, partner: Place, gaps: Floats) -> float:
    """Return the threshold for a difference that repeats under new rounding; else infinite.

    Rounding errors are drawn anew and a mistake is not, so a mistake that is no larger than the
    noise still shows: the two differences point the same way.
    """
    spreads = [each for each in (a.spread.get(place), b.spread.get(partner)) if each is not None]
    if a.rounded is None or b.rounded is None or not spreads or not gaps.size:
        return math.inf
    factor = REPEATED if a.coarsest == b.coarsest else REPEATED_ELSEWHERE
    unit = torch.finfo(a.recording.dtype(place)).eps / 2
    allowed = max(factor * max(each.typical for each in spreads), unit)
    if math.sqrt(float(np.square(gaps).mean())) <= allowed:
        return math.inf
    return allowed if _comes_back(a, b, place, partner) else math.inf


def _comes_back(a: Side, b: Side, place: Place, partner: Place) -> bool:
    """Whether the difference points the same way at most tokens when both sides round anew."""
    assert a.rounded is not None
    assert b.rounded is not None
    if a.rounded.value(place) is None or b.rounded.value(partner) is None:
        return False
    tables = (
        a.recording.rows(place), b.recording.rows(partner),
        a.rounded.rows(place), b.rounded.rows(partner),
    )  # fmt: skip
    one, two, *again = (each.values for each in tables if each is not None)
    if len(again) < 2 or len({each.shape for each in (one, two, *again)}) > 1:
        return False
    if len(one) < _LEAST_ROWS or one.numel() < _LEAST_VALUES:
        return False
    before, after = two - one, again[1] - again[0]
    products = (before * after).sum(1), before.norm(dim=1) * after.norm(dim=1)
    whole = before.norm() * after.norm()
    rows = products[0] / products[1].clamp_min(1e-300)
    alike = float(products[0].sum() / whole.clamp_min(1e-300))
    return alike > _ALIKE and float(rows.median()) > _ALIKE_ROWS


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
