"""The files of an incident: written whole, bound to each other, read as if an enemy wrote them.

    incidents/step-000012/
        incident.json        step, number of processes, the finding            (the first process)
        rank-0/
            part.json        what this process found, its scaler, the versions of the software,
                             the size and SHA-256 of the files below
            calls.json       each call of the model: batch, random generators, autocast, targets
            calls.safetensors    the tensors among these
            history.jsonl    statistics of the last steps
            weights.json .safetensors    only if asked for

`aftermath` writes with `write_part` and `write_summary`, `replay_run` reads with `read_part`. The
names of files and keys above are a stored format, and version 0.1 must still be read (`_OLD`).

A part is written under another name and renamed when it is complete and on the disk. Its
`part.json` is written last and lists the others; it and `incident.json` carry the identity of the
incident. So no file can stand in for one of another incident. None of them is a pickle. A file that
is damaged and not needed for what was asked is a note; one that is needed raises. Further keys may
be added to part.json.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchfmri._files import (
    compare_files,
    finite_json,
    is_listing,
    list_files,
    list_names,
    make_folder,
    new_file,
    new_folder,
    parse,
    read_regular,
    seal,
    unseal,
)
from torchfmri._incidents.incident import Incident, IncidentPart
from torchfmri._incidents.incident_folders import (
    SUMMARY,
    find_incident,
    others_in,
    part_folder,
    ranks_of,
)
from torchfmri._incidents.model_call import ModelCall
from torchfmri._incidents.stored_data import load_data, save_data
from torchfmri._records import COLUMNS, Finding, History, write_records
from torchfmri._text import listed
from torchfmri.exceptions import FileFormatError, InspectionError

_PART, _CALLS, _WEIGHTS, _HISTORY = "part.json", "calls", "weights", "history.jsonl"
_DATA = ("calls.json", "calls.safetensors", "weights.json", "weights.safetensors")
_FORMAT = {"format": "torchfmri-incident", "version": 1}
RECORD_BYTES = 16 << 20
_OLD = b'{\n "step"'  # how version 0.1 began its records, which had no checksum
_OWN_FIELDS = (*_FORMAT, "step", "rank", "incident", "finding", "files")
_IDENTITY = re.compile("[0-9a-f]{32}")


def write_part(folder: Path, part: IncidentPart, history: History | None, steps: int) -> Path:
    """Write the part of this process into the folder of the incident; returns that folder.

    Args:
        folder: The folder of the incident.
        part: What to keep.
        history: The history of the Monitor.
        steps: How many of its latest steps to keep.
    """
    make_folder(folder)
    content = {
        "step": part.step,
        "rank": part.rank,
        "incident": part.identity,
        "finding": part.finding.to_dict(),
        **part.about,
        "weights": part.weights is not None,
        "software": {"torch": torch.__version__, "python": platform.python_version()},
    }
    calls = {"calls": [call.to_data() for call in part.calls], "told": part.told}
    with new_folder(part_folder(folder, part.rank)) as new:
        save_data(new / _CALLS, calls)
        if part.weights is not None:
            save_data(new / _WEIGHTS, part.weights)
        if history is not None and len(history):
            first = history[max(0, len(history) - steps)].number
            rows = (row for row in history.rows() if row["step"] >= first)
            write_records(rows, COLUMNS, new / _HISTORY)
        (new / _PART).write_bytes(_seal(content | {"files": list_files(new)}, _PART))
    return folder


def write_summary(folder: Path, incident: Incident, identity: str, processes: int) -> None:
    """Write what the whole incident is about; for the first process."""
    content = {
        "step": incident.step,
        "processes": processes,
        "incident": identity,
        "rank": incident.rank,
        "action": incident.action,
        "finding": incident.finding.to_dict(),
    }
    with new_file(folder / SUMMARY) as new:
        new.write_bytes(_seal(content, SUMMARY))


def read_part(folder: Path, rank: int | None = None, *, with_data: bool = True) -> IncidentPart:
    """Return the part of one process: the one whose finding it is, unless another is asked for.

    What is wrong with files that are not needed is told in the part's `notes`.

    Args:
        folder: The folder of an incident, or of several: then the highest step is read.
        rank: The rank of the process.
        with_data: Whether to read calls and weights too.

    Raises:
        FileFormatError: A file of it is damaged, or is not what was written.
        InspectionError: There is no incident, or no part of this process.
    """
    found = find_incident(folder)
    ranks = ranks_of(found)
    summary = _read_summary(found)
    if rank is None:
        rank = ranks[0] if summary is None else summary["rank"]
    if rank not in ranks:
        there = ", ".join(map(str, ranks))
        raise InspectionError(f"There is no rank {rank} in {str(found)!r}: there is {there}.")
    part, wrong = _open_part(found, rank, summary)
    notes = [*_notes_on(found, summary, ranks), *part.notes]
    if with_data:
        _refuse(wrong)
        calls, told = _read_calls(part_folder(found, rank) / _CALLS)
        part = replace(part, calls=calls, told=told, weights=_weights_of(found, part, summary))
    notes += [f"{error}." for error in wrong.values()]
    return replace(part, notes=tuple(notes))


def _read_summary(incident: Path) -> dict[str, Any] | None:
    """Return what the whole incident is about; None if that was never written."""
    if SUMMARY not in list_names(incident):
        return None
    summary = _read_record(incident / SUMMARY)
    if type(summary.get("rank")) is not int:
        raise FileFormatError(SUMMARY, "its rank is not a number")
    return summary


def _notes_on(incident: Path, summary: dict[str, Any] | None, ranks: list[int]) -> list[str]:
    """Return what is odd about the folder: something is missing from it, or was added."""
    notes = _notes_on_others(incident, others_in(incident))
    if summary is None:
        notes.append(f"{SUMMARY!r} is missing: it was never written, or it was removed.")
        return notes
    count = summary.get("processes")
    if summary.get("action") != "continue" and type(count) is int and len(ranks) < count:
        notes.append(f"Of {count} processes {len(ranks)} have a part in the folder.")
    return notes


def _notes_on_others(folder: Path, names: list[str]) -> list[str]:
    return [f"{folder.name!r} also holds {listed(names)}, which no Monitor wrote."] if names else []


def _open_part(
    incident: Path, rank: int, summary: dict[str, Any] | None
) -> tuple[IncidentPart, dict[str, FileFormatError]]:
    """Return a part without its data, and what is wrong with its files by their names."""
    own = part_folder(incident, rank)
    content = _read_record(own / _PART)
    about = {key: content[key] for key in content if key not in _OWN_FIELDS}
    _check_about(about)
    if content.get("rank") != rank:
        raise FileFormatError(_PART, f"it is not the part of process {rank}")
    identity, files = content.get("incident", ""), content.get("files", {})
    if content.keys() >= _FORMAT.keys():
        _check_listing(identity, files)
    # Processes that continue wait for nobody: each has an identity of its own.
    is_alone = about.get("action") == "continue" and summary is not None and summary["rank"] != rank
    if summary is not None and summary.get("incident", "") != identity and not is_alone:
        raise FileFormatError(_PART, f"it belongs to another incident than {SUMMARY!r}")
    others = [name for name in list_names(own) if files and name not in files and name != _PART]
    part = IncidentPart(
        rank=rank,
        step=_step_of(content),
        finding=_checked_finding(content.get("finding")),
        calls=[],
        told=None,
        about=about,
        identity=identity,
        notes=tuple(_notes_on_others(own, others)),
    )
    return part, compare_files(own, files)


def _check_listing(identity: Any, files: Any) -> None:
    """Raise if a part does not say which incident and which files it belongs to."""
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise FileFormatError(_PART, "it does not say to which incident it belongs")
    if not is_listing(files) or not files.keys() >= set(_DATA[:2]):
        raise FileFormatError(_PART, "it does not list its files")
    if unknown := sorted(files.keys() - {*_DATA, _HISTORY}):
        raise FileFormatError(_PART, f"it lists {unknown[0][:80]!r}, which no part has")


def _refuse(wrong: Mapping[str, FileFormatError]) -> None:
    """Raise for the first damaged file that a replay needs."""
    for name in _DATA:
        if name in wrong:
            raise wrong[name]


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


def _weights_of(
    incident: Path, part: IncidentPart, summary: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the weights, perhaps from another process's part; None if they were not kept."""
    for rank in dict.fromkeys((part.rank, *ranks_of(incident))):
        own = part_folder(incident, rank)
        if f"{_WEIGHTS}.json" in list_names(own):
            if rank != part.rank:
                _refuse(_open_part(incident, rank, summary)[1])
            weights = load_data(own / _WEIGHTS)
            if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
                raise FileFormatError(f"{_WEIGHTS}.json", "it holds no weights by name")
            return weights
    if part.about.get("weights"):
        raise FileFormatError(f"{_WEIGHTS}.json", "it is missing")
    return None


