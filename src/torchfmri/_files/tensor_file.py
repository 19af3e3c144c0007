"""A file of tensors: safetensors, written by hand and read as a memory map.

Scans, inspections, histories, incidents and contrasts store their numbers with it.
https://github.com/huggingface/safetensors describes the format: eight bytes that hold the length of
the header, the header in JSON, the tensors without gaps. Other programs read these files, so
nothing may be added outside the metadata. It is small enough to do without the library, which
neither calls fsync nor computes a checksum on the way. A header is somebody else's word: each
number in it is checked before memory is taken for it. The arrays are views of the map: they keep it
open, and cannot be written to. How many files are mapped at once may change freely.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._files.regular import open_limited, open_regular
from torchfmri._files.sealed import parse, to_json
from torchfmri.exceptions import FileFormatError, InspectionError

DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16: its bits
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
"""The types of values, smallest first: tensors are written in the opposite order, so that each is
aligned; the order is that of the safetensors library."""
TAGS = {dtype: tag for tag, dtype in DTYPES.items() if tag != "BF16"}
HEADER_BYTES = 16 << 20
MAPPINGS = 256
"""Files mapped at once where each mapping holds a file descriptor; further ones are read."""

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class FileColumn(NamedTuple):
    """One tensor of a file, in parts that follow each other along its first axis."""

    tag: str
    parts: Sequence[NDArray[Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parts together."""
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that was read: a view of the file."""

    tag: str
    values: NDArray[Any]


def write_tensors(
    path: Path, columns: Mapping[str, FileColumn], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Write a file of tensors, and wait for the disk; return its size and CRC-32.

    The content is on the disk then; its name in the folder may not be.

    Args:
        path: The new file; nothing may be there.
        columns: Name -> tensor; its parts are contiguous arrays of the type of its tag.
        metadata: Further texts for the header. `crc32`, that of the tensors' bytes, and `layout`,
            that of the rest of the header, are added.

    Raises:
        InspectionError: There are too many tensors for one file.
        OSError: The disk is full, or the like. The file is removed.
    """
    order = list(DTYPES)
    names = sorted(columns, key=lambda name: (-order.index(columns[name].tag), name))
    parts = [
        part.reshape(-1).view(np.uint8).data
        for name in names
        for part in columns[name].parts
        if part.size
    ]
    check = 0
    for data in parts:
        check = zlib.crc32(data, check)
    header = _header(names, columns, {**metadata, "crc32": f"{check:08x}"})
    size, check = len(header), zlib.crc32(header)
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            file.write(header)
            for data in parts:
                file.write(data)
                size, check = size + len(data), zlib.crc32(data, check)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return size, check


def _header(
    names: Sequence[str], columns: Mapping[str, FileColumn], metadata: Mapping[str, str]
) -> bytes:
    """Return the length and the JSON that stand before the tensors, padded to eight bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tag, shape = columns[name].tag, columns[name].shape
        end = at + math.prod(shape) * DTYPES[tag].itemsize
        entries[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    entries["__metadata__"]["layout"] = _layout(entries)
    text = to_json(entries).encode()
    if len(text) > HEADER_BYTES:
        raise InspectionError(
            f"The names of {len(names):,} tensors take {len(text):,} bytes, and {HEADER_BYTES:,} "
            "are allowed. Keep the full tensors of fewer layers."
        )
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_tensors(path: Path, size: int, check: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name, as read-only views of the file, and the metadata.

    Args:
        path: The file.
        size: How many bytes it must have.
        check: Their CRC-32.

    Raises:
        FileFormatError: The file is missing or damaged.
    """
    data = map_file(path, size)
    if zlib.crc32(data) != check:
        raise FileFormatError(path.name, "its checksum is wrong: the file was changed or damaged")
    return parse_tensors(data, path.name)


