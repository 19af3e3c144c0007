"""Two training runs: the first step and layer where they part, beyond their own noise.

The statistics of every layer are compared step by step. Runs that differ by rounding drift apart
slowly; what jumps is a difference. With several runs of one side the spread between them is its
noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchfmri._arguments import is_list
from torchfmri._compare.history_comparison import HistoryComparison, StepDifference
from torchfmri._compare.step_gaps import (
    RunTable,
    alone_in_one,
    column_of,
    number_gaps,
    statistics_gaps,
)
from torchfmri._compare.step_noise import JUMP, RunPair, largest_so_far, step_noise
from torchfmri._monitor import Monitor
from torchfmri._records import STORED, UPDATES, Floats, History, Series, Step
from torchfmri._text import apart, listed, plural
from torchfmri.exceptions import InspectionError

LOSS = Series("", "loss")
_ORDER = ("parameters", "activations", "loss", "gradients", "parameter_gradients", UPDATES)
"""The order in which the numbers of a step come about."""
_SHOWN = ("mean", "std", "min", "max")


def histories_of(given: Any) -> list[History]:
    """Return the training runs of a side; empty if the side is no training run."""
    several = list(given) if is_list(given) and given else [given]
    found = [each.history if isinstance(each, Monitor) else each for each in several]
    if not all(isinstance(each, History) for each in found):
        return []
    for history, each in zip(found, several, strict=True):
        if isinstance(each, Monitor):
            history.findings = each.findings
    return found


class _Common(NamedTuple):
    """The steps and series that both sides have, and gradients that one lacks from the start."""

    steps: list[int]
    series: list[Series]
    updated: list[str]


def compare_histories(
    a: Sequence[History], b: Sequence[History], tolerance: float | None = None
) -> HistoryComparison:
    """Find the first step and layer where two training runs part.

    Args:
        a: The reference, and repetitions of it.
        b: The other run, and repetitions of it.
        tolerance: The relative difference to allow instead of what rounding explains.

    Raises:
        InspectionError: One has no steps, or they have neither steps nor layers in common.
    """
    for name, runs in (("a", a), ("b", b)):
        if any(not len(each) for each in runs):
            raise InspectionError(
                f"{name} has no steps: nothing was watched yet, or TORCHFMRI=off. Give a run that "
                "has trained."
            )
    a, b, resumed = _counted_alike(a, b)
    common = _common([*a, *b])
    one, two = ([_table(each, common) for each in side] for side in (a, b))
    kinds = [each.what for each in common.series]
    gaps = _gaps(one[0], two[0], kinds)
    spread = np.maximum(_spread(one, gaps.shape, kinds), _spread(two, gaps.shape, kinds))
    series = [*common.series, LOSS, *(Series(name, UPDATES) for name in common.updated)]
    pair = RunPair(a=a[0], b=b[0], one=one[0], two=two[0], series=series, gaps=gaps)
    least, allowed = step_noise(pair, spread, measured=len(a) > 1 or len(b) > 1)
    if tolerance is not None:
        least = allowed = np.full(gaps.shape, tolerance)
    first = _first(pair, allowed, common.steps, exact=tolerance is not None)
    if first is not None and tolerance is None:
        # Later differences follow from the first one. They are measured by what came before it.
        row = common.steps.index(first.step)
        allowed[row + 1 :] = np.maximum(least[row + 1 :], allowed[row])
    return HistoryComparison(
        a=a[0],
        b=b[0],
        steps=common.steps,
        series=series,
        gaps=gaps,
        allowed=allowed,
        first=first,
        tolerance=tolerance,
        notes=[
            *resumed,
            *_nonfinite(one[0], two[0], common),
            *_notes(a, b, common, measured=tolerance is not None),
        ],
    )


def _counted_alike(
    a: Sequence[History], b: Sequence[History]
) -> tuple[Sequence[History], Sequence[History], list[str]]:
    """Return both sides with the steps of a resumed run counted on, and a note if there is one."""
    for name, whole, part in (("b", a, b), ("a", b, a)):
        if by := _resumed_at(whole[0], part[0]):
            note = (
                f"{name} begins with the parameters that the other run has at step {by}: it was "
                "resumed there, and its steps are counted from there"
            )
            shifted = [each.renumbered(by) for each in part]
            return *((a, shifted) if name == "b" else (shifted, b)), [note]
    return a, b, []


def _resumed_at(whole: History, part: History) -> int:
    """Return at which later step of one run another begins that counts from 0; 0 if it does not."""
    known = [each for each in part.series if each.what == "parameters" and each in whole.series]
    if not known or part[0].number != 0:
        return 0

    def parameters(history: History, step: Step) -> Floats:
        found: Floats = step.table[[history.series.index(each) for each in known]]
        return found

    first = parameters(part, part[0])
    for step in whole:
        # Not to the last bit: a checkpoint may be read on another machine.
        if len(step.table) >= len(known) and np.allclose(
            parameters(whole, step), first, rtol=1e-6, atol=0, equal_nan=True
        ):
            return step.number
    return 0


def _common(runs: Sequence[History]) -> _Common:
    steps = set(runs[0].steps.tolist())
    series, updated = list(runs[0].series), list(_updated(runs[0]))
    for each in runs[1:]:
        steps &= set(each.steps.tolist())
        known, names = set(each.series), set(_updated(each))
        more = [one for one in each.series if _is_frozen(one, runs[0])]
        series = [one for one in series if one in known or _is_frozen(one, each)]
        series += [one for one in more if one not in series]
        updated = [name for name in updated if name in names]
    if not steps:
        spans = [f"{each.steps[0]} to {each.steps[-1]}" for each in (runs[0], runs[-1])]
        raise InspectionError(
            f"The runs have no step in common: a has steps {spans[0]}, b has {spans[1]}. Give runs "
            "that were watched at the same steps."
        )
    if not series and not updated:
        layers = [listed(each.layers) for each in (runs[0], runs[-1])]
        raise InspectionError(
            f"The runs have no layer in common: a has {layers[0]}, b has {layers[1]}. Give runs of "
            "the same model."
        )
    return _Common(sorted(steps), series, updated)


def _is_frozen(series: Series, history: History) -> bool:
    """Whether a run has a parameter, and gradients of others, and none of this one.

    Parameters need not be watched; then their layer must be known.
    """
    if series.what != "parameter_gradients" or series in history.series:
        return False
    kinds = {each.what for each in history.series}
    parameter = series._replace(what="parameters")
    layers = {each.layer for each in history.series if each.what == "activations"}
    has = series.layer.rpartition(".")[0] in layers
    return series.what in kinds and (parameter in history.series if "parameters" in kinds else has)


def _updated(history: History) -> list[str]:
    return list(dict.fromkeys(name for step in history for name in step.parameters))


def _table(history: History, common: _Common) -> RunTable:
    rows = {step.number: step for step in history}
    known_places = {each: place for place, each in enumerate(history.series)}
    places = [known_places.get(each, len(known_places)) for each in common.series]
    values = np.full((len(common.steps), len(places), len(STORED)), math.nan)
    updates = np.full((len(common.steps), len(common.updated)), math.nan)
    loss = np.full(len(common.steps), math.nan)
    for row, number in enumerate(common.steps):
        step = rows[number]
        known = [(at, place) for at, place in enumerate(places) if place < len(step.table)]
        if known:
            values[row, [at for at, _ in known]] = step.table[[place for _, place in known]]
        # What was seen and is NaN is something else than what was not seen.
        ratios = {name: _seen(ratio) for name, ratio in step.update_ratios.items()}
        updates[row] = [ratios.get(name, math.nan) for name in common.updated]
        loss[row] = _seen(step.loss) if step.has_loss else math.nan
    return RunTable(values, updates, loss)


def _seen(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _gaps(a: RunTable, b: RunTable, kinds: Sequence[str]) -> Floats:
    """(step, series) how far two runs are apart: statistics, then the loss, then updates."""
    alone = alone_in_one(a.values, b.values, kinds)
    parts = [np.where(alone, math.inf, statistics_gaps(a.values, b.values))]
    parts += [number_gaps(a.loss, b.loss)[:, None], number_gaps(a.updates, b.updates)]
    return np.concatenate(parts, 1)


def _spread(runs: Sequence[RunTable], shape: tuple[int, ...], kinds: Sequence[str]) -> Floats:
    """(step, series) the largest difference between the repetitions of one side."""
    found = np.zeros(shape)
    for other in runs[1:]:
        found = np.fmax(found, _gaps(runs[0], other, kinds))
    return np.maximum.accumulate(np.nan_to_num(found), 0)  # noise grows, and is drawn once only


def _first(
    runs: RunPair, allowed: Floats, steps: Sequence[int], *, exact: bool
) -> StepDifference | None:
    """Return the first step and series beyond what is allowed.

    Args:
        runs: The two runs.
        allowed: (step, series) what is allowed.
        steps: The numbers of the steps.
        exact: Whether that is exactly what was asked for.
    """
    gaps, series = runs.gaps, runs.series
    with np.errstate(invalid="ignore"):
        beyond = gaps > allowed
    rows = np.flatnonzero(beyond.any(1))
    if not len(rows):
        return None
    row = int(rows[0])
    columns = np.flatnonzero(beyond[row]).tolist()
    if row and not exact and min(_rank(series[each], each)[0] for each in columns) > 0:
        # The step is known to part: now its first layer that jumps, however little, is wanted.
        before = largest_so_far(gaps)[row]
        limits = np.maximum(JUMP * before, allowed[row] / JUMP if before.any() else 0.0)
        computed = ("activations", "loss", "gradients")
        more = [at for at in range(len(series)) if series[at].what in computed]
        allowed = allowed.copy()
        allowed[row, more] = np.minimum(allowed[row], limits)[more]
        columns = np.flatnonzero(gaps[row] > allowed[row]).tolist()
    column = min(columns, key=lambda each: _rank(series[each], each))
    layer, what = series[column]
    return StepDifference(
        step=steps[row],
        layer=layer,
        what=what,
        relative=float(gaps[row, column]),
        allowed=float(allowed[row, column]),
        before=float(np.nan_to_num(gaps[:row, column]).max(initial=0.0)),
        reason=_reason(runs.a, runs.b, steps[row], series[column]),
    )


def _rank(series: Series, column: int) -> tuple[int, int]:
    place = _ORDER.index(series.what) if series.what in _ORDER else len(_ORDER)
    return place, -column if series.what == "gradients" else column


def _reason(a: History, b: History, step: int, series: Series) -> str:
    """Describe both sides in words, by the statistic that differs most."""
    ours, theirs = (history[history.steps.tolist().index(step)] for history in (a, b))
    if series.what == "loss":
        return " against ".join(apart(ours.loss, theirs.loss, 6))
    if series.what == UPDATES:
        one_ratio, other = (each.update_ratios[series.layer] for each in (ours, theirs))
        return "update / weight " + " against ".join(apart(one_ratio, other))
    lacking = [name for name, history in (("a", a), ("b", b)) if series not in history.series]
    if lacking:
        return f"only {'b' if 'a' in lacking else 'a'} has any: not trained in {lacking[0]}"
    one, two = (
        history.statistics(*series, history.steps.tolist().index(step)) for history in (a, b)
    )
    if not (one.count and two.count):
        return f"only {'a' if one.count else 'b'} has any in that step"
    if one.count != two.count:
        return f"{one.count:,} against {two.count:,} values"
    bad = [each.nan + each.inf for each in (one, two)]
    if bad[0] != bad[1]:
        return f"{bad[0]:,} against {bad[1]:,} NaN or infinite values of {one.count:,}"
    worst = max(_SHOWN, key=lambda name: abs(float(one[name]) - float(two[name])))
    values = " against ".join(apart(float(one[worst]), float(two[worst]), 5))
    return f"{worst} {values} of {one.count:,} values"


def _nonfinite(a: RunTable, b: RunTable, common: _Common) -> list[str]:
    """Say from where on both runs have values that cannot be compared."""
    kinds = ("nan", "pos_inf", "neg_inf")
    bad = [sum(column_of(each.values, kind) for kind in kinds) > 0 for each in (a, b)]
    found = np.argwhere(bad[0] & bad[1])
    if not len(found):
        return []
    row, at = found[0]
    layer, what = common.series[at]
    since = f"from step {common.steps[row]} on, first in the {what} of {layer!r}"
    return [f"both runs have NaN or infinite values {since}: only their number was compared"]


def _notes(
    a: Sequence[History], b: Sequence[History], common: _Common, *, measured: bool
) -> list[str]:
    found = []
    for name, runs in (("a", a), ("b", b)):
        extra: dict[str, list[str]] = {}
        for each in runs[0].series:
            if each not in common.series:
                extra.setdefault(each.what, []).append(each.layer)
        for what, layers in extra.items():
            said = what.replace("_", " ")
            found.append(f"only {name} has {said} of {listed(layers)}: not compared")
        left = len(runs[0]) - len(common.steps)
        if left:
            found.append(
                f"{plural(left, 'step')} of {name} {'is' if left == 1 else 'are'} not in both runs"
            )
        found += [
            f"{name}: {text}"
            for text in runs[0].notes
            if any(said in text for said in ("cannot be read", "is missing"))
        ]
    if len(a) == len(b) == 1 and not measured:
        found.append(
            "one run on each side: what rounding amounts to is taken from the dtype, and slow "
            "drift does not count. Give several runs of a side to measure its own spread"
        )
    return found
