"""A training run on the viewer's board: layers down, steps across, findings as its health.

A run is a file of JSON lines that a Monitor adds to at every watched step: a first line that says
so, a line with the names of series that are new, one per step, one per finding. Whoever reads it
while the model trains sees every line that is whole.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchfmri._files import make_folder, printable
from torchfmri._records import UPDATES, Finding, History, Series, Step
from torchfmri._viewer.board import LAYERS, TRACKS, Board, Entry, Health, Metric
from torchfmri._viewer.growing import GrowingTable
from torchfmri._viewer.server import View, serve
from torchfmri._viewer.tiles import Table
from torchfmri.exceptions import FileFormatError
from torchfmri.statistics import Statistics

FORMAT = "torchfmri-run"
SUFFIX = ".run.jsonl"
_LINE_BYTES, _PIECE = 64 << 20, 16 << 20
_WHAT = {
    "activations": Metric(
        "activations", "Activations", "How strong each layer's output is at each training step.",
        "root mean square",
    ),
    "gradients": Metric(
        "gradients", "Gradients", "How strong the gradient of each output is (dL/d output).",
        "root mean square",
    ),
    "parameters": Metric(
        "parameters", "Parameters", "How large the weights are.", "root mean square"
    ),
    "parameter_gradients": Metric(
        "parameter_gradients", "Parameter gradients", "What the optimizer finds in .grad.",
        "root mean square",
    ),
    UPDATES: Metric(
        UPDATES, "Updates", "How far each step moves the weights; about 1e-3 is usual.",
        "rms of the update / rms of the weight",
    ),
}  # fmt: skip
_CURVES = {
    "loss": Metric("loss", "Loss", "The loss of the step.", ""),
    "seconds": Metric("seconds", "Seconds", "How long the step took.", "s"),
}


class Run:
    """What is known of a run: fed step by step, by a Monitor or from its file.

    Args:
        model: The name of the model.
    """

    def __init__(self, model: str = "model") -> None:
        self.model = model
        self.series: list[Series] = []
        self.numbers: list[int] = []
        self.curves = GrowingTable(len(_CURVES))
        self.rms = GrowingTable(0)
        self.findings: list[Health] = []
        self._index: dict[Series, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_history(cls, history: History) -> Run:
        """The run whose steps a history holds."""
        run = cls()
        run._know([*history.series, *(Series(name, UPDATES) for name in _updated(history))])
        columns = np.full((len(history), len(run.series)), np.nan)
        for what in dict.fromkeys(series.what for series in run.series):
            names, values = history.matrix(what, "rms")
            if what != UPDATES:  # a value that is not finite makes the whole so
                lost = history.matrix(what, "nan")[1] + history.matrix(what, "inf")[1]
                values = np.where(lost > 0, np.nan, values)
            columns[:, [run._index[Series(name, what)] for name in names]] = values.T
        for step, rms in zip(history, columns, strict=True):
            run.feed({"step": step.number, "loss": step.loss, "seconds": step.seconds,
                      "rms": rms.tolist()})  # fmt: skip
        return run

    def add(self, step: Step, found: Mapping[Series, Statistics]) -> dict[str, Any]:
        """Add a step as a Monitor tells it; returns the step as a line of the file."""
        values = {series: _rms(each) for series, each in found.items()}
        for name, ratio in step.update_ratios.items():
            values[Series(name, UPDATES)] = ratio
        fresh = [series for series in values if series not in self._index]
        line = {
            "series": [list(series) for series in fresh],
            "step": step.number, "loss": step.loss, "seconds": step.seconds,
        }  # fmt: skip
        self._know(fresh)
        line["rms"] = [values.get(series, math.nan) for series in self.series]
        self.feed(line)
        return line

    def feed(self, line: Mapping[str, Any]) -> None:
        """Add what a line of a file says.

        Raises:
            KeyError, TypeError, ValueError: It says something else.
        """
        if "finding" in line:
            self.find(line["finding"])
        if "series" in line:
            self._know([Series(str(layer), str(what)) for layer, what in line["series"]])
        if "step" in line:
            curve = np.array([_number(line.get(name)) for name in _CURVES], np.float32)
            rms = np.array([_number(each) for each in line["rms"]], np.float32)
            if len(rms) > len(self.series):
                raise ValueError(f"{len(rms)} values of {len(self.series)} series")
            with self._lock:
                self.numbers.append(int(line["step"]))
                self.rms.append(rms)
                self.curves.append(curve)  # last: its length is that of the run

    def find(self, finding: Mapping[str, Any]) -> None:
        """Add a finding, or replace the one of the same problem and layers."""
        layers = [str(each) for each in finding.get("layers") or ()]
        step = finding.get("step")
        column = None
        if isinstance(step, int) and self.numbers:
            column = int(np.searchsorted(self.numbers, step))
        text = printable(str(finding.get("text", "")))
        found = Health(
            f"{finding.get('problem', '')}: {text}", str(finding.get("severity", "warn")),
            layers[0] if layers else None, column, printable(str(finding.get("advice", ""))),
        )  # fmt: skip
        kept = [
            each
            for each in self.findings
            if each.text.split(":")[0] != str(found.text).split(":")[0]
        ]
        self.findings = [*kept, found]

    def _know(self, fresh: Sequence[Series]) -> None:
        for series in fresh:
            if series not in self._index:
                self._index[series] = len(self.series)
                self.series.append(series)


class RunWriter:
    """Writes a run while a model trains; a Monitor calls it for each watched step.

    Args:
        path: The file, or a folder to put one into.
        model: The name of the model.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path if path.name.endswith(SUFFIX) else path / f"{os.getpid()}{SUFFIX}"
        make_folder(self.path.parent)
        self._run = Run(model)
        self._file = self.path.open("w", encoding="utf-8")
        self._put({"format": FORMAT, "version": 1, "model": model})

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Write one step."""
        self._put(self._run.add(step, found))

    def find(self, finding: Finding) -> None:
        """Write a finding."""
        self._put({"finding": finding.to_dict()})

    def _put(self, line: dict[str, Any]) -> None:
        text = json.dumps(_plain(line), separators=(",", ":"), default=str)
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunView:
    """A run that can be looked at while it goes on: on a page, or in a file for `torchfmri view`.

    It is a writer of a Monitor. Looking must not stop training: what fails here is warned of once.

    Args:
        where: True for a page of this process, else the file or folder to write the run to.
        model: The name of the model.
    """

    def __init__(self, where: Literal[True] | str | Path, model: str) -> None:
        self.view: View | None = None
        self._writer: RunWriter | None = None
        self._run = Run(model)
        self._known: list[Any] = []
        if where is True:
            self.view = serve(RunBoard(run=self._run), name="Monitor")
        else:
            self._writer = RunWriter(Path(where), model)

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Take one step."""
        if self._writer is not None:
            self._writer(step, found)
        else:
            known = len(self._run.series)
            self._run.add(step, found)
            if self.view is not None and len(self._run.series) != known:
                self.view.changed()

    def find(self, findings: Sequence[Finding]) -> None:
        """Take what is wrong so far."""
        found = [each for each in findings if each not in self._known]
        self._known += found
        for each in found:
            if self._writer is not None:
                self._writer.find(each)
            else:
                self._run.find(each.to_dict())
        if found and self.view is not None:
            self.view.changed()


