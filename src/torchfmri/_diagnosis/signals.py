"""Signals: numbers of an observation that are compared with a cut.

The diagnoses and `benchmarks diagnosis` read them. Each returns one number or one number per step,
and NaN if it is not known: comparisons with a cut are written so that NaN gives no finding (`not x
< cut`). Changing a signal moves all figures that its cut was measured with; run `benchmarks
diagnosis --thresholds` before and after. A faster way to the same number is welcome.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis.cuts import LOSS_NOT_BETTER
from torchfmri._diagnosis.observation import Floats, Observation, UnitActivity
from torchfmri._diagnosis.structure import ParameterFacts

_NEAR_ZERO = 0.05
"""rms x sqrt(fan in) of weights that have yet to grow (adapters, branches that start at 0)."""
SMALL_GAIN = 0.2
"""rms x sqrt(fan in) below which a layer makes signals a fifth of what they were."""
_EQUAL = 1e-3  # relative difference of sums that are equal but for rounding
_APART = 1.1  # ratio from which on the factors of two biases differ
_SCALED, _SOME = 0.2, 0.1
"""A GradScaler's scale is 8 or more, and exact powers of two in more than a tenth of the steps are
not chance."""
LEAST_STEPS = 10
_LEAST_SAMPLES, _FEW_SAMPLES = 256, 64
"""Samples to judge units by: in general, and if not a single unit was ever on."""


def median(values: Floats | Sequence[float]) -> float:
    """Return the median of what is known; nan if nothing is."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else math.nan


