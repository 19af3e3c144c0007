"""Files of flat records: CSV, JSON lines and Parquet, written a piece at a time.

`History.export` and incidents write with it. A run has more rows than memory should hold, so
records come from an iterator and are never listed. A value that is not there stays empty, which
differs from NaN: JSON lines say "NaN" as a text, since null would say that there was no value.
`PIECE` may change freely.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchfmri._arguments import from_extra
from torchfmri._files import new_file
from torchfmri.exceptions import InspectionError

Record = Mapping[str, Any]
PIECE = 20_000
"""Records held at once while a Parquet file is written."""


def write_records(records: Iterable[Record], columns: Mapping[str, type], path: Path) -> None:
    """Write flat records to a .csv, .jsonl or .parquet file.

    Args:
        records: None stands for a value that is not there.
        columns: The names of the columns, each with str, int or float.
        path: The file; its ending says in which format.

    Raises:
        InspectionError: The ending is none of these, or pyarrow is missing.
    """
    writers = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise InspectionError(
            f"Cannot write {path.name!r}: the ending is one of {', '.join(writers)}."
        )
    with new_file(path) as new:
        writers[path.suffix](records, columns, new)


def _write_csv(records: Iterable[Record], columns: Mapping[str, type], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(records)


def _write_jsonl(records: Iterable[Record], columns: Mapping[str, type], path: Path) -> None:
    def plain(value: Any) -> Any:
        # JSON has neither NaN nor infinity; null would say that there was no value at all.
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    with path.open("w", encoding="utf-8") as file:
        for record in records:
            line = json.dumps({name: plain(record[name]) for name in columns})
            file.write(line + "\n")


def _write_parquet(records: Iterable[Record], columns: Mapping[str, type], path: Path) -> None:
    with from_extra("Parquet needs pyarrow", "parquet", "CSV and JSONL need nothing."):
        import pyarrow
        import pyarrow.parquet
    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        remaining = iter(records)
        while piece := list(itertools.islice(remaining, PIECE)):
            writer.write_table(pyarrow.Table.from_pylist(piece, schema=schema))
