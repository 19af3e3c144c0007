"""A finding: what is wrong with a model or its training, where, when, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        layers: Where; empty where it is about no layer (the data, the loss, the optimizer).
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
            ValueError: It is none.
        """
        require_forms(data, _FORMS)
        if data["severity"] not in SEVERITIES or data["phase"] not in PHASES:
            raise ValueError(f"{data['severity']!r} or {data['phase']!r} is unknown")
        parts = {name: data[name] for name in _FORMS}
        consequences = tuple(map(cls.from_dict, data["consequences"]))
        return cls(**{**parts, "layers": tuple(data["layers"]), "consequences": consequences})
