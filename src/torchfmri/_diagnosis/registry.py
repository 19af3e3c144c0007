"""All diagnoses, and which of their findings follow from which.

A new diagnosis is one function of an Observation, entered in DIAGNOSES; if others follow from it,
or it from others, a line in CAUSES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from torchfmri._diagnosis import flowing, judging, optimizing, updating, wiring
from torchfmri._diagnosis.finding import PHASES, SEVERITIES, Finding
from torchfmri._diagnosis.nonfinite import nonfinite_in_trace
from torchfmri._diagnosis.notes import Notes
from torchfmri._diagnosis.observation import Observation

Diagnose = Callable[[Observation], Iterator[Finding]]


def origin(seen: Observation) -> Iterator[Finding]:
    """Where the first number that is not finite came from."""
    if seen.origin is not None:
        yield seen.origin


DIAGNOSES: tuple[Diagnose, ...] = (
    origin, nonfinite_in_trace,
    judging.unscaled_inputs, judging.unscaled_targets, judging.duplicate_samples,
    judging.unshuffled_data, judging.padding_in_loss, judging.padding_row, judging.init_too_large,
    judging.initial_loss, judging.misread_output, judging.loss_broadcast, judging.inverted_loss,
    judging.unreachable_targets, judging.half_headroom, judging.half_underflow,
    wiring.graph_cut, wiring.unused_layer, wiring.missing_from_optimizer,
    wiring.unregistered_parameters, wiring.frozen_layer, wiring.stale_gradients,
    wiring.shared_module, wiring.symmetric_init, wiring.untied_weights, wiring.evaluation_mode,
    flowing.vanishing_gradients, flowing.exploding_gradients, flowing.activation_growth,
    flowing.recurrent_growth, flowing.excessive_dropout, flowing.dead_units, flowing.dead_layer,
    flowing.saturated_units, flowing.attention_collapse, flowing.representation_collapse,
    flowing.routing_collapse, optimizing.learning_rate_too_high, optimizing.diverging_loss,
    optimizing.learning_rate_too_low, updating.updates_lost, updating.weight_decay_too_strong,
    updating.clipping_hides_explosion, updating.optimizer_never_steps,
    updating.cleared_gradients, updating.learning_rate_ended, updating.stopped_training,
    optimizing.loss_spike,
)  # fmt: skip

LIVE: tuple[Diagnose, ...] = (
    nonfinite_in_trace, wiring.missing_from_optimizer, wiring.frozen_layer, wiring.shared_module,
    wiring.stale_gradients, judging.half_headroom, flowing.vanishing_gradients,
    flowing.exploding_gradients, flowing.activation_growth, flowing.dead_layer,
    optimizing.learning_rate_too_high, optimizing.diverging_loss, optimizing.learning_rate_too_low,
    updating.clipping_hides_explosion, updating.learning_rate_ended,
    updating.stopped_training, optimizing.loss_spike,
)  # fmt: skip
"""Those that need nothing but the statistics of a Monitor."""

_NONFINITE = (
    "nonfinite_forward", "nonfinite_loss", "nonfinite_backward", "nonfinite_update",
    "nonfinite_weights",
)  # fmt: skip
_SIZES = (
    "initial_loss", "saturated_units", "activation_growth", "attention_collapse",
    "vanishing_gradients", "exploding_gradients", "dead_units", "representation_collapse",
    "half_headroom", "clipping_hides_explosion", "loss_spike", "diverging_loss",
)  # fmt: skip
CAUSES: dict[str, tuple[str, ...]] = {
    # Cause -> what it leads to; the first cause in this order takes what is there.
    "nonfinite_data": (*_NONFINITE, "loss_spike", "diverging_loss", "representation_collapse"),
    **dict.fromkeys(_NONFINITE, ("init_too_large", "unscaled_inputs", *_SIZES)),
    "inverted_loss": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "logits_as_log_probabilities": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "graph_cut": ("unused_layer", "optimizer_never_steps", "symmetric_init"),
    "unscaled_inputs": ("learning_rate_too_high", "init_too_large", *_SIZES, *_NONFINITE),
    "init_too_large": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "stale_gradients": ("learning_rate_too_high", *_SIZES, *_NONFINITE),
    "symmetric_init": (*_SIZES, "updates_lost", "learning_rate_too_low"),
    "weight_decay_too_strong": (
        "learning_rate_too_high", "representation_collapse", "dead_units", "vanishing_gradients",
        "learning_rate_too_low",
    ),
    "learning_rate_too_high": (*_SIZES, *_NONFINITE, "routing_collapse"),
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
    "duplicate_samples": ("unshuffled_data", "representation_collapse"),
    "contradictory_labels": ("unshuffled_data", "representation_collapse"),
    "unscaled_targets": ("clipping_hides_explosion", "learning_rate_too_low", "updates_lost"),
    "excessive_dropout": ("dead_units", "representation_collapse"),
    "cleared_gradients": ("updates_lost", "learning_rate_too_low"),
    "updates_lost": ("learning_rate_too_low",),
}  # fmt: skip
"""Cause -> problems that follow from it, the most basic causes first."""


def find(
    seen: Observation, diagnoses: Sequence[Diagnose] = DIAGNOSES, notes: Notes | None = None
) -> list[Finding]:
    """All findings, consequences folded under their causes, the worst first.

    Args:
        seen: What was observed.
        diagnoses: Those to ask.
        notes: Takes down which of them failed; without it the failure is raised.
    """
    found: list[Finding] = []
    for diagnose in diagnoses:
        with nullcontext() if notes is None else notes.guard(f"{diagnose.__name__!r}"):
            found += diagnose(seen)
    return fold(found)


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """Each cause with what follows from it, the worst first.

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
        replace(each, consequences=(*each.consequences, *following.get(place, ())))
        for place, each in enumerate(findings)
        if parents[place] is None
    ]
    return sorted(roots, key=_rank)


def _parent(place: int, findings: Sequence[Finding]) -> int | None:
    """The earliest finding that this one follows from."""
    effect = findings[place]
    causes = [
        other
        for other, cause in enumerate(findings)
        if effect.problem in CAUSES.get(cause.problem, ()) and _order(cause) < _order(effect)
    ]
    return min(causes, key=lambda other: _order(findings[other]), default=None)


def _order(finding: Finding) -> tuple[int, int, int]:
    """When it begins: nothing follows from what comes later."""
    step = -1 if finding.step is None else finding.step
    if step == 0 and finding.problem in _NONFINITE:
        step = -1  # nothing was trained yet: what the numbers do by themselves comes first
    place = list(CAUSES).index(finding.problem) if finding.problem in CAUSES else len(CAUSES)
    return step, PHASES.index(finding.phase), place


def _rank(finding: Finding) -> tuple[int, int, int]:
    """The worst first, then the earliest, then in the order of a step."""
    step = -1 if finding.step is None else finding.step
    return SEVERITIES.index(finding.severity), step, PHASES.index(finding.phase)
