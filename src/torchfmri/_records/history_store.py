"""A History on disk: a file of steps, or the folder that a Monitor writes while a model trains.

`History.save` and `load` and the Monitor's `folder` come here; the viewer asks `step_files` and
`has_ended`. The folder holds files of steps, each written whole or not at all, so that it can be
read at any moment and what a killed run has written stays readable. The format is stored: names of
files hold their first step, and each file says how many steps come before it, by which a lost file
is noticed. A damaged file costs its own steps only and is named in `notes`. When steps are written
(`_SECONDS`, `_SHARE`) may change.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchfmri._files import list_names, make_folder, require_forms
from torchfmri._records.finding import Finding
from torchfmri._records.history import STORED, History, HistoryRows, Series, Step
from torchfmri._records.inspection_files import Columns, read_sealed, write_sealed
from torchfmri._text import plural
from torchfmri.exceptions import FileFormatError, InspectionError
from torchfmri.statistics import Statistics

KIND = "history"
_FILE, _ENDING = "steps-", ".safetensors"
_ENDED = "ended"
"""An empty file beside the steps: the run is over, unless a file of steps is newer."""
_SECONDS = 10.0
_SHARE = 0.01
"""Steps are written after ten seconds, or after a hundredth of the time that the run took so far:
a run of a month has some hundred files. The first step, and the first whose loss is not finite, do
not wait."""

_FORMS: dict[str, Any] = {
    "before": int, "series": [[str]], "labels": [list], "scalars": [str], "sets": [[str]],
    "missing": {str: str}, "notes": {str: [str]}, "findings": list, "columns": {str: list},
}  # fmt: skip

# -- writing -------------------------------------------------------------------------------------


def save_history(
    history: History, path: Path, findings: Sequence[Finding] = (), before: int = 0
) -> None:
    """Write the steps of a history to one file; histograms are not kept.

    Args:
        history: The steps.
        path: The file.
        findings: The findings so far; by default those of the history.
        before: How many steps of the run are in other files, so that a lost file is noticed.
    """
    steps = list(history)
    columns = Columns()
    tables = np.full((len(steps), len(history.series), len(STORED)), math.nan)
    for row, step in enumerate(steps):
        tables[row, : len(step.table)] = step.table
    scalars = list(dict.fromkeys(name for step in steps for name in step.scalars))
    numbers = [[step.scalars.get(name, math.nan) for name in scalars] for step in steps]
    present = [[name in step.scalars for name in scalars] for step in steps]
    sets = list(dict.fromkeys(step.parameters for step in steps))
    updates = [np.asarray(step.updates, float).reshape(2, -1) for step in steps]
    arrays = {
        "number": np.array([step.number for step in steps], np.int64),
        "loss": np.array([[step.loss, step.seconds] for step in steps], float).reshape(-1, 2),
        "has_loss": np.array([step.has_loss for step in steps], bool),
        "tables": tables,
        "scalars": np.array(numbers, float).reshape(len(steps), len(scalars)),
        "present": np.array(present, bool).reshape(len(steps), len(scalars)),
        "sets": np.array([sets.index(step.parameters) for step in steps], np.int64),
        "updates": np.concatenate([np.empty((2, 0)), *updates], 1),
    }
    said = {
        "before": before,
        "series": [list(series) for series in history.series],
        "labels": [[dtype, list(shape or ())] for dtype, shape in _labels(history)],
        "scalars": scalars,
        "sets": [list(each) for each in sets],
        "missing": history.missing,
        "notes": history.notes,
        "findings": [_plain_finding(each) for each in (findings or history.findings)],
        "columns": {
            name: [columns.add(torch.from_numpy(np.ascontiguousarray(each))), list(each.shape)]
            for name, each in arrays.items()
        },
    }
    write_sealed(path, KIND, said, columns)


def _labels(history: History) -> list[tuple[str, tuple[int, ...] | None]]:
    """Return the dtype and shape of each series, as far as the most recent steps know them."""
    found: list[tuple[str, tuple[int, ...] | None]] = [("float32", None)] * len(history.series)
    for step in history:
        for index, label in step.labels.items():
            found[index] = label
        for index, statistics in step.statistics.items():
            found[index] = (statistics.dtype, statistics.shape)
    return found


def _plain_finding(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data, with its evidence in the types of JSON."""
    said = finding.to_dict()
    kept = (bool, int, float, str, type(None), list, tuple)
    said["evidence"] = {
        str(name): value if isinstance(value, kept) else str(value)
        for name, value in said["evidence"].items()
    }
    said["consequences"] = [_plain_finding(each) for each in finding.consequences]
    return said