def map_file(path: Path, size: int) -> mmap.mmap | bytes:
    """Return the bytes of a regular file of this size: a memory map, if that is possible.

    Raises:
        FileFormatError: It has another size, or cannot be read.
    """
    with open_limited(path) as file:
        descriptor = file.fileno()
        found = os.fstat(descriptor).st_size
        if found != size:
            raise FileFormatError(
                path.name, f"it has {found:,} bytes instead of {size:,}: it is not complete"
            )
        if not size:
            return b""
        if sys.version_info >= (3, 13):
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, trackfd=False)
        if len(_mappings) >= MAPPINGS:
            return file.read(size)
        mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        _mappings.add(mapping)
        return mapping


def parse_tensors(data: mmap.mmap | bytes, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in the bytes of a safetensors file, and the metadata; nothing is copied.

    Raises:
        FileFormatError: The header is wrong, or the tensors do not fill the file without gaps.
    """
    if len(data) < 8:
        raise FileFormatError(where, "it is too short")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(HEADER_BYTES, len(data) - 8):
        raise FileFormatError(where, f"its header claims {length:,} bytes")
    entries = parse(data[8 : 8 + length], where)
    if not isinstance(entries, dict):
        raise FileFormatError(where, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileFormatError(where, "its metadata are not texts by name")
    room = len(data) - 8 - length
    spans = []
    found = {}
    for name, entry in entries.items():
        tag, shape, first, last = _checked(entry, f"{where}, tensor {name[:100]!r}", room)
        count = math.prod(shape)
        spans.append((first, last))
        values = np.frombuffer(data, DTYPES[tag], count, 8 + length + first) if count else None
        found[name] = Tensor(
            tag, np.empty(shape, DTYPES[tag]) if values is None else values.reshape(shape)
        )
    at = 0
    for first, last in sorted(spans):
        if first != at:
            raise FileFormatError(where, "its tensors overlap or leave gaps")
        at = last
    if at != room:
        raise FileFormatError(where, "its tensors do not fill the file")
    return found, metadata


def is_intact(data: mmap.mmap | bytes, metadata: Mapping[str, str]) -> bool:
    """Whether the tensors, and what the header says of each, have the checksums in the metadata."""
    (length,) = struct.unpack("<Q", data[:8])
    layout = _layout(json.loads(data[8 : 8 + length]))
    check = f"{zlib.crc32(memoryview(data)[8 + length :]):08x}"
    return metadata.get("crc32") == check and metadata.get("layout", layout) == layout


def _layout(entries: Mapping[str, Any]) -> str:
    """Return the CRC-32 of the types, shapes and places of the tensors in a header."""
    kept = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    return f"{zlib.crc32(to_json(kept).encode()):08x}"


def _checked(entry: Any, where: str, room: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return the type, shape, first and last byte of a tensor, which lie in the file and agree."""
    try:
        tag, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise FileFormatError(where, "it has no dtype, shape and two data_offsets") from error
    if not isinstance(tag, str) or tag not in DTYPES:
        raise FileFormatError(where, f"its dtype is {str(tag)[:40]!r}, not one of {list(DTYPES)}")
    if not all(type(each) is int and 0 <= each < 1 << 40 for each in (first, last)):
        raise FileFormatError(where, "its data_offsets are not two places in a file")
    shape = shape_of(shape, where, most=8)
    if not first <= last <= room or last - first != math.prod(shape) * DTYPES[tag].itemsize:
        raise FileFormatError(where, "its shape and place do not agree, or lie outside the file")
    return tag, shape, first, last


def shape_of(value: Any, where: str, most: int) -> tuple[int, ...]:
    """Return the shape that a file gives, with at most `most` axes.

    Raises:
        FileFormatError: It is not a shape, or one too large for any memory.
    """
    if not isinstance(value, list) or len(value) > most:
        raise FileFormatError(where, f"its shape is not a list of at most {most} numbers")
    if not all(type(each) is int and 0 <= each < 1 << 40 for each in value):
        raise FileFormatError(where, f"{str(value)[:80]} is not a shape")
    if math.prod(max(each, 1) for each in value) >= 1 << 40:  # even where one of the sizes is 0
        raise FileFormatError(where, f"{str(value)[:80]} is an absurd shape")
    return tuple(value)
