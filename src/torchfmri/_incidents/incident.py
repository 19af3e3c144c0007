"""An incident: a step with non-finite values, and the part of it that each process keeps.

`Incident` is public (`monitor.incidents`); `IncidentPart` is what `stored_incident` writes and
reads, and what a replay runs. `IncidentPart` may get further fields with a default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchfmri._incidents.model_call import ModelCall
from torchfmri._records import Finding


@dataclass(frozen=True)
class Incident:
    """A step with non-finite values.

    Attributes:
        step: Its number.
        finding: What is wrong, where and why.
        action: What was done: "raise", "skip" or "continue".
        folder: Where it was written; None if nowhere.
        rank: The process whose finding it is.

    Examples:
        >>> import torch
        >>> from torchfmri import Monitor, NonFiniteError
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> monitor = Monitor(model, optimizer, on_nonfinite="raise")
        >>> try:
        ...     with monitor.step():
        ...         model(torch.tensor([[1.0, float("inf")]])).sum().backward()
        ...         optimizer.step()
        ... except NonFiniteError:
        ...     print(monitor.incidents[0].finding.problem)
        nonfinite_data
    """

    step: int
    finding: Finding
    action: str
    folder: Path | None = None
    rank: int = 0


@dataclass(frozen=True)
class IncidentPart:
    """What one process keeps of an incident.

    Attributes:
        rank: The rank of the process.
        step: The number of the step.
        finding: What this process found.
        calls: The calls of the model, one per micro-batch.
        told: The batch that the user told the Monitor of; None if it was not told.
        about: The action, the scaler's state, compiled or not, norms of the weights.
        weights: Name -> tensor; None if they were not asked for.
        identity: The identity of the incident, the same in all of its parts.
        notes: What is odd about the folder that it was read from.
    """

    rank: int
    step: int
    finding: Finding
    calls: list[ModelCall]
    told: Any = None
    about: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] | None = None
    identity: str = ""
    notes: tuple[str, ...] = ()
