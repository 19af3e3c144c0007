"""The problems that can be found, and how a finding of one is made.

A problem always begins in the same part of a training step, with very few exceptions, so its phase
is looked up here instead of being repeated at every finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchfmri._records.finding import Finding, Phase, Severity

_PROBLEMS: dict[Phase, str] = {
    "data": "constant_targets contradictory_labels duplicate_samples nonfinite_data outlier_batch "
    "unscaled_inputs unscaled_targets unshuffled_data",
    "forward": "activation_growth attention_collapse batch_norm_of_few batch_norm_statistics "
    "dead_units evaluation_mode excessive_dropout half_headroom init_too_large loss_spike "
    "missing_causal_mask missing_nonlinearity nonfinite_forward padding_row "
    "representation_collapse routing_collapse samples_mixed saturated_units shared_module "
    "signal_shrinks softmax_dimension symmetric_init untied_weights unused_layer",
    "loss": "accumulation_not_scaled activation_before_loss initial_loss inverted_loss "
    "logits_as_log_probabilities logits_too_small loss_broadcast loss_divided_again "
    "nonfinite_loss padding_in_loss probabilities_as_log_probabilities probabilities_as_logits "
    "targets_not_shifted unreachable_targets",
    "backward": "clipped_before_unscaling clipping_hides_explosion clipping_too_strong "
    "exploding_gradients frozen_layer graph_cut half_underflow nonfinite_backward "
    "stale_gradients vanishing_gradients",
    "optimizer": "cleared_gradients diverging_loss learning_rate_too_high learning_rate_too_low "
    "learning_rate_zero missing_from_optimizer momentum_too_high nonfinite_update "
    "nonfinite_weights "
    "optimizer_never_steps step_before_backward stopped_training unregistered_parameters "
    "updates_lost updates_undone weight_decay_too_strong weights_changed_outside",
}
PHASE_OF = {name: phase for phase, names in _PROBLEMS.items() for name in names.split()}


def finding_of(
    problem: str,
    severity: Severity,
    *,
    text: str,
    advice: str,
    layers: tuple[str, ...] = (),
    phase: Phase | None = None,
    step: int | None = 0,
    evidence: Mapping[str, Any] | None = None,
) -> Finding:
    """Return a finding; see `Finding` for its parts.

    Args:
        problem: Its short name, one of those listed in this file.
        severity: How bad it is.
        text: What is wrong and why.
        advice: What to do.
        layers: Where; none for what concerns no layer in particular.
        phase: Where it differs from that of the problem.
        step: When it was first seen; None for what does not depend on a step.
        evidence: The numbers behind it.
    """
    return Finding(
        problem=problem,
        severity=severity,
        layers=layers,
        phase=phase or PHASE_OF[problem],
        step=step,
        text=text,
        advice=advice,
        evidence=evidence or {},
    )


alarm = partial(finding_of, severity="alarm")
warn = partial(finding_of, severity="warn")