def is_run(path: Path) -> bool:
    """Whether a path is a run, or a folder with runs in it."""
    return path.name.endswith(SUFFIX) or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))


class RunBoard(Board):
    """The board of one run or of several: those of a folder are its sequences.

    Args:
        path: A file or a folder; None for a run of this process.
        run: The run of this process.
    """

    kind, axis, live = "run", "step", True

    def __init__(self, path: Path | None = None, run: Run | None = None) -> None:
        self._path = path
        self._runs: dict[str, Run] = {} if run is None else {"this process": run}
        self._read: dict[str, int] = {}
        self._lock = threading.Lock()
        if path is not None:
            self.refresh()

    @property
    def id(self) -> str:
        """The path, or the object itself."""
        return str(self._path or f"memory-{id(self)}")

    @property
    def _first(self) -> Run:
        return next(iter(self._runs.values()), Run())

    @property
    def layers(self) -> Sequence[str]:
        """Layers and parameters of all runs, parameters under their layers."""
        known = dict.fromkeys(each.layer for run in self._runs.values() for each in run.series)
        return sorted(known, key=lambda name: _model_order(name, list(known)))

    def about(self) -> dict[str, Any]:
        """What the head of the page says."""
        models = list(dict.fromkeys(printable(run.model) for run in self._runs.values()))
        python = repr(str(self._path)) if self._path else "monitor"
        title = self._path.name if self._path else "training"
        return {"title": title, "model": " and ".join(models), "notes": [], "python": python}

    def entries(self) -> Sequence[Entry]:
        """The runs."""
        return [Entry(name, len(run.curves)) for name, run in self._runs.items()]

    def length(self, sequence: int) -> int:
        """How many steps a run has now."""
        return len(self._run(sequence).curves)

    def metrics(self, sequence: int) -> Sequence[Metric]:
        """What was watched."""
        known = {series.what for series in self._run(sequence).series}
        return [each for name, each in _WHAT.items() if name in known]

    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Loss and seconds."""
        return list(_CURVES.values())

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """The numbers of some steps."""
        numbers = self._run(sequence).numbers[first:last]
        nothing = [0] * len(numbers)
        pieces = [f"{number:,} " for number in numbers]
        return {"pieces": pieces, "ids": numbers, "generated": nothing, "special": nothing}

    def values(self, sequence: int, metric: str, plane: str) -> Table:
        """(step, row) the values of a plane."""
        run = self._run(sequence)
        length = len(run.curves)
        if plane == TRACKS:
            return run.curves.values[:length]
        if plane != LAYERS:
            raise LookupError("a run has no voxels")
        table = np.full((length, len(self.layers)), np.nan, np.float32)
        place = {name: at for at, name in enumerate(self.layers)}
        stored = run.rms.values[:length]
        for at, series in enumerate(run.series[: stored.shape[1]]):
            if series.what == metric:
                table[:, place[series.layer]] = stored[:, at]
        return table

    def health(self, sequence: int) -> Sequence[Health]:
        """The findings so far, the worst first; layers that are no rows are left out."""
        order = {"alarm": 0, "warn": 1}
        return sorted(self._run(sequence).findings, key=lambda each: order.get(each.severity, 2))

    def refresh(self) -> bool:
        """Read the lines that were added to the files; whether runs, series or findings are new."""
        if self._path is None:
            return False
        with self._lock:
            before = self._shape()
            folder = self._path.is_dir()
            paths = sorted(self._path.glob(f"*{SUFFIX}")) if folder else [self._path]
            for path in paths:
                self._follow(path)
            return self._shape() != before

    def _shape(self) -> list[tuple[str, int, int]]:
        return [(name, len(run.series), len(run.findings)) for name, run in self._runs.items()]

    def _follow(self, path: Path) -> None:
        name = path.name.removesuffix(SUFFIX)
        size, at = path.stat().st_size, self._read.get(name, 0)
        if size < at:  # written anew
            self._runs.pop(name, None)
            at = 0
        with path.open("rb") as file:
            while at < size:
                file.seek(at)
                data = file.read(_PIECE)
                whole = data.rfind(b"\n") + 1
                if not whole:
                    if len(data) >= _LINE_BYTES:
                        raise FileFormatError(path.name, "it has a line of more than 64 MiB")
                    break
                self._feed(name, path, data[:whole].splitlines())
                at += whole
        self._read[name] = at

    def _feed(self, name: str, path: Path, lines: Sequence[bytes]) -> None:
        for text in lines:
            try:
                line = json.loads(text)
                if name not in self._runs:
                    if line["format"] != FORMAT:
                        raise ValueError(f"its format is {str(line['format'])[:40]!r}")
                    self._runs[name] = Run(str(line["model"])[:200])
                else:
                    self._runs[name].feed(line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FileFormatError(path.name, f"it is no run of a Monitor ({error})") from error

    def _run(self, sequence: int) -> Run:
        return list(self._runs.values())[sequence]


def _updated(history: History) -> list[str]:
    return list(dict.fromkeys(name for step in history for name in step.parameters))


def _model_order(name: str, known: Sequence[str]) -> tuple[int, str]:
    """Parameters behind the layer they belong to, layers in the order they were seen."""
    layer = name.rpartition(".")[0]
    place = known.index(layer) if layer in known else known.index(name)
    return place, "" if layer not in known else name


def _rms(statistics: Statistics) -> float:
    if not statistics.finite or statistics.finite < statistics.count:
        return math.nan  # a value that is not finite makes the whole so
    return statistics.l2 / math.sqrt(statistics.finite)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _plain(value: Any) -> Any:
    """The value with None for what is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
