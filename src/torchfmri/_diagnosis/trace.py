"""The last steps of a run, as arrays that a diagnosis can read at once.

`LiveDiagnosis` adds steps one by one, `trace_of` takes a whole history. The steps are those of
`_records.History`; arrays are made from their tables when asked for and dropped at the next step,
so a diagnosis must not write into them. The rms leaves out NaN and infinity, and `updates` is NaN
where no optimizer stepped and 0 if one changed nothing. A further field is an entry of `_FIELDS`;
how arrays are cached may change freely.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._records import DERIVED, STORED, History, Series, Step

Floats = NDArray[np.float64]
_Stored = Mapping[str, Floats]


_FIELDS: dict[str, Callable[[_Stored], Floats]] = {
    "rms": DERIVED["rms"],
    "abs_max": DERIVED["abs_max"],
    "zero_share": lambda stored: stored["zero"] / stored["count"],
    "subnormal_share": lambda stored: stored["subnormal"] / stored["count"],
    "total": lambda stored: stored["mean"] * DERIVED["finite"](stored),
    "count": lambda stored: stored["count"],
    "nonfinite": lambda stored: stored["nan"] + DERIVED["inf"](stored),
    "harmful": lambda stored: stored["nan"] + stored["pos_inf"],  # -inf alone may be a mask
}


class RunTrace:
    """The last steps of a run; arrays are made of them when they are asked for.

    Args:
        length: How many steps to keep.

    Attributes:
        series: The layer and the kind of value of each row of the steps' tables.
        dtypes: Series -> the dtype that it was first seen with.
        first_loss: The first loss ever seen, also when its step is forgotten.
    """

    def __init__(self, length: int) -> None:
        self._steps: deque[Step] = deque(maxlen=length)
        self.series: list[Series] = []
        self._rows: dict[str, list[int]] = {}  # what -> its rows in a table
        self._places: dict[str, dict[str, int]] = {}  # what -> layer -> place among these
        self._tables: Floats | None = None
        self._stacks: dict[str, _Stored] = {}
        self._matrices: dict[tuple[str, str], Floats] = {}
        self._updated: tuple[tuple[str, ...], Floats, Floats, Floats] | None = None
        self.dtypes: dict[Series, str] = {}
        self.first_loss = math.nan

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step, series: Sequence[Series]) -> None:
        """Take in a step; `series` names the rows of its table."""
        for index in range(len(self.series), len(series)):
            layer, what = series[index]
            self.series.append(series[index])
            rows = self._rows.setdefault(what, [])
            self._places.setdefault(what, {})[layer] = len(rows)
            rows.append(index)
        self._steps.append(step)
        self._tables = None
        self._stacks.clear()
        self._matrices.clear()
        self._updated = None
        if math.isnan(self.first_loss) and math.isfinite(step.loss):
            self.first_loss = step.loss
        for index, label in step.labels.items():
            self.dtypes.setdefault(self.series[index], label[0])
        for index, statistics in step.statistics.items():
            self.dtypes.setdefault(self.series[index], str(statistics.dtype))

    # -- losses and other numbers of a step --------------------------------------------------

    @property
    def steps(self) -> NDArray[np.int64]:
        """The numbers of the steps."""
        return np.array([step.number for step in self._steps], np.int64)

    @property
    def loss(self) -> Floats:
        """The loss at each step; nan if it was not seen or is not a number."""
        return np.array([step.loss for step in self._steps], np.float64)

    @property
    def bad_loss(self) -> NDArray[np.bool_]:
        """Whether the loss was seen at each step, and was not finite."""
        seen = np.array([step.has_loss for step in self._steps], bool)
        return seen & ~np.isfinite(self.loss)

    def scalar(self, name: str) -> Floats:
        """Return a named number of each step; nan if it is not known."""
        return np.array([step.scalars.get(name, math.nan) for step in self._steps], np.float64)

    def variances(self) -> dict[str, Floats]:
        """Return, by batch norm, the largest running variance after each step; nan if not seen."""
        layers = dict.fromkeys(layer for step in self._steps for layer in step.variances)
        return {
            layer: np.array([step.variances.get(layer, math.nan) for step in self._steps])
            for layer in layers
        }

    # -- statistics of layers and parameters -------------------------------------------------

    def names(self, what: str) -> list[str]:
        """Return the layers or parameters with `what`."""
        return list(self._places.get(what, ()))

    def matrix(self, what: str, field: str) -> Floats:
        """Return one field as (step, series): rms, abs_max, zero_share, nonfinite, total, count."""
        if (what, field) not in self._matrices:
            with np.errstate(divide="ignore", invalid="ignore"):
                self._matrices[what, field] = _FIELDS[field](self._stack(what))
        return self._matrices[what, field]

    def _stack(self, what: str) -> _Stored:
        """Return each stored field of `what` as (step, series)."""
        if what not in self._stacks:
            rows = self._rows.get(what, [])
            stored = np.ascontiguousarray(self._read_tables()[:, rows].transpose(2, 0, 1))
            self._stacks[what] = dict(zip(STORED, stored, strict=True))
        return self._stacks[what]

    def _read_tables(self) -> Floats:
        """Return the tables of all steps as (step, series, field); nan for series not yet seen."""
        if self._tables is None:
            self._tables = np.full((len(self), len(self.series), len(STORED)), math.nan)
            for place, step in enumerate(self._steps):
                self._tables[place, : len(step.table)] = step.table
        return self._tables

    def column(self, layer: str, what: str, field: str) -> Floats:
        """Return one series over the steps; all nan if it was never seen."""
        place = self._places.get(what, {}).get(layer)
        if place is None:
            return np.full(len(self), math.nan)
        found: Floats = self.matrix(what, field)[:, place]
        return found

    def ends_nonfinite(self, whats: Collection[str]) -> bool:
        """Whether the last step has NaN or infinity in one of these; makes no arrays."""
        table = self._steps[-1].table
        rows = [row for what in whats for row in self._rows.get(what, ()) if row < len(table)]
        counts = _FIELDS["nonfinite"](dict(zip(STORED, table[rows].T, strict=True)))
        return bool((counts > 0).any())

    # -- what the optimizer changed ----------------------------------------------------------

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that an optimizer may have changed."""
        return self._read_updates()[0]

    @property
    def updates(self) -> Floats:
        """(step, parameter): norm of the change / norm of the weights before."""
        return self._read_updates()[1]

    @property
    def changes(self) -> Floats:
        """(step, parameter): norm of what the optimizer changed, over all its updates in a step."""
        return self._read_updates()[2]

    @property
    def weights(self) -> Floats:
        """(step, parameter): norm of the same weights before it."""
        return self._read_updates()[3]

    def _read_updates(self) -> tuple[tuple[str, ...], Floats, Floats, Floats]:
        if self._updated is not None:
            return self._updated
        tuples = dict.fromkeys(step.parameters for step in self._steps)
        names = tuple(dict.fromkeys(name for parameters in tuples for name in parameters))
        place_of = {name: place for place, name in enumerate(names)}
        places = {each: np.array([place_of[name] for name in each], np.intp) for each in tuples}
        ratios, changes, weights = np.full((3, len(self), len(names)), math.nan)
        for row, step in enumerate(self._steps):
            where, (changed, before) = places[step.parameters], step.updates
            with np.errstate(divide="ignore", invalid="ignore"):
                # No change of a weight that is 0 counts as 0, although 0 / 0 is NaN.
                ratios[row, where] = np.where(changed == 0, 0.0, changed / before)
            # An optimizer that steps several times has a parameter several times: all its changes
            # count, and the weights before the first.
            changes[row, where] = 0.0
            np.add.at(changes[row], where, changed)
            weights[row, where[::-1]] = before[::-1]
        self._updated = names, ratios, changes, weights
        return self._updated


def trace_of(history: History) -> RunTrace:
    """Return the whole of a history as a trace."""
    trace = RunTrace(max(1, len(history)))
    for step in history:
        trace.add(step, history.series)
    return trace
