"""Statistics over training steps: the record that a Monitor keeps and everything else reads.

Monitors append; diagnoses, compare, figures, loggers and the viewer read. Each step is one table
(series x stored field), because objects for every series would cost more than watching. `STORED` is
the order of columns in saved files: a new field goes to its end, and the version of the files goes
up. Statistics with histograms are kept for the last steps only. A step that did not see a series
has NaN there, and its table may have fewer rows than the history has series.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_file, check_number, check_path, is_whole, require
from torchfmri._model import nearest_names, not_found
from torchfmri._records.finding import Finding
from torchfmri._records.history_files import write_records
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics

# What is stored of each series at each step; the rest of a Statistics is derived from these.
STORED = (
    *("count", "mean", "squared_deviations", "min", "max"),
    *("nan", "pos_inf", "neg_inf", "zero", "subnormal"),
)
FIELDS = (
    *("count", "mean", "std", "min", "max", "abs_max", "l2", "rms"),
    *("nan", "inf", "pos_inf", "neg_inf", "zero", "subnormal"),
)
COUNTS = frozenset({"count", "nan", "inf", "pos_inf", "neg_inf", "zero", "subnormal"})
UPDATES = "updates"
UPDATE_SAMPLE = 16_384
"""The update of a parameter with more values than these is known from a sample of them."""
COLUMNS: dict[str, type] = {
    "step": int, "layer": str, "what": str,
    **{name: int if name in COUNTS else float for name in FIELDS},
    "update_ratio": float, "loss": float,
}  # fmt: skip
"""The columns of an exported file."""
Floats = NDArray[np.float64]
_Stored = Mapping[str, Floats]
_read_stored = attrgetter(*STORED)


NO_STEPS = "No step was watched (not yet, or TORCHFMRI=off)."


class Series(NamedTuple):
    """What one curve of a history is about: a layer (or a parameter), and what of it."""

    layer: str
    what: str


class HistoryRows(Mapping[Series, Statistics]):
    """The statistics of many series in one table; single ones are made when they are asked for.

    Args:
        series: The series of each row, each once.
        table: (series, stored field).
        labels: The dtype and the shape of each.
    """

    def __init__(
        self, series: list[Series], table: Floats, labels: list[tuple[str, tuple[int, ...]]]
    ) -> None:
        self.series, self.table, self.labels = series, table, labels

    @cached_property
    def _places(self) -> dict[Series, int]:
        return {series: place for place, series in enumerate(self.series)}

    def __getitem__(self, series: Series) -> Statistics:
        index = self._places[series]
        return _statistics_of_row(self.table[index], *self.labels[index])

    def __iter__(self) -> Iterator[Series]:
        return iter(self.series)

    def __len__(self) -> int:
        return len(self.series)


@dataclass(slots=True, repr=False)
class Step:
    """One watched step.

    Attributes:
        number: Counted from 0 over all steps, watched or not.
        loss: The loss, nan if it was not seen; one that is NaN itself has `has_loss`.
        seconds: How long the step took, with watching.
        scalars: Other numbers of the step by name, such as the gradient scale.
        table: (series, stored field), nan if a series was not seen in this step.
        statistics: Series index -> statistics, with histograms; for the most recent steps only.
        labels: Series index -> dtype and shape, of recent steps without such statistics.
        parameters: The parameters that the optimizer may have changed.
        updates: (2, parameter): the norm of the change of each, and of the weights before.
        has_loss: Whether a loss was seen, even if it was NaN.
        variances: Batch norm -> the largest of its running variances after the step; not stored.
    """

    number: int
    loss: float = math.nan
    seconds: float = math.nan
    scalars: dict[str, float] = field(default_factory=dict)
    table: Floats = field(default_factory=lambda: np.empty((0, len(STORED))))
    statistics: dict[int, Statistics] = field(default_factory=dict)
    labels: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    updates: Floats = field(default_factory=lambda: np.empty((2, 0)))
    has_loss: bool = False
    variances: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_loss = self.has_loss or not math.isnan(self.loss)

    def __repr__(self) -> str:
        series = f"{len(self.table)} series"
        return f"<Step {self.number}: {series}, {self.loss_text}, {self.seconds:.3g} s>"

    @property
    def loss_text(self) -> str:
        """The loss in words."""
        return f"loss {self.loss:.6g}" if self.has_loss else "loss not seen"

    @property
    def update_ratios(self) -> dict[str, float]:
        """Parameter -> rms of what the optimizer changed / rms of the weights before."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = self.updates[0] / self.updates[1]
        return dict(zip(self.parameters, ratios.tolist(), strict=True))


