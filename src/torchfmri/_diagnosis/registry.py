"""All diagnoses, and which of their findings follow from which.

`diagnose`, `Inspector.diagnose` and `LiveDiagnosis` call `find`. A new diagnosis is one function of
an `Observation` that yields findings, entered in `DIAGNOSES`, and in `LIVE` if the statistics of a
Monitor are enough for it. If others follow from it, or it from others, add a line to `CAUSES`. The
order of `CAUSES` matters: the most basic cause comes first and takes the findings that several
could explain. One planted fault must give one finding; the suite checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from torchfmri._diagnosis import (
    depth,
    jumps,
    learning_rates,
    loss,
    norm_layers,
    reach,
    starting_point,
    step_sizes,
    stillness,
    units,
    updates,
    wiring,
)
from torchfmri._diagnosis.nonfinite import nonfinite_in_trace, origin
from torchfmri._diagnosis.observation import Observation
from torchfmri._diagnosis.outliers import outlier_batch
from torchfmri._diagnosis.report import Notes
from torchfmri._records import PHASES, SEVERITIES, Finding

Diagnose = Callable[[Observation], Iterator[Finding]]


DIAGNOSES: tuple[Diagnose, ...] = (
    origin, nonfinite_in_trace, outlier_batch, jumps.changed_outside,
    starting_point.unscaled_inputs, starting_point.unscaled_targets,
    starting_point.duplicate_samples, starting_point.unshuffled_data,
    starting_point.padding_in_loss, starting_point.padding_row, starting_point.init_too_large,
    starting_point.initial_loss, starting_point.half_headroom, starting_point.half_underflow,
    loss.misread_output, loss.loss_broadcast, loss.inverted_loss, loss.unreachable_targets,
    loss.softmax_dimension, loss.targets_not_shifted, loss.missing_causal_mask,
    loss.constant_targets, loss.loss_divided_again, loss.logits_too_small, reach.graph_cut,
    reach.unused_layer, reach.unregistered_parameters, wiring.missing_from_optimizer,
    wiring.frozen_layer, wiring.stale_gradients, wiring.shared_module, wiring.symmetric_init,
    wiring.untied_weights, wiring.missing_nonlinearity, wiring.samples_mixed,
    norm_layers.evaluation_mode, norm_layers.batch_norm_of_few, norm_layers.batch_norm_statistics,
    depth.vanishing_gradients, depth.exploding_gradients, depth.activation_growth,
    depth.recurrent_growth, depth.signal_shrinks, units.excessive_dropout, units.dead_units,
    units.dead_layer, units.saturated_units, units.attention_collapse, units.constant_layer,
    units.representation_collapse, units.routing_collapse, step_sizes.learning_rate_too_high,
    step_sizes.diverging_loss, learning_rates.learning_rate_too_low,
    learning_rates.group_rate_too_low, learning_rates.learning_rate_fell,
    learning_rates.momentum_too_high, updates.updates_lost, updates.weight_decay_too_strong,
    updates.clipping_hides_explosion, updates.optimizer_never_steps, updates.step_before_backward,
    updates.cleared_gradients, updates.updates_undone, stillness.learning_rate_ended,
    stillness.stopped_training, step_sizes.loss_spike,
)  # fmt: skip

LIVE: tuple[Diagnose, ...] = (
    nonfinite_in_trace, outlier_batch, jumps.changed_outside, reach.graph_cut,
    wiring.missing_from_optimizer, wiring.frozen_layer, wiring.shared_module,
    wiring.stale_gradients, starting_point.half_headroom, depth.vanishing_gradients,
    depth.exploding_gradients, depth.activation_growth, units.dead_layer,
    step_sizes.learning_rate_too_high, step_sizes.diverging_loss,
    learning_rates.learning_rate_too_low, learning_rates.group_rate_too_low,
    learning_rates.momentum_too_high, updates.weight_decay_too_strong,
    updates.clipping_hides_explosion, updates.cleared_gradients, updates.updates_undone,
    stillness.learning_rate_ended, stillness.stopped_training, step_sizes.loss_spike,
)  # fmt: skip
"""The diagnoses that need nothing but the statistics of a Monitor."""

_NONFINITE = (
    *("nonfinite_forward", "nonfinite_loss", "nonfinite_backward"),
    *("nonfinite_update", "nonfinite_weights"),
)
_SIZES = (
    *("initial_loss", "saturated_units", "activation_growth", "attention_collapse"),
    *("vanishing_gradients", "exploding_gradients", "dead_units", "representation_collapse"),
    *("half_headroom", "clipping_hides_explosion", "loss_spike", "diverging_loss"),
)
CAUSES: dict[str, tuple[str, ...]] = {
    "nonfinite_data": (*_NONFINITE, "loss_spike", "diverging_loss", "representation_collapse"),
    "outlier_batch": ("learning_rate_too_high", "updates_lost", *_SIZES, *_NONFINITE),
    "weights_changed_outside": (
        "outlier_batch", "learning_rate_too_high", "updates_lost", *_SIZES, *_NONFINITE,
    ),
    **dict.fromkeys(_NONFINITE, ("init_too_large", "unscaled_inputs", *_SIZES)),
    "inverted_loss": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "logits_as_log_probabilities": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "graph_cut": ("unused_layer", "optimizer_never_steps", "symmetric_init"),
    "unscaled_inputs": (
        "learning_rate_too_high", "init_too_large", "signal_shrinks", "updates_lost",
        "learning_rate_too_low", *_SIZES, *_NONFINITE,
    ),
    "softmax_dimension": ("representation_collapse", "learning_rate_too_high", *_SIZES),
    "probabilities_as_log_probabilities": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "momentum_too_high": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "init_too_large": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "stale_gradients": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "symmetric_init": (*_SIZES, "updates_lost", "learning_rate_too_low"),
    "weight_decay_too_strong": (
        "learning_rate_too_high", "representation_collapse", "dead_units", "vanishing_gradients",
        "learning_rate_too_low",
    ),
    "logits_too_small": ("learning_rate_too_low", "updates_lost", "vanishing_gradients"),
    "signal_shrinks": (
        "logits_too_small",
        "updates_lost", "dead_units", "representation_collapse", "learning_rate_too_low",
    ),
    "learning_rate_too_high": (*_SIZES, *_NONFINITE, "routing_collapse", "updates_lost"),
    "diverging_loss": (*_NONFINITE, "loss_spike"),
    "initial_loss": (
        "clipping_hides_explosion", "learning_rate_too_high", "diverging_loss", "dead_units",
    ),
    "activation_growth": (
        "initial_loss", "half_headroom", "attention_collapse", "vanishing_gradients",
        "exploding_gradients", "clipping_hides_explosion", "loss_spike", "saturated_units",
        "representation_collapse", "learning_rate_too_high", "diverging_loss", *_NONFINITE,
    ),
    "saturated_units": (
        "vanishing_gradients", "exploding_gradients", "representation_collapse", "initial_loss",
        "learning_rate_too_low", "learning_rate_too_high",
    ),
    "dead_units": (
        "representation_collapse", "vanishing_gradients", "updates_lost", "learning_rate_too_low",
    ),
    "half_headroom": ("nonfinite_forward",),
    "half_underflow": ("vanishing_gradients", "learning_rate_too_low", "updates_lost"),
    "routing_collapse": ("vanishing_gradients", "updates_lost"),
    "attention_collapse": ("representation_collapse", "half_headroom", "nonfinite_forward"),
    "vanishing_gradients": (
        "learning_rate_too_low", "representation_collapse", "updates_lost",
    ),
    "probabilities_as_logits": (
        "learning_rate_too_low", "vanishing_gradients", "representation_collapse",
    ),
    "loss_broadcast": ("representation_collapse",),
    "unreachable_targets": ("dead_units", "saturated_units", "representation_collapse"),
    "activation_before_loss": ("dead_units",),
    "duplicate_samples": ("unshuffled_data", "representation_collapse", "dead_units"),
    "contradictory_labels": ("unshuffled_data", "representation_collapse", "dead_units"),
    "constant_targets": ("representation_collapse", "dead_units", "learning_rate_too_low"),
    "batch_norm_of_few": ("representation_collapse", "dead_units", "batch_norm_statistics"),
    "loss_divided_again": ("learning_rate_too_low", "updates_lost", "vanishing_gradients"),
    "missing_nonlinearity": ("vanishing_gradients", "signal_shrinks"),
    "unscaled_targets": ("clipping_hides_explosion", "learning_rate_too_low", "updates_lost"),
    "excessive_dropout": ("dead_units", "representation_collapse"),
    "cleared_gradients": ("updates_lost", "learning_rate_too_low"),
    "step_before_backward": ("cleared_gradients", "updates_lost", "learning_rate_too_low"),
    "clipping_too_strong": ("updates_lost", "learning_rate_too_low"),
    "clipped_before_unscaling": ("updates_lost", "learning_rate_too_low"),
    "clipping_hides_explosion": ("updates_lost", "learning_rate_too_low"),
    "learning_rate_too_low": ("updates_lost",),
    "updates_lost": ("learning_rate_too_low",),
    "representation_collapse": (  # of a layer that returns a constant from the first step on
        "dead_units", "updates_lost", "learning_rate_too_low", "vanishing_gradients",
    ),
}  # fmt: skip
"""Cause -> problems that follow from it, the most basic causes first."""


def find(
    seen: Observation, diagnoses: Sequence[Diagnose] = DIAGNOSES, notes: Notes | None = None
) -> list[Finding]:
    """Return all findings, consequences folded under their causes, the worst first.

    Args:
        seen: What was observed.
        diagnoses: The diagnoses to make.
        notes: Takes down which of them failed; without it the failure is raised.
    """
    found: list[Finding] = []
    for diagnose in diagnoses:
        with nullcontext() if notes is None else notes.guard(f"{diagnose.__name__!r}"):
            found += diagnose(seen)
    return fold(found)


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """Return each cause with what follows from it, the worst first.

    What follows from something that itself follows from a cause is folded under that cause too.
    """
    parents = [_parent(each, findings) for each in range(len(findings))]
    following: dict[int, list[Finding]] = {}
    for place, parent in enumerate(parents):
        if parent is None:
            continue
        while (above := parents[parent]) is not None:
            parent = above
        following.setdefault(parent, []).append(findings[place])
    roots = [
        _with_consequences(each, following.get(place, ()))
        for place, each in enumerate(findings)
        if parents[place] is None
    ]
    return sorted(roots, key=_rank)


def _with_consequences(cause: Finding, following: Sequence[Finding]) -> Finding:
    """Return a cause with its consequences; an alarm if numbers become non-finite."""
    ends = any(each.problem in _NONFINITE and each.severity == "alarm" for each in following)
    return replace(
        cause,
        consequences=(*cause.consequences, *following),
        severity="alarm" if ends else cause.severity,
    )


def _parent(place: int, findings: Sequence[Finding]) -> int | None:
    """Return the earliest finding that this one follows from."""
    effect = findings[place]
    causes = [
        other
        for other, cause in enumerate(findings)
        if effect.problem in CAUSES.get(cause.problem, ()) and _order(cause) < _order(effect)
    ]
    return min(causes, key=lambda other: _order(findings[other]), default=None)


def _order(finding: Finding) -> tuple[int, int, int]:
    """Return when a finding begins, to compare; nothing follows from a later one."""
    step = -1 if finding.step is None else finding.step
    if step == 0 and finding.problem in ("outlier_batch", *_NONFINITE):
        step = -1  # nothing was trained yet: what the numbers do by themselves comes first
    place = list(CAUSES).index(finding.problem) if finding.problem in CAUSES else len(CAUSES)
    if finding.problem == "weights_changed_outside":
        return step, -1, place  # before the step began
    return step, PHASES.index(finding.phase), place


def _rank(finding: Finding) -> tuple[int, int, int]:
    """Return the worst first, then the earliest, then in the order of a step."""
    step = -1 if finding.step is None else finding.step
    return SEVERITIES.index(finding.severity), step, PHASES.index(finding.phase)
