"""Diagnoses of data, initialisation and number formats: what a model begins with.

`registry` calls each function with an `Observation`. Most read `DataFacts` and the first step;
`unscaled_targets` also reads the loss of the whole run, `half_headroom` and `half_underflow` all
steps. A fact that was not measured keeps its default (NaN, 0 or empty), and a default never leads
to a finding: conditions are written so that NaN fails them. The names of findings and the keys of
`evidence` are read by users and by `benchmarks`, so they stay; texts and advice may be changed
freely, limits in `cuts` with their tests. `init_too_large` needs a symptom beside the large
weights, because some architectures multiply on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.depth import growths
from torchfmri._diagnosis.observation import Observation, layers_of
from torchfmri._diagnosis.outliers import odd_data
from torchfmri._diagnosis.signals import gains, initial_loss_ratio, is_stuck, learns
from torchfmri._records import Finding, Severity, alarm, finding_of, warn
from torchfmri._text import listed, percent

_LARGEST_HALF = 65504.0


# -- data ----------------------------------------------------------------------------------------


def unscaled_inputs(seen: Observation) -> Iterator[Finding]:
    """Find inputs far larger or smaller than initialisations assume, with no norm layer first."""
    reader = seen.data.reader
    rms = None if seen.data.normalised or not reader else seen.data.rms
    if rms is None or cuts.INPUT_SMALL <= rms <= cuts.INPUT_SIZE:
        yield from _large_given(seen)
    elif rms > cuts.INPUT_SIZE:
        yield warn(
            "unscaled_inputs",
            layers=(reader,),
            text=f"The inputs have an rms of {rms:,.0f}, and {reader!r} takes them as they are; "
            "initial weights and learning rates assume about 1.",
            advice="Subtract the mean and divide by the standard deviation of the training data "
            "(or put a norm layer first).",
            evidence={"input_rms": rms},
        )
    elif is_stuck(seen):  # later layers see little but biases
        yield warn(
            "unscaled_inputs",
            layers=(reader,),
            text=(f"The inputs have an rms of {rms:.2g}" if rms > 0 else "The inputs are 0")
            + f", and {reader!r} takes them as they are: next to its bias they make no difference, "
            "and the loss does not fall. Initial weights and learning rates assume about 1.",
            advice="Subtract the mean and divide by the standard deviation of the training data; "
            "see that it is not scaled down twice.",
            evidence={"input_rms": rms},
        )


def _large_given(seen: Observation) -> Iterator[Finding]:
    """Find large numbers that the model makes from the data before its first layer."""
    given = seen.data.given.items()
    large = {layer: rms for layer, rms in given if np.inf > rms > cuts.INPUT_SIZE}
    if not large or any(odd.step == 0 for odd in odd_data(seen)):  # the first batch is odd itself
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


def unscaled_targets(seen: Observation) -> Iterator[Finding]:
    """Find targets that are so far away that the loss does not move."""
    data, loss = seen.data, seen.trace.loss
    if not data.target_rms > cuts.TARGET_SIZE or len(loss) < 10:
        return
    first, last = float(np.median(loss[:3])), float(np.median(loss[-3:]))
    if not last > cuts.LOSS_NOT_BETTER * first:
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
    if data.changing > cuts.CHANGING:
        yield warn(
            "contradictory_labels",
            text=f"{percent(data.changing)} of the samples that came again had another class than "
            "before: targets do not belong to their inputs.",
            advice="See that inputs and targets are shuffled together: one dataset that returns "
            "both, one sampler.",
            evidence={"changing_share": data.changing},
        )
        return
    if data.repeated <= cuts.REPEATED:
        return
    contradicting = data.contradicting > cuts.REPEATED / 2
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
    if data.classes_seen < 2 or data.one_class_batches <= cuts.ONE_CLASS:
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
    if data.padding <= cuts.PADDING:
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
    rows = seen.data.padding_rows
    if not rows:
        return
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
    """Find matrices that make outputs much larger than inputs, if a symptom shows the harm."""
    large = {name: gain for name, gain in gains(seen).items() if gain > cuts.GAIN}
    if not large:
        return
    symptoms = []
    ratio = initial_loss_ratio(seen)
    if ratio > cuts.INITIAL_LOSS:
        symptoms.append(f"the first loss is {ratio:.3g} times what guessing costs")
    if seen.loss.output_size > cuts.OUTPUT_SIZE:
        symptoms.append(f"the first output is {seen.loss.output_size:,.0f} times its targets")
    if any(each.factor > cuts.GROWTH_WARN for each in growths(seen)):
        symptoms.append("outputs grow along the depth")
    if seen.origin is not None and seen.origin.problem == "nonfinite_forward":
        symptoms.append("the numbers did not stay finite")
    if not symptoms:
        return
    worst = max(large, key=lambda name: large[name])
    many = f", and so do {len(large)} matrices in all" if len(large) > 1 else ""
    yield alarm(
        "init_too_large",
        layers=layers_of(seen.structure.parameters[name] for name in large),
        text=f"{worst!r} makes outputs {large[worst]:.3g} times its inputs (usual is 0.6 to 1.4)"
        f"{many}; {', '.join(symptoms)}.",
        advice="Initialise with a standard deviation of 1/sqrt(fan in) (Kaiming, Xavier, or 0.02).",
        evidence={"gain": large[worst], "matrices": len(large), "initial_loss_ratio": ratio},
    )


def initial_loss(seen: Observation) -> Iterator[Finding]:
    """Find a first cross entropy far above that of guessing."""
    ratio, loss = initial_loss_ratio(seen), seen.loss
    if not ratio > cuts.INITIAL_LOSS or loss.classes is None:
        return
    yield alarm(
        "initial_loss",
        layers=loss.layers,
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
            above = np.flatnonzero(column > cuts.HEADROOM_WARN)
            if largest > worst[0] and len(above):
                worst = (largest, series.layer, int(trace.steps[above[0]]))
    share, layer, step = worst
    if share <= cuts.HEADROOM_WARN:
        return
    yield finding_of(
        "half_headroom",
        severity="alarm" if share > cuts.HEADROOM_ALARM else "warn",
        layers=(layer,),
        step=step,
        text=f"{layer!r} returns values up to {share * _LARGEST_HALF:,.0f} in float16, "
        f"{percent(share)} of the largest there is.",
        advice="Use bfloat16, or keep this layer in float32.",
        evidence={"headroom_used": share},
    )


def half_underflow(seen: Observation) -> Iterator[Finding]:
    """Find float16 gradients below float16's normal range, or flushed to 0."""
    if seen.steps is None or not (seen.steps.half_gradients or seen.steps.flushed):
        return
    shares = seen.steps.half_gradients
    small = {name: share for name, share in shares.items() if share > cuts.UNDERFLOW_WARN}
    flushed = sorted(name for name in seen.steps.flushed if name not in shares)
    if not small and not (flushed and shares):
        return
    worst = max(shares.values())
    found = []
    if small:
        found.append(
            f"{percent(worst)} of the float16 gradients at {listed(list(small))} lie below its "
            "normal range (6e-5)."
        )
    if flushed:
        found.append(f"All float16 gradients of {listed(flushed)} are 0; those of others are not.")
    severity: Severity = "alarm" if worst > cuts.UNDERFLOW_ALARM or flushed else "warn"
    layers = tuple(dict.fromkeys([*flushed, *small]))
    yield finding_of(
        "half_underflow",
        # A run that has little left to learn has small gradients.
        severity="inform" if learns(seen) else severity,
        layers=layers,
        text=" ".join(found),
        advice="Use a GradScaler, or bfloat16.",
        evidence={"subnormal_share": worst, "flushed": len(flushed)},
    )
