"""An incident: a step with non-finite values, and the folder that keeps what is needed to redo it.

    incidents/step-000012/
        incident.json        step, number of processes, the finding            (the first process)
        rank-0/
            part.json        what this process found, its scaler, the versions of the software
            calls.json       each call of the model: batch, random generators, autocast, targets
            calls.safetensors    the tensors among these
            history.jsonl    statistics of the last steps
            weights.json .safetensors    only if asked for

A part is written under another name and renamed when it is complete and on the disk. There is no
pickle in it, and what is read is read as if an enemy wrote it.
"""

from __future__ import annotations

import math
import platform
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchfmri._files import (
    list_names,
    make_folder,
    new_file,
    new_folder,
    parse,
    read_regular,
    seal,
    unseal,
)
from torchfmri._incidents.model_call import ModelCall
from torchfmri._incidents.stored_data import load_data, save_data
from torchfmri._records import COLUMNS, PHASES, SEVERITIES, Finding, History, write_records
from torchfmri.exceptions import FileFormatError, InspectionError

_SUMMARY, _PART, _CALLS, _WEIGHTS, _HISTORY = (
    "incident.json", "part.json", "calls", "weights", "history.jsonl",
)  # fmt: skip
RECORD_BYTES = 16 << 20
_RANK = re.compile(r"rank-([0-9]{1,6})")
_STEP = re.compile(r"step-([0-9]{1,18})(?:-([0-9]{1,9}))?")
_OLD = b'{\n "step"'  # how version 0.1 began its records, which had no checksum


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
    make_folder(folder)
    content = {
        "step": part.step,
        "rank": part.rank,
        "finding": part.finding.to_dict(),
        **part.about,
        "weights": part.weights is not None,
        "software": {"torch": torch.__version__, "python": platform.python_version()},
    }
    calls = {"calls": [call.to_data() for call in part.calls], "told": part.told}
    with new_folder(folder / f"rank-{part.rank}") as new:
        (new / _PART).write_bytes(_seal(content, _PART))
        save_data(new / _CALLS, calls)
        if part.weights is not None:
            save_data(new / _WEIGHTS, part.weights)
        if history is not None and len(history):
            first = history[max(0, len(history) - steps)].number
            rows = (row for row in history.rows() if row["step"] >= first)
            write_records(rows, COLUMNS, new / _HISTORY)
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
    with new_file(folder / _SUMMARY) as new:
        new.write_bytes(_seal(content, _SUMMARY))


def read_part(folder: Path, rank: int | None = None, *, with_data: bool = True) -> Part:
    """The part of one process: the one whose finding it is, unless another is asked for.

    Args:
        folder: Of an incident, or one that holds several: then that of the highest step.
        rank: Of the process.
        with_data: Whether to read calls and weights too.

    Raises:
        FileFormatError: A file of it is damaged, or is not what was written.
        InspectionError: There is none.
    """
    found = find_incident(folder)
    ranks = ranks_of(found)
    if rank is None:
        rank = _rank_of_finding(found, ranks)
    if rank not in ranks:
        there = ", ".join(map(str, ranks))
        raise InspectionError(f"There is no rank {rank} in {str(found)!r}: there is {there}.")
    own = found / f"rank-{rank}"
    content = _read_record(own / _PART)
    about = {key: content[key] for key in content if key not in ("step", "rank", "finding")}
    _check_about(about)
    part = Part(rank, _step_of(content), _checked_finding(content.get("finding")), [], None, about)
    if not with_data:
        return part
    calls, told = _read_calls(own / _CALLS)
    weights = _read_weights(found, own, ranks)
    if about.get("weights") and weights is None:
        raise FileFormatError(f"{_WEIGHTS}.json", "it is missing")
    return replace(part, calls=calls, told=told, weights=weights)


def _rank_of_finding(incident: Path, ranks: list[int]) -> int:
    """The process that found the origin; the first one if the summary was never written."""
    if _SUMMARY not in list_names(incident):
        return ranks[0]
    rank = _read_record(incident / _SUMMARY).get("rank")
    if type(rank) is not int:
        raise FileFormatError(_SUMMARY, "its rank is no number")
    return rank


def _read_calls(path: Path) -> tuple[list[ModelCall], Any]:
    stored = load_data(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("calls"), list):
        raise FileFormatError(f"{path.name}.json", "it holds no calls of a model")
    try:
        return [ModelCall.from_data(each) for each in stored["calls"]], stored.get("told")
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FileFormatError(
            f"{path.name}.json",
            f"a call of the model is not what was written: {' '.join(str(error).split())[:200]}",
        ) from error


