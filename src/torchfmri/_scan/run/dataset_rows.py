"""The rows of a dataset, from a file of JSON lines or from any sequence: `rows_of`.

`entry_points.scan_dataset` calls it, and `dataset` scans the `DatasetRow`s. Rows are read when they
are asked for, so a large dataset is never in memory as a whole. The names of rows (their ids, else
place and content) are stored in scan folders: if they change, every row of an existing scan counts
as new and is scanned again. To look for prompts in another field, extend `FIELDS`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchfmri._files import parse, plain, to_json
from torchfmri._scan.store.fields import label_of
from torchfmri.exceptions import InspectionError

FIELD_BYTES = 1 << 16
"""Larger values of a row are not kept."""
FIELDS = ("prompt", "messages", "text", "ids")
"""Where the prompt is looked for, in this order, unless a field is named."""


@dataclass(frozen=True)
class DatasetRow:
    """One prompt of a dataset.

    Attributes:
        number: Its place, counted from 0.
        prompt: A text, chat messages or token ids.
        condition: The label by which scans are contrasted.
        place: The same place in words, for messages.
        problem: Why it cannot be scanned, with its place; empty where it can.
        fields: All that the record has, the prompt too, in the types of JSON.
        id: What its id field says, if one is named.
    """

    number: int
    prompt: Any
    condition: str = ""
    place: str = field(default="", compare=False)
    problem: str = field(default="", compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    id: str = ""

    @property
    def name(self) -> str:
        """Its id; or place and content: equal for the same row of a dataset, and for no other."""
        if self.id:
            return self.id
        if self.problem:
            return f"{self.number:08d}-unreadable"
        return f"{self.number:08d}-{hashlib.sha256(self.content.encode()).hexdigest()[:12]}"

    @property
    def content(self) -> str:
        """What it says, as JSON of ASCII characters."""
        return json.dumps([self.prompt, self.condition], sort_keys=True, default=str)


def rows_of(
    source: Any,
    field: str | None = None,
    condition_field: str = "condition",
    *,
    id_field: str | None = None,
    strict: bool = False,
) -> Sequence[DatasetRow]:
    """The rows of a dataset.

    Args:
        source: The path of a file with one JSON object per line, or anything with a length whose
            elements are mappings, texts, messages or ids (a dataset of Hugging Face, for example).
        field: Where the prompt is; by default the first of prompt, messages, text and ids.
        condition_field: Where the condition is.
        id_field: Where the name of the row is, if it has one; no two rows may share it.
        strict: Raise for a row that cannot be read; otherwise it is a row with a `problem`.

    Raises:
        InspectionError: It is none of these, it is empty, or no line of it can be read.
    """
    named = {"field": field, "condition_field": condition_field, "id_field": id_field}
    for name, value in named.items():
        if not isinstance(value, str) and not (name != "condition_field" and value is None):
            raise InspectionError(
                f"{name}={value!r} is not the name of a field: give a text such as 'prompt'."
            )
    rows: _LazyRows
    fields = _Fields(field, condition_field, id_field)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise InspectionError(f"There is no file {str(path)!r}: a dataset is a .jsonl file.")
        rows = _JsonLines(path, fields, strict)
    elif isinstance(source, Mapping) or not (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    ):
        raise InspectionError(
            f"A dataset is a .jsonl file or a sequence of records, with a length, not "
            f"{type(source).__name__}."
        )
    else:
        rows = _Records(source, fields, strict)
    if not len(rows):
        raise InspectionError(f"The dataset {str(source)[:200]!r} has no rows.")
    if id_field is not None:
        _refuse_shared_ids(rows, id_field)
    return rows


def _refuse_shared_ids(rows: Sequence[DatasetRow], id_field: str) -> None:
    """Raise where two rows have one id: the second would be taken for the first."""
    places: dict[str, str] = {}
    for row in rows:
        if row.id and places.setdefault(row.id, row.place) != row.place:
            raise InspectionError(
                f"{places[row.id]} and {row.place[0].lower()}{row.place[1:]} have the same "
                f"{id_field!r}: {row.id!r}. Give each row an id of its own, or name no id field."
            )


class _Fields(NamedTuple):
    """Which field of a record holds what."""

    prompt: str | None
    condition: str
    id: str | None


class _LazyRows(Sequence[DatasetRow]):
    """Rows that are read when they are asked for."""

    def __init__(self, fields: _Fields, strict: bool) -> None:
        self._fields, self._strict = fields, strict

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no row {index} among {len(self)}.")
        number = index % len(self)
        return self._tried(number, partial(self._read, number))

    def _tried(self, number: int, read: Callable[[], DatasetRow]) -> DatasetRow:
        """The row that `read` returns; where it cannot be read, one that says why.

        Raises:
            InspectionError: It cannot be read, and rows are to be read strictly.
        """
        try:
            return read()
        except InspectionError as error:
            if self._strict:
                raise
            return DatasetRow(number, "", problem=str(error))

    def _read(self, number: int) -> DatasetRow:
        raise NotImplementedError

    def _row(self, record: Any, number: int, place: str) -> DatasetRow:
        """The row in a record, which may be the prompt itself.

        Raises:
            InspectionError: It has no prompt.
        """
        if not isinstance(record, Mapping):
            return _complete(DatasetRow(number, _prompt_of(record, place), place=place))
        names = FIELDS if self._fields.prompt is None else (self._fields.prompt,)
        found = next((name for name in names if record.get(name) is not None), None)
        if found is None:
            wanted = ", ".join(repr(name) for name in names)
            raise InspectionError(
                f"{place} has no prompt in {wanted}; its fields are "
                f"{', '.join(map(repr, record)) or 'none'}. Name the one with the prompt (field=, "
                "--field)."
            )
        label = record.get(self._fields.condition)
        prompt = _prompt_of(record[found], f"{found!r} in {place[0].lower()}{place[1:]}")
        return _complete(
            DatasetRow(
                number,
                prompt,
                label_of(label) or "",
                place,
                fields={str(key): _kept(value) for key, value in record.items()},
                id=self._id_of(record, place),
            )
        )

    def _id_of(self, record: Mapping[str, Any], place: str) -> str:
        name = self._fields.id
        if name is None:
            return ""
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise InspectionError(
                f"{place} has {value!r} in {name!r}, which is to name the row: a text or a whole "
                f"number. Its fields are {', '.join(map(repr, record))}."
            )
        return str(value)


class _JsonLines(_LazyRows):
    """The rows of a file with one JSON object per line; each line is looked at when it is opened.

    Raises:
        InspectionError: No line has a prompt, or, where rows are read strictly, one has none; the
            message names the line.
    """

    def __init__(self, path: Path, fields: _Fields, strict: bool) -> None:
        super().__init__(fields, strict)
        self._path = path
        self._places: list[tuple[int, int]] = []  # offset, and line counted from 1
        problem: str | None = None
        readable = False
        with path.open("rb") as file:
            offset = 0
            for line, text in enumerate(file, start=1):
                if text.strip():
                    self._places.append((offset, line))
                    number = len(self._places) - 1
                    found = self._tried(number, partial(self._parse, text, number, line))
                    problem, readable = problem or found.problem, readable or not found.problem
                offset += len(text)
        if problem and not readable:
            raise InspectionError(problem)

    def __len__(self) -> int:
        return len(self._places)

    def _read(self, number: int) -> DatasetRow:
        offset, line = self._places[number]
        with self._path.open("rb") as file:
            file.seek(offset)
            return self._parse(file.readline(), number, line)

    def _parse(self, text: bytes, number: int, line: int) -> DatasetRow:
        place = f"Line {line} of {str(self._path)!r}"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InspectionError(
                f"{place} is not JSON: {error}. A dataset has one JSON object in each line."
            ) from error
        if not isinstance(record, dict):
            raise InspectionError(
                f"{place} is a {type(record).__name__}. A dataset has one JSON object in each line."
            )
        return self._row(record, number, place)


class _Records(_LazyRows):
    """The rows of a sequence of records."""

    def __init__(self, source: Any, fields: _Fields, strict: bool) -> None:
        super().__init__(fields, strict)
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def _read(self, number: int) -> DatasetRow:
        place = f"Record {number}"
        try:
            record = self._source[number]
        except Exception as error:
            raise InspectionError(
                f"{place} cannot be read from the {type(self._source).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return self._row(record, number, place)


def _complete(row: DatasetRow) -> DatasetRow:
    """The row itself, if it can be named and kept.

    Raises:
        InspectionError: It cannot be written as JSON, or not as UTF-8.
    """
    try:
        if "\\ud" in row.content:  # half of a pair that stands for one character, or both
            json.dumps([row.prompt, row.condition], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise InspectionError(
            f"{row.place} has {bad!r} in its prompt or condition, which is half of a character "
            "and no text. Correct the row, or leave it out."
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InspectionError(
            f"{row.place} cannot be written as JSON ({error}). A prompt is a text, a list of chat "
            "messages or a list of token ids."
        ) from error
    return row


def _kept(value: Any) -> Any:
    """A field in the types of JSON, so that it can be kept; what JSON cannot say becomes a text.

    Of very large ones, such as images, nothing is left but their size.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if hasattr(value, "isoformat"):
        return value.isoformat()
    try:
        text = to_json(plain(value, "A field")).encode()
    except (InspectionError, UnicodeEncodeError):
        value = str(value).encode(errors="replace").decode()
        text = to_json(value).encode()
    if len(text) > FIELD_BYTES:
        return f"<{type(value).__name__}, {len(text):,} bytes, not kept>"
    return parse(text, "A field")  # as it will be read again: lists for tuples, NaN as NaN


def _prompt_of(value: Any, place: str) -> Any:
    """The prompt, with arrays and tensors as lists, so that a row's name is made of all values.

    Raises:
        InspectionError: It is not a prompt.
    """
    prompt = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(prompt, (str, list, tuple)):
        return prompt
    raise InspectionError(
        f"{place[0].upper()}{place[1:]} is {str(prompt)[:80]!r}: a prompt is a text, a list of "
        "chat messages or a list of token ids."
    )
