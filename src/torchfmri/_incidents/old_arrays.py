"""The arrays of an incident of version 0.1: an `.npz` file of bytes, as `numpy.savez` writes it.

`stored_data` reads with it what no version writes any more; nothing needs to be added. The zip file
is read by hand: its entries are not compressed and follow each other, and each is an array of
bytes. Anything else is refused, so that a small file cannot stand for a large one.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._files import map_file, size_of
from torchfmri.exceptions import FileFormatError

_ENTRY, _END, _LONG = b"PK\x03\x04", b"PK\x05\x06", 0xFFFFFFFF
_NAME = re.compile(rb"([0-9]{1,9})\.npy")
_ARRAY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '\|u1', 'fortran_order': False, "
    rb"'shape': \(([0-9]{1,13}),\), \} *\n",
    re.DOTALL,
)


def read_arrays(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Return the arrays by name, as views of the file.

    Raises:
        FileFormatError: It is damaged, or no such file.
    """
    data = memoryview(map_file(path, size_of(path)))
    found: dict[str, NDArray[np.uint8]] = {}
    at = 0
    while bytes(data[at : at + 4]) == _ENTRY:
        name, at, size, check = _entry(data, at, path.name)
        content = data[at : at + size]
        if len(content) != size or zlib.crc32(content) != check:
            raise FileFormatError(path.name, f"{name!r} in it is damaged: its checksum is wrong")
        found[name] = _values(content, f"{path.name}, {name}.npy")
        at += size
    end = bytes(data[-22:])
    if end[:4] != _END or len(end) < 22 or struct.unpack("<H", end[10:12])[0] != len(found) % 65536:
        raise FileFormatError(path.name, "it is not complete, or no file of numpy.savez")
    return found


def _entry(data: memoryview, at: int, where: str) -> tuple[str, int, int, int]:
    """Return the name of an entry, where its content begins, how long it is, and its CRC-32."""
    header = bytes(data[at : at + 30])
    if len(header) < 30:
        raise FileFormatError(where, "it is not complete")
    flags, method = struct.unpack("<HH", header[6:10])
    check, packed, size, name_bytes, extra_bytes = struct.unpack("<IIIHH", header[14:30])
    name = _NAME.fullmatch(data[at + 30 : at + 30 + name_bytes])
    extra = bytes(data[at + 30 + name_bytes : at + 30 + name_bytes + extra_bytes])
    if size == _LONG and len(extra) >= 20 and extra[:2] == b"\x01\x00":
        size, packed = struct.unpack("<QQ", extra[4:20])
    if flags & ~0x800 or method or packed != size or name is None:
        raise FileFormatError(where, "it is compressed, or no file of numpy.savez")
    return name[1].decode(), at + 30 + name_bytes + extra_bytes, size, check


def _values(content: memoryview, where: str) -> NDArray[Any]:
    header = _ARRAY.match(content)
    if header is None or int(header[1]) != len(content) - header.end():
        raise FileFormatError(where, "it is not an array of bytes")
    return np.frombuffer(content, np.uint8)[header.end() :]