def _read_weights(incident: Path, own: Path, ranks: list[int]) -> dict[str, Any] | None:
    """The weights, which may be in the part of another process; None where they were not kept."""
    for part in (own, *(incident / f"rank-{other}" for other in ranks)):
        if f"{_WEIGHTS}.json" in list_names(part):
            weights = load_data(part / _WEIGHTS)
            if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
                raise FileFormatError(f"{_WEIGHTS}.json", "it holds no weights by name")
            return weights
    return None


def find_incident(folder: Path) -> Path:
    """The folder of one incident: this one, or that of the highest step in it.

    Raises:
        FileFormatError: Its parts are missing.
        InspectionError: There is none.
    """
    if not folder.is_dir():
        raise InspectionError(f"There is no folder {str(folder)!r}.")
    if ranks_of(folder):
        return folder
    _refuse_without_parts(folder)
    inside = [name for name in list_names(folder) if _is_folder(folder / name)]
    incidents = [name for name in inside if _is_incident(folder / name)]
    if not incidents:
        raise InspectionError(
            f"{str(folder)!r} holds no incident. A Monitor writes them with "
            "Monitor(model, optimizer, incidents='folder')."
        )
    newest = folder / max(incidents, key=_order)
    _refuse_without_parts(newest)
    return newest


def _is_incident(folder: Path) -> bool:
    """Whether an incident was written here; an interrupted one has neither summary nor parts."""
    return any(name == _SUMMARY or _RANK.fullmatch(name) for name in list_names(folder))


def _refuse_without_parts(folder: Path) -> None:
    """Raise for an incident whose parts are gone: another one must not be shown in its place."""
    if _is_incident(folder) and not ranks_of(folder):
        raise FileFormatError(
            folder.name,
            "it is an incident without the part of any process: its folders rank-0, ... are "
            "missing, or are links. Name the folder of another incident to replay that one",
        )


def _order(name: str) -> tuple[int, int, str]:
    """Step and number of an incident; what has another name comes before all of them."""
    matched = _STEP.fullmatch(name)
    return (int(matched[1]), int(matched[2] or 1), name) if matched else (-1, 0, name)


def ranks_of(folder: Path) -> list[int]:
    """The processes of which an incident has a part."""
    names = (name for name in list_names(folder) if _is_folder(folder / name))
    return sorted(int(matched[1]) for matched in map(_RANK.fullmatch, names) if matched)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder itself, no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


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


def _checked_finding(data: Any) -> Finding:
    """The finding in a file.

    Raises:
        FileFormatError: It is none.
    """
    try:
        finding = finding_from_dict(data)
    except (LookupError, TypeError, AttributeError) as error:
        raise FileFormatError(_PART, "its finding is not complete") from error
    for each in (finding, *finding.consequences):
        texts = (each.problem, each.text, each.advice, *each.layers)
        right = all(isinstance(text, str) for text in texts) and isinstance(each.evidence, Mapping)
        known = each.severity in SEVERITIES and each.phase in PHASES
        if not right or not known or not (each.step is None or type(each.step) is int):
            raise FileFormatError(_PART, "its finding is not what was written")
    return finding


def _check_about(about: Mapping[str, Any]) -> None:
    """Raise where something is not of the kind that a replay counts on."""
    norms, scaler = about.get("norms") or {}, about.get("scaler") or {}
    if not isinstance(norms, dict) or not all(map(_is_number, norms.values())):
        raise FileFormatError(_PART, "its norms are no numbers by name")
    if not isinstance(scaler, dict) or not _is_number(scaler.get("scale")):
        raise FileFormatError(_PART, "its scaler has no scale")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return False
    return value is None or not abs(value) > 1e300  # no float holds every integer


def _step_of(content: Mapping[str, Any]) -> int:
    step = content.get("step")
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise FileFormatError(_PART, "its step is no number")
    return step


def _seal(content: Mapping[str, Any], name: str) -> bytes:
    record = {"format": "torchfmri-incident", "version": 1, **_finite(content)}
    return seal(record, name, ",\n") + b"\n"


def _read_record(path: Path) -> dict[str, Any]:
    data = read_regular(path, RECORD_BYTES)
    if not data.startswith(_OLD):
        return unseal(data.removesuffix(b"\n"), path.name)
    record = parse(data, path.name)
    if not isinstance(record, dict):
        raise FileFormatError(path.name, "it is not a JSON object")
    return record


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
