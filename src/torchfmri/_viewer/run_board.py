"""A training run on the viewer's board: layers down, steps across, findings as its health.

A run is the history of a Monitor: of this process, or in the folder that it writes while the model
trains (`Monitor(folder=...)`), of which new files are read as they appear.

`torchfmri view RUN`, `torchfmri.view(monitor.history)` and `Monitor(view=True)` show it. A file of
a run is read once; training itself is never waited for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._files import printable
from torchfmri._records import UPDATES, Finding, History, Series, Step, has_ended, step_files
from torchfmri._text import plural
from torchfmri._viewer.board import LAYERS, TRACKS, Board, Entry, Health, Metric
from torchfmri._viewer.growing import GrowingTable
from torchfmri._viewer.server import View, serve
from torchfmri._viewer.tiles import Table
from torchfmri.exceptions import FileFormatError
from torchfmri.statistics import Statistics

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
        UPDATES, "Updates", "How far each step moves the weights; about 0.001 is usual.",
        "rms of the update / rms of the weight",
    ),
}  # fmt: skip
FRESH = 60.0
"""Seconds after its last file for which a run counts as going on that has not said it is over."""
_CURVES = {
    "loss": Metric("loss", "Loss", "The loss of the step.", ""),
    "seconds": Metric("seconds", "Seconds", "How long the step took.", "s"),
}


class ViewedRun:
    """What is known of a run, step by step.

    Args:
        model: The name of the model; empty where it is not known.
        types: Layer -> the type of its module, as far as it is known.
    """

    def __init__(self, model: str = "", types: Mapping[str, str] | None = None) -> None:
        self.model, self.types = model, dict(types or {})
        self.series: list[Series] = []
        self.numbers: list[int] = []
        self.curves = GrowingTable(len(_CURVES))
        self.rms = GrowingTable(0)
        self.watched = GrowingTable(0)  # 1 where there is an rms, which may be NaN
        self.findings: list[Health] = []
        self._index: dict[Series, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_history(cls, history: History) -> ViewedRun:
        """Return the run whose steps a history holds."""
        run = cls()
        run.extend(history)
        return run

    def extend(self, history: History) -> None:
        """Add the steps and findings of a history."""
        self._know([*history.series, *(Series(name, UPDATES) for name in _updated(history))])
        columns = np.full((len(history), len(self.series)), np.nan)
        watched = np.zeros(columns.shape, bool)
        for what in dict.fromkeys(series.what for series in self.series):
            names, values = history.matrix(what, "rms")
            known = ~np.isnan(values)
            if what != UPDATES:  # a value that is not finite makes the whole so
                nan, inf = (history.matrix(what, each)[1] > 0 for each in ("nan", "inf"))
                values = np.where(nan, np.nan, np.where(inf, np.inf, values))
                known |= nan | inf
            places = [self._index[Series(name, what)] for name in names]
            columns[:, places], watched[:, places] = values.T, known.T
        for step, rms, known in zip(history, columns, watched, strict=True):
            self._append(step, rms, known)
        for finding in history.findings:
            self.find(finding)

    def add(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Add a step as a Monitor tells it."""
        values = {series: _rms(each) for series, each in found.items()}
        for name, ratio in step.update_ratios.items():
            values[Series(name, UPDATES)] = ratio
        self._know(list(values))
        rms = np.array([values.get(series, math.nan) for series in self.series])
        watched = [
            s in found or not math.isnan(each) for s, each in zip(self.series, rms, strict=True)
        ]
        self._append(step, rms, np.array(watched))

    def _append(self, step: Step, rms: NDArray[np.floating], watched: NDArray[np.bool_]) -> None:
        with self._lock:
            self.numbers.append(step.number)
            self.rms.append(rms)
            self.watched.append(np.where(watched, 1.0, np.nan))
            # Last: its length is that of the run.
            self.curves.append(np.array([step.loss, step.seconds], np.float32))

    def find(self, finding: Finding) -> None:
        """Add a finding, or replace the one of the same problem."""
        column = None
        if finding.step is not None and self.numbers:
            column = int(np.searchsorted(self.numbers, finding.step))
        found = Health(
            f"{_problem(finding.problem)}{printable(finding.text)}", finding.severity,
            finding.layers[0] if finding.layers else None, column, printable(finding.advice),
        )  # fmt: skip
        same = _problem(finding.problem)
        self.findings = [e for e in self.findings if not e.text.startswith(same)] + [found]

    def _know(self, fresh: Sequence[Series]) -> None:
        for series in fresh:
            if series not in self._index:
                self._index[series] = len(self.series)
                self.series.append(series)