class History:
    """The watched steps of a run, the oldest forgotten beyond `length`.

    Args:
        length: How many steps to remember.
        with_histograms: How many of them, the most recent, with histograms.

    Attributes:
        series: Every (layer, what) seen so far; a step's table has one row for each.
        missing: Layer -> why it, or something of it, was not captured.
        notes: Reservation -> the layers it holds for.
        findings: The findings of the run; filled when a Monitor's folder is loaded.

    Examples:
        >>> import torch
        >>> from torchfmri import calculate_statistics
        >>> history = History(length=100)
        >>> for number in range(3):
        ...     found = calculate_statistics(torch.full((8,), float(number)))
        ...     history.append(Step(number), {Series("fc", "activations"): found})
        >>> history.values("fc", "activations", "mean")
        array([0., 1., 2.])
    """

    def __init__(self, length: int = 1000, with_histograms: int = 16) -> None:
        check_number("length", length, 1, "give the number of steps to remember, at least 1")
        check_number("with_histograms", with_histograms, 0, "a number of steps, 0 for none")
        self.series: list[Series] = []
        self.missing: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {}
        self.findings: list[Finding] = []
        self._index: dict[Series, int] = {}
        self._steps: deque[Step] = deque(maxlen=length)
        self._with_histograms = with_histograms

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __getitem__(self, position: int) -> Step:
        count = len(self)
        if not is_whole(position) or not -count <= position < count:
            raise InspectionError(
                f"There is no step at position {position!r}: {count} are kept, the last is -1."
            )
        return self._steps[position]

    def __repr__(self) -> str:
        if not self._steps:
            return "<History: no steps yet>"
        first, last = self._steps[0].number, self._steps[-1].number
        loss = self._steps[-1].loss_text
        return f"<History: steps {first} to {last}, {len(self.series)} series, {loss}>"

    # -- writing -----------------------------------------------------------------------------

    def append(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Add a step with the statistics of each series seen in it."""
        for series in found:
            if series not in self._index:
                self._index[series] = len(self.series)
                self.series.append(series)
        step.table = np.full((len(self.series), len(STORED)), math.nan)
        if isinstance(found, HistoryRows):
            places = [self._index[series] for series in found.series]
            step.table[places] = found.table
            step.labels = dict(zip(places, found.labels, strict=True))
        else:
            for series, statistics in found.items():
                index = self._index[series]
                step.table[index] = _read_stored(statistics)
                step.statistics[index] = statistics
        if self._steps and self._steps[-1].parameters == step.parameters:
            step.parameters = self._steps[-1].parameters  # one tuple of names for all steps
        self._steps.append(step)
        if len(self._steps) > self._with_histograms:
            old = self._steps[-1 - self._with_histograms]
            old.statistics, old.labels = {}, {}

    def renumbered(self, by: int) -> History:
        """Return the same steps with other numbers, as of a run that was resumed at step `by`."""
        other = copy.copy(self)
        steps = (replace(step, number=step.number + by) for step in self._steps)
        other._steps = deque(steps, self._steps.maxlen)
        return other

    # -- reading -----------------------------------------------------------------------------

    @property
    def layers(self) -> list[str]:
        """The layers that something is known of, in the order in which they were first seen."""
        return list(dict.fromkeys(series.layer for series in self.series))

    @property
    def steps(self) -> NDArray[np.int64]:
        """The numbers of the steps kept."""
        return np.array([step.number for step in self._steps], np.int64)

    @property
    def loss(self) -> Floats:
        """The loss at each step; nan if it was not seen, or is NaN."""
        return self.scalar("loss")

    def scalar(self, name: str) -> Floats:
        """Return another number per step, such as "seconds" or "gradient_scale"; nan if unknown."""
        require(isinstance(name, str), "name", name, "give the name of a number, such as 'seconds'")
        if name in ("loss", "seconds"):
            return np.array([getattr(step, name) for step in self._steps], np.float64)
        return np.array([step.scalars.get(name, math.nan) for step in self._steps], np.float64)

    def values(self, layer: str, what: str = "activations", field: str = "std") -> Floats:
        """Return one statistic of one series over the steps; nan if it was not seen.

        Args:
            layer: The layer, or for parameters their full name, such as "fc.weight".
            what: activations, gradients, parameters, parameter_gradients, or updates (their
                ratio, whatever `field` is).
            field: count, mean, std, min, max, abs_max, l2, rms, nan, inf, pos_inf, neg_inf, zero
                or subnormal.

        Raises:
            LayerNotFoundError: Nothing is known of this layer.
            InspectionError: Nothing is known of `what`, or there is no such statistic.
        """
        if what == UPDATES:
            return self.update_ratio(layer)
        column: Floats = _derive(self._stack([self._find(layer, what)]), field)[0]
        return column

    def update_ratio(self, parameter: str) -> Floats:
        """Return rms(update) / rms(weight) of a parameter at each step; nan if not measured.

        Raises:
            LayerNotFoundError: It was never measured.
        """
        known = self._updated()
        if parameter not in known:
            raise not_found(parameter, known, "history[-1].update_ratios", "parameter")
        ratios: Floats = self._ratios([parameter])[0]
        return ratios

    def matrix(self, what: str = "activations", field: str = "std") -> tuple[list[str], Floats]:
        """Return the layers with `what`, and one statistic of them as (layer, step).

        Raises:
            InspectionError: Nothing is known of `what`, or there is no such statistic.
        """
        if what == UPDATES and self._updated():
            return self._updated(), self._ratios(self._updated())
        chosen = [index for index, series in enumerate(self.series) if series.what == what]
        if not chosen:
            known = sorted({series.what for series in self.series})
            known += [UPDATES] if self._updated() else []
            raise InspectionError(
                f"There are no {what!r} in this history, only {', '.join(known) or 'no steps'}."
            )
        return [self.series[index].layer for index in chosen], _derive(self._stack(chosen), field)

    def statistics(self, layer: str, what: str = "activations", step: int = -1) -> Statistics:
        """Return the statistics of one series at one of the steps kept (by default the latest).

        Histograms are there for the most recent steps only.
        """
        index = self._find(layer, what)
        record = self[step]
        if index in record.statistics:
            return record.statistics[index]
        if index >= len(record.table) or math.isnan(record.table[index, 0]):
            return Statistics.empty()
        return _statistics_of_row(record.table[index], *record.labels.get(index, ("float64", None)))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a flat record per step and series, for tables and files; None if not known."""
        nothing = dict.fromkeys(FIELDS)
        for step in self._steps:
            loss = step.loss if step.has_loss else None
            columns = {name: _derive(step.table.T, name).tolist() for name in FIELDS}
            for index, (layer, what) in enumerate(self.series[: len(step.table)]):
                if math.isnan(columns["count"][index]):
                    continue
                found = {
                    name: int(values[index]) if name in COUNTS else values[index]
                    for name, values in columns.items()
                }
                place = {"step": step.number, "layer": layer, "what": what}
                yield {**place, **found, "update_ratio": None, "loss": loss}
            for name, ratio in step.update_ratios.items():
                place = {"step": step.number, "layer": name, "what": UPDATES}
                yield {**place, **nothing, "update_ratio": ratio, "loss": loss}

    def export(self, path: str | Path) -> Path:
        """Write every step and series to `path`: .csv, .jsonl or .parquet (needs pyarrow).

        Raises:
            InspectionError: The ending is none of these, or pyarrow is missing.
        """
        path = check_file("path", path)
        write_records(self.rows(), COLUMNS, path)
        return path

    def save(self, path: str | PathLike[str]) -> Path:
        """Write every step to one file, whole or not at all; histograms are not kept.

        Raises:
            InspectionError: The path is a folder, or in none that exists.
        """
        from torchfmri._records.history_store import save_history  # it makes histories itself

        place = check_file("path", path)
        save_history(self, place)
        return place

    @staticmethod
    def load(path: str | PathLike[str]) -> History:
        """Return the history that `save` wrote, or that a Monitor writes to its folder.

        A run that still trains can be loaded: it has the steps written so far.

        Raises:
            FileFormatError: There is none, or the file is damaged. A damaged file of a folder is
                named in `notes` instead.
        """
        from torchfmri._records.history_store import load_history

        return load_history(check_path("path", path))

    def _find(self, layer: str, what: str) -> int:
        """Return the row of a series in the tables; an error says why there is none."""
        index = self._index.get(Series(layer, what))
        if index is not None:
            return index
        reason = self.missing.get(layer)
        why = f" ({reason})" if reason else ""
        if layer not in self.layers:
            if reason:
                raise InspectionError(f"Nothing is known of {layer!r}{why}.")
            raise not_found(layer, self.layers, "history.layers")
        known = ", ".join(series.what for series in self.series if series.layer == layer)
        raise InspectionError(f"Nothing is known of the {what!r} of {layer!r}, only {known}{why}.")

    def _stack(self, indices: Sequence[int]) -> Floats:
        """Return (stored field, series, step) of some series, given in ascending order."""
        rows = np.array(indices)
        stacked = np.full((len(self._steps), len(rows), len(STORED)), math.nan)
        for position, step in enumerate(self._steps):
            known = int(np.searchsorted(rows, len(step.table)))
            stacked[position, :known] = step.table[rows[:known]]
        return stacked.transpose(2, 1, 0)

    def _updated(self) -> list[str]:
        known = dict.fromkeys(step.parameters for step in self._steps)
        return list(dict.fromkeys(name for parameters in known for name in parameters))

    def _ratios(self, names: Sequence[str]) -> Floats:
        columns = [
            [ratios.get(name, math.nan) for name in names]
            for ratios in (step.update_ratios for step in self._steps)
        ]
        return np.array(columns, np.float64).T


def _statistics_of_row(row: Floats, dtype: str, shape: tuple[int, ...] | None) -> Statistics:
    numbers = dict(zip(STORED, row.tolist(), strict=True))
    exact = {name: int(numbers[name]) for name in STORED if name in COUNTS}
    return Statistics(**{**numbers, **exact}, dtype=dtype, shape=shape)


def _derive(stored: Floats, field: str) -> Floats:
    """Return a statistic computed from the stored fields: (stored field, ...) -> (...)."""
    if field not in FIELDS:
        near = nearest_names(field, FIELDS, count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InspectionError(f"There is no statistic {field!r}: {', '.join(FIELDS)}.{hint}")
    known: dict[str, Floats] = dict(zip(STORED, stored, strict=True))
    if field in known:
        return known[field]
    with np.errstate(divide="ignore", invalid="ignore"):
        return DERIVED[field](known)


def _finite(stored: _Stored) -> Floats:
    return stored["count"] - stored["nan"] - stored["pos_inf"] - stored["neg_inf"]


def _squares(stored: _Stored) -> Floats:
    return stored["squared_deviations"] + _finite(stored) * stored["mean"] ** 2


DERIVED: dict[str, Callable[[_Stored], Floats]] = {
    "finite": _finite,
    "inf": lambda stored: stored["pos_inf"] + stored["neg_inf"],
    "abs_max": lambda stored: np.maximum(np.abs(stored["min"]), np.abs(stored["max"])),
    "std": lambda stored: np.sqrt(stored["squared_deviations"] / _finite(stored)),
    "l2": lambda stored: np.sqrt(_squares(stored)),
    "rms": lambda stored: np.sqrt(_squares(stored) / _finite(stored)),
}
"""How each other statistic is computed from the stored ones."""
