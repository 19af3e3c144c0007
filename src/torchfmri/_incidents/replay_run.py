"""Run a stored step again, and narrow it down to sample, layer, operation and line.

`torchfmri replay` calls it. The folder may be somebody else's and the model another than then:
weights are compared by their norms, and what differs is a note in the result, not an error. Without
a model the finding is shown as it was written. Words may change freely; the keys of `to_dict` are
public (`--json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_path
from torchfmri._incidents.aftermath import weight_norms
from torchfmri._incidents.incident import IncidentPart
from torchfmri._incidents.model_call import ModelCall
from torchfmri._incidents.redone_step import OVERWRITTEN, BadStep, depends_on_batch, redo_call
from torchfmri._incidents.stored_data import omissions
from torchfmri._incidents.stored_incident import read_part
from torchfmri._model import TARGET_NAMES, Subject, device_of, loss_in, needs_target, unwrap
from torchfmri._records import Finding, alarm
from torchfmri._torch import flatten, map_tensors
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True)
class Replay:
    """The outcome of running an incident again.

    Attributes:
        step: The number of the step.
        rank: The process whose part was run.
        finding: What it is; as it was written, if nothing was run.
        was_run: Whether the step was run again.
        notes: Reservations.
    """

    step: int
    rank: int
    finding: Finding
    was_run: bool
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data, for JSON."""
        return {**vars(self), "finding": self.finding.to_dict(), "notes": list(self.notes)}

    def text(self) -> str:
        """Return the outcome in words."""
        how = "run again" if self.was_run else "as it was written down"
        code = self.finding.evidence.get("code")
        lines = [
            f"Step {self.step} of process {self.rank}, {how}: {self.finding.problem}",
            "",
            self.finding.text,
            *([f"    {code}"] if code else []),
            f"What to do: {self.finding.advice}",
            *(f"Note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def replay(folder: str | Path, subject: Subject | None = None, rank: int | None = None) -> Replay:
    """Find what is wrong with the step of an incident, by running it again.

    Args:
        folder: The folder of an incident, or of several: then the highest step is used.
        subject: The model and loss to run it with; without them the finding as it was written.
        rank: The process whose part is run; by default the one that has the origin.

    Raises:
        FileFormatError: It is damaged, or is not what was written.
        InspectionError: There is no incident, or it cannot be run.
    """
    part = read_part(check_path("folder", folder), rank, with_data=subject is not None)
    if subject is None:
        note = "Name your model and loss to run it again: --factory module:factory."
        return Replay(part.step, part.rank, part.finding, False, (*part.notes, note))
    if not part.calls:
        raise InspectionError(
            "The incident holds no call of the model: it was not called as model(...) with "
            "gradients on, or was compiled in place."
        )
    model, notes = subject.model, [*part.notes, *_prepare(subject.model, part)]
    step = BadStep(
        number=part.step,
        calls=part.calls,
        losses=[],
        gradients={"": torch.empty(0, device="cpu")},
        after_update=bool(part.about.get("after_update")),
        scale=_scale(part),
    )
    found, ran_loss = None, True
    is_written = bool(part.about.get("batch_was_written"))
    for call in part.calls:
        moved = _to_device(call, model)
        loss = _loss_for(subject, moved, part.told, notes)
        ran_loss = ran_loss and (subject.loss is None or loss is not None)
        found = redo_call(step, moved, model, loss)
        if found is not None and is_written and depends_on_batch(found):
            found = None
        if found is not None:
            break
    finding = found or _not_reproduced(part, ran_loss)
    return Replay(part.step, part.rank, finding, True, tuple(dict.fromkeys(notes)))


def _prepare(model: nn.Module, part: IncidentPart) -> list[str]:
    """Give the model its weights, if they were written; returns reservations."""
    kept = {"calls": [call.to_data() for call in part.calls], "told": part.told}
    absent = dict.fromkeys(omissions(kept))
    notes = [f"A {kind} among the batch could not be kept." for kind in absent]
    if part.weights is not None:
        inner = unwrap(model)
        try:
            inner.load_state_dict(part.weights)
        except RuntimeError as error:
            raise InspectionError(
                f"The weights of the incident do not fit the model of the factory: {error}"
            ) from error
    elif not _same_norms(part.about.get("norms") or {}, weight_norms(model)):
        notes.append(
            "The weights are not those of the incident. Let the factory load the checkpoint "
            "before it, or have them written: Monitor(incidents=Incidents(folder, weights=True))."
        )
    model.train(bool(part.about.get("training", True)))
    return notes


def _same_norms(then: dict[str, float | None], now: dict[str, float]) -> bool:
    if then.keys() != now.keys():
        return False
    return all(
        (value is None and not math.isfinite(now[name]))
        or (value is not None and math.isclose(value, now[name], rel_tol=1e-4, abs_tol=1e-12))
        for name, value in then.items()
    )


def _scale(part: IncidentPart) -> float:
    scaler = part.about.get("scaler") or {}
    return float(scaler.get("scale") or 1.0)


def _loss_for(
    subject: Subject, call: ModelCall, told: Any, notes: list[str]
) -> Callable[..., Any] | None:
    """Return the loss to call after the model, with its old arguments if they are known."""
    loss = subject.loss
    if loss is None or call.loss_arguments is not None:
        return loss if callable(loss) else None
    name, target = _target_in(told, call)
    pairs = needs_target(loss)
    if pairs and target is None:
        notes.append(
            "The targets were not written, so the loss was not run. Hand the loss module to the "
            "Monitor (loss=criterion), or tell it the batch: step.batch((x, y)), or a dict with "
            "'target' or 'labels'."
        )
        return None
    if not pairs:
        return partial(_loss_of_output, loss, None)
    device = device_of(subject.model)
    moved = map_tensors(target, lambda tensor: tensor.to(device))
    call.targets = {name: moved}
    return partial(_loss_of_output, loss, moved)


def _target_in(told: Any, call: ModelCall) -> tuple[str, Any]:
    """Return the name and value of the target: the second of two, or what the model did not get."""
    if isinstance(told, Mapping):
        named = {str(key): value for key, value in told.items()}
    elif isinstance(told, (list, tuple)):
        named = {f"batch[{place}]": value for place, value in enumerate(told)}
    else:
        return "", None
    if not isinstance(told, Mapping) and len(told) == 2:
        return "batch[1]", told[1]
    fed = [each.tensor for each in flatten([call.arguments, dict(call.keywords)])]
    left = {key: value for key, value in named.items() if not _is_among(value, fed)}
    if len(left) == 1 or (left and not isinstance(told, Mapping)):
        return list(left.items())[-1]
    # Among several, a usual name decides. An autoencoder was fed all: its input is the target.
    known = [(key, value) for key, value in (left or named).items() if key.lower() in TARGET_NAMES]
    return known[0] if len(known) == 1 else ("", None)


def _is_among(value: Any, tensors: list[Tensor]) -> bool:
    """Whether the tensors of a value are all among these; also True if it has no tensors."""
    own = [each.tensor for each in flatten(value)]
    return all(any(_same_values(each, other) for other in tensors) for each in own)


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _loss_of_output(loss: Callable[..., Any], target: Any, output: Any) -> Any:
    """Return the output's own loss, or the loss of it, and of a target if there is one."""
    if loss_in(output) is not None:
        return output
    return loss(output) if target is None else loss(output, target)


def _to_device(call: ModelCall, model: nn.Module) -> ModelCall:
    device = device_of(model)

    def move(value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(device))

    moved = replace(call, arguments=move(call.arguments), keywords=move(dict(call.keywords)))
    if call.loss_arguments is not None:
        moved.loss_arguments = move(call.loss_arguments)
    return moved


def _not_reproduced(part: IncidentPart, ran_loss: bool) -> Finding:
    """Return the finding about a step that is finite when run again, with the likely reason."""
    if part.about.get("batch_was_written"):
        why = (
            "The batch was written into after the model was called, so the one in the folder is "
            "not the one of the step, and running it again does not show the origin."
        )
        advice = OVERWRITTEN
    elif not ran_loss:
        why = (
            "The model, run again, is finite. The loss was not run, because its targets were not "
            "written: it began there or with the targets, as far as can be told."
        )
        advice = (
            "Tell the Monitor the batch with its targets (step.batch((x, y)), or "
            "monitor.batch((x, y))), and replay the incident that is then written."
        )
    elif part.about.get("compiled"):
        why = (
            "The step came from compiled code, and eager code does not reproduce it: the cause is "
            "in what the compiler made of the model (fused operations, other precision)."
        )
        advice = "Compile without the part named above, or with torch.compile(backend='aot_eager')."
    else:
        why = "The step, run again, is finite."
        advice = (
            "Check that model, weights, loss and device are those of the incident; operations "
            "that are not deterministic may also differ."
        )
    return alarm(
        "nonfinite_not_reproduced",
        layers=part.finding.layers,
        phase=part.finding.phase,
        step=part.step,
        text=f"{why} When it happened: {part.finding.text}",
        advice=advice,
        evidence={"compiled": bool(part.about.get("compiled"))},
    )