class RunView:
    """A run on a page of this process, while it goes on; a writer of a Monitor.

    Args:
        model: The name of the model.
        types: Layer -> the type of its module.
    """

    def __init__(self, model: str, types: Mapping[str, str]) -> None:
        self._run = ViewedRun(model, types)
        self._known: list[Finding] = []
        self._board = RunBoard(run=self._run)
        self.view: View = serve(self._board, name="Monitor")

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Take one step."""
        known = len(self._run.series)
        self._run.add(step, found)
        if len(self._run.series) != known:
            self.view.changed()

    def end(self) -> None:
        """Take note that the run is over: nothing more is added."""
        self._board.end()
        self.view.changed()

    def find(self, findings: Sequence[Finding]) -> None:
        """Take what is wrong so far."""
        fresh = [each for each in findings if each not in self._known]
        self._known += fresh
        for each in fresh:
            self._run.find(each)
        if fresh:
            self.view.changed()


def runs_in(path: Path) -> dict[str, Path]:
    """Return the runs at a path by name: a file of steps, a Monitor's folder, or several."""
    if not path.is_dir():
        return {path.name: path} if step_files(path) else {}
    if step_files(path):
        return {path.name: path}
    return {
        each.name: each for each in sorted(path.iterdir()) if each.is_dir() and step_files(each)
    }


