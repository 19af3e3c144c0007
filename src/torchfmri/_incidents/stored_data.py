"""Nested data with tensors as sealed JSON and a file of tensors, without pickle.

`stored_incident` keeps calls and weights with it. The structure becomes JSON with a checksum. Each
tensor becomes bytes in a safetensors file under a number; the JSON says of which dtype and shape it
is, and has the size and checksum of that file. Version 0.1 wrote JSON without a checksum and an
`.npz` file; both must still be read. Each tensor can be taken once, so that a small file cannot
become much memory. What cannot be kept (a KV cache) is named in its place, never dropped. A further
kind of value needs a word of its own in `_encode` and `_Decoder`.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchfmri._files import (
    FileColumn,
    open_limited,
    parse,
    read_regular,
    read_tensors,
    seal,
    shape_of,
    size_of,
    unseal,
    write_tensors,
)
from torchfmri._torch import local_part
from torchfmri.exceptions import FileFormatError, InspectionError

JSON_BYTES = 64 << 20
FORMAT = "torchfmri-data"
_LEVELS = 18  # each takes up to three of the 64 that JSON may have here
_PLAIN = (str, int, float, bool, type(None))
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
_WITHOUT_BYTES = re.compile(r"q\w+|bits\w+|u?int[1-7]|float4\w+")  # cannot be viewed as bytes
_OLD_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '\|u1', 'fortran_order': False, "
    rb"'shape': \(([0-9]{1,13}),\), \} *\n",
    re.DOTALL,
)
Bytes: TypeAlias = NDArray[np.uint8]


def save_data(path: Path, data: Any) -> None:
    """Write `data` as `path`.json and `path`.safetensors; what cannot be kept is named in place.

    Raises:
        InspectionError: There is more of it than would be read again.
    """
    arrays: list[Bytes] = []
    structure = _encode(data, arrays, _LEVELS)
    columns = {str(number): FileColumn("U8", [array]) for number, array in enumerate(arrays)}
    file = path.with_suffix(".safetensors")
    size, check = write_tensors(file, columns, {"format": FORMAT})
    record = {
        "format": FORMAT,
        "version": 1,
        "bytes": size,
        "checksum": f"{check:08x}",
        "data": structure,
    }
    sealed = seal(record, path.name, ",\n")
    if len(sealed) > JSON_BYTES:
        raise InspectionError(
            f"{path.name} cannot be kept: apart from tensors it takes {len(sealed):,} bytes, and "
            f"{JSON_BYTES:,} are allowed."
        )
    path.with_suffix(".json").write_bytes(sealed)


def load_data(path: Path) -> Any:
    """Return what `save_data` wrote; `Omitted` stands for what could not be kept.

    Raises:
        FileFormatError: The files are not there, are damaged, or are not such files.
    """
    file, old = path.with_suffix(".json"), path.with_suffix(".npz")
    content = read_regular(file, JSON_BYTES)
    # A damaged bit in a file of ours must not lead to the old files, which have no checksum.
    if old.exists() and not path.with_suffix(".safetensors").exists():
        structure, arrays = parse(content, file.name), _old_arrays(old)
    else:
        record = unseal(content, file.name)
        size, check = record.get("bytes"), record.get("checksum")
        if record.get("format") != FORMAT or record.get("version") != 1 or "data" not in record:
            raise FileFormatError(file.name, f"it is not a {FORMAT} of version 1")
        if type(size) is not int or re.fullmatch("[0-9a-f]{8}", str(check)) is None:
            raise FileFormatError(file.name, "it lacks the size and checksum of its tensors")
        structure = record["data"]
        tensors, _ = read_tensors(path.with_suffix(".safetensors"), size, int(str(check), 16))
        arrays = {name: each.values for name, each in tensors.items() if each.tag == "U8"}
    return _Decoder(arrays, file.name).decode(structure)


def _old_arrays(path: Path) -> dict[str, Bytes]:
    """Return the arrays of an `.npz` file of version 0.1 by name: bytes, never compressed.

    Anything else is refused, so that a small file cannot stand for a large one.
    """
    found: dict[str, Bytes] = {}
    try:
        with open_limited(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            stored = all(each.compress_type == zipfile.ZIP_STORED for each in entries)
            if not stored or sum(each.file_size for each in entries) > size_of(path):
                raise FileFormatError(path.name, "it is compressed, or no file of numpy.savez")
            for each in entries:
                content = archive.read(each)
                header = _OLD_HEADER.match(content)
                if header is None or int(header[1]) != len(content) - header.end():
                    raise FileFormatError(path.name, f"{each.filename!r} is not an array of bytes")
                name = each.filename.removesuffix(".npy")
                found[name] = np.frombuffer(content, np.uint8)[header.end() :]
    except FileFormatError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError) as error:
        raise FileFormatError(
            path.name, f"it is no complete file of numpy.savez: {error}"
        ) from error
    return found


class Omitted:
    """Stands for an object that could not be kept (a KV cache, a function)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}, which was not kept>"


def omissions(data: Any) -> list[str]:
    """Return the kinds of objects in `data` that could not be kept."""
    if isinstance(data, Omitted):
        return [data.kind]
    if isinstance(data, Mapping):
        return [kind for each in data.values() for kind in omissions(each)]
    if isinstance(data, (list, tuple)):
        return [kind for each in data for kind in omissions(each)]
    return []


