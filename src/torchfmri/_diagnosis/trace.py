"""The numbers of the last steps, as arrays that a diagnosis can read at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._records import STORED, History, Series, Step

Floats = NDArray[np.float64]
_FIELDS = (
    "rms",
    "abs_max",
    "zero_share",
    "nonfinite",
    "total",
    "count",
    "subnormal_share",
    "harmful",
)
_COLUMN = {name: index for index, name in enumerate(STORED)}


class RunTrace:
    """Statistics over the last steps: step by series, one array per field.

    Args:
        length: How many steps to keep.

    Attributes:
        first_loss: The first loss ever seen, also when its step is forgotten.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.series: list[Series] = []
        self._index: dict[Series, int] = {}
        self._of: dict[str, tuple[list[str], list[int]]] = {}
        self._values = np.full((length, 0, len(_FIELDS)), math.nan)
        self.parameters: tuple[str, ...] = ()
        self._updates = np.full((length, 0), math.nan)
        self._norms = np.full((2, length, 0), math.nan)
        self._variances: list[dict[str, float]] = []
        self._steps: list[int] = []
        self._loss: list[float] = []
        self._bad_loss: list[bool] = []
        self._scalars: list[dict[str, float]] = []
        self.dtypes: dict[Series, str] = {}
        self.first_loss = math.nan

    def __len__(self) -> int:
        return len(self._steps)

    # -- writing -----------------------------------------------------------------------------

    def add(self, step: Step, series: Sequence[Series]) -> None:
        """Take in a step; `series` names the rows of its table."""
        if len(series) > len(self.series):
            self._widen(series)
        if len(self._steps) == self._length:
            for kept in (
                self._steps, self._loss, self._bad_loss, self._scalars, self._variances,
            ):  # fmt: skip
                del kept[0]
            self._values[:-1] = self._values[1:]
            self._updates[:-1] = self._updates[1:]
            self._norms[:, :-1] = self._norms[:, 1:]
        place = len(self._steps)
        self._steps.append(step.number)
        self._loss.append(step.loss)
        self._bad_loss.append(step.has_loss and not math.isfinite(step.loss))
        if math.isnan(self.first_loss) and math.isfinite(step.loss):
            self.first_loss = step.loss
        self._scalars.append(step.scalars)
        self._variances.append(step.variances)
        self._values[place] = math.nan
        self._values[place, : len(step.table)] = _derive(step.table)
        self._add_updates(place, step)
        for index, label in step.labels.items():
            self.dtypes.setdefault(self.series[index], label[0])
        for index, statistics in step.statistics.items():
            self.dtypes.setdefault(self.series[index], str(statistics.dtype))

    def _widen(self, series: Sequence[Series]) -> None:
        wider = np.full((self._length, len(series), len(_FIELDS)), math.nan)
        wider[:, : len(self.series)] = self._values
        self._values = wider
        self.series = list(series)
        self._index = {each: index for index, each in enumerate(series)}
        self._of = {}
        for index, each in enumerate(series):
            names, places = self._of.setdefault(each.what, ([], []))
            names.append(each.layer)
            places.append(index)

    def _add_updates(self, place: int, step: Step) -> None:
        if step.parameters != self.parameters:
            names = list(dict.fromkeys([*self.parameters, *step.parameters]))
            wider = np.full((self._length, len(names)), math.nan)
            wider[:, : self._updates.shape[1]] = self._updates
            both = np.full((2, self._length, len(names)), math.nan)
            both[..., : self._norms.shape[2]] = self._norms
            self.parameters, self._updates, self._norms = tuple(names), wider, both
        self._updates[place] = math.nan
        self._norms[:, place] = math.nan
        if not step.parameters:
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = step.updates[0] / step.updates[1]
        # Nothing changed in a weight that is 0 is no change, not an unknown one.
        ratios = np.where(step.updates[0] == 0, 0.0, ratios)
        if step.parameters == self.parameters:
            self._updates[place], self._norms[:, place] = ratios, step.updates
            return
        known = {name: column for column, name in enumerate(self.parameters)}
        where = np.array([known[name] for name in step.parameters])
        self._updates[place, where] = ratios
        # An optimizer that steps several times has a parameter several times: all its changes
        # count, and the weights before the first.
        self._norms[0, place, where] = 0.0
        np.add.at(self._norms[0, place], where, step.updates[0])
        self._norms[1, place, where[::-1]] = step.updates[1, ::-1]

    # -- reading -----------------------------------------------------------------------------

    @property
    def steps(self) -> NDArray[np.int64]:
        """The numbers of the steps."""
        return np.array(self._steps, np.int64)

    @property
    def loss(self) -> Floats:
        """The loss at each step; nan where it was not seen or is not a number."""
        return np.array(self._loss, np.float64)

    @property
    def bad_loss(self) -> NDArray[np.bool_]:
        """Whether the loss was seen at each step, and was not finite."""
        return np.array(self._bad_loss, bool)

    def scalar(self, name: str) -> Floats:
        """Another number per step; nan where unknown."""
        return np.array([each.get(name, math.nan) for each in self._scalars], np.float64)

    def names(self, what: str) -> list[str]:
        """The layers or parameters with `what`."""
        return self._of.get(what, ([], []))[0]

    def matrix(self, what: str, field: str) -> Floats:
        """(step, series) of one field: rms, abs_max, zero_share, nonfinite, total, count, ..."""
        places = self._of.get(what, ([], []))[1]
        found: Floats = self._values[: len(self), places, _FIELDS.index(field)]
        return found

    def column(self, layer: str, what: str, field: str) -> Floats:
        """One series over the steps; all nan where it was never seen."""
        index = self._index.get(Series(layer, what))
        if index is None:
            return np.full(len(self), math.nan)
        column: Floats = self._values[: len(self), index, _FIELDS.index(field)]
        return column

    @property
    def updates(self) -> Floats:
        """(step, parameter): norm of the change / norm of the weights before."""
        return self._updates[: len(self)]

    @property
    def changes(self) -> Floats:
        """(step, parameter): norm of what the optimizer changed, of all its steps in a step."""
        return self._norms[0, : len(self)]

    @property
    def weights(self) -> Floats:
        """(step, parameter): norm of the same weights before it."""
        return self._norms[1, : len(self)]

    def variances(self) -> dict[str, Floats]:
        """Batch norm -> its largest running variance after each step; nan where not seen."""
        layers = dict.fromkeys(layer for each in self._variances for layer in each)
        return {
            layer: np.array([each.get(layer, math.nan) for each in self._variances], np.float64)
            for layer in layers
        }

    def update_ratio(self, parameter: str) -> Floats:
        """The same of one parameter."""
        if parameter not in self.parameters:
            return np.full(len(self), math.nan)
        ratios: Floats = self.updates[:, self.parameters.index(parameter)]
        return ratios


def trace_of(history: History) -> RunTrace:
    """The whole of a history as a trace."""
    trace = RunTrace(max(1, len(history)))
    for step in history:
        trace.add(step, history.series)
    return trace


def _derive(table: Floats) -> Floats:
    """(series, stored field) -> (series, field of a trace)."""
    column = {name: table[:, index] for name, index in _COLUMN.items()}
    count = column["count"]
    infinite = column["pos_inf"] + column["neg_inf"]
    finite = count - column["nan"] - infinite
    with np.errstate(divide="ignore", invalid="ignore"):
        square = column["squared_deviations"] + finite * column["mean"] ** 2
        return np.stack(
            [
                np.sqrt(square / finite),
                np.maximum(np.abs(column["min"]), np.abs(column["max"])),
                column["zero"] / count,
                column["nan"] + infinite,
                column["mean"] * finite,
                count,
                column["subnormal"] / count,
                column["nan"] + column["pos_inf"],  # -inf alone may be a mask
            ],
            axis=1,
        )
