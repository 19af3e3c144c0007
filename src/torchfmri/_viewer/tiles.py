"""Tiles: a table of values as pictures of one byte per value, at any zoom.

A plane is a table (columns, rows): tokens or steps across, layers or voxels down. Its tiles are 256
columns wide and hold every row. Level l pools 2**l neighbouring columns into one, so that the whole
of a plane fits into one tile of the last level.

A byte is 0 where a value is not finite, 1 where nothing was measured, else 128 + round(126 *
asinh(x / scale) / asinh(limit / scale)): nearly linear below the row's scale and logarithmic above
it, with the sign kept. The scale and the limit of each row travel as float32 in the plane's header,
so that a page can change how it maps values to colours without asking again.

The desk makes a `Plane` per table and sends its tiles. `viewer/src/colour.ts` decodes them: a
change of the code here must be made there, too. A value that is not finite must never become a
colour: pooling leaves NaN out, and the header counts such values per row, so that the page marks
the row at any zoom.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 256
"""Columns of a tile."""
NOT_FINITE, NOT_MEASURED, ZERO, STEPS = 0, 1, 128, 126
"""Codes: of what is no number, of what was not measured, of 0; and how many follow it each way."""
QUANTILE, FEW = 0.995, 4
"""The top of a row; of fewer values it is the largest. As in `torchfmri.visualization`."""
SAMPLED = 8_192
"""Percentiles of a row are over at most so many evenly spaced columns."""
_COMMON = 1 << 18
"""A scale common to all rows is that of at most so many values."""
_POOLED = 6
"""The level that is kept once the table was read; coarser ones are made of it."""
DECADES = 2
"""How many powers of ten the colours of a logarithmic metric span."""
TILE_BYTES = 32 << 20
"""Tiles of a plane that stay in memory."""
_BLOCK = 1 << 22
"""Values that are pooled at once."""
RANGED = frozenset({"activations", "parameters"})
"""Metrics of a run that change little: the colours of a row begin at its lowest value."""
LINEAR = RANGED | {"activation", "surprisal", "entropy", "loss", "seconds"}
"""Metrics whose colours follow the value itself; those of others follow its logarithm."""
NARROWEST = 0.2
"""The colours of a row span at least this share of its top: a byte tells little less apart."""
_NUMBERS = ("columns", "rows", "levels", "signed", "logarithmic")
_BY_ROW = ("scale", "limit", "tops", "lows")
"""What the header of a plane says of the whole, and of each row."""

Table = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]


class Plane:
    r"""The tiles of one table, made when they are asked for.

    Args:
        values: (column, row); read, never changed.
        metric: What the values are.
        missing: (column or 1, row or 1) where nothing was measured; None where everything was.
        signed: Whether they compare, and colours go both ways from 0.
        headroom: How many times the largest value of a row its code can hold: more than 1 for a
            table that still grows.
        bars: Whether rows are drawn as bars, which end at the largest value.

    Examples:
        >>> plane = Plane(np.array([[1.0, -2.0], [4.0, np.nan]], np.float32), "activation")
        >>> plane.levels, list(plane.tile(0, 0))
        (1, [163, 254, 2, 0])
    """

    def __init__(
        self, values: Table, metric: str, *, missing: Mask | None = None, signed: bool = False,
        headroom: float = 1.0, bars: bool = False,
    ) -> None:  # fmt: skip
        self.values, self.metric, self.signed, self.bars = values, metric, signed, bars
        self.columns, self.rows = values.shape
        self.coded_columns = self.columns  # those that the scales were chosen by
        # A board that grows may have been longer by the time it was asked for this.
        self._missing = None if missing is None else missing[: max(1, self.columns)]
        self.logarithmic = not signed and metric not in LINEAR
        self.nonfinite, self.missing, largest = self._read()
        self.tops, self.lows, self.middle = self._percentiles()
        if bars:
            self.tops = largest
        scale = np.where(self.tops > 0, self.tops, np.where(largest > 0, largest, 1.0))
        if self.logarithmic:
            scale = scale / 10**DECADES
        # As float32, because that is what the page decodes with.
        self.scale = np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float32)
        limit = np.maximum(largest * headroom, self.scale)
        self.limit = limit.astype(np.float32)
        self._tiles: OrderedDict[tuple[int, int, bool], bytes] = OrderedDict()
        self._bytes = 0

    @property
    def levels(self) -> int:
        """How many levels there are: the last one is a single tile."""
        return 1 + max(0, math.ceil(math.log2(max(self.columns, 1) / WIDTH)))

    def longer(self, values: Table, missing: Mask | None = None) -> Plane:
        """Return the plane of a table that has grown, with the codes of this one."""
        plane = copy.copy(self)
        plane.values, plane.columns = values, len(values)
        plane._missing = None if missing is None else missing[: max(1, len(values))]
        plane._tiles, plane._bytes = OrderedDict(), 0
        fresh = plane._marked(self.columns, len(values))
        plane.nonfinite = self.nonfinite + np.isinf(fresh).sum(0)
        plane.missing = self.missing + np.isnan(fresh).sum(0)
        whole = self.columns >> _POOLED
        plane._pooled = np.concatenate([self._pooled[:whole], plane._pool_from(whole)])
        if self.bars:
            largest = np.abs(fresh).max(0, initial=0, where=np.isfinite(fresh))
            plane.tops = np.maximum(self.tops, largest)
        return plane

    def _marked(self, first: int, last: int) -> Table:
        """Return columns, (column, row): infinite for no number, NaN where none was measured.

        So marked, numpy's own functions pool as they should: a value wins over none, infinity over
        all.
        """
        part = self.values[first:last]
        finite = np.isfinite(part)
        if finite.all():
            return part
        if self._missing is None:
            return np.where(finite, part, np.inf)
        whole = self._missing.shape[0] == 1
        missing = self._missing if whole else self._missing[first:last]
        return np.where(finite, part, np.where(missing, np.nan, np.inf))

    def _pool_from(self, first: int) -> Table:
        """Return pooled columns of the level that is kept, from the given one on, (column, row)."""
        step = 1 << _POOLED
        many = max(1, _BLOCK // max(1, self.rows * step)) * step
        parts = [
            pool(self._marked(at, min(at + many, self.columns)), step)
            for at in range(first * step, self.columns, many)
        ]
        return np.concatenate(parts) if parts else np.empty((0, self.rows), np.float32)

    def _read(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return by row how many values are not finite or missing, and the largest size.

        Reads the table once: pooled values are finite where all that they stand for are, or are
        missing.
        """
        self._pooled = self._pool_from(0)
        nonfinite, missing = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        with np.errstate(invalid="ignore"):
            largest = np.abs(self._pooled).max(0, initial=0).astype(np.float64)
        odd = np.flatnonzero(~np.isfinite(largest))
        if self._missing is not None:  # a missing value leaves no trace in what it is pooled with
            odd = np.arange(self.rows)
        for row in odd.tolist():
            column = np.asarray(self.values[:, row])
            known = np.isfinite(column)
            lost = ~known & self._lost(row)
            missing[row] = int(lost.sum())
            nonfinite[row] = len(column) - int(known.sum()) - missing[row]
            largest[row] = np.abs(column).max(initial=0, where=known)
        return nonfinite, missing, largest

    def _lost(self, row: int) -> Mask:
        """Return where a row was not measured, (column or 1,)."""
        if self._missing is None:
            return np.zeros(1, np.bool_)
        return self._missing[:, row if self._missing.shape[1] > 1 else 0]

    def _percentiles(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, float]]:
        """Return the top of each row, where its colours begin, and a scale common to all rows.

        The top is the 99.5th percentile of |value|, the next lower of them, as in the pictures: the
        largest value of a short text does not count, for its first token is often a hundred times
        as loud as any other. Of two or three values the largest does count, because nothing else
        would tell them apart.
        """
        every = -(-self.columns // SAMPLED) or 1
        sample = np.abs(np.asarray(self.values[::every], np.float32).T)
        finite = np.isfinite(sample)
        tops, lows = np.zeros(self.rows), np.zeros(self.rows)
        counts = finite.sum(1)
        if counts.any():  # one call for all rows: what is not finite comes last
            ordered = np.sort(np.where(finite, sample, np.inf), axis=1)
            shares = np.where(counts >= FEW, QUANTILE, 1.0)
            places = (shares * np.maximum(counts - 1, 0)).astype(np.int64)
            tops = np.where(counts > 0, ordered[np.arange(self.rows), places], 0.0)
            if self.metric in RANGED and not self.signed:
                lows = np.minimum(np.where(counts > 0, ordered[:, 0], 0.0), (1 - NARROWEST) * tops)
        known = sample[finite & (sample > 0)]
        known = known[:: len(known) // _COMMON + 1]
        common = {"low": 0.0, "high": 1.0}
        if len(known):
            common["high"] = float(np.quantile(known, QUANTILE, method="lower"))
            common["low"] = float(np.quantile(known, 1 - QUANTILE))
        return tops, lows, common

    def header(self) -> dict[str, Any]:
        """Return what a page needs to decode and to colour the tiles."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: getattr(self, name).astype(np.float32).tolist() for name in _BY_ROW},
            "nonfinite": self.nonfinite.tolist(),
            "missing": self.missing.tolist(),
            **self.middle,
        }

    def fits(self, values: Table) -> bool:
        """Whether the codes of this plane can hold further values, (column, row)."""
        with np.errstate(invalid="ignore"):
            return not bool((np.abs(values) > self.limit).any(where=np.isfinite(values)))

    def coded(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of some columns, (row, column)."""
        return self._encode(self._marked(first, last))

    def _encode(self, marked: Table) -> NDArray[np.uint8]:
        """Return the bytes (row, column) of marked values (column, row)."""
        table = np.asarray(marked, np.float64).T
        scale = self.scale[:, None].astype(np.float64)
        limit = np.arcsinh(self.limit[:, None].astype(np.float64) / scale)
        with np.errstate(invalid="ignore"):
            code = np.clip(np.arcsinh(table / scale) / limit, -1, 1)
            found = (ZERO + np.rint(STEPS * np.nan_to_num(code))).astype(np.uint8)
        found[np.isinf(table)] = NOT_FINITE
        found[np.isnan(table)] = NOT_MEASURED
        return found

    def tile(self, level: int, x: int, *, mean: bool = False) -> bytes:
        """Return the bytes of a tile, row by row; columns beyond the end of the plane are left out.

        Args:
            level: 0 for one column per value.
            x: Which tile of the level.
            mean: Pool by the mean instead of by the value of the largest size.

        Raises:
            IndexError: There is no such tile.
        """
        # The level is looked at first: shifting by a huge one would take all memory and time.
        first = x * WIDTH << level if 0 <= level < self.levels and x >= 0 else -1
        if first < 0 or (first >= self.columns and x > 0):
            raise IndexError(f"tile {x} of level {level}")
        step = 1 << level
        key = (level, x, mean)
        if key not in self._tiles:
            if level >= _POOLED and not mean:
                start, count = first >> _POOLED, WIDTH * step >> _POOLED
                values = pool(self._pooled[start : start + count], step >> _POOLED)
            else:
                values = pool(self._marked(first, first + WIDTH * step), step, mean=mean)
            self._tiles[key] = self._encode(values).tobytes()
            self._bytes += len(self._tiles[key])
            while self._bytes > TILE_BYTES and len(self._tiles) > 1:
                self._bytes -= len(self._tiles.popitem(last=False)[1])
        self._tiles.move_to_end(key)
        return self._tiles[key]


def pool(values: Table, step: int, *, mean: bool = False) -> Table:
    """Return every `step` columns as one: the value of the largest size, with its sign.

    Infinity wins, NaN loses to everything.

    Examples:
        >>> pool(np.array([[1.0], [-3.0], [2.0], [np.nan]]), 2).tolist()
        [[-3.0], [2.0]]
    """
    if step == 1 or not len(values):
        return values
    columns, rows = values.shape
    result = np.empty((-(-columns // step), rows), np.float32)
    many = max(1, _BLOCK // max(1, rows * step))
    for at in range(0, len(result), many):
        part = values[at * step : (at + many) * step]
        whole = len(part) // step
        for start, group in (
            (at, part[: whole * step].reshape(whole, step, rows)),
            (at + whole, part[whole * step :][None]),
        ):
            if group.size:
                result[start : start + len(group)] = _pool_group(group, mean)
    return result


def _pool_group(group: Table, mean: bool) -> Table:
    if mean:
        known = ~np.isnan(group)
        with np.errstate(invalid="ignore"):
            total = np.where(known, group, 0).sum(1, dtype=np.float64)
            averaged: Table = total / known.sum(1)
        return averaged
    # Two plain passes are several times faster than finding the place of the largest size.
    high, low = np.fmax.reduce(group, axis=1), np.fmin.reduce(group, axis=1)
    high[-low > high] = low[-low > high]
    taken: Table = high
    return taken
