"""Weights that jump: by one enormous update, or by something other than the optimizer.

`step_sizes` asks for `update_jump`, `registry` for `changed_outside`. Both compare the norm of a
parameter before a step with its norm before the last step; the update explains growth up to its own
norm, and anything beyond it was written by somebody else. Norms come from the Monitor as float32,
so growth below `_NOTICED` is rounding. With `every` > 1 some updates were not seen: `unwatched`
counts them, and the text must say so instead of accusing the user's code. Texts and advice may be
changed freely; conditions only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.learning_rates import rate_in_words
from torchfmri._diagnosis.observation import Floats, Observation
from torchfmri._diagnosis.signals import (
    first_nonfinite,
    gradient_norms,
    is_worse,
    loss_around,
    median,
    update_ratios,
)
from torchfmri._diagnosis.trace import RunTrace
from torchfmri._records import Finding, alarm, finding_of
from torchfmri._text import listed, percent

_WINDOW = 5  # steps after a jump that tell whether it stands alone
_OFTEN = 3  # times that weights must grow by themselves if none of the growths is large
_NOTICED = 1.02
"""Growth beyond what the update explains counts from here on; below it may be rounding."""


class WeightGrowth(NamedTuple):
    """(step, parameter) how the weights before an update compare with those before the last one.

    Attributes:
        size: Their norm / the norm at the last step that changed them; nan at the first.
        beyond: The part of that growth, or shrinking, which the updates do not explain; else 1.
        update: The last update / the weights before it.
        unwatched: How many steps since then were not watched, so that their updates are not known.
    """

    size: Floats
    beyond: Floats
    update: Floats
    unwatched: NDArray[np.int64]

    def of(self, columns: NDArray[np.int64]) -> WeightGrowth:
        """Return the growth of some of the parameters alone."""
        return WeightGrowth._make(each[:, columns] for each in self)


def growth_outside(trace: RunTrace) -> WeightGrowth:
    """Compare each parameter with itself, and with the updates in between.

    A norm grows and shrinks by no more than the norm of the update. A large parameter is
    compared by the same sample each time, so that it does not matter which rows an update concerns.
    Updates of steps that were not watched count as the larger one of the updates around them.
    """
    weights, place = trace.weights, np.arange(len(trace))[:, None]
    known = weights > 0
    before = np.full(weights.shape, -1)  # the step that knew the weight last, -1 if none did
    before[1:] = np.maximum.accumulate(np.where(known, place, -1), axis=0)[:-1]
    missed = np.cumsum(np.diff(trace.steps, prepend=trace.steps[:1] - 1) - 1)[:, None]
    gap = missed - np.where(before < 0, 0, missed[:, 0][before])

    def at_last(values: Floats) -> Floats:
        found: Floats = np.where(before < 0, math.nan, np.take_along_axis(values, before, axis=0))
        return found

    with np.errstate(all="ignore"):
        now = np.where(known, trace.changes / weights, math.nan)
        ratio, size = at_last(now), np.where(known, weights / at_last(weights), math.nan)
        bound = np.where(gap > 0, np.fmax(ratio, now), ratio)
        grown = size / (1 + bound) ** (gap + 1)
        shrunk = size / np.maximum(1 - bound, 0) ** (gap + 1)
        beyond = np.where(grown > _NOTICED, grown, 1.0)
        beyond = np.where(shrunk < 1 / _NOTICED, shrunk, beyond)
    return WeightGrowth(size=size, beyond=beyond, update=ratio, unwatched=gap)


def update_jump(seen: Observation) -> Iterator[Finding]:
    """Find the first update that replaces the weights by itself, and harms.

    The weights are large afterwards, so that later updates are small beside them: their size says
    nothing about the learning rate.
    """
    ratios, norms, steps = update_ratios(seen), gradient_norms(seen), seen.trace.steps
    for place in np.flatnonzero(ratios > cuts.UPDATE_ALONE).tolist():
        usual, ratio = median(ratios[:place]), float(ratios[place])
        ahead = ratios[place + 1 : place + 1 + _WINDOW]
        alone = int((ahead > cuts.UPDATE_HIGH).sum()) < 2
        # Without calm steps before it, a large update may be what the run does all the time.
        jumped = not usual >= cuts.UPDATE_HIGH and (
            math.isinf(ratio) or ratio > cuts.UPDATE_JUMP * usual
        )
        if not alone or not jumped or not math.isfinite(norms[place]):
            continue  # another diagnosis reports non-finite gradients
        before, after = loss_around(seen.trace.loss, place)
        turned = first_nonfinite(seen)
        lost = seen.origin is not None or (turned is not None and turned > place)
        if not (lost or math.isinf(ratio) or is_worse(before, after)):
            continue
        step, spike = int(steps[place]), norms[place] / median(norms[:place])
        yield alarm(
            "learning_rate_too_high",
            step=step,
            text=f"The update of step {step} changed the weights {_by(ratio, usual)}"
            f"{_gradients(spike)}{_then(lost, before, after)}.",
            advice=_advice(step, spike)
            if place
            else f"Lower the learning rate{rate_in_words(seen)}.",
            evidence={"update_ratio": ratio, "loss_before": before, "loss_after": after},
        )
        return


def changed_outside(seen: Observation) -> Iterator[Finding]:
    """Find weights that something other than the optimizer changed: far at once, or often."""
    found = growth_outside(seen.trace)
    grown, shrunk = found.beyond > 1, found.beyond < 1
    at_once = found.beyond > cuts.OUTSIDE_GROWTH
    told = at_once.copy()
    for one_way, other in ((grown, shrunk), (shrunk, grown)):
        in_all = np.abs(np.cumsum(np.log(np.where(one_way, found.beyond, 1.0)), axis=0))
        often = (in_all > math.log(cuts.OUTSIDE_SUM)) & (np.cumsum(one_way, axis=0) >= _OFTEN)
        told |= often & (np.cumsum(other, axis=0) == 0)  # not exchanged for others and put back
    concerned = np.flatnonzero(told.any(0))
    if not len(concerned):
        return
    # If some parameters grow and others shrink, report those that grow.
    written = grown if bool((told & grown).any()) else shrunk
    concerned = concerned[(told & written)[:, concerned].any(0)]
    names = [seen.trace.parameters[each] for each in concerned]
    growth = found.of(concerned)
    yield _about_growth(seen, names, growth, written[:, concerned], bool(at_once.any()))


def _about_growth(
    seen: Observation,
    names: list[str],
    found: WeightGrowth,
    written: NDArray[np.bool_],
    at_once: bool,
) -> Finding:
    trace = seen.trace
    first, times = int(written.any(1).argmax()), int(written.any(1).sum())
    stepped = np.flatnonzero(np.isfinite(trace.weights[:first]).any(1))
    before, step = int(trace.steps[stepped[-1]]), int(trace.steps[first])
    which = "the weights" if len(names) == len(trace.parameters) else listed(names)
    size, update = median(found.size[written]), median(found.update[written])
    became = f"became {size:.3g} times as large"
    if not math.isfinite(size):
        became = "became too large for their norm to be a float32"
    unwatched = int(found.unwatched[written].max())
    watched = "watched " if unwatched else ""
    if times == 1:
        text = f"Between step {before} and step {step} {which} {became}, and the update of step "
        text += f"{before} changed them by {percent(update)} only"
    else:
        text = f"From step {step} on, {which} {became} between one {watched}step and "
        text += f"the next, at least {times} times, and the updates changed them by "
        text += f"{percent(update)} only"
    cause, advice = "it was not the optimizer", ""
    if unwatched:
        cause = (
            f"it was not the optimizer, or it was an update of a step that was not watched "
            f"({unwatched} of {unwatched + 1}) and is unlike the others"
        )
        advice = " Watch each step (every=1) to tell the two apart."
    in_all = abs(math.log(size) * times) if math.isfinite(size) else math.inf
    severe = at_once or in_all > math.log(cuts.OUTSIDE_GROWTH)
    return finding_of(
        "weights_changed_outside",
        severity="alarm" if severe else "warn",
        layers=tuple(dict.fromkeys(each.rpartition(".")[0] for each in names if "." in each)),
        step=step,
        text=f"{text}: {cause}.",
        advice="Look at what writes to the weights outside optimizer.step(): load_state_dict, "
        f"scaling, averaging or merging by hand.{advice}",
        evidence={"growth": size, "times": times, "unwatched": unwatched},
    )


def _by(ratio: float, usual: float) -> str:
    size = f"by {ratio:.3g} times their size"
    if math.isinf(ratio):
        size = "so far that their norm is too large for float32"
    return size if math.isnan(usual) else f"{size} (those before it: by {percent(usual)})"


def _gradients(spike: float) -> str:
    if math.isnan(spike):
        return ""
    if spike > cuts.SPIKE:
        return f", from gradients {spike:.3g} times as large as before"
    return ", from gradients of the usual size"


def _then(lost: bool, before: float, after: float) -> str:
    if lost:
        return ", and the numbers stopped being finite"
    if not math.isfinite(after):
        return ""
    return f", and the loss went from {before:.3g} to {after:.3g}"


def _advice(step: int, spike: float) -> str:
    back = "The weights do not come back by themselves: load a checkpoint from before it."
    if spike > cuts.SPIKE:
        return f"Look at the batch of step {step}, and clip the gradients. {back}"
    return (
        f"See what set the learning rate of step {step} (a scheduler, its warm-up, a group that "
        f"was added), and lower it. {back}"
    )
