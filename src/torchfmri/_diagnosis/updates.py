"""Diagnoses of updates that go missing: cleared, clipped, decayed, rounded off, never made.

`registry` calls each function. A check-up knows each step's flags (`StepFacts`); a Monitor infers
clipping and clearing from biases, whose gradient is the sum of the gradients at their layer's
output. Each fault has one finding: where another diagnosis reports it, a comment says which one.
Texts and advice may be changed freely; conditions only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.learning_rates import FINER_WEIGHTS, SET_RATE, low_groups
from torchfmri._diagnosis.observation import Observation, layers_of
from torchfmri._diagnosis.signals import (
    clip_factors,
    gradient_norms,
    median,
    trained_matrices,
)
from torchfmri._records import Finding, alarm
from torchfmri._text import how_many, listed, percent

_SUSTAINED = 3  # steps with the same fault before it is reported
_WINDOW = 5
_LEAST_STEPS = 10
_LIMITS = (0.1, 10.0)
"""The usual limits of clip_grad_norm_, from and to."""
_POWER = 1e-2  # how far log2 of a norm may be from a whole number to be a power of two


def updates_lost(seen: Observation) -> Iterator[Finding]:
    """Find weights that stay bit for bit although they have gradients and an optimizer."""
    if seen.steps is None or int(seen.steps.stepped.sum()) < _SUSTAINED:
        return
    if seen.steps.cleared.mean() > 0.5:  # there was nothing to update with
        return
    judged = [
        each
        for each in trained_matrices(seen)
        if each.name in seen.weights and seen.weights[each.name].gradient == "some"
    ]
    told = {name for group, _ in low_groups(seen) for name in group.parameters}
    told |= set(seen.steps.idle)
    still = [
        each
        for each in judged
        if seen.weights[each.name].moved < cuts.UNMOVED and each.name not in told
    ]
    if not still:
        return
    if not (seen.steps.learning_rate > 0).any():
        yield alarm(
            "learning_rate_zero",
            step=int(seen.trace.steps[0]),
            text=f"The learning rate was 0 in all of {len(seen.steps.learning_rate)} steps: "
            "nothing is trained.",
            advice=SET_RATE,
        )
        return
    yield alarm(
        "updates_lost",
        layers=layers_of(still),
        step=int(seen.trace.steps[0]),
        text=f"{how_many(len(still), len(judged), 'matrices')} did not change in "
        f"{int(seen.steps.stepped.sum())} steps although they have gradients: the updates are "
        "smaller than the last digit of the weights.",
        advice=FINER_WEIGHTS,
        evidence={"moved_share": max(seen.weights[each.name].moved for each in still)},
    )


def weight_decay_too_strong(seen: Observation) -> Iterator[Finding]:
    """Find a decay that shrinks the weights faster than gradients can build them."""
    for group in seen.structure.groups:
        rate = group["lr"] * group["weight_decay"]
        if not rate >= cuts.DECAY:
            continue
        left = median([_size_left(seen, name) for name in group["parameters"]])
        if not left < cuts.SHRUNK:
            continue
        yield alarm(
            "weight_decay_too_strong",
            step=int(seen.trace.steps[0]),
            text=f"Weight decay takes {percent(rate)} of every weight at each step; after "
            f"{len(seen.trace)} steps {percent(left)} of their size is left.",
            advice=f"Lower weight_decay={group['weight_decay']:g}: 0.01 to 0.1 is usual for AdamW.",
            evidence={"decay_per_step": rate, "size_left": left},
        )
        return


def _size_left(seen: Observation, name: str) -> float:
    """Return the size of a parameter at the end / at the start; nan if it is not known."""
    if name in seen.weights:
        weight = seen.weights[name]
        return weight.last_rms / weight.rms if weight.rms > 0 else math.nan
    sizes = seen.trace.column(name, "parameters", "rms")
    sizes = sizes[np.isfinite(sizes)]
    return float(sizes[-1] / sizes[0]) if len(sizes) >= _LEAST_STEPS and sizes[0] > 0 else math.nan


def clipping_hides_explosion(seen: Observation) -> Iterator[Finding]:
    """Find clipping that makes every gradient a hundredth of itself or less."""
    factors = clip_factors(seen)
    known = np.isfinite(factors)
    if int(known.sum()) < _WINDOW:
        return
    clipped = factors[known] < cuts.CLIPPED
    if clipped.mean() <= 0.9:
        return
    factor = median(factors)
    first = int(seen.trace.steps[np.flatnonzero(known)[np.flatnonzero(clipped)[0]]])
    found = gradient_norms(seen)
    left = median(found[known])
    norm = f" (their norm is {median(found[known] / factors[known]):.3g})" if left > 0 else ""
    share, evidence = float(clipped.mean()), {"clip_factor": factor, "norm_left": left}
    if _is_clipped_scaled(seen, left):
        problem = "clipped_before_unscaling"
        text = (
            "The gradients are clipped while they are still multiplied by the scale of the "
            f"GradScaler, and divided by it afterwards: a norm of {left:.2g} is left of them, on "
            f"{percent(share)} of the steps."
        )
        advice = "Call scaler.unscale_(optimizer) before torch.nn.utils.clip_grad_norm_."
    elif left < cuts.CLIPPED_NORM:
        problem = "clipping_too_strong"
        cause, advice = _why_so_little(seen, left)
        text = (
            f"Between backward and the optimizer's step the gradients{norm} are multiplied by "
            f"{factor:.2g} on {percent(share)} of the steps, which leaves a norm of {left:.2g}: "
            f"{cause}."
        )
    else:
        problem = "clipping_hides_explosion"
        evidence = {"clip_factor": factor, "share_of_steps": share}
        text = (
            f"Clipping multiplies the gradients{norm} by {factor:.2g} on {percent(share)} of the "
            "steps: they explode, and what is left of them is mostly a direction."
        )
        advice = (
            "Find what makes them so large (the size of the loss, of the inputs, of the "
            "initialisation) before you clip; a healthy run is clipped now and then."
        )
    yield alarm(problem, step=first, text=text, advice=advice, evidence=evidence)


def _why_so_little(seen: Observation, left: float) -> tuple[str, str]:
    """Return why so small a norm is left, and advice: a low limit or an unknown scale."""
    lower = "Clip at 0.1 to 10 (1 is usual), and at a norm rather than at a value."
    if math.isfinite(median(seen.trace.scalar("gradient_scale"))):
        return "it is the limit that is too low", lower
    power = math.log2(left) if left > 0 else math.nan
    is_power = abs(power - round(power)) < _POWER if math.isfinite(power) else False
    likely = f" ({left:.3g} is 1 / {2 ** -round(power):,}, a usual scale)" if is_power else ""
    cause = (
        "the limit is too low, or they are clipped while the loss is still scaled, by a "
        f"GradScaler or by hand, and divided by the scale afterwards{likely}"
    )
    advice = (
        "With a GradScaler: call scaler.unscale_(optimizer) before "
        "torch.nn.utils.clip_grad_norm_, and give the scaler to the Monitor (scaler=scaler). With "
        "a scale of your own: divide by it before you clip. Without either: clip at a norm of 0.1 "
        "to 10."
    )
    return cause, advice


def _is_clipped_scaled(seen: Observation, left: float) -> bool:
    """Whether clipping comes before the unscaling of a GradScaler.

    A Monitor knows the scale alone: with it, what is left has a usual limit for its norm.
    """
    if seen.steps is not None:
        return seen.steps.scaled_clip < cuts.CLIPPED
    limit = left * median(seen.trace.scalar("gradient_scale"))
    return left < cuts.CLIPPED_NORM and _LIMITS[0] <= limit <= _LIMITS[1]


def step_before_backward(seen: Observation) -> Iterator[Finding]:
    """Find an optimizer that steps before there is a gradient, and backward only then."""
    early = np.zeros(0, bool) if seen.steps is None else seen.steps.early
    if int(early.sum()) < _SUSTAINED or early.mean() <= 0.5:
        return
    yield alarm(
        "step_before_backward",
        step=int(seen.trace.steps[early.argmax()]),
        text=f"In {int(early.sum())} of {len(early)} steps optimizer.step() came before "
        "backward(), with no gradient there: nothing is trained.",
        advice="Call zero_grad(), backward() and step(), in this order.",
        evidence={"share_of_steps": float(early.mean())},
    )


def cleared_gradients(seen: Observation) -> Iterator[Finding]:
    """Find gradients that arrive, and are gone when the optimizer comes for them."""
    if seen.steps is None:
        yield from _nothing_moves(seen)
        return
    cleared = seen.steps.cleared
    if int(cleared.sum()) < _SUSTAINED or cleared.mean() <= 0.5:
        return
    if seen.steps.early.mean() > 0.5:  # `step_before_backward` reports it
        return
    yield alarm(
        "cleared_gradients",
        step=int(seen.trace.steps[cleared.argmax()]),
        text=f"In {int(cleared.sum())} of {len(cleared)} steps backward left gradients, and all "
        "were 0 or gone when the optimizer stepped.",
        advice="Call optimizer.zero_grad() before backward, not between backward and step.",
        evidence={"share_of_steps": float(cleared.mean())},
    )


def _nothing_moves(seen: Observation) -> Iterator[Finding]:
    """Find frozen training in a Monitor's view: gradients at layers, no update of a parameter."""
    trace = seen.trace
    if len(trace) < _LEAST_STEPS or not trace.parameters or not seen.structure.groups:
        return
    arrive = np.nan_to_num(trace.matrix("gradients", "rms")) > 0
    arrived = np.nan_to_num(trace.matrix("parameter_gradients", "rms")) > 0
    moved = np.nan_to_num(trace.updates) > 0
    stepped = np.isfinite(trace.updates).any(1)
    if arrived.any() or moved.any() or np.mean(arrive.any(1)) <= 0.5:
        return
    if int(stepped.sum()) < _LEAST_STEPS:  # gradients may be on their way to a later step
        return
    if not all(group["lr"] > 0 for group in seen.structure.groups):
        return
    yield alarm(
        "cleared_gradients",
        step=int(trace.steps[0]),
        text=f"In {len(trace)} steps gradients arrived at layers, and whenever the optimizer "
        "stepped there was none at any parameter: nothing is trained.",
        advice="Call optimizer.zero_grad() before backward, and optimizer.step() after it.",
    )


