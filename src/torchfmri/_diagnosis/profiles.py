"""Profiles along the depth: gradients, outputs of alike layers, differences between samples.

`depth` and `starting_point` read them, and `benchmarks diagnosis` measures them. A profile needs at
least four layers. The second smallest value counts beside the smallest, because one layer that
differs is not a trend; correlations are of ranks or of logarithms, because sizes span many powers
of ten. Change these rules only with the suite of `benchmarks diagnosis`, because the cuts were
measured with them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis.cuts import DEPTH_RATIO, DEPTH_TREND, GROWTH_WARN
from torchfmri._diagnosis.observation import Floats, Observation
from torchfmri._diagnosis.signals import median, trained_matrices
from torchfmri._diagnosis.structure import ParameterFacts

_SECOND_RATIO = 1e-3  # the second smallest must be small too: one odd layer is not a trend
STEADY = 0.9  # correlation with depth from which on sizes change steadily
_LEAST_LAYERS = 4
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class DepthProfile:
    """How the gradients of the matrices change along the depth.

    Attributes:
        parameters: The parameters, in the order in which their layers run.
        rms: The rms of each one's gradient, as the median over the steps.
        trend: Rank correlation of rms with depth; positive: smaller towards the input.
    """

    parameters: list[ParameterFacts]
    rms: Floats
    trend: float

    @property
    def ratio(self) -> float:
        """Smallest / largest."""
        return float(self.rms.min() / self.rms.max())

    @property
    def second_ratio(self) -> float:
        """Second smallest / largest: one layer that differs is not a trend."""
        return float(np.sort(self.rms)[1] / self.rms.max())

    @property
    def vanishes(self) -> bool:
        """Whether they get so much smaller towards the input that the first layers do not learn."""
        return self.trend >= DEPTH_TREND and self._is_steep

    @property
    def explodes(self) -> bool:
        """Whether they get as much larger towards the input."""
        return self.trend <= -DEPTH_TREND and self._is_steep

    @property
    def _is_steep(self) -> bool:
        return self.ratio < DEPTH_RATIO and self.second_ratio < _SECOND_RATIO


def gradient_profile(seen: Observation) -> DepthProfile | None:
    """Return the gradients of the trained matrices by depth; None for fewer than four."""
    found = []
    for each in trained_matrices(seen):
        column = seen.trace.column(each.name, "parameter_gradients", "rms")
        size = median(column[column > 0])
        if math.isfinite(size):
            found.append((each, size))
    if len(found) < _LEAST_LAYERS:
        return None
    rms = np.array([each for _, each in found])
    return DepthProfile([each for each, _ in found], rms, _rank_trend(rms))


def signal_sizes(seen: Observation) -> tuple[list[str], Floats]:
    """Return how much the input of each hidden matrix differs between samples at first.

    In the order in which the layers run; what reads the data itself is left out.
    """
    known = {} if seen.steps is None else seen.steps.signal
    layers = [each for each in seen.order if math.isfinite(known.get(each, math.nan))]
    return layers, np.array([known[each] for each in layers])


def signal_left(seen: Observation) -> float:
    """Return how much of the difference between samples is left along the depth: last / first.

    nan if there are fewer than four hidden matrices, or no steady fall.
    """
    layers, sizes = signal_sizes(seen)
    if len(layers) < _LEAST_LAYERS or not sizes[0] > 0:
        return math.nan
    return float(sizes[-1] / sizes[0]) if _rank_trend(sizes) <= -STEADY else math.nan


def _rank_trend(values: Floats) -> float:
    """Return the rank correlation of values with their places."""
    if not np.std(values) > 0:
        return 0.0
    return float(np.corrcoef(np.arange(len(values)), values.argsort().argsort())[0, 1])


@dataclass(frozen=True)
class DepthGrowth:
    """How the outputs of alike layers grow along the depth.

    Attributes:
        layers: Alike layers in the order in which they run.
        rms: The rms of each layer's output, at the step where it grew most.
        step: The number of the step at which they grew most.
        trend: Correlation of log rms with depth.
    """

    layers: list[str]
    rms: Floats
    step: int
    trend: float

    @property
    def factor(self) -> float:
        """Last / first."""
        return float(self.rms[-1] / self.rms[0])


def growths(seen: Observation) -> list[DepthGrowth]:
    """Return the growth of each family of at least four alike layers."""
    trace = seen.trace
    if not len(trace):
        return []
    known = set(trace.names("activations"))
    families: dict[tuple[str, str], list[str]] = {}
    for layer in seen.order:
        if layer in known:
            key = (_DIGITS.sub("*", layer), seen.structure.kinds.get(layer, ""))
            families.setdefault(key, []).append(layer)
    found = []
    for layers in families.values():
        if len(layers) < _LEAST_LAYERS:
            continue
        rms = np.stack([trace.column(each, "activations", "rms") for each in layers], axis=1)
        growth = _largest_growth(layers, rms, trace.steps)
        if growth is not None:
            found.append(growth)
    return found


def _largest_growth(layers: list[str], rms: Floats, steps: NDArray[np.int64]) -> DepthGrowth | None:
    usable = np.isfinite(rms).all(1) & (rms > 0).all(1)
    if not usable.any():
        return None
    rows, numbers = rms[usable], steps[usable]
    factors = rows[:, -1] / rows[:, 0]
    # By the median, so that one spike does not count as growth; the first step where it is seen.
    typical = float(np.median(factors))
    place = int(np.flatnonzero(factors >= min(typical, GROWTH_WARN))[0])
    logs = np.log(rows[place])
    trend = float(np.corrcoef(np.arange(len(logs)), logs)[0, 1]) if logs.std() > 0 else 0.0
    return DepthGrowth(layers, rows[place], int(numbers[place]), trend)