def _encode(value: Any, arrays: list[Bytes], levels: int) -> Any:
    """Return a value in JSON's types; its tensors go to the end of `arrays`."""
    if isinstance(value, Tensor):
        return _encode_tensor(value, arrays)
    if isinstance(value, Omitted):
        return {"omitted": value.kind}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"array": _encode_tensor(torch.from_numpy(np.ascontiguousarray(value)), arrays)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(float(value))}
    if isinstance(value, _PLAIN):
        return value if _can_be_kept(value) else {"omitted": type(value).__name__}
    if isinstance(value, (Mapping, list, tuple)) and not levels:
        return {"omitted": f"deeply nested {type(value).__name__}"}
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[_encode(each, arrays, levels - 1) for each in item] for item in items]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(each, arrays, levels - 1) for each in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"omitted": type(value).__name__}


def _can_be_kept(value: Any) -> bool:
    """Whether JSON holds a value as it is: of texts only Unicode, of integers only 64 bits."""
    if isinstance(value, str):
        return value.encode(errors="ignore").decode() == value
    return not isinstance(value, int) or abs(value) < 1 << 64


def _encode_tensor(tensor: Tensor, arrays: list[Bytes]) -> Any:
    local = local_part(tensor)
    if local.is_nested or local.is_quantized or local.is_meta:
        return {"omitted": f"{type(tensor).__name__} ({local.layout})"}
    dense = (local.to_dense() if local.layout != torch.strided else local).cpu().contiguous()
    # Bytes: neither NumPy nor safetensors knows every dtype.
    arrays.append(dense.reshape(-1).view(torch.uint8).numpy())
    dtype = str(dense.dtype).removeprefix("torch.")
    return {"tensor": str(len(arrays) - 1), "dtype": dtype, "shape": list(dense.shape)}


class _Decoder:
    """Reads a structure; every tensor can be taken once, so that a file gives no more than it has.

    Args:
        arrays: The bytes of the tensors by number.
        where: The file, for errors.
    """

    def __init__(self, arrays: Mapping[str, Bytes], where: str) -> None:
        self._arrays, self._where = dict(arrays), where

    def decode(self, value: Any) -> Any:
        """Return the value that a part of the structure stands for."""
        if isinstance(value, _PLAIN):
            return value
        if not isinstance(value, dict) or not value:
            raise self._damage(f"{repr(value)[:80]} is none of the values that are written")
        kind = next(iter(value))
        inner = value[kind]
        if set(value) == {"tensor", "dtype", "shape"}:
            return self._tensor(value)
        if len(value) > 1:
            raise self._damage(f"{list(value)[:4]} are not the keys of a value")
        if kind == "array":
            return self._array(inner)
        if kind == "number" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if kind == "dict" and isinstance(inner, list):
            return self._dict(inner)
        if kind in ("list", "tuple") and isinstance(inner, list):
            found = [self.decode(each) for each in inner]
            return found if kind == "list" else tuple(found)
        if kind == "dtype" and isinstance(inner, str) and inner in _DTYPES:
            return _DTYPES[inner]
        if kind == "omitted" and isinstance(inner, str):
            return Omitted(inner[:200])
        raise self._damage(f"{kind[:40]!r} of {repr(inner)[:80]} is not a value")

    def _tensor(self, value: Mapping[str, Any]) -> Tensor:
        """Return a tensor in memory of its own, and strike it off: it can be taken once."""
        name, dtype, shape = value["tensor"], value["dtype"], value["shape"]
        if not isinstance(name, str) or name not in self._arrays:
            raise self._damage(f"there is no tensor {str(name)[:40]!r}, or it is taken twice")
        content = self._arrays.pop(name)
        if not isinstance(dtype, str) or dtype not in _DTYPES or _WITHOUT_BYTES.fullmatch(dtype):
            raise self._damage(f"{str(dtype)[:40]!r} is not a dtype of a tensor")
        shape = shape_of(shape, f"{self._where}, tensor {name!r}", most=64)
        found = _DTYPES[dtype]
        if content.ndim != 1 or len(content) != math.prod(shape) * found.itemsize:
            raise self._damage(f"tensor {name!r} has {content.size:,} bytes, not {dtype} {shape}")
        if not len(content):
            return torch.empty(shape, dtype=found, device="cpu")
        values = torch.from_numpy(content.copy())
        return (values.ne(0) if found == torch.bool else values.view(found)).reshape(shape)

    def _array(self, value: Any) -> NDArray[Any]:
        tensor = self.decode(value)
        try:
            if isinstance(tensor, Tensor):
                return tensor.numpy()
        except TypeError as error:  # NumPy has no such dtype
            raise self._damage(f"{tensor.dtype} is not a dtype of an array") from error
        raise self._damage("an array is not a tensor")

    def _dict(self, items: list[Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for item in items:
            if not isinstance(item, list) or len(item) != 2:
                raise self._damage("a dict has something else than pairs")
            key = self.decode(item[0])
            if not isinstance(key, (*_PLAIN, torch.dtype)) and not _is_plain_tuple(key):
                raise self._damage(f"a {type(key).__name__} is not a key")
            if key in found:
                raise self._damage(f"{repr(key)[:80]} is a key twice")
            found[key] = self.decode(item[1])
        return found

    def _damage(self, reason: str) -> FileFormatError:
        return FileFormatError(self._where, reason)


def _is_plain_tuple(key: Any) -> bool:
    return isinstance(key, tuple) and all(
        isinstance(each, _PLAIN) or _is_plain_tuple(each) for each in key
    )
