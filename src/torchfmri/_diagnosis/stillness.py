"""Diagnoses of weights that no longer move, or never did, while gradients arrive.

`registry` calls each function. A check-up knows the learning rates; a Monitor sees only that no
weight changes, and has to tell a rate of 0 from updates that are smaller than the last digit. A run
that has converged also stands still: gradients below `_SETTLED` of the largest are its sign. Texts
and advice may be changed freely; conditions only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.learning_rates import FINER_WEIGHTS, SET_RATE, TRAIN_LENGTH
from torchfmri._diagnosis.observation import Observation
from torchfmri._diagnosis.signals import LEAST_STEPS, gradient_norms, median
from torchfmri._records import Finding, alarm
from torchfmri._text import listed

_WINDOW = 5  # steps at which a layer must have moved before it counts as stopped
_STOPPED = 3  # steps at which others moved since
_OUTGROWN = 1e3
"""Growth in one step after which usual updates (0.1 %) are below the last digit of the weights."""
_SETTLED = 1e-3
"""Gradients below this share of the largest show that nothing is left to learn."""


def learning_rate_ended(seen: Observation) -> Iterator[Finding]:
    """Find steps that go on after the learning rate has become 0 for good."""
    if seen.steps is None:
        yield from _updates_ended(seen)
        return
    rates = seen.steps.learning_rate
    above = np.flatnonzero(rates > 0)
    if not len(above) or len(rates) - 1 - above[-1] < LEAST_STEPS:
        return
    step = int(seen.trace.steps[above[-1] + 1])
    yield alarm(
        "learning_rate_zero",
        step=step,
        text=f"The learning rate is 0 from step {step} on: the last {len(rates) - 1 - above[-1]} "
        "steps changed nothing.",
        advice=TRAIN_LENGTH,
        evidence={"steps_without_update": int(len(rates) - 1 - above[-1])},
    )


def _updates_ended(seen: Observation) -> Iterator[Finding]:
    """Find lost updates in a Monitor's view: gradients arrive, but no weight moves any more."""
    trace = seen.trace
    if len(trace) < 2 * LEAST_STEPS or not trace.parameters:
        return
    moved = np.flatnonzero((np.nan_to_num(trace.updates, nan=0.0) > 0).any(1))
    if not len(moved):
        yield from _never_moved(seen)
        return
    still = len(trace) - 1 - int(moved[-1])
    gap = max(int(np.diff(moved).max(initial=1)), int(moved[0]) + 1)  # of accumulated gradients
    gradients = trace.matrix("parameter_gradients", "rms")[-still:] if still else np.zeros((1, 0))
    arrives = gradients.size > 0 and bool((np.nan_to_num(gradients) > 0).any(1).all())
    if still < max(LEAST_STEPS, 2 * gap) or not arrives:
        return
    norms = gradient_norms(seen)
    if median(norms[-still:]) < _SETTLED * norms[:-still].max():
        return  # it is where it wants to be (LBFGS stops by itself)
    step = int(trace.steps[moved[-1] + 1])
    sizes = trace.matrix("parameters", "rms")
    grown = median(sizes[-1] / sizes[moved[-1]]) if sizes.size else math.nan
    no_weight = f"From step {step} on no weight changes, in {still} steps with gradients"
    if grown > _OUTGROWN:
        yield alarm(
            "updates_lost",
            step=step,
            text=f"{no_weight}: the weights have become {grown:.3g} times as large, and updates "
            "are smaller than their last digit.",
            advice="Look at what made the weights so large in the step before; load a checkpoint "
            "from before it.",
            evidence={"growth": grown, "steps_without_update": still},
        )
        return
    yield alarm(
        "learning_rate_zero",
        step=step,
        text=f"{no_weight}.",
        advice="See where the learning rate went: give the scheduler the number of steps that you "
        "train for (steps, not epochs).",
        evidence={"steps_without_update": still},
    )


def _never_moved(seen: Observation) -> Iterator[Finding]:
    """Find in a Monitor's view that no weight ever moves, though gradients arrive."""
    trace = seen.trace
    gradients = np.nan_to_num(trace.matrix("parameter_gradients", "rms"))
    stepped = np.isfinite(trace.updates).any(1) & (gradients > 0).any(1)
    if int(stepped.sum()) < LEAST_STEPS or not seen.structure.groups:
        return
    has_rate = any(group["lr"] > 0 for group in seen.structure.groups)
    why = "the learning rate is 0"
    if has_rate:
        why = (
            "the updates are smaller than the last digit of the weights, or something has set the "
            "learning rate to 0"
        )
    yield alarm(
        "updates_lost" if has_rate else "learning_rate_zero",
        step=int(trace.steps[0]),
        text=f"No weight has changed in {int(stepped.sum())} steps with gradients: {why}.",
        advice=FINER_WEIGHTS if has_rate else SET_RATE,
    )


def stopped_training(seen: Observation) -> Iterator[Finding]:
    """Find layers whose weights moved at every step and then no more, while others go on."""
    trace = seen.trace
    if len(trace) < _WINDOW + _STOPPED or not trace.parameters:
        return
    moved = np.nan_to_num(trace.updates, nan=0.0) > 0
    others_go_on: NDArray[np.bool_] = np.asarray(moved.any(1))
    stopped: dict[int, list[str]] = {}
    for column, name in enumerate(trace.parameters):
        place = _stop(moved[:, column], others_go_on)
        facts = seen.structure.parameters.get(name)
        if place is None or facts is None or not facts.is_matrix:
            continue
        gradient = trace.column(name, "parameter_gradients", "rms")[place:]
        if (gradient == 0).any():  # it would move if anything arrived: another diagnosis
            continue
        if trace.updates[place - 1, column] < cuts.UPDATE_LOW:
            continue  # it faded out, to below the last digit: a matter of the learning rate
        stopped.setdefault(place, []).append(facts.layer)
    for place, layers in stopped.items():
        named = tuple(dict.fromkeys(layers))
        step = int(trace.steps[place])
        yield alarm(
            "stopped_training",
            layers=named,
            step=step,
            text=f"The weights of {listed(named)} moved at every step until {step - 1} and not at "
            f"all since, while others go on.",
            advice="If they were frozen on purpose, there is nothing to do; if not, see who set "
            "requires_grad=False or took them out of the optimizer.",
            evidence={"steps_without_update": len(trace) - place},
        )


def _stop(moved: NDArray[np.bool_], others: NDArray[np.bool_]) -> int | None:
    """Return the place since which something that always moved stands still; or None."""
    if moved[-1] or not moved.any():
        return None
    last = int(np.flatnonzero(moved)[-1])
    after = others[last + 1 :]
    if int(after.sum()) < _STOPPED or last + 1 < _WINDOW:
        return None
    return last + 1 if moved[last + 1 - _WINDOW : last + 1].all() else None
