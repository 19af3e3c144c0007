"""Nested data with tensors as JSON and NumPy arrays, without pickle.

The structure becomes JSON. Each tensor becomes an array of an `.npz` file under a number; dtypes
that NumPy does not have (bfloat16, float8) are kept as bytes, and the JSON says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfmri.exceptions import InspectionError

_PLAIN = (str, int, float, bool, type(None))


def save_data(path: Path, data: Any) -> None:
    """Write `data` as `path`.json and `path`.npz; what cannot be kept is named in its place."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    structure = _encode(data, arrays)
    path.with_suffix(".json").write_text(json.dumps(structure, indent=1), "utf-8")
    with path.with_suffix(".npz").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_data(path: Path) -> Any:
    """What `save_data` wrote; `Omitted` stands for what could not be kept.

    Raises:
        InspectionError: The files are not there, or are not such files.
    """
    try:
        structure = json.loads(path.with_suffix(".json").read_text("utf-8"))
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            return _decode(structure, arrays)
    except FileNotFoundError as error:
        raise InspectionError(f"There is no {error.filename!r}: it is not an incident.") from error
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError) as error:
        raise InspectionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class Omitted:
    """Stands for an object that could not be kept (a KV cache, a function)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}, which was not kept>"


def omissions(data: Any) -> list[str]:
    """The kinds of objects in `data` that could not be kept."""
    if isinstance(data, Omitted):
        return [data.kind]
    if isinstance(data, Mapping):
        return [kind for each in data.values() for kind in omissions(each)]
    if isinstance(data, (list, tuple)):
        return [kind for each in data for kind in omissions(each)]
    return []


def _encode(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, Tensor):
        return _encode_tensor(value, arrays)
    if isinstance(value, Omitted):
        return {"omitted": value.kind}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"array": _encode_tensor(torch.from_numpy(np.ascontiguousarray(value)), arrays)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return {"number": repr(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        items = [[_encode(k, arrays), _encode(v, arrays)] for k, v in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(each, arrays) for each in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"omitted": type(value).__name__}


def _encode_tensor(tensor: Tensor, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    detached = tensor.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    if local.is_nested or local.is_quantized or local.is_meta:
        return {"omitted": f"{type(tensor).__name__} ({local.layout})"}
    dense = (local.to_dense() if local.layout != torch.strided else local).cpu().contiguous()
    key = str(len(arrays))
    # Bytes: NumPy does not know every dtype.
    arrays[key] = dense.reshape(-1).view(torch.uint8).numpy()
    dtype = str(dense.dtype).removeprefix("torch.")
    return {"tensor": key, "dtype": dtype, "shape": list(dense.shape)}


def _decode(value: Any, arrays: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        content = torch.from_numpy(arrays[value["tensor"]].copy())
        if not len(content):
            return torch.empty(value["shape"], dtype=dtype)
        return content.view(dtype).reshape(value["shape"])
    if "array" in value:
        return _decode(value["array"], arrays).numpy()
    if "number" in value:
        return float(value["number"])
    if "dict" in value:
        return {_decode(k, arrays): _decode(v, arrays) for k, v in value["dict"]}
    if "list" in value:
        return [_decode(each, arrays) for each in value["list"]]
    if "tuple" in value:
        return tuple(_decode(each, arrays) for each in value["tuple"])
    return getattr(torch, value["dtype"]) if "dtype" in value else Omitted(value["omitted"])
