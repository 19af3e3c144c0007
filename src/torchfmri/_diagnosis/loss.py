"""Diagnoses of the loss: what it takes the output for, and what it compares it with.

`registry` calls each function. They read `LossFacts`, which `_checkup` fills at the first step;
defaults mean that nothing is known, and give no finding. Texts may be changed freely. Exact
comparisons (`isclose` with 1e-4 or 1e-5) are deliberate: a loss may have any weight, and only an
exact ratio shows that a mean was divided again or negated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Observation, layers_of
from torchfmri._diagnosis.signals import is_stuck
from torchfmri._records import Finding, alarm, finding_of, warn
from torchfmri._text import listed, percent

_LEAST_SAMPLES, _LEAST_CLASSES = 64, 3
_LEAST_BATCH, _LEAST_PASSES = 8, 3


def misread_output(seen: Observation) -> Iterator[Finding]:
    """Find a loss that takes the output for something it is not."""
    loss = seen.loss
    if loss.misread is None:
        return
    expected, found = loss.misread
    cures = {
        ("logits", "probabilities"): "Pass the logits: the loss applies softmax (or sigmoid) "
        "itself.",
        ("logits", "probabilities over the batch"): "Remove the softmax, which also runs over "
        "the samples (dim=0) instead of the classes.",
        ("log-probabilities", "probabilities"): "Take log_softmax, or cross_entropy of the logits.",
        ("log-probabilities", "logits"): "Apply log_softmax before nll_loss or kl_div, or use "
        "cross_entropy.",
        ("log-probabilities of the targets", "probabilities"): "Leave out log_target=True, or "
        "pass the logarithm of the targets.",
    }
    name = "probabilities_as_logits" if expected == "logits" else f"{found}_as_log_probabilities"
    yield alarm(
        name,
        layers=loss.layers,
        text=f"The loss expects {expected}, but it gets {found}"
        + (
            ": softmax or sigmoid is applied twice, which flattens the gradient."
            if expected == "logits"
            else "."
        ),
        advice=cures[loss.misread],
    )


def loss_broadcast(seen: Observation) -> Iterator[Finding]:
    """Find a comparison of output and target that pairs every sample with every other."""
    if seen.loss.broadcast is None:
        return
    one, other, result = seen.loss.broadcast
    yield alarm(
        "loss_broadcast",
        text=f"The loss compares {one} with {other}, which broadcasts to {result}: every output is "
        "compared with every target, and the best answer is their mean.",
        advice="Give both the same shape: output.squeeze(-1), or target.unsqueeze(-1).",
        evidence={"output": list(one), "target": list(other), "result": list(result)},
    )


def inverted_loss(seen: Observation) -> Iterator[Finding]:
    """Find a loss with the wrong sign: an error that is made larger, or a score made smaller."""
    loss = seen.loss
    maximized = any(group.get("maximize") for group in seen.structure.groups)
    right, wrong = loss.score or (0.0, 0.0)
    if not maximized and right > cuts.SCORE and 0 <= wrong < 1 - cuts.SCORE:
        yield warn(
            "inverted_loss",
            text=f"The loss is {right:.2g} for outputs that equal the targets and {wrong:.2g} for "
            "their opposite: it is a score, and training makes it smaller.",
            advice="Minimise 1 - score; if targets mark what is not wanted, there is nothing to "
            "do.",
            evidence={"right": right, "opposite": wrong},
        )
    if loss.inner is None or not loss.inner > 0:
        return
    signed = loss.inner if maximized else -loss.inner
    if not math.isclose(loss.value, signed, rel_tol=1e-4):
        return
    yield alarm(
        "inverted_loss",
        text=f"The optimizer has maximize=True, and the loss ({loss.value:.3g}) is an error: "
        "training makes it larger."
        if maximized
        else f"The loss is {loss.value:.3g}, minus the error ({loss.inner:.3g}): training makes "
        "the error larger.",
        advice="Remove maximize=True." if maximized else "Remove the minus.",
        evidence={"loss": loss.value, "error": loss.inner},
    )


def unreachable_targets(seen: Observation) -> Iterator[Finding]:
    """Find targets that the last function of the model cannot return."""
    loss, is_relu = seen.loss, seen.loss.output_function == "relu"
    sums = loss.range.startswith("numbers")
    if loss.outside > cuts.OUTSIDE:
        yield alarm(
            "unreachable_targets",
            layers=loss.layers,
            text=f"The output goes through {loss.output_function}, which makes {loss.range}, but "
            f"{percent(loss.outside)} of the targets {'do not' if sums else 'lie outside'}.",
            advice="Use sigmoid (BCEWithLogitsLoss of the logits) where several labels may be on "
            "at once."
            if sums
            else "Scale the targets into its range (masks of 0 and 255 by 1/255), or use another "
            "last activation or loss.",
            evidence={"outside_share": loss.outside},
        )
    elif loss.classes is not None and (is_relu or (loss.bounded and loss.misread is None)):
        yield warn(
            "activation_before_loss",
            layers=loss.layers,
            text="The logits go through relu before the cross entropy: no class can be made less "
            "likely than one at 0, and units at 0 do not learn."
            if is_relu
            else f"The logits go through {loss.output_function} before the cross entropy and lie "
            f"within {loss.range}: no class can become much more likely than another.",
            advice="Remove the activation after the last layer.",
        )


def softmax_dimension(seen: Observation) -> Iterator[Finding]:
    """Find a softmax that does not run over what its result is used for."""
    found = list(seen.softmaxes)
    if not found or (seen.loss.misread or ("", ""))[0] == "logits":
        return  # another diagnosis says that it should not be there at all
    worst = found[0]
    where = f"of {worst.layer!r} " if worst.layer else ""
    axis = f"axis {worst.axis} of {worst.shape}"
    over = axis if worst.over == f"axis {worst.axis}" else f"{worst.over} ({axis})"
    mixes = "" if worst.wanted else ": what is said about one sample depends on the others"
    wanted = f", but its result is used as one over {worst.wanted}" if worst.wanted else mixes
    layers = layers_of(each for each in found if each.layer or not each.in_loss)
    yield alarm(
        "softmax_dimension",
        layers=layers or seen.loss.layers,
        phase="loss" if worst.in_loss else "forward",
        text=f"A softmax {where}runs over {over}{wanted}.",
        advice="Give it the right dim: classes are the last axis of (batch, classes) and axis 1 of "
        "(batch, classes, ...), keys the last axis of attention scores.",
        evidence={"axis": worst.axis, "shape": list(worst.shape)},
    )


def targets_not_shifted(seen: Observation) -> Iterator[Finding]:
    """Find a causal model whose targets are the tokens that it is given."""
    causal = [each for each in seen.heads if each.future == 0]
    if seen.loss.targets != "inputs" or not causal:
        return
    yield alarm(
        "targets_not_shifted",
        text=f"The targets are the inputs themselves, place by place, and attention "
        f"({causal[0].layer!r}) is causal: the model only learns to copy the token it reads.",
        advice="Compare the output at each place with the next token: logits[:, :-1] with ids[:, "
        "1:].",
    )


def missing_causal_mask(seen: Observation) -> Iterator[Finding]:
    """Find attention that reads the very token that it should predict."""
    layers = layers_of(each for each in seen.heads if each.future > cuts.FUTURE)
    if seen.loss.targets != "next inputs" or seen.origin is not None or not layers:
        return
    yield warn(
        "missing_causal_mask",
        layers=layers,
        text=f"The targets are the next tokens of the input, and {listed(layers)} may read them: "
        "every query sees the keys after it.",
        advice="Use is_causal=True, or a mask that hides what comes after.",
    )


def constant_targets(seen: Observation) -> Iterator[Finding]:
    """Find class numbers that are all the same, of a model that tells several classes apart."""
    data, loss = seen.data, seen.loss
    if data.classes_seen != 1 or data.samples < _LEAST_SAMPLES:
        return
    if loss.classes is None or loss.classes < _LEAST_CLASSES:
        return  # one of two classes may be rare
    yield warn(
        "constant_targets",
        text=f"All targets of {data.samples} samples are one class, and the model tells "
        f"{loss.classes} apart: there is nothing to learn but a constant.",
        advice="Look at how the dataset makes its labels, and shuffle: sorted data begins with one "
        "class.",
        evidence={"samples": data.samples, "classes": loss.classes},
    )


def loss_divided_again(seen: Observation) -> Iterator[Finding]:
    """Find a mean that is divided twice, and accumulated gradients that are not scaled."""
    loss, passes = seen.loss, 0 if seen.steps is None else seen.steps.passes
    if len({round(weight, 9) for weight, _ in loss.weights}) != 1 or passes < 1:
        return
    weight, samples = loss.weights[0]
    again = {
        **({samples: "the number of samples"} if samples >= _LEAST_BATCH and passes == 1 else {}),
        **({samples**2: "the number of samples, twice"} if samples >= _LEAST_BATCH else {}),
        **({passes**2: "the number of backward passes, twice"} if passes >= _LEAST_PASSES else {}),
    }
    by = next((each for each in again if math.isclose(weight, 1 / each, rel_tol=1e-5)), None)
    if by is not None:
        yield warn(
            "loss_divided_again",
            text=f"The loss is a mean over {samples} samples and is then divided by {by} "
            f"({again[by]}): gradients are that much smaller, and a learning rate means less.",
            advice="Divide once: reduction='mean' needs no division, and n accumulated passes need "
            "one by n.",
            evidence={"weight": weight, "samples": samples, "passes": passes},
        )
    elif passes >= _LEAST_PASSES and math.isclose(weight, 1.0, rel_tol=1e-5):
        yield finding_of(
            "accumulation_not_scaled",
            severity="inform",
            text=f"An update adds up the gradients of {passes} backward passes, each of a mean of "
            "its own: it is as large as with a learning rate that many times as high.",
            advice=f"Divide each loss by {passes} if they are parts of one batch.",
            evidence={"passes": passes},
        )


def logits_left(seen: Observation) -> float:
    """Return the largest logit that the loss is given / the largest output of the last layer."""
    if not seen.loss.output_layer or not len(seen.trace):
        return math.nan
    largest = float(seen.trace.column(seen.loss.output_layer, "activations", "abs_max")[0])
    return seen.loss.logit / largest if largest > 0 else math.nan


def logits_too_small(seen: Observation) -> Iterator[Finding]:
    """Find logits that are so small that every class is as likely as the others."""
    left, loss = logits_left(seen), seen.loss
    if not left < cuts.LOGITS_LEFT or loss.misread or not is_stuck(seen):
        return
    yield warn(
        "logits_too_small",
        layers=loss.layers,
        text=f"The cross entropy is given {left:.1g} of what {loss.output_layer!r} returns (at "
        f"most {loss.logit:.1g}): all classes are as likely, whatever the input, and the loss does "
        "not fall.",
        advice="Pass the logits as they are, or lower the temperature that they are divided by.",
        evidence={"left": left, "largest_logit": loss.logit},
    )
