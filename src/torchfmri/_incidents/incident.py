"""An incident: a step with non-finite values, and the folder that keeps what is needed to redo it.

    incidents/step-000012/
        incident.json        step, number of processes, the finding            (the first process)
        rank-0/
            part.json        what this process found, its scaler, the versions of the software
            calls.json .npz  each call of the model: batch, random generators, autocast, targets
            history.jsonl    statistics of the last steps
            weights.json .npz    only if asked for

A part is written under another name and renamed when it is complete. There is no pickle in it.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchfmri._incidents.model_call import ModelCall
from torchfmri._incidents.stored_data import load_data, save_data
from torchfmri._records import COLUMNS, Finding, History, write_records
from torchfmri.exceptions import InspectionError

_SUMMARY, _PART, _CALLS, _WEIGHTS, _HISTORY = (
    "incident.json", "part.json", "calls", "weights", "history.jsonl",
)  # fmt: skip


@dataclass(frozen=True)
class Incident:
    """A step with non-finite values.

    Attributes:
        step: Its number.
        finding: What is wrong, where and why.
        action: What was done: "raise", "skip" or "continue".
        folder: Where it was written; None if nowhere.
        rank: The process whose finding it is.

    Example:
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
class Part:
    """What one process keeps of an incident.

    Attributes:
        rank: Of the process.
        step: The number of the step.
        finding: What this process found.
        calls: The calls of the model, one per micro-batch.
        told: The batch that the user told the Monitor of; None where it was not told.
        about: The action, the scaler's state, compiled or not, norms of the weights.
        weights: Name -> tensor; None where they were not asked for.
    """

    rank: int
    step: int
    finding: Finding
    calls: list[ModelCall]
    told: Any = None
    about: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] | None = None


def write_part(folder: Path, part: Part, history: History | None, steps: int) -> Path:
    """Write the part of this process into the folder of the incident; returns that folder.

    Args:
        folder: Of the incident.
        part: What to keep.
        history: Of the Monitor.
        steps: How many of its latest steps to keep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"rank-{part.rank}"
    unfinished = Path(tempfile.mkdtemp(prefix=f".rank-{part.rank}-", dir=folder))
    try:
        content = {
            "step": part.step,
            "rank": part.rank,
            "finding": part.finding.to_dict(),
            **part.about,
            "software": {"torch": torch.__version__, "python": platform.python_version()},
        }
        _write_json(unfinished / _PART, content)
        save_data(
            unfinished / _CALLS,
            {"calls": [call.to_data() for call in part.calls], "told": part.told},
        )
        if part.weights is not None:
            save_data(unfinished / _WEIGHTS, part.weights)
        if history is not None and len(history):
            first = history[max(0, len(history) - steps)].number
            rows = (row for row in history.rows() if row["step"] >= first)
            write_records(rows, COLUMNS, unfinished / _HISTORY)
        unfinished.chmod(0o755)
        unfinished.replace(final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def write_summary(folder: Path, incident: Incident, processes: int) -> None:
    """Write what the whole incident is about; for the first process."""
    content = {
        "step": incident.step,
        "processes": processes,
        "rank": incident.rank,
        "action": incident.action,
        "finding": incident.finding.to_dict(),
    }
    unfinished = folder / f".{_SUMMARY}"
    _write_json(unfinished, content)
    unfinished.replace(folder / _SUMMARY)


def read_part(folder: Path, rank: int | None = None) -> Part:
    """The part of one process: the one whose finding it is, unless another is asked for.

    Args:
        folder: Of an incident, or one that holds several: then the latest.
        rank: Of the process.

    Raises:
        InspectionError: There is none, or it cannot be read.
    """
    found = find_incident(folder)
    ranks = ranks_of(found)
    if rank is None:
        summary = found / _SUMMARY
        rank = _read_json(summary)["rank"] if summary.is_file() else ranks[0]
    if rank not in ranks:
        there = ", ".join(map(str, ranks))
        raise InspectionError(f"There is no rank {rank} in {str(found)!r}: there is {there}.")
    own = found / f"rank-{rank}"
    content = _read_json(own / _PART)
    stored = load_data(own / _CALLS)
    weights = next(
        (
            load_data(each / _WEIGHTS)
            for each in (own, *(found / f"rank-{other}" for other in ranks))
            if (each / _WEIGHTS).with_suffix(".json").is_file()
        ),
        None,
    )
    return Part(
        rank,
        content["step"],
        finding_from_dict(content["finding"]),
        [ModelCall.from_data(each) for each in stored["calls"]],
        stored["told"],
        {key: content[key] for key in content if key not in ("step", "rank", "finding")},
        weights,
    )


def find_incident(folder: Path) -> Path:
    """The folder of one incident: this one, or the latest one in it.

    Raises:
        InspectionError: There is none.
    """
    if not folder.is_dir():
        raise InspectionError(f"There is no folder {str(folder)!r}.")
    if ranks_of(folder):
        return folder
    inside = [each for each in folder.iterdir() if each.is_dir() and ranks_of(each)]
    if not inside:
        raise InspectionError(
            f"{str(folder)!r} holds no incident. A Monitor writes them with "
            "Monitor(model, optimizer, incidents='folder')."
        )
    return max(inside, key=lambda each: (each.stat().st_mtime_ns, each.name))


def ranks_of(folder: Path) -> list[int]:
    """The processes of which an incident has a part."""
    names = (each.name.removeprefix("rank-") for each in folder.glob("rank-*") if each.is_dir())
    return sorted(int(name) for name in names if name.isdigit())


def free_folder(parent: Path, step: int) -> Path:
    """A folder for an incident at this step that is not there yet."""
    for attempt in range(10_000):
        folder = parent / (f"step-{step:06d}" + (f"-{attempt + 1}" if attempt else ""))
        if not folder.exists():
            return folder
    raise InspectionError(f"{str(parent)!r} is full of incidents at step {step}.")


def finding_from_dict(data: dict[str, Any]) -> Finding:
    """The finding that `Finding.to_dict` gave."""
    return Finding(
        data["problem"],
        data["severity"],
        tuple(data["layers"]),
        data["phase"],
        data["step"],
        data["text"],
        data["advice"],
        data["evidence"],
        tuple(finding_from_dict(each) for each in data.get("consequences", ())),
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", "utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InspectionError(f"{str(path)!r} cannot be read: {error}") from error


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
