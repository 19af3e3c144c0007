"""Give each field of a dataset's rows one column with one type, whatever single rows hold.

Exports, tables and formulas call `field_columns`. Rows come from JSON, so that a field may hold
numbers in one row, texts in the next and nothing in a third. No value may be changed on the way:
what a type cannot hold exactly (2**63, a list, two types together) becomes a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._files import plain, to_json
from torchfmri._scan.record.sequence import ScannedSequence

_TYPES: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64, str: object}
_EXACT = 1 << 53
"""Whole numbers up to this one are exact as float64."""
_INT64 = 1 << 63


@dataclass(frozen=True)
class FieldColumn:
    """One field of the rows.

    Attributes:
        field: What it is called there.
        name: What its column is called: the same, unless a column of the scan has that name.
        type: bool, int, float or str. Whole numbers and others together are float. Everything else
            is a text: several types together, lists and mappings (as JSON), and whole numbers that
            an int64 (or, among others, a float64) cannot hold.
        has_gaps: Whether some rows lack it: it is absent, None or NaN there.
        is_exact: Whether a float64 holds all of its whole numbers.
    """

    field: str
    name: str
    type: type
    has_gaps: bool = False
    is_exact: bool = True

    def value(self, fields: Mapping[str, Any]) -> Any:
        """Return the value of one row; None, or NaN in a column of floats, where it has none."""
        found = _unboxed(fields.get(self.field))
        if is_missing(found):
            return math.nan if self.type is float else None
        return text_of(found) if self.type is str else self.type(found)

    def masked(self, value: Any, count: int) -> NDArray[Any]:
        """Return a value `count` times; where the column has gaps, masked unless it is a float."""
        filled = np.full(count, 0 if value is None else value, _TYPES[self.type])
        if not self.has_gaps or self.type is float:
            return filled
        return np.ma.array(filled, mask=np.full(count, value is None))

    def array(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return the values of several rows in a type that NumPy and NetCDF have.

        With gaps, whole numbers become float64 (texts, where that is not exact) and booleans
        become texts; a text that is missing is empty.
        """
        found: NDArray[Any] = np.array([*values, None], object)[:-1]
        if self.type is str or (self.has_gaps and (self.type is bool or not self.is_exact)):
            return np.array([*map(text_of, found), None], object)[:-1]
        return found.astype(np.float64 if self.has_gaps else _TYPES[self.type])


def _unboxed(value: Any) -> Any:
    """Return a NumPy scalar as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def is_missing(value: Any) -> bool:
    """Return whether a field has nothing to say: None, or the NaN that stands for it in pandas."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def label_of(value: Any) -> str | None:
    """Return a field as the label of a condition or a pair; None if it has none."""
    return None if is_missing(value) or value == "" else str(value)


def text_of(value: Any) -> str:
    """Return a value as the text of a cell."""
    if value is None:
        return ""
    if isinstance(value, str | float):
        return str(value)
    return to_json(plain(value, "A field"))


@dataclass
class _Seen:
    """The types and the range of what the rows hold in one field.

    Attributes:
        types: The types of the values that are not missing.
        count: How many rows have one.
        least: The smallest whole number.
        most: The largest.
        is_number: Whether a NaN was seen.
    """

    types: set[type] = field(default_factory=set)
    count: int = 0
    least: int = 0
    most: int = 0
    is_number: bool = False

    def add(self, value: Any) -> None:
        value = _unboxed(value)
        if is_missing(value):
            self.is_number |= value is not None
            return
        self.types.add(type(value))
        self.count += 1
        if isinstance(value, int):
            self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def is_exact(self) -> bool:
        return max(-self.least, self.most) <= _EXACT

    @property
    def kind(self) -> type:
        if self.types == {int} and self.least >= -_INT64 and self.most < _INT64:
            return int
        if self.types == {int, float}:
            return float if self.is_exact else str
        if self.types == {bool}:
            return bool
        return float if self.types == {float} or (not self.types and self.is_number) else str


def field_columns(sequences: Iterable[ScannedSequence], taken: Iterable[str]) -> list[FieldColumn]:
    """Return the columns of all fields that rows have, in the order in which they first come.

    Args:
        sequences: The scan.
        taken: Names that the scan's own columns have; a field of such a name is prefixed.
    """
    found: dict[str, _Seen] = {}
    count = 0
    for sequence in sequences:
        count += 1
        for key, value in sequence.fields.items():
            found.setdefault(key, _Seen()).add(value)
    used = set(taken)
    columns = []
    for key, seen in found.items():
        name = key
        while name in used:
            name = f"field_{name}"
        used.add(name)
        columns.append(
            FieldColumn(
                field=key,
                name=name,
                type=seen.kind,
                has_gaps=seen.count < count,
                is_exact=seen.is_exact,
            )
        )
    return columns
