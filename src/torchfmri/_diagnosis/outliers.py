"""A single batch that is unlike the others, and what it does to the run.

`registry` calls `outlier_batch`; `starting_point` asks `odd_data` whether the first batch is odd. A
batch is reported only with its harm (numbers lost, weights replaced, running statistics or Adam's
averages polluted): rare classes and hard examples are odd too, and harmless. A jump counts after
ordinary updates only; after a large one it is the weights that differ, and not the batch. Texts and
advice may be changed freely; conditions only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Floats, Observation
from torchfmri._diagnosis.signals import (
    first_nonfinite,
    gradient_norms,
    median,
    update_ratios,
)
from torchfmri._records import Finding, finding_of
from torchfmri._text import listed, percent

_BEFORE = 3
"""How many calm steps must come before a step that is called unlike them."""
_SOON = 5
"""How many steps later lost numbers still count as the harm of a batch."""
_MANY = 1e6
_LARGEST = float(np.finfo(np.float32).max)
_LOST = "the numbers stopped being finite"
_HELD = "hold it, which evaluation uses"
_CLIP = (
    "Clip the gradients, so that one batch cannot ruin the weights: "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
)
_FORGET = (
    "Running statistics forget it slowly, and infinity never: before you evaluate, load those from "
    "before it, or call reset_running_stats() and run some batches in training mode."
)


class OddBatch(NamedTuple):
    """A batch unlike the others.

    Attributes:
        step: The step that used it.
        what: The part of the batch that is too large, in words.
        factor: How many times as large as usual that is.
    """

    step: int
    what: str
    factor: float


def outlier_batch(seen: Observation) -> Iterator[Finding]:
    """Find the first batch whose size or effect is unlike the others' and harms the run."""
    found = [(odd, _harm_of(seen, odd.step) or _trace_of(seen, odd.step)) for odd in odd_data(seen)]
    found += [(odd, _harm_of(seen, odd.step)) for odd in _odd_steps(seen)]
    for odd, harm in (*found, *_odd_variances(seen)):
        if not harm:
            continue
        held = harm.endswith(_HELD)
        factor = f"{odd.factor:,.0f}" if odd.factor < _MANY else f"{odd.factor:.1g}"
        yield finding_of(
            "outlier_batch",
            severity="alarm" if harm == _LOST or _stays_off(seen, odd.step) else "warn",
            step=odd.step,
            text=f"The batch of step {odd.step} is unlike the others, {odd.what} {factor} times as "
            f"large as usual, and {harm}.",
            advice=f"Look at that batch, and drop or repair it. {_FORGET if held else _CLIP}",
            evidence={"factor": odd.factor},
        )
        return


def _stays_off(seen: Observation, step: int) -> bool:
    """Whether the loss stays ten times what it was; at the end, whether the weights are gone."""
    loss, steps = seen.trace.loss, seen.trace.steps
    if not (steps > step).any():
        return bool(update_ratios(seen)[-1] > cuts.UPDATE_REPLACED)
    return median(loss[steps > step]) > cuts.DIVERGED * abs(median(loss[steps < step]))


def _harm_of(seen: Observation, step: int) -> str:
    """Describe what happened to the run at this step or soon after; empty if nothing did."""
    steps, ratios = seen.trace.steps, update_ratios(seen)
    lost = None if seen.origin is None else seen.origin.step
    if lost is None and (place := first_nonfinite(seen)) is not None:
        lost = int(steps[place])
    if lost is not None and step <= lost <= step + _SOON:
        return _LOST
    found = ratios[steps == step]
    if len(found) and found[0] > cuts.UPDATE_HIGH:
        return f"its update changed the weights by {percent(min(found[0], _MANY))} of their size"
    return ""


