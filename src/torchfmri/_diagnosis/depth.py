"""Diagnoses of sizes that change along the depth of a model, or along a sequence.

`registry` calls each function with an `Observation`; the numbers come from `profiles`. Texts and
advice may be changed freely. Keep the order of questions: a vanishing gradient and a shrinking
signal are the same fault seen from two ends, so `signal_shrinks` stays silent if
`vanishing_gradients` speaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Observation, layers_of
from torchfmri._diagnosis.profiles import (
    STEADY,
    gradient_profile,
    growths,
    signal_left,
    signal_sizes,
)
from torchfmri._diagnosis.signals import SMALL_GAIN, gains, is_stuck, median
from torchfmri._records import Finding, alarm, finding_of


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
