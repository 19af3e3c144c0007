"""Diagnoses of data, initialisation and precision: what a model begins with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Observation
from torchfmri._diagnosis.outliers import odd_data
from torchfmri._diagnosis.profiles import growths
from torchfmri._diagnosis.signals import gains, initial_loss_ratio, is_stuck, learns
from torchfmri._records import Finding, Severity, alarm, finding_of, warn
from torchfmri._text import listed, percent

_LARGEST_HALF = 65504.0


# -- data ----------------------------------------------------------------------------------------


def unscaled_inputs(seen: Observation) -> Iterator[Finding]:
    """Find inputs far larger than initialisations assume, with no norm layer to read them."""
    data = seen.data
    if data is None:
        return
    if data.rms is None or data.normalised or not data.reader:
        yield from _large_given(seen, data.given)
        return
    if data.rms < cuts.INPUT_SMALL.value:
        yield from _small_inputs(seen, data.rms, data.reader)
        return
    if data.rms <= cuts.INPUT_SIZE.value:
        yield from _large_given(seen, data.given)
        return
    yield warn(
        "unscaled_inputs",
        layers=(data.reader,),
        text=f"The inputs have an rms of {data.rms:,.0f}, and {data.reader!r} takes them as they "
        "are; initial weights and learning rates assume about 1.",
        advice="Subtract the mean and divide by the standard deviation of the training data (or "
        "put a norm layer first).",
        evidence={"input_rms": data.rms},
    )


def _large_given(seen: Observation, given: Mapping[str, float]) -> Iterator[Finding]:
    """Find large numbers that the model makes from the data before its first layer."""
    if any(odd.step == 0 for odd in odd_data(seen)):  # they are those of the first batch
        return
    large = {layer: rms for layer, rms in given.items() if np.inf > rms > cuts.INPUT_SIZE.value}
    if not large:
        return
    layer, rms = max(large.items(), key=lambda each: each[1])
    yield warn(
        "unscaled_inputs",
        layers=tuple(large),
        text=f"The input of {layer!r} has an rms of {rms:,.0f}, made from the data with no layer "
        "between; initial weights and learning rates assume about 1.",
        advice="Bring each feature to about 1 before it is joined with others: a number of a step "
        "by its largest (or by an embedding), pixels by 255, others by their standard deviation.",
        evidence={"input_rms": rms},
    )


def _small_inputs(seen: Observation, rms: float, reader: str) -> Iterator[Finding]:
    """Find inputs so small that later layers see only biases, if nothing is learnt."""
    if not is_stuck(seen):
        return
    yield warn(
        "unscaled_inputs",
        layers=(reader,),
        text=(f"The inputs have an rms of {rms:.2g}" if rms > 0 else "The inputs are 0")
        + f", and {reader!r} takes them as they are: next to its bias they make no difference, and "
        "the loss does not fall. Initial weights and learning rates assume about 1.",
        advice="Subtract the mean and divide by the standard deviation of the training data; see "
        "that it is not scaled down twice.",
        evidence={"input_rms": rms},
    )


def unscaled_targets(seen: Observation) -> Iterator[Finding]:
    """Find targets that are so far away that the loss does not move."""
    data, loss = seen.data, seen.trace.loss
    if data is None or not data.target_rms > cuts.TARGET_SIZE.value or len(loss) < 10:
        return
    first, last = float(np.median(loss[:3])), float(np.median(loss[-3:]))
    if not last > cuts.LOSS_NOT_BETTER.value * first:
        return
    yield warn(
        "unscaled_targets",
        text=f"The targets have an rms of {data.target_rms:,.0f}, far from what a model returns at "
        f"its start, and the loss went from {first:.3g} to {last:.3g} in {len(loss)} steps.",
        advice="Subtract the mean of the targets and divide by their standard deviation, and undo "
        "it in predictions (or predict the logarithm).",
        evidence={"target_rms": data.target_rms},
    )


def duplicate_samples(seen: Observation) -> Iterator[Finding]:
    """Find batches that consist of copies, or copies that have different targets."""
    data = seen.data
    if data is None:
        return
    if data.changing > cuts.CHANGING.value:
        yield warn(
            "contradictory_labels",
            text=f"{percent(data.changing)} of the samples that came again had another class than "
            "before: targets do not belong to their inputs.",
            advice="See that inputs and targets are shuffled together: one dataset that returns "
            "both, one sampler.",
            evidence={"changing_share": data.changing},
        )
        return
    if data.repeated <= cuts.REPEATED.value:
        return
    contradicting = data.contradicting > cuts.REPEATED.value / 2
    yield warn(
        "contradictory_labels" if contradicting else "duplicate_samples",
        text=f"{percent(data.repeated)} of the samples equal another one of the same batch"
        + (
            f", and {percent(data.contradicting)} are among copies with different targets."
            if contradicting
            else "."
        ),
        advice="Look at the dataset's __getitem__ (does it use its index?), the sampler and the "
        "collate function.",
        evidence={"repeated_share": data.repeated, "contradicting_share": data.contradicting},
    )


def unshuffled_data(seen: Observation) -> Iterator[Finding]:
    """Find batches of a single class each, although there are several."""
    data = seen.data
    if data is None or data.classes_seen < 2 or data.one_class_batches <= cuts.ONE_CLASS.value:
        return
    yield alarm(
        "unshuffled_data",
        text=f"{percent(data.one_class_batches)} of the batches (more than chance gives) hold a "
        f"single class, of {data.classes_seen} in all: the data comes sorted.",
        advice="Shuffle: DataLoader(..., shuffle=True).",
        evidence={"one_class_batches": data.one_class_batches, "classes": data.classes_seen},
    )


def padding_in_loss(seen: Observation) -> Iterator[Finding]:
    """Find targets after the end of a text that count in the loss."""
    data = seen.data
    if data is None or data.padding <= cuts.PADDING.value:
        return
    yield warn(
        "padding_in_loss",
        text=f"{percent(data.padding)} of the targets are token {data.padding_token}, which only "
        "fills up the ends of rows: the loss counts padding.",
        advice=f"Set those targets to -100, or use ignore_index={data.padding_token}.",
        evidence={"padding_share": data.padding, "token": data.padding_token},
    )


def padding_row(seen: Observation) -> Iterator[Finding]:
    """Find an embedding whose padding row is not 0 and, by its nature, never learns."""
    if seen.data is None or not seen.data.padding_rows:
        return
    rows = seen.data.padding_rows
    yield warn(
        "padding_row",
        layers=tuple(rows),
        step=None,
        text=f"The padding row of {listed(list(rows))} is not 0 (rms {max(rows.values()):.2g}) and "
        "gets no gradient: padding adds the same noise for ever.",
        advice="Set it to 0 after initialising: embedding.weight.data[padding_idx] = 0.",
        evidence={"rms": max(rows.values())},
    )


# -- initialisation and loss ---------------------------------------------------------------------


def init_too_large(seen: Observation) -> Iterator[Finding]:
    """Find matrices that multiply sizes, where that is seen to do harm."""
    large = {name: gain for name, gain in gains(seen).items() if gain > cuts.GAIN.value}
    if not large:
        return
    symptoms = []
    ratio = initial_loss_ratio(seen)
    if ratio > cuts.INITIAL_LOSS.value:
        symptoms.append(f"the first loss is {ratio:.3g} times what guessing costs")
    if seen.loss is not None and seen.loss.output_size > cuts.OUTPUT_SIZE.value:
        symptoms.append(f"the first output is {seen.loss.output_size:,.0f} times its targets")
    if any(each.factor > cuts.GROWTH_WARN.value for each in growths(seen)):
        symptoms.append("outputs grow along the depth")
    if seen.origin is not None and seen.origin.problem == "nonfinite_forward":
        symptoms.append("the numbers did not stay finite")
    if not symptoms:
        return
    facts = seen.structure.parameters
    layers = tuple(dict.fromkeys(facts[name].layer for name in large))
    worst = max(large, key=lambda name: large[name])
    yield alarm(
        "init_too_large",
        layers=layers,
        text=f"{worst!r} makes outputs {large[worst]:.3g} times its inputs (usual is 0.6 to 1.4), "
        f"and so do {len(large)} matrices in all; {', '.join(symptoms)}.",
        advice="Initialise with a standard deviation of 1/sqrt(fan in) (Kaiming, Xavier, or 0.02).",
        evidence={"gain": large[worst], "matrices": len(large), "initial_loss_ratio": ratio},
    )


def initial_loss(seen: Observation) -> Iterator[Finding]:
    """Find a first cross entropy far above that of guessing."""
    ratio = initial_loss_ratio(seen)
    loss = seen.loss
    if loss is None or not ratio > cuts.INITIAL_LOSS.value or loss.classes is None:
        return
    yield alarm(
        "initial_loss",
        layers=(loss.output_layer,) if loss.output_layer else (),
        text=f"The first cross entropy is {loss.cross_entropy:.3g} nats, {ratio:.3g} times the "
        f"{math.log(loss.classes):.2g} of guessing among {loss.classes} classes: the model begins "
        "sure and wrong.",
        advice="Make the output layer's weights smaller (or divide the logits); look at its "
        "input's size.",
        evidence={"cross_entropy": loss.cross_entropy, "ratio": ratio, "classes": loss.classes},
    )


# -- precision -----------------------------------------------------------------------------------


def half_headroom(seen: Observation) -> Iterator[Finding]:
    """Find float16 values about to overflow."""
    trace = seen.trace
    worst: tuple[float, str, int] = (0.0, "", 0)
    for series, dtype in trace.dtypes.items():
        if "float16" not in dtype or "bfloat16" in dtype or series.what != "activations":
            continue
        column = trace.column(series.layer, series.what, "abs_max") / _LARGEST_HALF
        # A mask is filled with the lowest number itself.
        column = np.where(column >= 1, math.nan, column)
        if np.isfinite(column).any():
            largest = float(np.nanmax(column))
            above = np.flatnonzero(column > cuts.HEADROOM_WARN.value)
            if largest > worst[0] and len(above):
                worst = (largest, series.layer, int(trace.steps[above[0]]))
    share, layer, step = worst
    if share <= cuts.HEADROOM_WARN.value:
        return
    yield finding_of(
        "half_headroom",
        severity="alarm" if share > cuts.HEADROOM_ALARM.value else "warn",
        layers=(layer,),
        step=step,
        text=f"{layer!r} returns values up to {share * _LARGEST_HALF:,.0f} in float16, "
        f"{percent(share)} of the largest there is.",
        advice="Use bfloat16, or keep this layer in float32.",
        evidence={"headroom_used": share},
    )


def half_underflow(seen: Observation) -> Iterator[Finding]:
    """Find float16 gradients too small to be numbers."""
    if seen.steps is None or not (seen.steps.half_gradients or seen.steps.flushed):
        return
    shares = seen.steps.half_gradients
    small = {name: share for name, share in shares.items() if share > cuts.UNDERFLOW_WARN.value}
    flushed = [name for name in seen.steps.flushed if name not in shares]
    if not small and not (flushed and shares):
        return
    worst = max(small.values(), default=1.0)
    is_alarm = worst > cuts.UNDERFLOW_ALARM.value or bool(flushed)
    severity: Severity = "alarm" if is_alarm else "warn"
    if learns(seen):  # small because little is left to learn
        severity = "inform"
    layers = tuple(dict.fromkeys([*flushed, *small]))
    yield finding_of(
        "half_underflow",
        severity=severity,
        layers=layers,
        text=f"{percent(worst)} of the float16 gradients at {listed(layers)} lie below its normal "
        "range "
        "(6e-5)" + (f", and those of {listed(flushed)} are all 0." if flushed else "."),
        advice="Use a GradScaler, or bfloat16.",
        evidence={"subnormal_share": worst, "flushed": len(flushed)},
    )