def row_medians(values: Floats) -> Floats:
    """Return the median of each row of what is known; nan if nothing is."""
    # np.nanmedian takes 20 times as long for the few columns of a small model.
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))  # nan comes last
    known = np.count_nonzero(~np.isnan(values), axis=1)
    below, above = ordered[rows, np.maximum(known - 1, 0) // 2], ordered[rows, known // 2]
    found: Floats = np.where(known % 2 == 1, below, (below + above) / 2)
    return found


def in_order(seen: Observation, found: Sequence[ParameterFacts]) -> list[ParameterFacts]:
    """Return parameters in the order in which their layers run."""
    place = {layer: index for index, layer in enumerate(seen.order)}
    return sorted(found, key=lambda each: place.get(each.layer, len(place)))


def trained_matrices(seen: Observation) -> list[ParameterFacts]:
    """Return the matrices that an optimizer may change, in the order in which they run."""
    chosen = [each for each in seen.structure.matrices if each.optimized is not False]
    return in_order(seen, chosen)


def _maps(each: ParameterFacts | None) -> bool:
    """Whether a parameter is a matrix or a kernel, not a table, that an optimizer may change."""
    if each is None or not each.trainable or each.optimized is False:
        return False
    return len(each.shape) >= 2 and "Embedding" not in each.kind


def update_ratios(seen: Observation, among: Collection[str] | None = None) -> Floats:
    """Return update / weight at each step: the median over matrices that are not near 0.

    Args:
        seen: What was observed.
        among: The parameters to look at; all by default.
    """
    if among is not None:  # one group may be a single filter bank of one channel
        facts = seen.structure.parameters
        return _ratios_of(seen, {name: facts[name] for name in among if _maps(facts.get(name))})
    if "update_ratios" not in seen.signals:
        names = {each.name: each for each in trained_matrices(seen)}
        seen.signals["update_ratios"] = _ratios_of(seen, names)
    return seen.signals["update_ratios"]


def _ratios_of(seen: Observation, names: Mapping[str, ParameterFacts]) -> Floats:
    trace = seen.trace
    chosen = [name for name in trace.parameters if name in names]
    if not chosen or not len(trace):
        return np.full(len(trace), math.nan)
    columns = [trace.parameters.index(name) for name in chosen]
    ratios = trace.updates[:, columns].copy()
    known = {name: index for index, name in enumerate(trace.names("parameters"))}
    sizes = trace.matrix("parameters", "rms")
    for column, name in enumerate(chosen):
        if name in known:
            gain = sizes[:, known[name]] * math.sqrt(names[name].fan_in)
            ratios[gain < _NEAR_ZERO, column] = math.nan
    return row_medians(ratios)


def has_gradients(seen: Observation) -> NDArray[np.bool_]:
    """Return whether each step has gradients; True at all steps if they are not watched.

    A loss that is exactly 0 (all margins kept) has no gradient, and what moves then is momentum.
    """
    sizes = seen.trace.matrix("parameter_gradients", "rms")
    if not sizes.size:
        return np.ones(len(seen.trace), bool)
    found: NDArray[np.bool_] = np.asarray((np.nan_to_num(sizes, nan=1.0) > 0).any(1))
    return found


def gradient_norms(seen: Observation) -> Floats:
    """Return the norm of all parameters' gradients at each step, as the optimizer finds them."""
    squares = seen.trace.matrix("parameter_gradients", "rms") ** 2
    norms: Floats = np.sqrt(
        np.nansum(squares * seen.trace.matrix("parameter_gradients", "count"), axis=1)
    )
    return norms


def first_nonfinite(seen: Observation) -> int | None:
    """Return the place of the first step with non-finite gradients or weights; or None.

    Without gradients and weights the outputs are judged, where -inf may be a mask.
    """
    trace = seen.trace
    harmed = [
        trace.matrix(what, "nonfinite")
        for what in ("parameter_gradients", "parameters")
        if trace.names(what)
    ] or [trace.matrix("activations", "harmful")]
    bad = np.zeros(len(trace), bool)
    for each in harmed:
        bad |= np.nan_to_num(each).sum(1) > 0
    return int(np.flatnonzero(bad)[0]) if bad.any() else None


def bias_sums(seen: Observation) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield for each bias: the summed gradient at its layer's output, its own, and their size.

    The gradient of a bias is the sum of the gradients at the layer's output, so the first two
    are equal unless somebody has scaled or added to what backward left.
    """
    trace = seen.trace
    for each in seen.structure.parameters.values():
        if each.name.rpartition(".")[2] != "bias" or not each.trainable or len(each.shape) != 1:
            continue
        if each.kind not in ("Linear", "Conv1d", "Conv2d", "Conv3d", "LayerNorm"):
            continue
        arrived = trace.column(each.layer, "gradients", "total")
        count = trace.column(each.layer, "gradients", "count")
        size = trace.column(each.layer, "gradients", "rms") * np.sqrt(count)
        yield arrived, trace.column(each.name, "parameter_gradients", "total"), size


def stale_steps(seen: Observation) -> NDArray[np.bool_]:
    """Return whether each step's gradients were added to those of the step before."""
    votes = np.zeros(len(seen.trace))
    judged = np.zeros(len(seen.trace))
    for arrived, found, size in bias_sums(seen):
        with np.errstate(invalid="ignore"):
            added = np.abs(np.diff(found, prepend=math.nan) - arrived) < _EQUAL * size
            alone = np.abs(found - arrived) < 0.05 * size
            # Sums that cancel (the classes of a softmax) say nothing.
            known = np.isfinite(found) & (np.abs(arrived) > 1e-2 * size)
        votes += known & added & ~alone
        judged += known
    stale: NDArray[np.bool_] = (judged > 0) & (votes > 0.5 * judged)
    return stale


def clip_factors(seen: Observation) -> Floats:
    """Return the gradients' norm as the optimizer finds them / as backward left them.

    Where only a Monitor watched, from the layers with a bias: its gradient is the sum of the
    gradients at the layer's output, so the two should be equal.
    """
    if seen.steps is not None:
        return seen.steps.clip
    ratios = []
    for arrived, found, size in bias_sums(seen):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.abs(found / arrived)
        # Sums that cancel (the classes of a softmax) say nothing.
        ratio[np.abs(arrived) < 1e-2 * size] = math.nan
        ratios.append(ratio)
    if not ratios:
        return np.full(len(seen.trace), math.nan)
    found = np.stack(ratios, axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a row of nan
        apart = np.nanmax(found, axis=1) > _APART * np.nanmin(found, axis=1)
    factors: Floats = np.where(apart, math.nan, row_medians(found))
    # Clipping multiplies all gradients by one factor; a graph that is used twice does not. A
    # GradScaler that the Monitor does not know divides by a power of two in all other steps.
    if np.mean(apart) > 0.5 or _is_unscaled(factors):
        return np.full(len(seen.trace), math.nan)
    return factors


def _is_unscaled(factors: Floats) -> bool:
    """Whether some of these are the inverse of a GradScaler's scale."""
    small = factors[np.isfinite(factors) & (factors > 0) & (factors < _SCALED)]
    if not len(small):
        return False
    powers = np.log2(small)
    exact = np.abs(powers - np.round(powers)) < _EQUAL
    return bool(exact.mean() > _SOME)


def gains(seen: Observation) -> dict[str, float]:
    """Return rms x sqrt(fan in) of each matrix before the first step."""
    found = {}
    for each in seen.structure.matrices:
        if each.name in seen.weights:
            found[each.name] = seen.weights[each.name].rms * math.sqrt(each.fan_in)
    return found


def experts_in_use(load: Floats) -> float:
    """Return how many experts are in use: exp of the entropy of the load."""
    shares = load[load > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def dead_shares(seen: Observation) -> Mapping[tuple[str, str, str], float]:
    """Return, by activity, the share of units that were off for every sample of the window."""
    return {
        each.key: each.silent / each.units
        for each in seen.units
        if each.function in ("relu", "relu6", "gelu", "silu") and _is_judged(each)
    }


def _is_judged(each: UnitActivity) -> bool:
    """Whether enough was seen: many samples, or fewer if not a single unit was ever on."""
    if each.samples >= _LEAST_SAMPLES:
        return True
    return each.silent == each.units and each.samples >= _FEW_SAMPLES


def flat_shares(seen: Observation) -> Mapping[tuple[str, str, str], float]:
    """Return, by hidden activity, the median share of values where its function is flat."""
    return {
        each.key: median(list(each.flat.values()))
        for each in seen.units
        if each.function in ("tanh", "sigmoid", "hardtanh") and not each.is_last
    }


def initial_loss_ratio(seen: Observation) -> float:
    """Return the first cross entropy / ln of the number of classes; nan if there is none."""
    loss = seen.loss
    if loss.classes is None or loss.cross_entropy is None or loss.classes < 2:
        return math.nan
    return loss.cross_entropy / math.log(loss.classes)


def learns(seen: Observation) -> bool:
    """Whether the loss falls to less than half."""
    loss = seen.trace.loss
    return median(loss[-len(loss) // 3 :]) < 0.5 * median(loss[:3])


def is_stuck(seen: Observation) -> bool:
    """Whether the loss of the last third is no better than that of the first steps."""
    loss = seen.trace.loss
    if len(loss) < LEAST_STEPS:
        return False
    first, last = median(loss[:3]), median(loss[-(len(loss) // 3) :])
    return last > LOSS_NOT_BETTER * first if first > 0 else False


def loss_around(loss: Floats, place: int) -> tuple[float, float]:
    """Return the loss before a step, and the typical loss at the end."""
    after = loss[place + 1 :]
    third = max(1, len(after) // 3)
    earlier = loss[max(0, place - 4) : place + 1]
    return median(earlier), median(after[-third:])


def is_worse(before: float, after: float) -> bool:
    """Whether the loss did not fall; also where it was not seen before."""
    if not math.isfinite(before) or not math.isfinite(after):
        return not math.isfinite(before)
    if before <= 0:
        return after > before
    return after > LOSS_NOT_BETTER * before


def all_frozen(seen: Observation) -> bool:
    """Whether there are parameters but none asks for gradients."""
    found = seen.structure.parameters.values()
    return bool(found) and not any(each.trainable for each in found)


def gradient_kind(seen: Observation, each: ParameterFacts) -> str:
    """Whether a gradient ever arrived: "none", "zero" or "some"."""
    if each.name in seen.weights:
        return seen.weights[each.name].gradient
    arrived = seen.trace.column(each.name, "parameter_gradients", "count") > 0
    if not arrived.any():
        return "none"
    rms = seen.trace.column(each.name, "parameter_gradients", "rms")
    return "some" if (rms[arrived] != 0).any() else "zero"  # also where none of it is finite
