"""What a Monitor inside a trainer has found, said when it happens."""

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
    """The first step with a loss or gradients that were not finite; None if there is none."""
    held = [step.number for step in monitor.history if "nonfinite" in step.scalars]
    found = [
        each.step
        for finding in monitor.findings
        for each in (finding, *finding.consequences)
        if each.problem.startswith("nonfinite") and each.step is not None
    ]
    return min([*held, *found], default=None)