def _checked_finding(data: Any) -> Finding:
    try:
        return Finding.from_dict(data)
    except (KeyError, ValueError) as error:
        raise FileFormatError(_PART, "its finding is not what was written") from error


def _check_about(about: Mapping[str, Any]) -> None:
    """Raise if something is not of the kind that a replay counts on."""
    norms, scaler = about.get("norms") or {}, about.get("scaler") or {}
    if not isinstance(norms, dict) or not all(map(_is_number, norms.values())):
        raise FileFormatError(_PART, "its norms are not numbers by name")
    if not isinstance(scaler, dict) or not _is_number(scaler.get("scale")):
        raise FileFormatError(_PART, "its scaler has no scale")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return False
    return value is None or not abs(value) > 1e300  # no float holds every integer


def _step_of(content: Mapping[str, Any]) -> int:
    step = content.get("step")
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise FileFormatError(_PART, "its step is not a number")
    return step


def _seal(content: Mapping[str, Any], name: str) -> bytes:
    return seal({**_FORMAT, **finite_json(content)}, name, ",\n") + b"\n"


def _read_record(path: Path) -> dict[str, Any]:
    data = read_regular(path, RECORD_BYTES)
    if not data.startswith(_OLD):
        sealed = unseal(data.removesuffix(b"\n"), path.name)
        if any(sealed.get(key) != value for key, value in _FORMAT.items()):
            raise FileFormatError(path.name, "it is not a torchfmri-incident of version 1")
        return sealed
    record = parse(data, path.name)
    if not isinstance(record, dict):
        raise FileFormatError(path.name, "it is not a JSON object")
    return record
