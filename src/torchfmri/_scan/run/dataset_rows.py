"""The rows of a dataset: a file of JSON lines, or any sequence of records."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchfmri.exceptions import InspectionError

FIELDS = ("prompt", "messages", "text", "ids")
"""Where the prompt is looked for, in this order, unless a field is named."""


@dataclass(frozen=True)
class Row:
    """One prompt of a dataset.

    Attributes:
        number: Its place, counted from 0.
        prompt: A text, chat messages or token ids.
        condition: The label by which scans are contrasted.
        place: The same place in words, for messages.
    """

    number: int
    prompt: Any
    condition: str = ""
    place: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """Place and content: equal for the same row of the same dataset, and for no other."""
        content = json.dumps([self.prompt, self.condition], sort_keys=True, default=str)
        return f"{self.number:08d}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def rows_of(
    source: Any, field: str | None = None, condition_field: str = "condition"
) -> Sequence[Row]:
    """The rows of a dataset.

    Args:
        source: The path of a file with one JSON object per line, or anything with a length whose
            elements are mappings, texts, messages or ids (a dataset of Hugging Face, for example).
        field: Where the prompt is; by default the first of prompt, messages, text and ids.
        condition_field: Where the condition is.

    Raises:
        InspectionError: It is none of these, it is empty, or a line of it is wrong.
    """
    rows: Sequence[Row]
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise InspectionError(f"There is no file {str(path)!r}: a dataset is a .jsonl file.")
        rows = _JsonLines(path, field, condition_field)
    elif isinstance(source, Mapping) or not (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    ):
        raise InspectionError(
            f"A dataset is a .jsonl file or a sequence of records, with a length, not "
            f"{type(source).__name__}."
        )
    else:
        rows = _Records(source, field, condition_field)
    if not len(rows):
        raise InspectionError(f"The dataset {str(source)[:200]!r} has no rows.")
    return rows


class _Rows(Sequence[Row]):
    """Rows that are read when they are asked for."""

    def __init__(self, field: str | None, condition_field: str) -> None:
        self._field, self._condition_field = field, condition_field

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no row {index} among {len(self)}.")
        return self._read(index % len(self))

    def _read(self, number: int) -> Row:
        raise NotImplementedError

    def _row(self, record: Any, number: int, place: str) -> Row:
        """The row in a record, which may be the prompt itself.

        Raises:
            InspectionError: It has no prompt.
        """
        if not isinstance(record, Mapping):
            return Row(number, _prompt_of(record, place), place=place)
        names = FIELDS if self._field is None else (self._field,)
        found = next((name for name in names if record.get(name) is not None), None)
        if found is None:
            wanted = ", ".join(repr(name) for name in names)
            raise InspectionError(
                f"{place} has no prompt in {wanted}; its fields are "
                f"{', '.join(map(repr, record)) or 'none'}. Name the one with the prompt (field=, "
                "--field)."
            )
        label = record.get(self._condition_field)
        prompt = _prompt_of(record[found], f"{found!r} in {place[0].lower()}{place[1:]}")
        return Row(number, prompt, "" if label is None else str(label), place)


class _JsonLines(_Rows):
    """The rows of a file with one JSON object per line; each line is looked at when it is opened.

    Raises:
        InspectionError: A line is no object, or has no prompt; the message names the line.
    """

    def __init__(self, path: Path, field: str | None, condition_field: str) -> None:
        super().__init__(field, condition_field)
        self._path = path
        self._places: list[tuple[int, int]] = []  # offset, and line counted from 1
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._parse(line, len(self._places), number)
                    self._places.append((offset, number))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def _read(self, number: int) -> Row:
        offset, line = self._places[number]
        with self._path.open("rb") as file:
            file.seek(offset)
            return self._parse(file.readline(), number, line)

    def _parse(self, text: bytes, number: int, line: int) -> Row:
        place = f"Line {line} of {str(self._path)!r}"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InspectionError(
                f"{place} is no JSON: {error}. A dataset has one JSON object in each line."
            ) from error
        if not isinstance(record, dict):
            raise InspectionError(
                f"{place} is a {type(record).__name__}. A dataset has one JSON object in each line."
            )
        return self._row(record, number, place)


class _Records(_Rows):
    """The rows of a sequence of records."""

    def __init__(self, source: Any, field: str | None, condition_field: str) -> None:
        super().__init__(field, condition_field)
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def _read(self, number: int) -> Row:
        return self._row(self._source[number], number, f"Record {number}")


def _prompt_of(value: Any, place: str) -> Any:
    """The prompt, with arrays and tensors as lists, so that a row's name is made of all values.

    Raises:
        InspectionError: It is no prompt.
    """
    prompt = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(prompt, (str, list, tuple)):
        return prompt
    raise InspectionError(
        f"{place[0].upper()}{place[1:]} is {str(prompt)[:80]!r}: a prompt is a text, a list of "
        "chat messages or a list of token ids."
    )
