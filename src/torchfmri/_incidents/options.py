"""Options for steps with non-finite values.

`Incidents` is public and the Monitor's `incidents=`. A new option needs a check here, a line in the
documentation, and its effect in `aftermath`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torchfmri._arguments import check_flag, check_folder, check_number, require

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