# -- reading -------------------------------------------------------------------------------------


def step_files(path: Path) -> list[Path]:
    """Return the files of steps at a path in order: the file itself, or those in the folder."""
    names = list_names(path) if path.is_dir() else [path.name] if path.is_file() else []
    found = sorted(name for name in names if name.startswith(_FILE) and name.endswith(_ENDING))
    return [path / name if path.is_dir() else path for name in found]


def has_ended(path: Path) -> bool:
    """Whether the Monitor that wrote a folder has said that it is done; a killed one says nothing.

    A Monitor that goes on afterwards writes steps that are newer than the mark.
    """
    mark, files = path / _ENDED, step_files(path)
    if not path.is_dir() or not mark.is_file() or not files:
        return False
    return files[-1].stat().st_mtime_ns <= mark.stat().st_mtime_ns


def load_history(path: Path) -> History:
    """Return the history in a file, or in a folder of such files.

    A damaged file of a folder is named in the notes of the history and passed over.

    Raises:
        FileFormatError: There is no history, or the file is damaged.
    """
    if not path.is_dir():
        return _merged([_load_file(path)])
    files = step_files(path)
    if not files:
        others = ", ".join(list_names(path)[:5])
        holds = f"it holds no steps of a training run, only {others}" if others else "it is empty"
        raise FileFormatError(
            str(path),
            f"{holds}. A Monitor writes the steps of a training run to its folder: "
            "Monitor(model, folder=...)",
        )
    parts: list[dict[str, Any]] = []
    problems = []
    for file in files:
        try:
            part = _load_file(file)
            _require_name(file.name, part["steps"])
            parts.append(part)
        except FileFormatError as error:
            problems.append(str(error))
    if not parts:
        raise FileFormatError(str(path), f"none of its files can be read: {problems[0]}")
    history = _merged(parts)
    problems = [f"{problem}: its steps are missing" for problem in problems]
    for text in problems or _gaps(parts):
        history.notes[text] = [""]
    return history


def _file_name(first: int) -> str:
    return f"{_FILE}{first:09d}{_ENDING}"


def _require_name(name: str, steps: Sequence[Step]) -> None:
    """Raise for a copy under another name, which would give its steps twice."""
    if not steps or name != _file_name(steps[0].number):
        holds = f"its first step is {steps[0].number}" if steps else "it holds no steps"
        raise FileFormatError(name, f"{holds}, so it is not the file of this name")


