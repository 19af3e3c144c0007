"""Since when weights have not been finite, as far as a history tells.

Weights that a step does not read (rows of an embedding, an idle expert) can have been bad for long
when they are noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from torchfmri._incidents.report import bad_from_start, changed_between, made_by_update
from torchfmri._model import unwrap
from torchfmri._records import UPDATE_SAMPLE, Finding, History, Series


def dated(
    finding: Finding, number: int, model: nn.Module, history: History, held: Mapping[int, str]
) -> Finding:
    """Return the finding; about non-finite weights it says who made them, or since when.

    Args:
        finding: Any.
        number: The step in which they were noticed.
        model: Whose weights they are.
        history: The statistics of the steps before.
        held: Earlier step whose loss or gradients were not finite -> what was done about it.
    """
    name = finding.evidence.get("parameter")
    parameter = dict(unwrap(model).named_parameters()).get(str(name))
    if finding.problem != "nonfinite_weights" or parameter is None:
        return finding
    steps, bad = _record_of(str(name), number, history)
    if not len(steps):
        return finding
    if bad[0]:
        return bad_from_start(finding, int(steps[0]))
    first_bad = int(steps[int(bad.argmax())]) if bad.any() else number
    last_good = int(steps[steps < first_bad][-1])
    done = [held.get(step) for step in range(last_good, first_bad)]
    if not parameter.requires_grad or all(action == "skip" for action in done):
        remark = f" At step {last_good} it was finite, and no update has changed it since."
        return replace(finding, text=finding.text + remark)
    left_finite = _was_left_finite(finding, last_good, history)
    if left_finite is None and "continue" in done:  # bad gradients were applied: reason enough
        left_finite = False
    if left_finite is False:
        return made_by_update(finding, (last_good, first_bad - 1), "continue" not in done)
    return changed_between(finding, last_good, first_bad, left_finite is not None)


def _was_left_finite(finding: Finding, number: int, history: History) -> bool | None:
    """Whether the update of a step left a parameter finite; None where that was not recorded."""
    found = finding.evidence
    step = history[int(np.flatnonzero(history.steps == number)[0])]
    if found["parameter"] not in step.parameters:
        return None
    if not np.isfinite(step.updates[0, step.parameters.index(found["parameter"])]):
        return False
    is_seen = found["count"] <= UPDATE_SAMPLE or found["nan"] + found["inf"] == found["count"]
    return True if is_seen else None


def _record_of(
    name: str, number: int, history: History
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return the steps at which a parameter was recorded, and where it was non-finite."""
    if Series(name, "parameters") not in history.series:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    counts = history.values(name, "parameters", "nan") + history.values(name, "parameters", "inf")
    seen = np.isfinite(counts) & (history.steps < number)
    return history.steps[seen], counts[seen] > 0