class RunBoard(Board):
    """The board of one run or of several: those of a folder are its sequences.

    Args:
        path: A run or a folder of runs; None for a run of this process.
        run: The run of this process.
    """

    kind, axis, live = "run", "step", True
    growth = (1.25, 4)

    def __init__(self, path: Path | None = None, run: ViewedRun | None = None) -> None:
        self._path = path and path.absolute()
        self._runs: dict[str, ViewedRun] = {} if run is None else {"this process": run}
        self._read: set[Path] = set()
        self._damaged: list[tuple[str, FileFormatError]] = []
        self._lock = threading.Lock()
        self._going = set(self._runs)
        if path is not None:
            self.refresh()
            if self._damaged and not any(each.numbers for each in self._runs.values()):
                raise self._damaged[0][1]

    @property
    def id(self) -> str:
        """The path, or the object itself."""
        return str(self._path or f"memory-{id(self)}")

    @property
    def going(self) -> bool:
        """Whether it is a run of this process, or one that wrote a moment ago and is not over."""
        return bool(self._going)

    def is_going(self, sequence: int) -> bool:
        """Whether it goes on, whatever the others do."""
        return list(self._runs)[sequence] in self._going

    def end(self) -> None:
        """Take note that the run is over: nothing more is added."""
        self._going = set()

    @property
    def layers(self) -> Sequence[str]:
        """Layers and parameters of all runs, parameters under their layers."""
        known = dict.fromkeys(each.layer for run in self._runs.values() for each in run.series)
        return sorted(known, key=lambda name: _model_order(name, list(known)))

    @property
    def types(self) -> Sequence[str]:
        """The type of each layer's module; of a parameter, what it is."""
        known: dict[str, str] = {}
        for run in self._runs.values():
            known |= run.types
        return [known.get(name, "") for name in self.layers]

    def about(self) -> dict[str, Any]:
        """Return what the head of the page says."""
        models = list(dict.fromkeys(printable(r.model) for r in self._runs.values() if r.model))
        python = repr(str(self._path)) if self._path else "monitor.history"
        title = self._path.name if self._path else "training"
        problems = [printable(f"{name}: {error}") for name, error in self._damaged]
        return {
            "title": title,
            "model": " and ".join(models),
            "notes": [],
            "problems": problems,
            "python": python,
        }

    def entries(self) -> Sequence[Entry]:
        """Return the runs."""
        return [Entry(name, len(run.curves)) for name, run in self._runs.items()]

    def length(self, sequence: int) -> int:
        """Return how many steps a run has now."""
        return len(self._run(sequence).curves)

    def metrics(self, sequence: int) -> Sequence[Metric]:
        """Return what was watched."""
        known = {series.what for series in self._run(sequence).series}
        return [each for name, each in _WHAT.items() if name in known]

    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Return loss and seconds."""
        return list(_CURVES.values())

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """Return the numbers of some steps."""
        numbers = self._run(sequence).numbers[first:last]
        nothing = [0] * len(numbers)
        pieces = [f"{number:,} " for number in numbers]
        return {"pieces": pieces, "ids": numbers, "generated": nothing, "special": nothing}

    def values(self, sequence: int, metric: str, plane: str) -> Table:
        """Return the values of a plane, (step, row)."""
        run = self._run(sequence)
        if plane == TRACKS:
            return run.curves.values[: len(run.curves)]
        if plane != LAYERS:
            raise LookupError("a run has no voxels")
        return self._table(run, run.rms, metric)

    def _table(self, run: ViewedRun, growing: GrowingTable, metric: str) -> Table:
        """Return what a run has of a metric, (step, row); NaN in rows of other runs and metrics."""
        length = len(run.curves)
        table = np.full((length, len(self.layers)), np.nan, np.float32)
        place = {name: at for at, name in enumerate(self.layers)}
        stored = growing.values[:length]
        for at, series in enumerate(run.series[: stored.shape[1]]):
            if series.what == metric:
                table[:, place[series.layer]] = stored[:, at]
        return table

    def missing(self, sequence: int, metric: str, plane: str) -> NDArray[np.bool_] | None:
        """Return what was not watched at a step; a value that is NaN was."""
        if plane == TRACKS:
            return None
        run = self._run(sequence)
        return np.isnan(self._table(run, run.watched, metric))

    def headline(self, sequence: int) -> str:
        """Return how the loss went."""
        run = self._run(sequence)
        numbers, losses = run.numbers, run.curves.values[: len(run.curves), 0]
        if len(losses) < 2 or np.isnan(losses).all():
            return ""
        broken = ~np.isfinite(losses)
        first = int((~broken).argmax()) if not broken.all() else 0
        said = f"{plural(len(losses), 'step')}: the loss went from {losses[first]:.4g}"
        if broken[-1]:
            begun = len(broken) - int((~broken)[::-1].argmax())
            return f"{said} to NaN or infinity, from step {numbers[begun]:,} on."
        lowest = int(np.nanargmin(np.where(broken, np.nan, losses)))
        least = f"lowest {losses[lowest]:.4g} at step {numbers[lowest]:,}"
        return f"{said} to {losses[-1]:.4g} ({least})."

    def health(self, sequence: int) -> Sequence[Health]:
        """Return the findings so far, the worst first."""
        order = {"alarm": 0, "warn": 1}
        return sorted(self._run(sequence).findings, key=lambda each: order.get(each.severity, 2))

    def refresh(self) -> bool:
        """Read the files that are new; whether runs, series or findings are, or it has ended."""
        if self._path is None:
            return False
        with self._lock:
            before, going = (self._shape(), self._going), set()
            for name, path in runs_in(self._path).items():
                run = self._runs.setdefault(name, ViewedRun())
                files = step_files(path)
                times = [file.stat().st_mtime for file in files[-1:]]
                if not has_ended(path) and any(time.time() - each < FRESH for each in times):
                    going.add(name)
                for file in files:
                    if file not in self._read:
                        self._read.add(file)
                        try:
                            run.extend(History.load(file))
                        except FileFormatError as error:  # the others can be shown
                            self._damaged.append((name, error))
            self._going = going
            return (self._shape(), self._going) != before

    def _shape(self) -> tuple[Any, ...]:
        runs = [(name, len(run.series), len(run.findings)) for name, run in self._runs.items()]
        return (*runs, len(self._damaged))

    def _run(self, sequence: int) -> ViewedRun:
        return list(self._runs.values())[sequence]


def _problem(name: str) -> str:
    """Return how a finding of a problem begins: "loss_spike" is "Loss spike: "."""
    words = printable(name).replace("_", " ")
    return f"{words[:1].upper()}{words[1:]}: "


def _updated(history: History) -> list[str]:
    return list(dict.fromkeys(name for step in history for name in step.parameters))


def _model_order(name: str, known: Sequence[str]) -> tuple[int, str]:
    """Return a key that sorts parameters behind their layer, layers as they were seen."""
    layer = name.rpartition(".")[0]
    place = known.index(layer) if layer in known else known.index(name)
    return place, "" if layer not in known else name


def _rms(statistics: Statistics) -> float:
    if not statistics.finite or statistics.finite < statistics.count:
        # A value that is not finite makes the whole so.
        return math.nan if statistics.nan else math.inf
    return statistics.l2 / math.sqrt(statistics.finite)
