"""Where numbers stopped being finite, as far as statistics tell.

`registry` calls `origin` and `nonfinite_in_trace`. If a step was run again operation by operation
(`_incidents`), its origin is known exactly and statistics are not asked. -inf alone is not counted
as harm (`harmful` leaves it out), because masks are filled with it. Texts and advice may be changed
freely; conditions only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from torchfmri._diagnosis.observation import Observation
from torchfmri._diagnosis.signals import first_nonfinite
from torchfmri._records import Finding, alarm

_ADVICE = (
    'Have the step traced back to its operation: Monitor(model, on_nonfinite="raise"), or '
    "torchfmri.diagnose."
)


def origin(seen: Observation) -> Iterator[Finding]:
    """Find where the first number that is not finite came from, as a replay of the step tells."""
    if seen.origin is not None:
        yield with_epsilon(seen.origin, seen)


def with_epsilon(finding: Finding, seen: Observation) -> Finding:
    """Return the finding, with its cause if an optimizer divides by an eps that is 0."""
    lost = next((each["eps_lost"] for each in seen.structure.groups if each["eps_lost"]), "")
    if finding.problem not in ("nonfinite_update", "nonfinite_weights") or not lost:
        return finding
    half = "" if lost == "eps=0" else ", or keep the weights in float32 (autocast, GradScaler)"
    return replace(
        finding,
        text=f"{finding.text} The optimizer has {lost}: it divides by 0 wherever the square of a "
        "gradient is 0.",
        advice=f"Set eps to 1e-8 in float32 (1e-4 in float16){half}.",
    )


def nonfinite_in_trace(seen: Observation) -> Iterator[Finding]:
    """Find the first layer with NaN or infinity, if they reach a gradient, a weight or the loss."""
    trace = seen.trace
    if seen.origin is not None or not len(trace):
        return
    place = first_nonfinite(seen)
    if place is None:
        yield from _in_loss(seen)
        return
    step = int(trace.steps[place])
    unknown = alarm(
        "nonfinite_backward",
        step=step,
        text=f"Gradients of step {step} are not finite.",
        advice=_ADVICE,
    )
    looks = (_in_weights, _in_forward, _in_backward)
    found = next((found for look in looks if (found := look(seen, place, step))), unknown)
    yield with_epsilon(found, seen)


def _in_loss(seen: Observation) -> Iterator[Finding]:
    """Find a loss that is not finite while gradients are: something stops them on their way."""
    bad = np.flatnonzero(seen.trace.bad_loss)
    if not len(bad):
        return
    step = int(seen.trace.steps[bad[0]])
    value = "NaN" if np.isnan(seen.trace.loss[bad[0]]) else "infinite"
    yield alarm(
        "nonfinite_loss",
        step=step,
        text=f"The loss of step {step} is {value} (of {len(bad)} of {len(seen.trace)} steps it is "
        "not finite), while gradients are finite: perhaps a logarithm of 0 or a division by 0.",
        advice=_ADVICE,
        evidence={"steps": len(bad)},
    )


def _in_weights(seen: Observation, place: int, step: int) -> Finding | None:
    weights = np.nan_to_num(seen.trace.matrix("parameters", "nonfinite"))
    if not weights.size or not weights[place].any():
        return None
    name = seen.trace.names("parameters")[int(np.flatnonzero(weights[place])[0])]
    return alarm(
        "nonfinite_weights",
        layers=(name.rpartition(".")[0],),
        step=step,
        text=f"Weights were not finite when step {step} began, {name!r} among them.",
        advice=_ADVICE,
        evidence={"parameter": name},
    )


def _in_forward(seen: Observation, place: int, step: int) -> Finding | None:
    """Find the first layer that ran with NaN or +inf; -inf counts only if there is no other."""
    known = seen.trace.names("activations")
    place_of = {layer: index for index, layer in enumerate(seen.order)}
    layers = sorted(known, key=lambda layer: place_of.get(layer, len(place_of)))
    for field in ("harmful", "nonfinite"):
        for layer in layers:
            count = seen.trace.column(layer, "activations", field)[place]
            if count > 0:
                total = seen.trace.column(layer, "activations", "count")[place]
                return alarm(
                    "nonfinite_forward",
                    layers=(layer,),
                    step=step,
                    text=f"At step {step} {layer!r} returned {count:,.0f} values of {total:,.0f} "
                    "that are not finite, and no layer before it did.",
                    advice=_ADVICE,
                    evidence={"count": int(count)},
                )
    return None


def _in_backward(seen: Observation, place: int, step: int) -> Finding | None:
    """Find the last layer with a non-finite gradient, because backward begins at the end."""
    counts = np.nan_to_num(seen.trace.matrix("gradients", "nonfinite"))
    if not counts.size or not counts[place].any():
        return None
    layers = seen.trace.names("gradients")
    first = layers[int(np.flatnonzero(counts[place])[-1])]
    if first == layers[-1]:
        return alarm(
            "nonfinite_loss",
            step=step,
            text=f"At step {step} the outputs of all layers were finite, but the gradient that "
            "came out of the loss was not.",
            advice=_ADVICE,
        )
    return alarm(
        "nonfinite_backward",
        layers=(first,),
        step=step,
        text=f"At step {step} the gradient at {first!r} is not finite, those of later layers are.",
        advice=_ADVICE,
        evidence={"count": int(counts[place][layers.index(first)])},
    )