def _trace_of(seen: Observation, step: int) -> str:
    """Describe what a batch of odd data leaves behind although its update was ordinary.

    Adam and its relatives divide by the gradient's own size: the update says nothing about it.
    """
    steps, norms = seen.trace.steps, gradient_norms(seen)
    found, usual = norms[steps == step], median(norms[steps != step])
    if len(found) and found[0] > cuts.ODD_STEP * usual > 0:
        factor = f"{found[0] / usual:,.0f}" if found[0] / usual < _MANY else "a million"
        return (
            f"its gradient is {factor} times as large, which an optimizer with running averages "
            "(Adam) remembers for many steps"
        )
    layers = [
        each.layer for each in seen.norms if each.training and _is_fed(seen, each.layer, step)
    ]
    if layers:
        return f"the running statistics of {listed(layers)} {_HELD}"
    return ""


def _is_fed(seen: Observation, layer: str, step: int) -> bool:
    """Whether what comes to a layer in a step, from the layer before it, is far larger than usual.

    The first layer gets the data themselves.
    """
    containers = {name.rpartition(".")[0] for name in seen.structure.kinds if name}
    order = [name for name in seen.order if name not in containers]
    names = seen.trace.names("activations")
    place = order.index(layer) if layer in order else -1
    if place <= 0:
        return place == 0
    if order[place - 1] not in names:
        return False
    sizes = seen.trace.matrix("activations", "rms")[:, list(names).index(order[place - 1])]
    found = sizes[seen.trace.steps == step]
    return bool(len(found) and found[0] > cuts.ODD_BATCH * median(sizes))


def odd_data(seen: Observation) -> Iterator[OddBatch]:
    """Yield the batches whose inputs or targets are far larger, if they are few."""
    for what, sizes in seen.data.sizes.items():
        usual = median(sizes)
        large = [step for step, size in enumerate(sizes) if size > cuts.ODD_BATCH * usual > 0]
        if len(large) <= len(sizes) // _BEFORE:
            for step in large:
                yield OddBatch(step, f"its {what}", sizes[step] / usual)


def _odd_steps(seen: Observation) -> Iterator[OddBatch]:
    """Yield the step whose loss or gradient jumps though the update before it was an ordinary one.

    The loss is that of the weights before the update: where these have hardly changed, it is the
    batch that is another one.
    """
    ratios = update_ratios(seen)
    for what, sizes in (("its loss", seen.trace.loss), ("its gradient", gradient_norms(seen))):
        place = _jump(sizes, ratios)
        if place is not None:
            factor = float(sizes[place] / sizes[:place].max())
            yield OddBatch(int(seen.trace.steps[place]), what, factor)


def _odd_variances(seen: Observation) -> Iterator[tuple[OddBatch, str]]:
    """Yield the step after which running variances are far larger, though updates were ordinary.

    A batch norm makes its output of the usual size whatever comes in: neither the loss nor the
    gradients tell of it.
    """
    ratios = update_ratios(seen)
    found: dict[int, dict[str, float]] = {}
    for layer, variances in seen.trace.variances().items():
        sizes = np.sqrt(np.nan_to_num(variances, nan=math.nan, posinf=_LARGEST))
        place = _jump(sizes, ratios)
        # Where all batches are larger from then on, the variance goes on growing.
        if place is not None and not (sizes[place + 1 : place + 2] > sizes[place]).any():
            found.setdefault(place, {})[layer] = float(sizes[place] / sizes[:place].max())
    if found:
        place = min(found)
        layers = found[place]
        what = f"what comes to {listed(list(layers))} at least"
        odd = OddBatch(int(seen.trace.steps[place]), what, max(layers.values()))
        yield odd, f"the running statistics {_HELD}"


def _jump(sizes: Floats, ratios: Floats) -> int | None:
    """Return the first place far above all before it, after ordinary updates only; or None."""
    for place in range(1, len(sizes)):
        before = sizes[:place]
        calm = before[-1] > 0 and np.isfinite(before[-1])
        if not calm or not ratios[place - 1] <= cuts.UPDATE_HIGH:
            return None
        if place >= _BEFORE and np.inf > sizes[place] > cuts.ODD_STEP * before.max():
            return place
    return None
