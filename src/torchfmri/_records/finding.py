"""A finding: what is wrong with a model or its training, where, when, and what to do.

Diagnoses, incidents and the Monitor make findings with `alarm`, `warn` and `finding_of`; reports,
loggers and the viewer read them. A problem nearly always begins in the same part of a training
step, so its phase is looked up here instead of being repeated at every finding: a new problem needs
an entry in `_PROBLEMS`. Names of problems and the fields of `to_dict` are public and stored: people
filter by them. Words of text and advice may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from torchfmri._files import require_forms

Severity: TypeAlias = Literal["alarm", "warn", "inform"]
Phase: TypeAlias = Literal["data", "forward", "loss", "backward", "optimizer"]

SEVERITIES: tuple[Severity, ...] = ("alarm", "warn", "inform")
"""From the worst."""
PHASES: tuple[Phase, ...] = ("data", "forward", "loss", "backward", "optimizer")
"""In the order of a training step."""
_FORMS: dict[str, Any] = {
    "problem": str, "severity": str, "layers": [str], "phase": str, "step": (int, None),
    "text": str, "advice": str, "evidence": dict, "consequences": list,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One cause, with what follows from it.

    Attributes:
        problem: Its short name, such as "dead_units".
        severity: "alarm" (training cannot go well), "warn" (look at it), "inform".
        layers: Where; empty if it is about no layer (the data, the loss, the optimizer).
        phase: In which part of the training step it begins.
        step: When it was first seen; None for what does not depend on a step.
        text: What is wrong and why, in one or two sentences with the numbers.
        advice: What to do.
        evidence: The numbers behind it, by name.
        consequences: Findings that follow from this one, so that they are not listed beside it.

    Examples:
        >>> finding = Finding(
        ...     "dead_units", "alarm", ("1",), "forward", 12,
        ...     "All 64 units of '1' were 0 for 12 steps.", "Lower the learning rate.",
        ... )
        >>> finding.severity
        'alarm'
    """

    problem: str
    severity: Severity
    layers: tuple[str, ...]
    phase: Phase
    step: int | None
    text: str
    advice: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    consequences: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data, for JSON."""
        plain = {"layers": list(self.layers), "evidence": dict(self.evidence)}
        consequences = [each.to_dict() for each in self.consequences]
        return {**vars(self), **plain, "consequences": consequences}

    @classmethod
    def from_dict(cls, data: Any) -> Finding:
        """Return the finding that `to_dict` gave.

        Raises:
            KeyError: A part of it is missing.
            ValueError: It is not a finding.
        """
        require_forms(data, _FORMS)
        if data["severity"] not in SEVERITIES or data["phase"] not in PHASES:
            raise ValueError(f"{data['severity']!r} or {data['phase']!r} is unknown")
        parts = {name: data[name] for name in _FORMS}
        consequences = tuple(map(cls.from_dict, data["consequences"]))
        return cls(**{**parts, "layers": tuple(data["layers"]), "consequences": consequences})


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
        phase: The phase, if it is not the usual one of this problem.
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