def updates_undone(seen: Observation) -> Iterator[Finding]:
    """Find weights that every step changes, and that are back when the next one begins."""
    trace = seen.trace
    sizes = trace.matrix("parameters", "rms")
    if len(trace) < _WINDOW or not sizes.size:
        return
    moved: NDArray[np.bool_] = np.asarray((np.nan_to_num(trace.updates) > 0).any(1))
    back: NDArray[np.bool_] = np.asarray((sizes[1:] == sizes[:-1]).all(1) & moved[:-1])
    if not back[-_WINDOW + 1 :].all():
        return
    start = np.flatnonzero(~back)
    step = int(trace.steps[int(start[-1]) + 1 if len(start) else 0])
    yield alarm(
        "updates_undone",
        step=step,
        text=f"From step {step} on each step changes the weights, and when the next one begins "
        "they have their old size again, to the last digit: updates are undone.",
        advice="Look for load_state_dict, a copy of the model, or an exchange of weights inside "
        "the loop.",
        evidence={"steps": int(len(trace) - step)},
    )


def optimizer_never_steps(seen: Observation) -> Iterator[Finding]:
    """Find backward passes that no optimizer step follows."""
    if seen.steps is None or len(seen.steps.stepped) < _WINDOW:
        return
    if seen.steps.stepped.any():
        yield from _one_never_steps(seen, seen.steps.idle)
        return
    if seen.reach is not None and not seen.reach.loss_has_graph:
        return
    yield alarm(
        "optimizer_never_steps",
        text=f"In {len(seen.steps.stepped)} steps optimizer.step() was not called once.",
        advice="Call optimizer.step() after backward, of the optimizer that was handed over.",
    )


def _one_never_steps(seen: Observation, idle: Sequence[str]) -> Iterator[Finding]:
    """Find one of several optimizers that nobody calls."""
    facts = seen.structure.parameters
    layers = layers_of(facts[name] for name in idle if name in facts)
    if not layers:
        return
    yield alarm(
        "optimizer_never_steps",
        layers=layers,
        text=f"The optimizer of {listed(layers)} did not step once, while another one does: these "
        "weights never change.",
        advice="Call step() of every optimizer after backward.",
    )