def _gaps(parts: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield a sentence for each gap between files; nobody can tell if the last ones are gone."""
    count = 0
    for part in parts:
        before = part["before"]
        if before != count and part["steps"]:
            yield (
                f"Before step {part['steps'][0].number} the run wrote {plural(before, 'step')}, of "
                f"which {count or 'none'} can be found: a file of the folder is missing"
            )
        count = before + len(part["steps"])


def _load_file(path: Path) -> dict[str, Any]:
    """Return the description of one file, with its arrays and steps, all of the right form."""
    said, tensors = read_sealed(path, KIND)
    try:
        require_forms(said, _FORMS)
        arrays = {
            name: np.array(tensors[key].values).reshape(shape)
            for name, (key, shape) in said["columns"].items()
        }
        series = [Series(*each) for each in said["series"]]
        if arrays["tables"].shape[1:] != (len(series), len(STORED)):
            raise ValueError("its tables do not fit its series")
        if len(said["labels"]) != len(series):
            raise ValueError("its labels do not fit its series")
        return {
            **said,
            "series": series,
            "labels": [(str(dtype), tuple(shape)) for dtype, shape in said["labels"]],
            "findings": [Finding.from_dict(each) for each in said["findings"]],
            "arrays": arrays,
            "steps": list(_steps(said, arrays)),
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileFormatError(path.name, f"its description is wrong ({error})") from error


def _steps(said: dict[str, Any], arrays: Mapping[str, Any]) -> Iterable[Step]:
    at, sets = 0, [tuple(each) for each in said["sets"]]
    for row, number in enumerate(arrays["number"].tolist()):
        parameters = sets[int(arrays["sets"][row])]
        present = arrays["present"][row]
        yield Step(
            number=number,
            loss=float(arrays["loss"][row, 0]),
            seconds=float(arrays["loss"][row, 1]),
            scalars={
                name: float(value)
                for name, value, there in zip(
                    said["scalars"], arrays["scalars"][row], present, strict=True
                )
                if there
            },
            parameters=parameters,
            updates=arrays["updates"][:, at : at + len(parameters)],
            has_loss=bool(arrays["has_loss"][row]),
        )
        at += len(parameters)


def _merged(parts: Sequence[dict[str, Any]]) -> History:
    """Return one history of the steps of several files, in the order of their numbers."""
    history = History(length=max(1, sum(len(part["steps"]) for part in parts)))
    for part in parts:
        labels = part["labels"]
        for row, step in enumerate(part["steps"]):
            table = part["arrays"]["tables"][row]
            seen = np.flatnonzero(~np.isnan(table[:, STORED.index("count")]))
            chosen = [part["series"][index] for index in seen]
            history.append(
                step, HistoryRows(chosen, table[seen], [labels[index] for index in seen])
            )
        history.missing |= part["missing"]
        for text, layers in part["notes"].items():
            history.notes[text] = list(dict.fromkeys([*history.notes.get(text, []), *layers]))
        history.findings = part["findings"] or history.findings
    return history


# -- while a model trains ------------------------------------------------------------------------


class HistoryFolder:
    """A writer for `Monitor.add_writer` that keeps every step on disk while the model trains.

    Args:
        folder: The folder to write to; made if it is not there. One run per folder.
        findings: Asked for what was found so far when steps are written.
        seconds: How long steps wait at least before they are written; 0 writes each at once. The
            first step does not wait, nor does one whose loss turns to NaN or infinity.

    Raises:
        InspectionError: The folder holds another run.
    """

    def __init__(
        self,
        folder: str | Path,
        findings: Callable[[], Sequence[Finding]] = lambda: (),
        seconds: float = _SECONDS,
    ) -> None:
        # Steps are written later, perhaps from another working directory.
        self.folder = Path(folder).absolute()
        if self.folder.is_dir() and any(name.startswith(_FILE) for name in list_names(self.folder)):
            raise InspectionError(
                f"folder={str(folder)!r}: it holds the steps of another run. Choose another "
                "folder, or remove that one."
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise InspectionError(f"folder={str(folder)!r}: that is a file. Name a folder.")
        make_folder(self.folder)
        self._pending = _UnwrittenSteps(self.folder, findings, seconds)
        # The last steps of a program that simply ends are written too.
        self._finalizer = weakref.finalize(self, self._pending.end)

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Keep one step."""
        self._pending.add(step, found)

    def flush(self) -> None:
        """Write the steps that wait."""
        self._pending.write()

    def end(self) -> None:
        """Write the steps that wait, and that the run is over: `torchfmri view` says so at once."""
        self._pending.end()


class _UnwrittenSteps:
    """The steps that are not written yet."""

    def __init__(
        self, folder: Path, findings: Callable[[], Sequence[Finding]], seconds: float
    ) -> None:
        self._folder, self._findings, self._seconds = folder, findings, seconds
        self._began = self._last = time.monotonic()
        self._steps = History(length=1 << 40)
        self._began_writing = self._was_lost = False
        self._written = 0

    def add(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Keep a step, without its histograms; write if it is time, or if the loss just broke."""
        copied = replace(step, scalars=dict(step.scalars), statistics={}, labels={}, variances={})
        self._steps.append(copied, found)
        now = time.monotonic()
        wait = max(self._seconds, _SHARE * (now - self._began)) if self._seconds else 0.0
        lost = step.has_loss and not math.isfinite(step.loss)
        if now - self._last >= wait or not self._began_writing or (lost and not self._was_lost):
            self.write()
        self._was_lost = lost

    def write(self) -> None:
        steps, self._steps = self._steps, History(length=1 << 40)
        self._last = time.monotonic()
        self._began_writing = True
        if len(steps):
            name = _file_name(steps[0].number)
            save_history(steps, self._folder / name, self._findings(), self._written)
            self._written += len(steps)

    def end(self) -> None:
        self.write()
        # It runs when the interpreter leaves as well: by then the user may have removed the folder.
        if self._written and self._folder.is_dir() and not has_ended(self._folder):
            (self._folder / _ENDED).touch()
