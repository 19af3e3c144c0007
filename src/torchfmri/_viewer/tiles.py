"""Tiles: a table of values as pictures of one byte per value, at any zoom.

A plane is a table (columns, rows): tokens or steps across, layers or voxels down. Its tiles are 256
columns wide and hold every row. Level l pools 2**l neighbouring columns into one, so that the whole
of a plane fits into one tile of the last level.

A byte is 0 where a value is not finite, else 128 + round(127 * asinh(x / scale) / asinh(limit /
scale)): nearly linear below the row's scale and logarithmic above it, with the sign kept. The scale
and the limit of each row travel as float32 in the plane's header, so that a page can change how it
maps values to colours without asking again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 256
"""Columns of a tile."""
QUANTILE = 0.995
SAMPLED = 16_384
"""Percentiles of a row are over at most so many evenly spaced columns."""
_COMMON = 1 << 20
"""A scale common to all rows is that of at most so many values."""
DECADES = 2
"""How many powers of ten the colours of a logarithmic metric span."""
TILE_BYTES = 32 << 20
"""Tiles of a plane that stay in memory."""
_BLOCK = 1 << 22
"""Values that are pooled at once."""
LINEAR = frozenset({"activation", "surprisal", "entropy", "loss", "seconds"})
"""Metrics whose colours follow the value itself; those of others follow its logarithm."""

Table = NDArray[np.floating[Any]]


class Plane:
    r"""The tiles of one table, made when they are asked for.

    Args:
        values: (column, row); read, never changed.
        metric: What the values are.
        signed: Whether they compare, and colours go both ways from 0.
        headroom: How many times the largest value of a row its code can hold: more than 1 for a
            table that still grows.
        bars: Whether rows are drawn as bars, which end at the largest value.

    Example:
        >>> plane = Plane(np.array([[1.0, -2.0], [4.0, np.nan]], np.float32), "activation")
        >>> plane.levels, list(plane.tile(0, 0))
        (1, [181, 255, 1, 0])
    """

    def __init__(
        self, values: Table, metric: str, *, signed: bool = False, headroom: float = 1.0,
        bars: bool = False,
    ) -> None:  # fmt: skip
        self.values, self.metric, self.signed, self.bars = values, metric, signed, bars
        self.columns, self.rows = values.shape
        self.levels = 1 + max(0, math.ceil(math.log2(max(self.columns, 1) / WIDTH)))
        self.logarithmic = not signed and metric not in LINEAR
        self.nonfinite = np.zeros(self.rows, np.int64)
        largest = np.zeros(self.rows)
        for block in self._blocks(values):
            finite = np.isfinite(block)
            if finite.all():
                sizes = np.abs(block)
            else:
                self.nonfinite += (~finite).sum(0)
                sizes = np.where(finite, np.abs(block), 0)
            largest = np.maximum(largest, sizes.max(0, initial=0))
        self.tops, self.middle = self._percentiles()
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

    @staticmethod
    def _blocks(values: Table) -> list[Table]:
        step = max(1, _BLOCK // max(1, values.shape[1]))
        return [values[at : at + step] for at in range(0, len(values), step)]

    def _percentiles(self) -> tuple[NDArray[np.float64], dict[str, float]]:
        """(row,) the 99.5th percentile of |value|, and what a scale common to all rows needs.

        It is the next lower of the values, as in the pictures: of few tokens the largest does not
        count, for the first token of a text is often a hundred times as loud as any other.
        """
        every = -(-self.columns // SAMPLED) or 1
        sample = np.abs(np.asarray(self.values[::every], np.float32).T)
        finite = np.isfinite(sample)
        tops = np.zeros(self.rows)
        if sample.size and finite.all():  # one call for all rows; the same as below
            place = int(QUANTILE * (sample.shape[1] - 1))
            tops = np.partition(sample, place, axis=1)[:, place].astype(np.float64)
        else:
            for row, kept in enumerate(finite):
                if kept.any():
                    tops[row] = np.quantile(sample[row][kept], QUANTILE, method="lower")
        known = sample[finite & (sample > 0)]
        known = known[:: len(known) // _COMMON + 1]
        common = {"low": 0.0, "high": 1.0}
        if len(known):
            common["high"] = float(np.quantile(known, QUANTILE, method="lower"))
            common["low"] = float(np.quantile(known, 1 - QUANTILE))
        return tops, common

    def header(self) -> dict[str, Any]:
        """What a page needs to decode and to colour the tiles."""
        return {
            "columns": self.columns,
            "rows": self.rows,
            "levels": self.levels,
            "signed": self.signed,
            "logarithmic": self.logarithmic,
            "scale": self.scale.tolist(),
            "limit": self.limit.tolist(),
            "tops": self.tops.astype(np.float32).tolist(),
            "nonfinite": self.nonfinite.tolist(),
            **self.middle,
        }

    def fits(self, values: Table) -> bool:
        """Whether the codes of this plane can hold further values, (column, row)."""
        with np.errstate(invalid="ignore"):
            return not bool((np.abs(values) > self.limit).any(where=np.isfinite(values)))

    def encode(self, values: Table) -> NDArray[np.uint8]:
        """(column, row) -> (row, column) bytes."""
        table = np.asarray(values, np.float64).T
        finite = np.isfinite(table)
        scale = self.scale[:, None].astype(np.float64)
        limit = np.arcsinh(self.limit[:, None].astype(np.float64) / scale)
        code = np.arcsinh(np.where(finite, table, 0.0) / scale) / limit
        return np.where(finite, 128 + np.rint(127 * np.clip(code, -1, 1)), 0).astype(np.uint8)

    def tile(self, level: int, x: int, *, mean: bool = False) -> bytes:
        """The bytes of a tile, row by row; its last columns are left out where the plane ends.

        Args:
            level: 0 for one column per value.
            x: Which tile of the level.
            mean: Pool by the mean instead of by the value of the largest size.

        Raises:
            IndexError: There is no such tile.
        """
        first, step = x * WIDTH << level, 1 << level
        if not 0 <= level < self.levels or x < 0 or (first >= self.columns and x > 0):
            raise IndexError(f"tile {x} of level {level}")
        key = (level, x, mean)
        if key not in self._tiles:
            values = pool(self.values[first : first + WIDTH * step], step, mean=mean)
            self._tiles[key] = self.encode(values).tobytes()
            self._bytes += len(self._tiles[key])
            while self._bytes > TILE_BYTES and len(self._tiles) > 1:
                self._bytes -= len(self._tiles.popitem(last=False)[1])
        self._tiles.move_to_end(key)
        return self._tiles[key]


def pool(values: Table, step: int, *, mean: bool = False) -> Table:
    """Every `step` columns as one: the value of the largest size with its sign, NaN wins.

    Example:
        >>> pool(np.array([[1.0], [-3.0], [2.0]]), 2).tolist()
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
        pooled: Table = group.mean(1, dtype=np.float64)
        return pooled
    # argmax takes NaN for the largest; infinity loses to it, and is shown like it anyway.
    chosen = np.abs(group).argmax(1)
    taken: Table = np.take_along_axis(group, chosen[:, None], 1)[:, 0]
    return taken
