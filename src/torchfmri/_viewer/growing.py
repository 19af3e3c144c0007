"""A table to which columns are added while others read it.

Live scans and runs keep their columns in it, while the server reads them from another thread. The
order of writes is what makes this safe without a lock: values first, the length last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class GrowingTable:
    """(column, row) float32; one thread adds columns, and others read them without a lock.

    Examples:
        >>> table = GrowingTable(2)
        >>> table.append(np.array([1.0, 2.0]))
        >>> table.append(np.array([3.0, 4.0, 5.0]))  # a row that was not there before
        >>> table.values.tolist()
        [[1.0, 2.0, nan], [3.0, 4.0, 5.0]]
    """

    def __init__(self, rows: int) -> None:
        self._table = np.full((64, rows), np.nan, np.float32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> NDArray[np.float32]:
        """(column, row) a view of what is there now."""
        length = self._length  # first: a table that is exchanged meanwhile has these columns too
        return self._table[:length]

    def append(self, column: NDArray[np.floating]) -> None:
        """Add a column; a longer one adds rows, which are nan in the columns before."""
        columns, rows = self._table.shape
        if self._length == columns or len(column) > rows:
            room = 2 * columns if self._length == columns else columns
            larger = np.full((max(64, room), max(rows, len(column))), np.nan, np.float32)
            larger[: self._length, :rows] = self._table[: self._length]
            self._table = larger
        self._table[self._length, : len(column)] = column
        self._length += 1  # last: readers see the column only when it is written
