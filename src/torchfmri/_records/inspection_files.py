"""An inspection in a file: one safetensors file, whose metadata say what each tensor is.

`Inspection.save` and `load` call it; `history_store` uses its `Columns`, `write_sealed` and
`read_sealed` for the same kind of file. What is written here must be readable for ever: a change of
`_record`, `_call` or `_value` needs a new `VERSION` that reads the old one too. A file may be
damaged or hostile, so whatever its description makes Python raise becomes a FileFormatError. A mask
that many values share is written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchfmri._capture import TokenMask
from torchfmri._files import (
    FileColumn,
    is_intact,
    map_file,
    new_file,
    parse_tensors,
    require_forms,
    seal,
    size_of,
    unseal,
    write_tensors,
)
from torchfmri._files import Tensor as Stored
from torchfmri._records.record import Call, Record
from torchfmri._records.values import Value, check_what
from torchfmri.exceptions import FileFormatError, InspectionError
from torchfmri.statistics import Statistics

KIND, VERSION = "inspection", 1
_FORMS: dict[str, Any] = {
    "model": str, "loss": (float, None), "missing": {str: str}, "notes": {str: [str]},
    "tokens": [str], "layers": [str], "records": [dict], "token_ids": (list, None),
    "kept": (list, None),
}  # fmt: skip
_RECORD: dict[str, Any] = {"layer": str, "kind": str, "names": [str], "what": [str]}
_TAGS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_DTYPES = {tag: dtype for dtype, tag in _TAGS.items()}


class Columns(dict[str, FileColumn]):
    """The tensors of a file, by a number."""

    def add(self, tensor: Tensor) -> str:
        """Keep a tensor and return its name."""
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.dtype not in _TAGS:  # eight-bit floats and the like
            tensor = tensor.float()
        tag = _TAGS[tensor.dtype]
        raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        values = raw.numpy() if tensor.ndim else raw.reshape(1).numpy()
        name = str(len(self))
        self[name] = FileColumn(tag, [values.view("<u2") if tag == "BF16" else values])
        return name


def tensor_of(stored: Stored, shape: tuple[int, ...]) -> Tensor:
    """Return a stored tensor as one of torch's, in memory of its own.

    Raises:
        ValueError: torch has no such tensors, or they have no such shape.
    """
    if stored.tag not in _DTYPES:
        raise ValueError(f"{stored.tag} is none of {', '.join(_DTYPES)}")
    values = np.array(stored.values)
    if stored.tag == "BF16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(values).to(_DTYPES[stored.tag]).reshape(shape)


def write_sealed(path: Path, kind: str, said: Mapping[str, Any], columns: Columns) -> None:
    """Write a file of tensors with a description, whole or not at all."""
    described = {"kind": kind, "version": VERSION, **said}
    text = seal(described, f"The {kind}").decode()
    with new_file(path) as new:
        write_tensors(new, columns, {"torchfmri": text})


def read_sealed(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the description and the tensors of a file.

    Raises:
        FileFormatError: It is damaged, or of another kind.
    """
    if not path.exists():
        raise FileFormatError(str(path), "there is no such file")
    data = map_file(path, size_of(path))
    tensors, metadata = parse_tensors(data, path.name)
    if "torchfmri" not in metadata:
        raise FileFormatError(path.name, f"it is not a {kind} that torchfmri saved")
    said = unseal(metadata["torchfmri"].encode(), path.name)
    if said.get("kind") != kind or said.get("version") != VERSION:
        found = f"{said.get('kind')!r} of version {said.get('version')!r}"
        raise FileFormatError(path.name, f"it holds {found}, not {kind!r} of version {VERSION}")
    if not is_intact(data, metadata):
        raise FileFormatError(path.name, "its checksum is wrong: it was changed or damaged")
    return said, tensors


def kind_of(path: Path) -> str:
    """Return what a file of ours holds; empty for any other file."""
    if not path.is_file() or path.suffix in (".json", ".jsonl"):
        return ""
    try:
        _, metadata = parse_tensors(map_file(path, size_of(path)), path.name)
        return str(unseal(metadata["torchfmri"].encode(), path.name).get("kind"))
    except (FileFormatError, KeyError):
        return ""


# -- writing -------------------------------------------------------------------------------------


def save_inspection(inspection: Any, path: Path) -> None:
    """Write an inspection, with its tensors or statistics, to one file.

    Raises:
        InspectionError: It has tensors that cannot be kept.
    """
    columns = Columns()
    masks: dict[int, list[str | None]] = {}
    unique = {id(each): each for each in inspection.values()}.values()
    records = [_record(each, columns, masks) for each in unique]
    grids = {name: getattr(inspection, name) for name in ("token_ids", "kept")}
    write_sealed(
        path,
        KIND,
        {
            "model": inspection.model,
            "loss": inspection.loss,
            "missing": inspection.missing,
            "notes": inspection.notes,
            "tokens": list(inspection.tokens),
            "layers": list(inspection),
            "records": records,
            **{
                name: None if each is None else [columns.add(each), list(each.shape)]
                for name, each in grids.items()
            },
        },
        columns,
    )


