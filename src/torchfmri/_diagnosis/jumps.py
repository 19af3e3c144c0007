"""Weights that jump: by one enormous update, or by something else than the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.losses_around import is_worse, loss_around
from torchfmri._diagnosis.observation import Floats, Observation
from torchfmri._diagnosis.rates import rate_in_words
from torchfmri._diagnosis.signals import first_nonfinite, gradient_norms, median, update_ratios
from torchfmri._records import UPDATE_SAMPLE, Finding
from torchfmri._text import listed, percent

_WINDOW = 5
_NOTICED = 1.02
"""Growth beyond an update that is no matter of rounding, nor of comparing a sample."""
_OFTEN = 3


def update_jump(seen: Observation) -> Iterator[Finding]:
    """The first update that replaces the weights by itself, and harms.

    The weights are large afterwards, so that later updates are small beside them: their size says
    nothing about the learning rate.
    """
    ratios, norms, steps = update_ratios(seen), gradient_norms(seen), seen.trace.steps
    for place in np.flatnonzero(ratios > cuts.UPDATE_ALONE.value).tolist():
        usual, ratio = median(ratios[:place]), float(ratios[place])
        ahead = ratios[place + 1 : place + 1 + _WINDOW]
        alone = int((ahead > cuts.UPDATE_HIGH.value).sum()) < 2
        # Without calm steps before it, a large update may be what the run does all the time.
        jumped = not usual >= cuts.UPDATE_HIGH.value and (
            math.isinf(ratio) or ratio > cuts.UPDATE_JUMP.value * usual
        )
        if not alone or not jumped or not math.isfinite(norms[place]):
            continue  # what is done by gradients that are not finite is told elsewhere
        before, after = loss_around(seen.trace.loss, place)
        turned = first_nonfinite(seen)
        lost = seen.origin is not None or (turned is not None and turned > place)
        if not (lost or math.isinf(ratio) or is_worse(before, after)):
            continue
        step, spike = int(steps[place]), norms[place] / median(norms[:place])
        yield Finding(
            "learning_rate_too_high", "alarm", (), "optimizer", step,
            f"The update of step {step} changed the weights {_by(ratio, usual)}"
            f"{_gradients(spike)}{_then(lost, before, after)}.",
            _advice(step, spike) if place else f"Lower the learning rate{rate_in_words(seen)}.",
            {"update_ratio": ratio, "loss_before": before, "loss_after": after},
        )  # fmt: skip
        return


def changed_outside(seen: Observation) -> Iterator[Finding]:
    """Weights that grow between steps by more than the updates did: at once, or step by step."""
    trace = seen.trace
    names = [each for each in trace.names("parameters") if _is_measured(seen, each)]
    if len(trace) < 2 or not names:
        return
    columns = [trace.names("parameters").index(name) for name in names]
    sizes = trace.matrix("parameters", "rms")[:, columns]
    updates = trace.updates[:, [trace.parameters.index(name) for name in names]]
    with np.errstate(all="ignore"):
        growth = np.where(sizes[:-1] > 0, sizes[1:] / sizes[:-1], math.nan)
        growth[np.diff(trace.steps) != 1] = math.nan
        # A norm grows and shrinks by no more than the norm of the update.
        beyond = growth / (1 + updates[:-1])
        shrunk = growth * _NOTICED < 1 - updates[:-1]
        beyond[~(beyond > _NOTICED)] = 1.0
        written = beyond > 1
        often = np.cumprod(beyond, axis=0) > cuts.OUTSIDE_SUM.value
        often &= np.cumsum(written, axis=0) >= _OFTEN
        often &= np.cumsum(shrunk, axis=0) == 0  # not exchanged for others and put back
    told = (beyond > cuts.OUTSIDE_GROWTH.value) | often
    if not told.any():
        return
    concerned = np.flatnonzero(told.any(0))
    first = int(written[:, concerned].any(1).argmax())
    once = bool((beyond[:, concerned] > cuts.OUTSIDE_GROWTH.value).any())
    yield _about_growth(seen, [names[each] for each in concerned], first, growth[:, concerned],
                        updates[:-1, concerned], written[:, concerned], once)  # fmt: skip


def _is_measured(seen: Observation, name: str) -> bool:
    """Whether the whole way of a parameter is known, from one optimizer step to the next.

    Of a large table a sample was compared, which may miss the rows that were looked up; of an
    optimizer that steps several times per step only one of the updates is known.
    """
    facts = seen.structure.parameters.get(name)
    if facts is None or name not in seen.trace.parameters:
        return False
    values = math.prod(facts.shape)
    counts = seen.trace.column(name, "parameters", "count")
    once = not (counts[np.isfinite(counts)] > values).any()
    return once and not ("Embedding" in facts.kind and values > UPDATE_SAMPLE)


def _about_growth(
    seen: Observation, names: list[str], first: int, growth: Floats, updates: Floats,
    written: NDArray[np.bool_], once: bool,
) -> Finding:  # fmt: skip
    trace = seen.trace
    before, step = int(trace.steps[first]), int(trace.steps[first + 1])
    which = "the weights" if len(names) == len(trace.parameters) else listed(names)
    times = int(written.any(1).sum())
    if times == 1:
        size = median(growth[first][written[first]])
        text = f"Between step {before} and step {step} {which} became {size:.3g} times as large, "
        text += f"and the update of step {before} changed them by "
        text += f"{percent(median(updates[first][written[first]]))} only"
    else:
        size = median(growth[written])
        text = f"From step {step} on, {which} became {size:.3g} times as large between one step "
        text += f"and the next, at least {times} times, and the updates changed them by "
        text += f"{percent(median(updates[written]))} only"
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name))
    return Finding(
        "weights_changed_outside", "alarm" if once or size ** times > cuts.OUTSIDE_GROWTH.value
        else "warn", layers, "optimizer", step,
        f"{text}: it was not the optimizer.",
        "Look at what writes to the weights outside of optimizer.step(): load_state_dict, "
        "scaling, averaging or merging by hand.",
        {"growth": size, "times": times},
    )  # fmt: skip


def _by(ratio: float, usual: float) -> str:
    size = f"by {ratio:.3g} times their size"
    if math.isinf(ratio):
        size = "so far that their norm is too large for float32"
    return size if math.isnan(usual) else f"{size} (those before it: by {percent(usual)})"


def _gradients(spike: float) -> str:
    if math.isnan(spike):
        return ""
    if spike > cuts.SPIKE.value:
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
    if spike > cuts.SPIKE.value:
        return f"Look at the batch of step {step}, and clip the gradients. {back}"
    return (
        f"See what set the learning rate of step {step} (a scheduler, its warm-up, a group that "
        f"was added), and lower it. {back}"
    )
