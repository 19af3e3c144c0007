"""Diagnoses of step sizes: learning rates that are too high, losses that diverge or jump.

`registry` calls each function. A large update alone is not a finding: Adam's first steps, warm
restarts and fast heads have them too. It is one together with harm, a loss that does not fall or
numbers that are lost. Keep that order of questions; the healthy setups of the suite hold each
exception. Texts and advice may be changed freely; conditions only with the suite of `benchmarks
diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.jumps import update_jump
from torchfmri._diagnosis.learning_rates import far_groups, rate_in_words
from torchfmri._diagnosis.observation import Floats, Observation
from torchfmri._diagnosis.signals import (
    first_nonfinite,
    gradient_norms,
    is_stuck,
    is_worse,
    loss_around,
    median,
    update_ratios,
)
from torchfmri._records import Finding, alarm, finding_of, warn
from torchfmri._text import listed, percent

_SUSTAINED = 3  # large updates within a window that are more than a single jump
_WINDOW = 5
_LEAST_STEPS = 10
_RECENT = 50  # steps in which a loss half as far out makes a spike nothing new
_MILLIONFOLD = 1e4  # update / weight that asks for a rate a million times smaller


def learning_rate_too_high(seen: Observation) -> Iterator[Finding]:
    """Find updates that replace the weights: a single one, all of them, or those of a group."""
    found = next(chain(update_jump(seen), _too_high(seen)), None)
    if found is not None:
        yield found
    else:
        yield from _group_too_high(seen)


def _group_too_high(seen: Observation) -> Iterator[Finding]:
    """Find one group whose weights are replaced, beside others that are changed with care."""
    facts = seen.structure.parameters
    for group in far_groups(seen):
        # Only the weights of layers: prompts and tables may be replaced.
        names = group.parameters
        weights = [name for name in names if name.rpartition(".")[2].startswith("weight")]
        ratios = update_ratios(seen, weights)
        large = ratios > cuts.UPDATE_HIGH
        calm = update_ratios(seen, [name for name in facts if name not in group.parameters])
        if not group.above or not large.any() or median(calm) > cuts.UPDATE_HIGH:
            continue
        place = int(large.argmax())
        ahead = ratios[place : place + _WINDOW]
        replaced = bool((ahead > cuts.UPDATE_REPLACED).any())
        stuck = is_stuck(seen) or seen.origin is not None
        if int(large[place : place + _WINDOW].sum()) < _SUSTAINED or not (replaced or stuck):
            continue
        before, after = loss_around(seen.trace.loss, place)
        yield finding_of(
            "learning_rate_too_high",
            severity="alarm" if stuck else "warn",
            layers=group.layers,
            step=int(seen.trace.steps[place]),
            text=f"From step {seen.trace.steps[place]} on, each step changed the weights of "
            f"{listed(group.layers)} by {percent(median(ahead))} of their size (usual is about "
            f"0.1 % to 1 %): their group has the learning rate {group.rate:g}, the nearest other "
            f"{group.nearest:g}.",
            advice=f"Lower the learning rate of this group ({group.rate:g}) by a factor of "
            f"{_factor(median(ahead))}; a head usually has up to ten times its body's.",
            evidence={"update_ratio": median(ahead), "loss_before": before, "loss_after": after},
        )


def _change(before: float, after: float) -> str:
    if not math.isfinite(after):
        return "and the loss was not seen"
    return f"and the loss went from {before:.3g} to {after:.3g}"


def _too_high(seen: Observation) -> Iterator[Finding]:
    ratios = update_ratios(seen)
    steps, loss = seen.trace.steps, seen.trace.loss
    turned = len(ratios) if seen.origin is not None else first_nonfinite(seen)
    lost = turned is not None
    # An update that is not finite is reported elsewhere, with its cause.
    for place in np.flatnonzero(np.isfinite(ratios) & (ratios > cuts.UPDATE_HIGH)):
        ahead = ratios[place : place + _WINDOW]
        sustained = int((ahead > cuts.UPDATE_HIGH).sum()) >= _SUSTAINED
        replaced = ratios[place] > cuts.UPDATE_REPLACED and len(ratios) - place > _SUSTAINED
        ends_soon = turned is not None and place < turned <= place + _WINDOW
        if not (sustained or replaced or ends_soon):
            continue
        before, after = loss_around(loss, int(place))
        if not lost and not is_worse(before, after):
            continue
        replacing = bool((ahead > cuts.UPDATE_REPLACED).any())
        # A restart loses some of what was learnt, and learns it again.
        passes = not _lasts(ratios[place:]) or _is_better(seen.trace.first_loss, after)
        if not lost and not replacing and math.isfinite(after) and passes:
            continue
        ratio = median(ahead)
        if (
            not lost
            and not math.isfinite(after)
            and not _cannot_be_right(ratios, int(place), ratio)
        ):
            continue
        then = "and the numbers stopped being finite" if lost else _change(before, after)
        rate = rate_in_words(seen)
        # Without steps before it there is no telling whether it was the batch.
        batch = "" if place else " If the first batch is unlike the others, repair it, or clip."
        yield alarm(
            "learning_rate_too_high",
            step=int(steps[place]),
            text=f"From step {steps[place]} on, each step changed the weights by {percent(ratio)} "
            f"of their size (usual is about 0.1 % to 1 %), {then}.",
            advice=f"Lower the learning rate{rate} by a factor of {_factor(ratio)}, or warm it up; "
            f"then look at update / weight again.{batch}",
            evidence={"update_ratio": ratio, "loss_before": before, "loss_after": after},
        )
        return


def diverging_loss(seen: Observation) -> Iterator[Finding]:
    """Find a loss that grows tenfold and stays there, whatever the updates look like."""
    loss = seen.trace.loss
    known = np.flatnonzero(np.isfinite(loss))
    if len(known) < _LEAST_STEPS or (loss[known] <= 0).any():
        return
    third = len(known) // 3
    early, late = loss[known[:third]], loss[known[-third:]]
    first, last = median(early), median(late)
    if last <= cuts.DIVERGED * first or late.min() <= early.max():
        return  # batches of one sample scatter tenfold, so every late step must be above
    start = known[np.flatnonzero(loss[known] > 2 * first)[0]]
    yield alarm(
        "diverging_loss",
        step=int(seen.trace.steps[start]),
        text=f"The loss grew from {first:.3g} to {last:.3g} and stays there.",
        advice=f"Lower the learning rate{rate_in_words(seen)}; with momentum, by more than you "
        "think.",
        evidence={"loss_first": first, "loss_last": last},
    )


def loss_spike(seen: Observation) -> Iterator[Finding]:
    """Find a sudden loss and gradient far above the usual, with the layer that moved first."""
    trace = seen.trace
    if len(trace) < 2 * _LEAST_STEPS:
        return
    if not trace.names("parameter_gradients"):
        return
    norm, loss = gradient_norms(seen), trace.loss
    suspects = np.flatnonzero(norm > cuts.SPIKE * median(norm) / 2)
    for place in suspects[suspects >= 2 * _LEAST_STEPS].tolist():
        before = slice(max(0, place - 100), place)
        usual, usual_loss = median(norm[before]), median(loss[before])
        learnt = max(abs(trace.first_loss), abs(trace.first_loss - usual_loss))
        rise = (loss[place] - usual_loss) / learnt if learnt > 0 else 0.0
        if not norm[place] > cuts.SPIKE * usual or not rise > cuts.SPIKE_RISE:
            continue
        if usual == 0 or _is_usual(loss[before], loss[place], usual_loss):
            continue
        layer, factor, step = _first_mover(seen, place)
        yield warn(
            "loss_spike",
            layers=(layer,) if layer else (),
            step=int(trace.steps[place]),
            text=f"At step {trace.steps[place]} the loss jumped to {loss[place]:.3g} (median "
            f"before: {usual_loss:.3g}) and the gradient to {norm[place] / usual:.0f} times its "
            "usual size"
            + (
                f"; {layer!r} moved first: {factor:.1f} times its usual output at step {step}."
                if layer
                else "."
            ),
            advice="Look at the batch of that step; clip gradients, or lower the learning rate.",
            evidence={"loss": float(loss[place]), "gradient_factor": float(norm[place] / usual)},
        )
        return


def _is_usual(before: Floats, value: float, typical: float) -> bool:
    """Whether such a loss is nothing new: some of the last steps were half as far out."""
    recent = before[-_RECENT:]
    return bool((recent - typical > (value - typical) / 2).any())


def _first_mover(seen: Observation, place: int) -> tuple[str, float, int]:
    """Return the layer whose output left its usual size first, in the last steps before a spike."""
    rms = seen.trace.matrix("activations", "rms")
    names = seen.trace.names("activations")
    if not names:
        return "", math.nan, 0
    for at in range(max(_LEAST_STEPS, place - 3), place + 1):
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = rms[at] / np.nanmedian(rms[: place - 3], axis=0)
        if np.isfinite(factors).any() and np.nanmax(factors) > 2:
            best = int(np.nanargmax(factors))
            return names[best], float(factors[best]), int(seen.trace.steps[at])
    return "", math.nan, 0


def _lasts(ratios: Floats) -> bool:
    """Whether most steps are too large; the first of Adam, or of a restart, are for a while."""
    large = int((ratios > cuts.UPDATE_HIGH).sum())
    return len(ratios) >= _LEAST_STEPS and large > len(ratios) / 2


def _is_better(first: float, after: float) -> bool:
    return math.isfinite(first) and math.isfinite(after) and not is_worse(first, after)


def _cannot_be_right(ratios: Floats, place: int, ratio: float) -> bool:
    """Whether updates are wrong whatever the loss: weights replaced each step, or a jump."""
    usual = median(ratios[:place]) if place >= _WINDOW else math.inf
    return ratio > cuts.UPDATE_REPLACED or ratio > cuts.UPDATE_JUMP * usual


def _factor(ratio: float) -> str:
    """Return by which power of ten to divide a learning rate for updates of about 1 %."""
    if ratio >= _MILLIONFOLD:
        return "a million or more"
    return f"{10 ** max(1, math.ceil(math.log10(ratio / 1e-2))):,}"
