"""What follows a non-finite step: its origin, its folder, an error or a warning.

`Hold` calls `look_into` when a step is bad. All processes must come through `report` together where
steps are held, because they agree there on one finding and one folder; a process that raised
earlier would leave the others waiting. So each part that can fail (running the step again, writing)
only warns. What is raised in the end is the NonFiniteError that the user asked for. Words may
change freely; the order of agreeing, writing and raising must stay.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from torchfmri._incidents.agreement import exchange, processes
from torchfmri._incidents.content import is_finite, readable
from torchfmri._incidents.incident import Action, Incident, IncidentPart, Incidents
from torchfmri._incidents.incident_folders import free_folder
from torchfmri._incidents.redone_step import BadStep, coarse_finding, plain_finding, redo, why_not
from torchfmri._incidents.report import HOLD, bad_from_start, changed_between, made_by_update
from torchfmri._incidents.seen_step import SeenStep
from torchfmri._incidents.stored_incident import write_part, write_summary
from torchfmri._model import unwrap
from torchfmri._records import UPDATE_SAMPLE, Finding, History, Series
from torchfmri._text import listed
from torchfmri._torch import gradient_scale
from torchfmri.exceptions import NonFiniteError, NonFiniteWarning

_SPOILT = " The step has left {} non-finite as well: in evaluation mode the model returns NaN."


@dataclass(frozen=True)
class IncidentSubject:
    """A guarded model, with everything that the guard has to know about it.

    Attributes:
        model: The model as it is trained.
        loss: The loss module, or None.
        scaler: The GradScaler, or None.
        history: The Monitor's history; told whether the step ends here.
        failed: Called with an error of ours.
        unwatched: While it is entered nobody watches the model: it is run again.
    """

    model: nn.Module
    loss: nn.Module | None
    scaler: Any
    history: Callable[[bool], History]
    failed: Callable[[Exception], None]
    unwatched: Callable[[], AbstractContextManager[None]]

    @property
    def is_compiled(self) -> bool:
        """Whether the model, or a part of it, is compiled."""
        kinds = {type(module).__name__ for module in self.model.modules()}
        return "OptimizedModule" in kinds

    def bad_gradients(self) -> dict[str, Tensor]:
        """Return the non-finite gradients by the names of their parameters, in model order."""
        found = {}
        for name, parameter in unwrap(self.model).named_parameters():
            values = readable(parameter.grad) if parameter.grad is not None else None
            if values is not None and not is_finite(values):
                found[name] = values
        return found


class Aftermath:
    """Deals with non-finite steps, one after the other.

    Args:
        subject: The model that is guarded.
        action: "raise", "skip" or "continue".
        options: Which incidents to look into and to write.

    Attributes:
        incidents: The incidents so far.
    """

    def __init__(self, subject: IncidentSubject, action: Action, options: Incidents) -> None:
        self.incidents: list[Incident] = []
        self._subject, self._action, self._options = subject, action, options

    @property
    def _is_full(self) -> bool:
        return len(self.incidents) >= self._options.most

    def look_into(self, number: int, seen: SeenStep, spoilt: Sequence[str] = ()) -> None:
        """Find the origin of what is wrong with a step, write it down, and tell.

        Args:
            number: The number of the step.
            seen: The calls, losses and batch of the step.
            spoilt: The buffers that the step has made non-finite, if they stay so.

        Raises:
            NonFiniteError: If that is the action.
        """
        exact = False
        try:
            known, exact = self._find(number, seen)
            history = self._subject.history(False)
            held = {each.step: each.action for each in self.incidents}
            known = dated(known, number, self._subject.model, history, held)
        except Exception as error:  # what is not known must not keep the step from being held
            self.warn(f"Step {number} could not be looked into: {type(error).__name__}: {error}")
            known = plain_finding(number)
        if self._action != "continue":
            known = replace(known, advice=known.advice.removesuffix(HOLD))
        if spoilt:
            known = replace(known, text=known.text + _SPOILT.format(listed(spoilt)))
        self.report(number, seen, known, exact)

    def _find(self, number: int, seen: SeenStep) -> tuple[Finding, bool]:
        """Return what is known of a step, and whether that is the origin."""
        subject = self._subject
        scale = 1.0 if subject.scaler is None else float(gradient_scale(subject.scaler))
        step = BadStep(
            number=number,
            calls=seen.calls,
            losses=seen.known_losses,
            gradients=subject.bad_gradients(),
            after_update=False,
            scale=scale,
            batch=seen.told_batch,
            overwritten=frozenset(seen.overwritten),
        )
        lasting = self._lasting(number) if self._is_full else None
        if lasting is not None:
            return lasting, True
        reason = self._why_not()
        if not reason:
            try:
                with subject.unwatched():
                    finding = redo(step, subject.model, subject.loss)
                if finding is not None:
                    return finding, True
            except Exception as error:  # the model's own, or ours: other processes wait for us
                reason = f"running the step again raised {type(error).__name__}"
                self.warn(f"Step {number} could not be run again: {type(error).__name__}: {error}")
        is_written = self._options.folder is not None and not self._is_full
        return coarse_finding(step, reason, subject.is_compiled, is_written), False

    def _lasting(self, number: int) -> Finding | None:
        """Return the last finding again, if it is about weights and these are still not finite."""
        last = self.incidents[-1].finding if self.incidents else None
        name = None if last is None else last.evidence.get("parameter")
        parameter = dict(unwrap(self._subject.model).named_parameters()).get(str(name))
        if last is None or parameter is None or is_finite(parameter):
            return None
        told = f"In process {last.evidence.get('rank')}: "  # told again once they have agreed
        return replace(last, step=number, text=last.text.removeprefix(told))

    def _why_not(self) -> str:
        """Return why a step is not run again; empty if it is."""
        if not self._options.origin:
            return "Incidents(origin=False)"
        if self._is_full:
            return f"{self._options.most} incidents were looked into before (Incidents(most=...))"
        return why_not(self._subject.model)

    def report(self, number: int, seen: SeenStep, finding: Finding, exact: bool) -> None:
        """Agree with the other processes on what it is, write it down, and tell.

        Raises:
            NonFiniteError: If that is the action.
        """
        try:
            incident = self._record(number, seen, finding, exact)
        except Exception as error:  # whatever else fails, the step is held
            self.warn(f"The incident could not be recorded: {type(error).__name__}: {error}")
            incident = Incident(number, finding, self._action)
        self.incidents.append(incident)
        whole = incident.finding
        if self._action == "raise":
            raise NonFiniteError(whole, number, incident.folder)
        done = "is left out" if self._action == "skip" else "is applied all the same"
        self.warn(f"Step {number} {done}. {whole.text} {whole.advice}")

    def _record(self, number: int, seen: SeenStep, finding: Finding, exact: bool) -> Incident:
        """Return the incident that the processes agree on, written down if that is wanted."""
        rank, count = processes()
        folder, identity = self._folder_for(number), secrets.token_hex(16)
        whole, of_rank = finding, rank
        if count > 1 and self._action != "continue":  # whoever continues waits for nobody
            whole, of_rank, folder, identity = _agree(finding, exact, folder, identity)
        incident = Incident(number, whole, self._action, folder, of_rank)
        history = self._subject.history(self._action == "raise")
        if folder is None:
            return incident
        try:
            part = replace(self._part(rank, number, seen, finding), identity=identity)
            write_part(folder, part, history, self._options.steps)
            if rank == 0 or self._action == "continue":
                write_summary(folder, incident, identity, count)
        except Exception as error:  # a full disk must not be worse than the incident itself
            self.warn(f"The incident could not be written: {type(error).__name__}: {error}")
            with contextlib.suppress(OSError):  # another process may have written its part
                folder.rmdir()
            return replace(incident, folder=None)
        return incident

    def _folder_for(self, number: int) -> Path | None:
        if self._options.folder is None or self._is_full:
            return None
        try:
            return free_folder(Path(self._options.folder), number)
        except Exception as error:
            self.warn(f"The incident could not be written: {type(error).__name__}: {error}")
            return None

    def _part(self, rank: int, number: int, seen: SeenStep, finding: Finding) -> IncidentPart:
        model, scaler = self._subject.model, self._subject.scaler
        about = {
            "action": self._action,
            "model": type(unwrap(model)).__name__,
            "training": model.training,
            "compiled": self._subject.is_compiled,
            "batch_was_written": any(call.was_written for call in seen.kept_calls),
            "after_update": finding.problem == "nonfinite_update" and finding.step == number - 1,
            "scaler": None if scaler is None else dict(scaler.state_dict()),
            "losses": [float(loss.detach()) for loss in seen.known_losses],
            "norms": weight_norms(model),
        }
        weights = dict(unwrap(model).state_dict()) if self._options.weights else None
        return IncidentPart(
            rank=rank,
            step=number,
            finding=finding,
            calls=seen.kept_calls,
            told=seen.told_batch,
            about=about,
            weights=weights,
        )

    def warn(self, text: str) -> None:
        """Warn the user in the name of torchfmri."""
        warnings.warn(f"torchfmri: {text}", NonFiniteWarning, stacklevel=2)


def weight_norms(model: nn.Module) -> dict[str, float]:
    """Return the norm of each parameter, to recognise the weights by."""
    found = {}
    for name, parameter in unwrap(model).named_parameters():
        values = readable(parameter)
        if values is not None:
            found[name] = float(values.norm())
    return found


def _agree(
    finding: Finding, exact: bool, folder: Path | None, identity: str
) -> tuple[Finding, int, Path | None, str]:
    """Return the best finding and its rank, with the folder and identity of rank 0."""
    own = {"finding": finding.to_dict(), "exact": exact, "folder": str(folder or "")}
    own["identity"] = identity
    everyone = exchange(own)
    known = [each for each, one in enumerate(everyone) if one["exact"]]
    data = [each for each, one in enumerate(everyone) if one["finding"]["phase"] == "data"]
    rank = (known or data or [0])[0]
    chosen = Finding.from_dict(everyone[rank]["finding"])
    whole = replace(
        chosen,
        text=f"In process {rank}: {chosen.text}",
        evidence={**chosen.evidence, "rank": rank},
    )
    place = everyone[0]["folder"]
    return whole, rank, Path(place) if place else None, everyone[0]["identity"]


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
    """Whether the update of a step left a parameter finite; None if that was not recorded."""
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
