"""An incident: a step with non-finite values, its part in each process, and what a Monitor keeps.

`Incident` (`monitor.incidents`) and `Incidents` (the Monitor's `incidents=`) are public;
`IncidentPart` is what `stored_incident` writes and reads, and what a replay runs. `IncidentPart`
may get further fields with a default. A new option needs a check here, a line in the documentation,
and its effect in `aftermath`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torchfmri._arguments import check_flag, check_folder, check_number, require
from torchfmri._incidents.model_call import ModelCall
from torchfmri._records import Finding

Action: TypeAlias = Literal["raise", "skip", "continue"]


@dataclass(frozen=True)
class Incidents:
    """What a Monitor keeps of steps with a NaN or infinite loss or gradient.

    Attributes:
        folder: Where to write them; None: nowhere.
        weights: Whether to write the weights too, so that a replay needs no checkpoint.
        steps: How many of the latest steps' statistics to write.
        most: How many incidents to write and to look into in one run.
        origin: Whether to run the step again at once, to find the origin.

    Examples:
        >>> Incidents("incidents", weights=True).steps
        100
    """

    folder: str | Path | None = None
    weights: bool = False
    steps: int = 100
    most: int = 5
    origin: bool = True

    def __post_init__(self) -> None:
        if self.folder is not None:
            check_folder("folder", self.folder)
        check_flag("weights", self.weights)
        check_flag("origin", self.origin)
        check_number("steps", self.steps, 1, "give a number from 1 upwards")
        check_number("most", self.most, 0, "give a number of incidents, 0 for none")


def check_action(action: Any) -> Action | None:
    """Return `action`, if it is one.

    Raises:
        InspectionError: It is not.
    """
    meaning = (
        "'raise' stops training before the step is applied, 'skip' leaves the step out, 'continue' "
        "only reports it"
    )
    require(action in (None, *get_args(Action)), "on_nonfinite", action, meaning)
    found: Action | None = action
    return found


def check_incidents(given: Any) -> Incidents:
    """Return the options for a folder, an `Incidents`, or None.

    Raises:
        InspectionError: It is something else, or one of its numbers makes no sense.
    """
    options = Incidents(given) if given is None or isinstance(given, (str, Path)) else given
    meaning = "that is neither a folder nor torchfmri.Incidents; give one of them"
    require(isinstance(options, Incidents), "incidents", given, meaning)
    require(options.most > 0, "incidents", given, "give most, which is at least 1 here")
    return options


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
