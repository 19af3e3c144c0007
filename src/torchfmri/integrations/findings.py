"""Tell the user what a Monitor inside a trainer has found, when it happens.

Both callbacks (`huggingface`, `lightning`) call these functions after each step. A finding is said
once, as a `FindingWarning`, so that it is not lost in a log of thousands of lines.
"""

from __future__ import annotations

import warnings

from torchfmri._monitor import Monitor
from torchfmri.exceptions import FindingWarning


def warn_of_findings(monitor: Monitor) -> None:
    """Warn of what the monitor found since it was last asked; remarks are left out."""
    for finding in monitor.new_findings():
        if finding.severity != "inform":
            warnings.warn(
                f"torchfmri: {finding.text} {finding.advice}", FindingWarning, stacklevel=3
            )


def first_nonfinite_step(monitor: Monitor) -> int | None:
    """Return the first step whose loss or gradients were not finite; None if there is none."""
    held = [step.number for step in monitor.history if "nonfinite" in step.scalars]
    found = [
        each.step
        for finding in monitor.findings
        for each in (finding, *finding.consequences)
        if each.problem.startswith("nonfinite") and each.step is not None
    ]
    return min([*held, *found], default=None)
