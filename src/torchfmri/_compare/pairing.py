"""Every tensor of one side beside its partner, and how far the two are apart."""

from __future__ import annotations

import math

import numpy as np
import torch

from torchfmri._compare.difference import Pair
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

FACTOR = 8.0
"""How many times its own spread a side may differ from the other: the spread is the largest of a
few draws, and implementations add up in other orders."""
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
    """All pairs, direction by direction, in the order in which the tensors of a came about."""
    found = []
    same_layout = a.recording.layout == b.recording.layout
    for direction, what in WHAT.items():
        if not (a.recording.places(direction) and b.recording.places(direction)):
            continue
        partners = _partners(b.recording, direction)
        for place in a.recording.places(direction):
            layer = matching.pairs.get(place.layer)
            if layer is None or what not in b.recording.inspection[layer].what:
                continue  # listed as unmatched, or not watched there
            partner = partners.get(layer, {}).pop((place.call, place.element), None)
            if partner is not None:
                if same_layout or _has_rows(a.recording, place):
                    found.append(_pair(a, b, direction, place, partner, tolerance))
            elif reason := _absent(b.recording, direction, layer, place):
                found.append(_lonely(direction, place, reason))
        back = {other: one for one, other in matching.pairs.items()}
        found += [
            _lonely(direction, place._replace(layer=back[layer]), f"call {call} happens in b only")
            for layer, rest in partners.items()
            for (call, _), place in rest.items()
            if layer in back and call >= len(a.recording.inspection[back[layer]].calls) > 0
        ]
    return found


def _partners(side: Recording, direction: str) -> dict[str, dict[tuple[int, str], Place]]:
    found: dict[str, dict[tuple[int, str], Place]] = {}
    for place in side.places(direction):
        found.setdefault(place.layer, {})[place.call, place.element] = place
    return found


def _has_rows(side: Recording, place: Place) -> bool:
    """Whether the rows of a tensor are tokens, or do not depend on how the batch is laid out."""
    rows = side.rows(place)
    return place.what == WHAT[PARAMETERS] or rows is None or rows.grid is not None


def _absent(side: Recording, direction: str, layer: str, place: Place) -> str:
    """Why it is a difference that b lacks a tensor; empty for one that it need not have.

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
    spread_a, spread_b = a.spread.get(place, math.nan), b.spread.get(partner, math.nan)
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
    return max(FACTOR * max(measured), LEAST_UNITS * max(units, default=0.0))


def _statistics_gap(value: Value | None, other: Value | None) -> tuple[float, str]:
    """How far two statistics are apart, relative to the rms, and that in words."""
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
