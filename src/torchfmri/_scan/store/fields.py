"""The fields of a scan's rows as columns: one type for each, whatever single rows hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._files import plain, to_json
from torchfmri._scan.record.sequence import ScannedSequence

_TYPES: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64, str: object}


@dataclass(frozen=True)
class FieldColumn:
    """One field of the rows.

    Attributes:
        field: What it is called there.
        name: What its column is called: the same, unless a column of the scan has that name.
        type: bool, int, float or str. Whole numbers and others together are float; a field that
            some rows lack is float (nan) or str (""); everything else is a text, JSON where it is
            a list or a mapping.
    """

    field: str
    name: str
    type: type

    def value(self, fields: Mapping[str, Any]) -> Any:
        """That of one row."""
        found = fields.get(self.field)
        if self.type is str:
            return text_of(found)
        return float("nan") if found is None else self.type(found)

    def array(self, values: Sequence[Any]) -> NDArray[Any]:
        """Values of several rows, of the column's type."""
        found: NDArray[Any] = np.array([*values, None], object)[:-1]
        return found.astype(_TYPES[self.type])


def text_of(value: Any) -> str:
    """A value as the text of a cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else to_json(plain(value, "A field"))


def field_columns(sequences: Iterable[ScannedSequence], taken: Iterable[str]) -> list[FieldColumn]:
    """The columns of all fields that rows have, in the order in which they first come.

    Args:
        sequences: The scan.
        taken: Names that the scan's own columns have; a field of such a name is prefixed.
    """
    found: dict[str, set[type]] = {}
    count, seen = 0, dict[str, int]()
    for sequence in sequences:
        count += 1
        for field, value in sequence.fields.items():
            found.setdefault(field, set()).add(type(value))
            seen[field] = seen.get(field, 0) + 1
    used = set(taken)
    columns = []
    for field, types in found.items():
        name = field
        while name in used:
            name = f"field_{name}"
        used.add(name)
        columns.append(FieldColumn(field, name, _type(types, complete=seen[field] == count)))
    return columns


def _type(types: set[type], *, complete: bool) -> type:
    known = types - {type(None)}
    complete = complete and known == types
    if known and known <= {int, float}:
        return int if known == {int} and complete else float
    return bool if known == {bool} and complete else str
