"""How far two training runs may be apart by rounding alone, step by step.

Rounding is small at first, and training makes it grow. Adam turns gradients that are nothing but
rounding into full updates; a ReLU whose input is nearly zero may let its gradient pass in one run
only. So a single series that jumps may be rounding. If many series of one kind jump in the same
step, something else has happened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchfmri._compare.step_gaps import RunTable, column_of, sizes_of
from torchfmri._records import UPDATES, Floats, History, Series

_FLOOR = {"float64": 1e-10, "float32": 3e-5, "bfloat16": 4e-2, "float16": 5e-3}
"""What rounding may do to the statistics of a layer, relative to its rms."""
_FLOOR_TIMES = {"gradients": 4.0, "parameter_gradients": 4.0, "loss": 0.3}
"""... and to those of gradients, which have gone through more layers, and to a mean over tokens.
Chosen on small models that trained with one thread and with two, and tested on no others."""
JUMP, _FACTOR = 10.0, 4.0
"""How many times the largest difference so far, and the spread of repeated runs, is a jump."""
_JUMP_ALONE = 30.0
"""... how many times the largest difference of its kind so far, if few series jump."""
_NOTHING_ELSE = 0.1
"""The share of a gradient from which on it counts as nothing but rounding."""
_MANY, _AT_LEAST = 0.25, 2
"""The share and number of the series of one kind that are many."""
_MOSTLY, _FLOOR_ALONE = 0.5, 3.0
"""If more than this share of the series differs at all, the runs round differently: then a single
series may differ by this many times what is usual."""
_AMPLIFIED = 1e5
"""How many times a difference of gradients an update may differ. With eager attention and SDPA, a
bias of keys in Phi reached 1.4e4."""
_FLIPPED = 1e-3
"""The share of the values of a gradient that are nothing but rounding, in the usual parameter."""
_COMPUTED = ("gradients", "parameter_gradients", UPDATES)


class RunPair(NamedTuple):
    """Two training runs side by side.

    Attributes:
        a: One run.
        b: The other.
        one: The numbers of a.
        two: Those of b.
        series: What was compared: (layer, what) of each column of `gaps`.
        gaps: (step, series) how far the two are apart.
    """

    a: History
    b: History
    one: RunTable
    two: RunTable
    series: Sequence[Series]
    gaps: Floats


class StepNoise(NamedTuple):
    """What noise explains, (step, series).

    Attributes:
        least: By the rounding of one step, and by the spread of repeated runs.
        allowed: By drift as well.
    """

    least: Floats
    allowed: Floats


def step_noise(runs: RunPair, spread: Floats, *, measured: bool) -> StepNoise:
    """Return what noise explains.

    Args:
        runs: The two runs.
        spread: (step, series) the largest difference between repetitions of one side.
        measured: Whether there are repetitions; without them, growth is taken from the runs.
    """
    gaps = runs.gaps
    least = np.maximum(_floors(runs), _FACTOR * spread)
    summed = _summed(runs)
    # A sum that is all rounding differs by as much as its size: that must not excuse what follows.
    drift = np.where(gaps <= summed, 0.0, gaps)
    allowed = np.maximum(np.maximum(least, summed), JUMP * largest_so_far(drift))
    if measured:
        return StepNoise(least, allowed)
    followed, amplified = _amplified(runs, summed)
    allowed = np.maximum.reduce([allowed, _kinks(runs), _flips(runs), followed])
    alone = np.maximum(allowed, amplified)
    rounds = (gaps > 0).mean(1, keepdims=True) > _MOSTLY
    alone = np.maximum(alone, np.where(rounds, _FLOOR_ALONE, 1.0) * least)
    with np.errstate(invalid="ignore"):
        beyond = gaps > allowed
    for what in {each.what for each in runs.series}:
        own = [at for at, each in enumerate(runs.series) if each.what == what]
        alone[:, own] = np.maximum(
            alone[:, own], _JUMP_ALONE * largest_so_far(drift)[:, own].max(1, keepdims=True)
        )
        many = beyond[:, own].sum(1) >= max(_AT_LEAST, _MANY * len(own))
        alone[:, own] = np.where(many[:, None], allowed[:, own], alone[:, own])
    return StepNoise(least, alone)


def largest_so_far(gaps: Floats) -> Floats:
    """(step, series) the largest finite difference in the steps before."""
    known = np.where(np.isfinite(gaps), gaps, 0.0)
    before = np.maximum.accumulate(known, 0)
    return np.concatenate([np.zeros_like(before[:1]), before[:-1]])


def _floors(runs: RunPair) -> Floats:
    """Return what rounding may do, (step, series).

    What a layer of float32 returns has the rounding of the layers before it, which may compute in
    bfloat16 under autocast. Runs that are equal to the last bit so far do not round differently.
    """
    series, both = runs.series, (runs.a, runs.b)
    own = np.array([max(_floor(run, each) for run in both) for each in series])
    computed = [each for each in series if each.what == "activations"]
    coarsest = max((_floor(run, each) for run in both for each in computed), default=0.0)
    times = np.array([_FLOOR_TIMES.get(each.what, 1.0) for each in series])
    own, upstream = own * times, coarsest * times
    # A loss near zero is a difference of larger numbers, and has their rounding.
    both_losses = np.fmax(np.abs(runs.one.loss), np.abs(runs.two.loss))
    losses = np.where(np.isfinite(both_losses), both_losses, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        beside = np.nan_to_num(np.maximum.accumulate(losses) / losses, posinf=0.0)
    given = np.array([each.what in ("parameters", UPDATES) for each in series])
    equal = ~np.any(largest_so_far(runs.gaps) > 0, axis=1)
    equal[:1] = False
    found: Floats = np.where(equal[:, None] | given, own, np.maximum(own, upstream))
    loss = [at for at, each in enumerate(series) if each.what == "loss"]
    found[:, loss] *= np.maximum(1.0, beside)[:, None]
    return found


def _floor(history: History, series: Series) -> float:
    if series in history.series:
        return _FLOOR.get(history.statistics(*series).dtype, _FLOOR["float32"])
    return _FLOOR["float32"]


def _summed(runs: RunPair) -> Floats:
    """Return what rounding may do to the gradients of parameters that are sums, (step, series).

    The gradient of a bias is the sum of the gradients of its layer's output. Before a BatchNorm, or
    in the keys of attention, they add up to zero, and what is left is their rounding: infinite
    then, because it may be anything.
    """
    tables = runs.one.values, runs.two.values
    column = {each: at for at, each in enumerate(runs.series)}
    found = np.zeros((len(tables[0]), len(column)))
    dtypes = {run.statistics(*each).dtype for run in (runs.a, runs.b) for each in column
              if each.what == "activations"}  # fmt: skip
    units = (torch.finfo(getattr(torch, each)).eps for each in dtypes & _FLOOR.keys())
    unit = max(units, default=0.0)
    sizes = [sizes_of(each) for each in tables]
    sums = [column_of(each, "count") * size for each, size in zip(tables, sizes, strict=True)]
    for each, at in column.items():
        terms = column.get(Series(each.layer.rpartition(".")[0], "gradients"))
        if each.what != "parameter_gradients" or terms is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            added = (
                np.fmax(*(each[:, terms] for each in sums)) / column_of(tables[0], "count")[:, at]
            )
            relative = _FACTOR * unit * added / np.fmax(*(each[:, at] for each in sizes))
        relative = np.nan_to_num(relative, posinf=0.0)
        found[:, at] = np.where(relative > _NOTHING_ELSE, math.inf, relative)
    return found


def _kinks(runs: RunPair) -> Floats:
    """Return what a ReLU at its kink may do, (step, series).

    Rounding puts some of its inputs on the other side of zero: hardly anything changes forward, and
    the gradient passes in one run only. The number of zeros says how many.
    """
    tables = runs.one.values, runs.two.values
    found = np.zeros_like(runs.gaps)
    seen = [at for at, each in enumerate(runs.series) if each.what == "activations"]
    zeros = [column_of(each, "zero")[:, seen] for each in tables]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.abs(zeros[0] - zeros[1]) / column_of(tables[0], "count")[:, seen]
    passed = _FACTOR * np.sqrt(np.nan_to_num(share).max(1, initial=0.0))
    behind = [at for at, each in enumerate(runs.series) if each.what in _COMPUTED]
    found[:, behind] = passed[:, None]
    # Parameters move apart by that share of an update, and what they compute with them.
    moved = np.cumsum(passed * _usual_update(runs))
    found[1:] = np.maximum(found[1:], _FACTOR * moved[:-1, None])
    return found


def _flips(runs: RunPair) -> Floats:
    """Return what Adam does to all that comes after its first step, (step, series).

    Its first updates have one size and the sign of the gradient, and the sign of a value that is
    nothing but rounding is drawn anew.
    """
    differs = np.any(np.nan_to_num(runs.gaps) > 0, axis=1)
    moved = np.maximum.accumulate(np.where(differs, _FLIPPED * _usual_update(runs), 0.0))
    times = np.array([_FLOOR_TIMES.get(each.what, 1.0) for each in runs.series])
    found = np.zeros_like(runs.gaps)
    found[1:] = _FACTOR * moved[:-1, None] * times
    return found


def _usual_update(runs: RunPair) -> Floats:
    """(step,) the size of the updates, relative to that of their parameters, in the median."""
    ratios = np.nan_to_num(np.fmax(runs.one.updates, runs.two.updates), posinf=0.0)
    return np.median(ratios, 1) if ratios.shape[1] else np.zeros(len(ratios))


def _amplified(runs: RunPair, summed: Floats) -> tuple[Floats, Floats]:
    """Return what rounding of gradients does to updates and parameters: as a rule, and at most.

    Both are (step, series). As a rule an update differs as its gradient does. Adam divides a
    gradient by its size. Where that is nothing but rounding (the bias of keys), so is the update:
    it has its usual size, and any direction.

    Args:
        runs: The two runs.
        summed: (step, series) what rounding may do to gradients that are sums.
    """
    column = {each: at for at, each in enumerate(runs.series)}
    known = np.nan_to_num(runs.gaps, posinf=0.0)
    usual, most = np.zeros_like(known), np.zeros_like(known)
    names = [each.layer for each in runs.series if each.what == UPDATES]
    updates = np.fmax(runs.one.updates, runs.two.updates)
    for name, sizes in zip(names, updates.T, strict=True):
        gradient = column.get(Series(name, "parameter_gradients"))
        if gradient is None:
            continue
        so_far = np.maximum.accumulate(known[:, gradient])
        nothing = np.isinf(np.maximum.accumulate(summed[:, gradient])) & (so_far > 0)
        update = column[Series(name, UPDATES)]
        usual[:, update] = _FACTOR * so_far
        most[:, update] = np.where(nothing, math.inf, _AMPLIFIED * so_far)
        touched = [update]
        if (parameter := column.get(Series(name, "parameters"))) is not None:
            moved = np.where(so_far > 0, np.where(np.isnan(sizes), math.inf, sizes), 0.0)
            with np.errstate(over="ignore"):  # a run that diverges has updates of any size
                usual[1:, parameter] = _FACTOR * np.cumsum(np.nan_to_num(sizes) * so_far)[:-1]
                # Sizes are those of all values together; the largest value may move by more.
                most[1:, parameter] = _FACTOR * np.cumsum(moved)[:-1]
            touched.append(parameter)
            output = column.get(Series(name.rpartition(".")[0], "activations"))
            if output is not None:  # it differs by no less than what it is computed with
                own = _FACTOR * np.maximum.accumulate(known[:, parameter])
                most[1:, output] = np.maximum(most[:, output], own)[1:]
                touched.append(output)
        usual[:, touched] = np.where(nothing[:, None], most[:, touched], usual[:, touched])
    return usual, most
