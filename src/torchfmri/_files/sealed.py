"""JSON that carries its own checksum, and reading it as if an enemy had written it.

Scans, histories, inspections, incidents and contrasts keep their descriptions this way. `seal` and
`unseal` are a stored format: the last key is the CRC-32 of the bytes before it, so no byte may be
written differently. Limits come before parsing, because small text can become much memory, and
brackets are counted because deep nesting ends Python. NaN and infinities are `{"$float": ...}`:
JSON has none. The checksum tells damage, not intent.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchfmri.exceptions import FileFormatError, InspectionError

DEPTH = 64
"""How deeply the values may be nested."""
VALUES = 4_000_000
CONTAINERS = 1_000_000
"""How many values, and how many lists, objects and keys, one text may hold: they take more room
than the text, an empty object thirty times as much."""
_FLOAT = "$float"  # JSON has neither NaN nor infinity
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")  # perhaps without its other half
_SEAL = ',"crc32":"%08x"}'
_SEAL_BYTES = len(_SEAL % 0)


def seal(record: Mapping[str, Any], where: str, separator: str = ",") -> bytes:
    """Return the record as JSON in UTF-8; its last key, `crc32`, is a checksum of all before it.

    Args:
        record: At least one key; strings, numbers, None, and lists and mappings of these.
        where: The name of the record, for the error.
        separator: The text between the keys of the record: `,` with or without a newline.

    Raises:
        InspectionError: A value cannot be written as JSON and read again as it was.
    """
    fields = (f"{to_json(key)}:{to_json(plain(value, where))}" for key, value in record.items())
    try:
        body = ("{" + separator.join(fields)).encode()
    except UnicodeEncodeError as error:
        raise InspectionError(
            f"{where} has a text that is not Unicode ({error.object[error.start]!r}): it cannot be "
            "kept. Decode it with errors='replace'."
        ) from error
    if excess := _excess(body):
        raise InspectionError(f"{where} cannot be kept: {excess}.")
    return body + (_SEAL % zlib.crc32(body)).encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Return the record that was sealed, without its checksum.

    Raises:
        FileFormatError: A bit is wrong, or it is not such a record.
    """
    body, end = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if end != (_SEAL % zlib.crc32(body)).encode():
        raise FileFormatError(where, "its checksum is wrong, or it is not complete")
    record = parse(data, where)
    if not isinstance(record, dict):
        raise FileFormatError(where, "it is not a JSON object")
    record.pop("crc32", None)
    return record


def parse(data: bytes, where: str) -> Any:
    """Return the value of a JSON text in UTF-8; stricter than `json.loads`.

    Raises:
        FileFormatError: It is not JSON, has a key twice, is nested too deeply, has too many values,
            NaN, or texts that are not Unicode.
    """
    if excess := _excess(data):
        raise FileFormatError(where, excess)
    try:
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if _HALF_CHARACTER.search(data) or _may_be_deep(data):
            _check(found, DEPTH)
        return found
    except RecursionError as error:
        raise FileFormatError(where, "its JSON is nested too deeply") from error
    except ValueError as error:
        raise FileFormatError(where, f"its JSON is wrong: {str(error)[:200]}") from error


def plain(value: Any, where: str, depth: int = DEPTH) -> Any:
    """Return the value in the types of JSON; NaN and infinity become `{"$float": "nan"}` etc.

    Raises:
        InspectionError: It has something that JSON cannot say, or is nested too deeply.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping) and depth:
        if _FLOAT in value or not all(isinstance(key, str) for key in value):
            raise InspectionError(
                f"{where} has keys that cannot be kept: {list(value)[:5]}. Use strings other than "
                f"{_FLOAT!r}."
            )
        return {str(key): plain(each, where, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [plain(each, where, depth - 1) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 64:
        return int(value)
    if isinstance(value, str):
        return str(value)
    raise InspectionError(
        f"{where} has a {type(value).__name__} that cannot be kept: {repr(value)[:80]}. Use texts, "
        f"numbers, None, and lists and mappings of these, at most {DEPTH} deep."
    )


def finite_json(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, for readers of plain JSON."""
    if isinstance(value, dict):
        return {str(key): finite_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any) -> str:
    """Return what `plain` returned as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any] | float:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    if _FLOAT not in found:
        return found
    if len(found) > 1 or found[_FLOAT] not in ("nan", "inf", "-inf"):
        raise ValueError(f"{_FLOAT} is one of nan, inf, -inf")
    return float(found[_FLOAT])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _excess(data: bytes) -> str:
    """Return what there is too much of; "" if nothing. Signs inside texts count too."""
    opened, closed = (data.count(a) + data.count(b) for a, b in ((b"[", b"{"), (b"]", b"}")))
    if max(opened, closed) > CONTAINERS:
        return f"it has more than {CONTAINERS:,} lists and objects"
    if data.count(b":") > CONTAINERS:
        return f"it has more than {CONTAINERS:,} keys"
    if data.count(b",") > VALUES:
        return f"it has more than {VALUES:,} values"
    return ""


def _may_be_deep(data: bytes) -> bool:
    """Whether brackets are nested too deeply, if none of them stands in a text."""
    signs = np.frombuffer(data, np.uint8) | 0x20  # [ and { differ in this bit, as do ] and }
    brackets = signs[(signs == ord("{")) | (signs == ord("}"))]
    depth = np.cumsum(np.where(brackets == ord("{"), 1, -1))
    return bool(depth.max(initial=0) > DEPTH)


def _check(value: Any, depth: int) -> None:
    """Raise if a text is not Unicode or the value is nested too deeply."""
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, list | dict):
        if not depth:
            raise ValueError("it is nested too deeply")
        for each in value:
            _check(each, depth - 1)
        for each in value.values() if isinstance(value, dict) else ():
            _check(each, depth - 1)
