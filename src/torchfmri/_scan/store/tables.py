"""Write a scan as a long table: a row for each token, or each layer, voxel or head at each token.

`Scan.to_dataframe` and the exports to CSV and Parquet use `LongTable`, which yields the columns of
one sequence at a time so that memory is enough for any scan. The names and the order of the columns
are public. Texts that repeat are kept as codes (`Words`). Float32 values are written with the
fewest digits that give the same float32 back.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import from_extra
from torchfmri._scan.record.anatomy import KINDS, Anatomy
from torchfmri._scan.record.sequence import METRICS, ScannedSequence, Tokens
from torchfmri._scan.store.fields import FieldColumn, field_columns
from torchfmri.exceptions import InspectionError

if TYPE_CHECKING:
    import pandas

BY = ("token", "layer", "voxel", "head")
_TOKEN = ("position", "id", "text", "surprisal", "entropy", "generated", "special")
_ANATOMY = ("layer", "module", "kind", "head", "unit", "units")


class Words(NamedTuple):
    """A column of texts that repeat: which there are, and which one each row has (-1: none)."""

    values: Sequence[str]
    codes: NDArray[np.int32]

    def texts(self) -> NDArray[Any]:
        """Return the text of each row, None where it has none."""
        found: NDArray[Any] = np.array([*self.values, None], object)[self.codes]
        return found


Cells = NDArray[Any] | Words
"""Arrays of whole numbers and booleans that lack some are masked."""


class LongTable:
    """The rows of a scan, sequence by sequence.

    Args:
        anatomy: The anatomy of the scan.
        sequences: To be iterated over several times.
        by: What has a row: "token", "layer", "voxel" or "head".

    Raises:
        InspectionError: `by` is none of these, or no layer has heads.
    """

    def __init__(self, anatomy: Anatomy, sequences: Iterable[ScannedSequence], by: str) -> None:
        if by not in BY:
            raise InspectionError(f"by={by!r}: choose one of {', '.join(map(repr, BY))}.")
        self._anatomy, self._sequences, self._by = anatomy, sequences, by
        self.fields: list[FieldColumn] = field_columns(
            sequences, ["sequence", "condition", *_TOKEN, *_ANATOMY, *METRICS]
        )
        self.fields = [each for each in self.fields if each.field != "condition"]
        tables = "layers" if by == "layer" else "voxels"
        found = {metric for each in sequences for metric in getattr(each, tables)}
        self.metrics = [*METRICS, *sorted(found.difference(METRICS))] if by != "token" else []
        self._columns = self._find_columns()

    def _find_columns(self) -> NDArray[np.int64]:
        """Return which layers or voxels have rows."""
        anatomy = self._anatomy
        if self._by in ("token", "layer"):
            return np.arange(1 if self._by == "token" else len(anatomy.layers))
        wanted = np.ones(len(anatomy.layer), bool)
        if self._by == "head":
            wanted = anatomy.kind == KINDS.index("head")
            if not wanted.any():
                raise InspectionError(
                    "No voxel of this scan is a head: the model's configuration does not say how "
                    "large one is. Choose by='voxel'."
                )
        return np.flatnonzero(wanted)

    def parts(self) -> Iterator[dict[str, Cells]]:
        """Return the columns of each sequence in turn."""
        for sequence in self._sequences:
            yield self._part(sequence)

    def empty(self) -> dict[str, Cells]:
        """Return the columns without any row."""
        return self._part(ScannedSequence("", Tokens.none(), {}, {}))

    def _part(self, sequence: ScannedSequence) -> dict[str, Cells]:
        tokens, s, count = sequence.tokens, len(sequence), len(self._columns)
        token = np.repeat(np.arange(s), count)
        one = np.zeros(len(token), np.int32)
        found: dict[str, Cells] = {
            "sequence": Words([sequence.name], one),
            "condition": Words([sequence.condition], one),
        }
        for each in self.fields:
            value = each.value(sequence.fields)
            if each.type is not str:
                found[each.name] = each.masked(value, len(token))
            else:
                found[each.name] = Words([], one - 1) if value is None else Words([value], one)
        found["position"] = token
        found["id"] = tokens.ids[token]
        found["text"] = Words(tokens.pieces, token.astype(np.int32))
        for key in ("surprisal", "entropy", "generated", "special"):
            found[key] = getattr(tokens, key)[token]
        found |= self._anatomy_cells(s)
        table = sequence.layers if self._by == "layer" else sequence.voxels
        for metric in self.metrics:
            values = table.get(metric)
            cells = np.full((s, count), np.nan, np.float32)
            found[metric] = (cells if values is None else values[:, self._columns]).reshape(-1)
        return found

    def _anatomy_cells(self, s: int) -> Mapping[str, Cells]:
        if self._by == "token":
            return {}
        anatomy, columns = self._anatomy, self._columns
        owner = columns if self._by == "layer" else anatomy.layer[columns]

        def words(values: Sequence[str], codes: NDArray[Any]) -> Words:
            return Words(values, np.tile(codes.astype(np.int32), s))

        found: dict[str, Cells] = {
            "layer": words(anatomy.layers, owner),
            "module": words(anatomy.types, owner),
        }
        if self._by == "layer":
            return found
        start, count = anatomy.start[columns], anatomy.count[columns]
        first = np.searchsorted(anatomy.layer, owner)  # the first voxel is as large as a head
        kinds = anatomy.kind[columns]
        head = np.where(kinds == 1, start // anatomy.count[first], -1)
        head = np.where(kinds == 2, start, head)
        return found | {
            "kind": words(KINDS, kinds),
            "head": np.tile(head.astype(np.int64), s),
            "unit": np.tile(start.astype(np.int64), s),
            "units": np.tile(count.astype(np.int64), s),
        }


def to_dataframe(
    anatomy: Anatomy, sequences: Iterable[ScannedSequence], by: str
) -> pandas.DataFrame:
    """Return the table in memory; see `Scan.to_dataframe`."""
    with from_extra("A DataFrame needs pandas", "tables"):
        import pandas
    table = LongTable(anatomy, sequences, by)
    parts = list(table.parts()) or [table.empty()]
    data = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return pandas.DataFrame({name: _series(cells) for name, cells in data.items()})


def _series(cells: Cells) -> Any:
    """Return cells as pandas has them: categories, and its own types where values are missing."""
    from pandas import Categorical, arrays

    if isinstance(cells, Words):
        return Categorical.from_codes(cells.codes, list(cells.values))
    if not isinstance(cells, np.ma.MaskedArray):
        return cells
    nullable = arrays.BooleanArray if cells.dtype == bool else arrays.IntegerArray
    return nullable(cells.data, np.ma.getmaskarray(cells))


def _joined(parts: Sequence[Cells]) -> Cells:
    """Return the cells of several sequences; texts that are equal become one."""
    if isinstance(parts[0], np.ma.MaskedArray):
        arrays = [part for part in parts if not isinstance(part, Words)]
        masks = [np.ma.getmaskarray(part) for part in arrays]
        values = np.concatenate([np.ma.getdata(part) for part in arrays])
        return np.ma.array(values, mask=np.concatenate(masks))
    if not isinstance(parts[0], Words):
        return np.concatenate([np.asarray(part) for part in parts])
    number: dict[str, int] = {}
    codes = []
    for part in parts:
        assert isinstance(part, Words)
        own = np.array([number.setdefault(each, len(number)) for each in part.values], np.int32)
        codes.append(np.where(part.codes >= 0, own[part.codes], -1) if len(own) else part.codes)
    return Words(list(number), np.concatenate(codes))


def write_csv(path: Path, anatomy: Anatomy, sequences: Iterable[ScannedSequence], by: str) -> None:
    """Write the table with a heading; what has no value is an empty cell."""
    table = LongTable(anatomy, sequences, by)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.empty())
        for part in table.parts():
            columns = [_cells(cells) for cells in part.values()]
            writer.writerows(zip(*columns, strict=True))


def _cells(cells: Cells) -> list[Any]:
    if isinstance(cells, Words):
        return list(cells.texts())
    if cells.dtype.kind != "f":
        return list(cells.tolist())
    # The shortest text that is read back as the same float32.
    texts = [str(each) for each in cells] if cells.dtype == np.float32 else cells.tolist()
    return ["" if gone else each for each, gone in zip(texts, np.isnan(cells), strict=True)]


def write_parquet(
    path: Path, anatomy: Anatomy, sequences: Iterable[ScannedSequence], by: str
) -> None:
    """Write the table, sequence by sequence.

    Raises:
        InspectionError: pyarrow is not installed.
    """
    with from_extra("Parquet needs pyarrow", "parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    table = LongTable(anatomy, sequences, by)

    def convert(cells: Cells) -> Any:
        if isinstance(cells, Words):
            values = pa.array(list(cells.values), pa.string())
            codes = pa.array(cells.codes, pa.int32(), mask=cells.codes < 0)
            return pa.DictionaryArray.from_arrays(codes, values)
        if isinstance(cells, np.ma.MaskedArray):
            return pa.array(cells.data, mask=np.ma.getmaskarray(cells))
        return pa.array(cells)

    schema = pa.table({name: convert(cells) for name, cells in table.empty().items()}).schema
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in table.parts():
            columns = {name: convert(cells) for name, cells in part.items()}
            writer.write_table(pa.table(columns, schema))
