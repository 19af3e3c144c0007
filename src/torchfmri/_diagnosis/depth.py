"""Sizes that change along the depth of a model, or along a sequence: profiles, and their diagnoses.

`registry` calls each diagnosis with an `Observation`; `starting_point` reads profiles too, and
`benchmarks diagnosis` measures them. A profile needs at least four layers. The second smallest
value counts beside the smallest, because one layer that differs is not a trend; correlations are of
ranks or of logarithms, because sizes span many powers of ten. Change these rules only with the
suite of `benchmarks diagnosis`, because the cuts were measured with them. Texts and advice may be
changed freely. Keep the order of questions: a vanishing gradient and a shrinking signal are the
same fault seen from two ends, so `signal_shrinks` stays silent if `vanishing_gradients` speaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.cuts import DEPTH_RATIO, DEPTH_TREND, GROWTH_WARN
from torchfmri._diagnosis.observation import Floats, Observation, layers_of
from torchfmri._diagnosis.signals import SMALL_GAIN, gains, is_stuck, median, trained_matrices
from torchfmri._diagnosis.structure import ParameterFacts
from torchfmri._records import Finding, alarm, finding_of

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


def vanishing_gradients(seen: Observation) -> Iterator[Finding]:
    """Find gradients that get smaller layer by layer on their way to the input."""
    profile = gradient_profile(seen)
    if profile is None or not profile.vanishes:
        return
    small = profile.rms < math.sqrt(cuts.DEPTH_RATIO) * profile.rms.max()
    shrunk = (each for each, is_small in zip(profile.parameters, small, strict=True) if is_small)
    per_layer = profile.ratio ** (1 / (len(profile.rms) - 1))
    gain = median(list(gains(seen).values()))
    why = ""
    if gain < SMALL_GAIN:
        why = f" The weights are small: outputs are {gain:.2g} times their inputs."
    yield alarm(
        "vanishing_gradients",
        layers=layers_of(shrunk),
        step=int(seen.trace.steps[0]),
        text=f"From {profile.parameters[-1].layer!r} back to {profile.parameters[0].layer!r} the "
        f"gradients of the weights shrink to {profile.ratio:.1g} of their size, by {per_layer:.2g} "
        f"per layer: the first layers do not learn.{why}",
        advice=_against_vanishing(seen),
        evidence={"ratio": profile.ratio, "factor_per_layer": per_layer, "trend": profile.trend},
    )


def _against_vanishing(seen: Observation) -> str:
    """Return advice against vanishing gradients: what the model does not have yet."""
    absent = _absent(seen)
    kinds = {kind.lower() for kind in seen.structure.kinds.values()}
    kinds |= {each.function for each in seen.units}
    if kinds & {"sigmoid", "tanh", "hardtanh", "softsign", "hardsigmoid", "logsigmoid"}:
        absent.insert(0, "an activation that is not flat (ReLU, GELU)")
    if absent:
        return f"Use {' or '.join(absent)}, and an initialisation that keeps variances."
    return (
        "Normalise before each branch instead of after the sum (pre-norm; norm_first=True in "
        "PyTorch's layers), start branches small, and warm the learning rate up."
    )


def _absent(seen: Observation) -> list[str]:
    """Return what would keep sizes along the depth but does not seem to be in the model."""
    found = []
    if not any("Norm" in kind for kind in seen.structure.kinds.values()):
        found.append("normalisation")
    if seen.reach is None:
        found.append("residual connections, if it has none")
    elif not seen.reach.has_residual:
        found.append("residual connections")
    return found


def exploding_gradients(seen: Observation) -> Iterator[Finding]:
    """Find gradients that get larger layer by layer on their way to the input."""
    profile = gradient_profile(seen)
    if profile is None or not profile.explodes:
        return
    yield alarm(
        "exploding_gradients",
        layers=layers_of(profile.parameters[:3]),
        step=int(seen.trace.steps[0]),
        text=f"From {profile.parameters[-1].layer!r} back to {profile.parameters[0].layer!r} the "
        f"gradients of the weights grow {1 / profile.ratio:.1g}-fold.",
        advice="Use an initialisation that keeps variances"
        + "".join(f", or {each}" for each in _absent(seen))
        + ".",
        evidence={"ratio": 1 / profile.ratio, "trend": profile.trend},
    )


def activation_growth(seen: Observation) -> Iterator[Finding]:
    """Find outputs that grow from one alike layer to the next."""
    growing = [
        each for each in growths(seen) if each.trend >= STEADY and each.factor > cuts.GROWTH_WARN
    ]
    if not growing:
        return
    # Of a block and the layers inside it, name the block.
    worst = min(growing, key=lambda each: each.layers[0].count("."))
    per_layer = worst.factor ** (1 / (len(worst.layers) - 1))
    adds = seen.reach is not None and seen.reach.has_residual
    lost = "what the first layers add is lost in the sum, and " if adds else ""
    yield finding_of(
        "activation_growth",
        severity="alarm" if worst.factor > cuts.GROWTH_ALARM else "warn",
        layers=tuple(worst.layers),
        step=worst.step,
        text=f"Outputs grow {worst.factor:,.0f}-fold from {worst.layers[0]!r} to "
        f"{worst.layers[-1]!r}, by {per_layer:.2g} per layer: {lost}the next doublings may "
        "overflow.",
        advice="Normalise before each branch, or scale branches down (by 1/sqrt(depth), or from 0)."
        if adds
        else "Use an initialisation that keeps variances (Kaiming for ReLU, Xavier for tanh), or "
        "put norm layers between"
        + ("." if seen.reach is not None else "; scale residual branches down, if there are any."),
        evidence={
            "factor": worst.factor,
            "factor_per_layer": per_layer,
            "rms_last": float(worst.rms[-1]),
        },
    )


def recurrent_growth(seen: Observation) -> Iterator[Finding]:
    """Find outputs of a recurrent layer that grow along the sequence."""
    growth = {} if seen.steps is None else seen.steps.growth
    large = {layer: each for layer, each in growth.items() if each > cuts.GROWTH_WARN}
    if not large:
        return
    layer, factor = max(large.items(), key=lambda each: each[1])
    yield finding_of(
        "activation_growth",
        severity="alarm" if factor > cuts.GROWTH_ALARM else "warn",
        layers=tuple(large),
        step=int(seen.trace.steps[0]),
        text=f"From the first to the last step of a sequence the outputs of {layer!r} grow "
        f"{factor:,.0f}-fold, and gradients with them on their way back.",
        advice="Start the recurrent weights orthogonal with gain 1, use tanh instead of relu, or "
        "an LSTM or GRU.",
        evidence={"factor": factor},
    )


def signal_shrinks(seen: Observation) -> Iterator[Finding]:
    """Find differences between samples that get lost layer by layer, so that nothing is learnt."""
    left = signal_left(seen)
    if not left < cuts.SIGNAL_LEFT or not is_stuck(seen):
        return
    profile = gradient_profile(seen)
    if profile is not None and profile.vanishes:  # the same seen from the other end
        return
    layers, _ = signal_sizes(seen)
    per_layer = left ** (1 / (len(layers) - 1))
    gain = median(list(gains(seen).values()))
    yield alarm(
        "signal_shrinks",
        layers=tuple(layers),
        text=f"From {layers[0]!r} to {layers[-1]!r} what differs between samples shrinks to "
        f"{left:.1g} of its size, by {per_layer:.2g} per layer (weights make outputs {gain:.2g} "
        "times their inputs): the output hardly depends on the input, and gradients shrink alike.",
        advice="Initialise for the activation (Kaiming for ReLU, Xavier for tanh; the default of "
        "Linear is too small for deep plain nets), or add normalisation or residual connections.",
        evidence={"left": left, "factor_per_layer": per_layer, "gain": gain},
    )