def _record(record: Record, columns: Columns, masks: dict[int, list[str | None]]) -> dict[str, Any]:
    return {
        "layer": record.layer,
        "kind": record.kind,
        "names": list(record.names),
        "what": list(record.what),
        "calls": [_call(call, columns, masks) for call in record.calls],
        "parameters": [
            [backward, what, name, _value(value, columns, masks)]
            for backward, found in record._parameters.items()
            for what, values in found.items()
            for name, value in values.items()
        ],
    }


def _call(call: Call, columns: Columns, masks: dict[int, list[str | None]]) -> dict[str, Any]:
    return {
        "index": call.index,
        "order": call.order,
        "differentiable": list(call._differentiable),
        "values": [
            [what, path, None if value is None else _value(value, columns, masks)]
            for (what, path), value in call._values.items()
        ],
        "gradients": [
            [backward, what, path, _value(value, columns, masks)]
            for (backward, what, path), value in call._gradients.items()
        ],
    }


def _value(value: Value, columns: Columns, masks: dict[int, list[str | None]]) -> dict[str, Any]:
    if value.has_tensor and (
        value.tensor.is_complex() or value.tensor.is_nested or value.tensor.layout != torch.strided
    ):
        raise InspectionError(
            f"A tensor of {value.dtype} in layout {value.tensor.layout} cannot be saved: keep "
            "it as real, dense numbers, or inspect with keep='statistics'."
        )
    mask = value._mask
    if mask is not None and id(mask) not in masks:
        masks[id(mask)] = [None if each is None else columns.add(each) for each in mask]
    return {
        "path": value.path,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "tensor": columns.add(value.tensor) if value.has_tensor else None,
        "statistics": None if value.has_tensor else value.statistics.to_dict(),
        "mask": None if mask is None else masks[id(mask)],
    }


# -- reading -------------------------------------------------------------------------------------


def load_inspection(path: Path) -> dict[str, Any]:
    """Return what `save_inspection` wrote: the attributes of an inspection, and `records` by layer.

    Raises:
        FileFormatError: The file is damaged, or no inspection.
    """
    said, tensors = read_sealed(path, KIND)
    try:
        require_forms(said, _FORMS)
        return _Reader(tensors).attributes(said)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, InspectionError) as error:
        raise FileFormatError(path.name, f"its description is wrong ({error})") from error


class _Reader:
    """Builds records from their description in a file; a mask that several share is made once."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors
        self._masks: dict[tuple[str | None, ...], TokenMask] = {}

    def attributes(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of an inspection."""
        by_name: dict[str, Record] = {}
        for each in said["records"]:
            require_forms(each, _RECORD)
            record = Record(each["layer"], each["kind"], frozenset(map(check_what, each["what"])))
            record.names = tuple(each["names"])
            record.calls = [self._call(record.layer, call) for call in each["calls"]]
            for backward, what, name, value in each["parameters"]:
                found = record._parameters.setdefault(int(backward), {}).setdefault(what, {})
                found[name] = self._value(value)
            by_name |= dict.fromkeys(record.names, record)
        grids = {
            name: None if said[name] is None else self._tensor(*said[name])
            for name in ("token_ids", "kept")
        }
        plain = {name: said[name] for name in ("model", "loss", "missing", "notes", "tokens")}
        return {**plain, **grids, "records": {layer: by_name[layer] for layer in said["layers"]}}

    def _call(self, layer: str, said: dict[str, Any]) -> Call:
        call = Call(layer, int(said["index"]), int(said["order"]))
        call._differentiable = tuple(said["differentiable"])
        for what, path, value in said["values"]:
            call._values[what, path] = None if value is None else self._value(value)
        for backward, what, path, value in said["gradients"]:
            call._gradients[int(backward), what, path] = self._value(value)
        return call

    def _value(self, said: dict[str, Any]) -> Value:
        dtype, shape = getattr(torch, str(said["dtype"]), None), tuple(map(int, said["shape"]))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{str(said['dtype'])[:40]!r} is not a dtype")
        source = torch.empty(shape, dtype=dtype, device="meta")
        value = Value(said["path"], source, nn.Module, self._mask(said["mask"]))
        if said["tensor"] is not None:
            value.keep(self._tensor(said["tensor"], shape))
        else:
            value.keep_statistics(Statistics.from_dict(said["statistics"]))
        return value

    def _mask(self, said: list[str | None] | None) -> TokenMask | None:
        if said is None:
            return None
        if (key := tuple(said)) not in self._masks:
            parts = [None if name is None else self._tensors[name] for name in key]
            self._masks[key] = TokenMask(
                *(None if part is None else tensor_of(part, part.values.shape) for part in parts)
            )
        return self._masks[key]

    def _tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        return tensor_of(self._tensors[name], tuple(shape))
