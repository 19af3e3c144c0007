"""Pack sequences into the tensors of a segment, and read them back.

`ScanWriter` calls `pack` and `join`, `StoredSequences` and `repair` read through `PackedSegment`.
Sequences of a segment follow each other, so reading one is slicing. The names and types of the
tensors are the stored format: names may be added, and readers ignore those they do not know, but
none may change. Every shape is checked against the anatomy, because the file may be hostile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._files import DTYPES, TAGS, FileColumn, Tensor, parse, plain, to_json
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import METRICS, STATISTICS, VECTORS, ScannedSequence, Tokens
from torchfmri._scan.store.manifest import SequenceEntry
from torchfmri.exceptions import FileFormatError, InspectionError

Packed = Mapping[str, tuple[str, NDArray[Any]]]
"""Name of a tensor -> its type and the part of one sequence."""

TOKENS = {
    "ids": "I64",
    "lengths": "I64",
    "surprisal": "F32",
    "entropy": "F32",
    "generated": "BOOL",
    "special": "BOOL",
}
"""What a token has; `lengths` are those of its bytes, which follow each other in tokens/bytes."""
GROUPS = ("tokens", "layers", "voxels", "statistics", "tensors", "fields", "vectors")
"""How the names of a segment's tensors begin."""


def pack(sequence: ScannedSequence, anatomy: Anatomy) -> Packed:
    """Return the arrays of a sequence by the names that they have in a segment.

    They are not copied where they are contiguous already.

    Raises:
        InspectionError: One has another shape or type than the scan's anatomy demands.
    """
    tokens, s = sequence.tokens, len(sequence.tokens)
    lengths = np.array([len(each) for each in tokens.spelling], dtype=np.int64)
    text = np.frombuffer(b"".join(tokens.spelling), dtype=np.uint8)
    arrays: dict[str, tuple[Any, str, tuple[int, ...]]] = {
        "tokens/bytes": (text, "U8", text.shape),
        "tokens/lengths": (lengths, "I64", (s,)),
    }
    for name, tag in TOKENS.items():
        if name != "lengths":
            arrays[f"tokens/{name}"] = (getattr(tokens, name), tag, (s,))
    for kind, table, width in (
        ("layers", sequence.layers, len(anatomy.layers)),
        ("voxels", sequence.voxels, len(anatomy.layer)),
    ):
        arrays |= {f"{kind}/{metric}": (each, "F32", (s, width)) for metric, each in table.items()}
    for what, each in sequence.statistics.items():
        shape = (len(anatomy.layers), len(STATISTICS))
        arrays[f"statistics/{what}"] = (each, "F64", shape)
    packed = {
        name: (tag, _contiguous(each, tag, shape, f"{name} of {sequence.name!r}"))
        for name, (each, tag, shape) in arrays.items()
    }
    for what in sequence.statistics:
        tag, each = packed[f"statistics/{what}"]
        packed[f"statistics/{what}"] = (tag, each[None])
    for layer, each in sequence.tensors.items():
        packed[f"tensors/{layer}"] = _pack_tensor(each, s, f"The tensor {layer!r}")
    for choice, vectors in sequence.vectors.items():
        for layer, vector in vectors.items():
            name = f"vectors/{choice}/{layer}"
            packed[name] = ("F32", _contiguous(vector, "F32", np.shape(vector)[:1], name)[None])
    return packed | _pack_fields(sequence)


def _pack_fields(sequence: ScannedSequence) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return the fields as JSON in bytes, and how many these are; nothing if there are none."""
    if not sequence.fields:
        return {}
    where = f"The fields of {sequence.name!r}"
    try:
        text = to_json(plain(sequence.fields, where)).encode()
    except UnicodeEncodeError as error:
        raise InspectionError(
            f"{where} have a text that is not Unicode ({error.object[error.start]!r}): they cannot "
            "be kept. Correct the row."
        ) from error
    return {
        "fields/bytes": ("U8", np.frombuffer(text, np.uint8)),
        "fields/lengths": ("I64", np.array([len(text)], np.int64)),
    }


def _contiguous(values: Any, tag: str, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    dtype = DTYPES[tag]
    if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype != dtype:
        found = f"{getattr(values, 'dtype', type(values))} {getattr(values, 'shape', '')}"
        raise InspectionError(
            f"{where} is {found}, but the scan's layers, voxels and tokens make it {dtype} "
            f"{shape}. Give an array of that type and shape."
        )
    return np.ascontiguousarray(values, dtype)


def _pack_tensor(values: NDArray[Any], s: int, where: str) -> tuple[str, NDArray[Any]]:
    if not isinstance(values, np.ndarray) or values.ndim != 2 or len(values) != s:
        found = getattr(values, "shape", "?")
        raise InspectionError(f"{where} is {found}, not ({s}, units). Give one row per token.")
    dtype = values.dtype.newbyteorder("<")
    if dtype not in TAGS:
        raise InspectionError(
            f"{where} has type {values.dtype}; give one of {list(map(str, TAGS))}."
        )
    values = np.ascontiguousarray(values, dtype)
    if dtype == DTYPES["F32"]:
        bits = values.view("<u4")
        if not (bits & 0xFFFF).any():  # it was bfloat16: half the size, and exact
            return "BF16", (bits >> 16).astype("<u2")
    return TAGS[dtype], values


def signature(packed: Packed) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what two sequences must have in common to share a segment."""
    return {name: (tag, values.shape[1:]) for name, (tag, values) in packed.items()}


def join(sequences: Sequence[Packed]) -> dict[str, FileColumn]:
    """Return the tensors of a segment that holds these sequences, which share a signature."""
    return {
        name: FileColumn(tag, [packed[name][1] for packed in sequences])
        for name, (tag, _) in sequences[0].items()
    }


class PackedSegment:
    """The sequences of a segment, read.

    Args:
        tensors: Its tensors by name.
        sequences: What the manifest says of the sequences in it.
        anatomy: The anatomy of the scan.
        where: The name of the file.

    Raises:
        FileFormatError: They contradict each other.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        sequences: Sequence[SequenceEntry],
        anatomy: Anatomy,
        where: str,
    ) -> None:
        self.sequences, self.anatomy = sequences, anatomy
        self.ends = np.cumsum([0, *(each.tokens for each in sequences)])
        tokens, layers = int(self.ends[-1]), len(anatomy.layers)
        self.groups: dict[str, dict[str, NDArray[Any]]] = {group: {} for group in GROUPS}
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "layers": ("F32", (tokens, layers)),
            "voxels": ("F32", (tokens, len(anatomy.layer))),
            "statistics": ("F64", (len(sequences), layers, len(STATISTICS))),
        }
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            if group not in self.groups:
                continue  # a later version may have more
            tag, shape = shapes.get(group, (tensor.tag, tensor.values.shape))
            if group == "tokens" and key in TOKENS:
                tag, shape = TOKENS[key], (tokens,)
            if group == "vectors":
                tag, shape = "F32", (len(sequences), *(tensor.values.shape[1:] or (1,))[:1])
            if group == "tensors":
                shape = (tokens, *(tensor.values.shape[1:] or (1,))[:1])
            if (tensor.tag, tensor.values.shape) != (tag, shape):
                found = f"{tensor.tag} {tensor.values.shape} instead of {tag} {shape}"
                raise FileFormatError(where, f"{name[:100]!r} is {found}")
            self.groups[group][key] = tensor.values
        self.bits = {
            name.partition("/")[2]
            for name, tensor in tensors.items()
            if name.startswith("tensors/") and tensor.tag == "BF16"
        }
        self._check_tokens(where)
        self.text_ends = _ends(tensors, "tokens", tokens, where)
        self.field_ends = np.empty(0, np.int64)
        if self.groups["fields"]:
            self.field_ends = _ends(tensors, "fields", len(sequences), where)

    def _check_tokens(self, where: str) -> None:
        tokens = self.groups["tokens"]
        absent = [name for name in ("bytes", *TOKENS) if name not in tokens]
        if absent:
            raise FileFormatError(where, f"it has no tokens/{absent[0]}")
        for name in ("generated", "special"):
            if tokens[name].view(np.uint8).max(initial=0) > 1:
                raise FileFormatError(where, f"tokens/{name} is neither true nor false")

    def sequence(self, index: int) -> ScannedSequence:
        """Return one of the sequences; its arrays are views of the file."""
        entry = self.sequences[index]
        rows = slice(int(self.ends[index]), int(self.ends[index + 1]))
        layers, voxels = self.groups["layers"], self.groups["voxels"]
        return ScannedSequence(
            name=entry.name,
            tokens=self._tokens(rows),
            layers={metric: layers[metric][rows] for metric in _ordered(layers, METRICS)},
            voxels={metric: voxels[metric][rows] for metric in _ordered(voxels, METRICS)},
            statistics={
                what: self.groups["statistics"][what][index]
                for what in _ordered(self.groups["statistics"], ())
            },
            tensors={
                layer: self._tensor(layer, rows)
                for layer in _ordered(self.groups["tensors"], self.anatomy.layers)
            },
            condition=entry.condition,
            padding=entry.padding,
            checks=entry.checks,
            fields=self._fields(index),
            vectors=self._vectors(index),
        )

    def _fields(self, index: int) -> Mapping[str, Any]:
        if not len(self.field_ends):
            return {}
        first, last = self.field_ends[index : index + 2].tolist()
        where = f"the fields of {self.sequences[index].name[:100]!r}"
        found = parse(self.groups["fields"]["bytes"][first:last].tobytes(), where)
        if not isinstance(found, dict):
            raise FileFormatError(where, "they are not a JSON object")
        return found

    def _vectors(self, index: int) -> dict[str, dict[str, NDArray[np.float32]]]:
        found: dict[str, dict[str, NDArray[np.float32]]] = {}
        for key, values in self.groups["vectors"].items():
            choice, _, layer = key.partition("/")
            found.setdefault(choice, {})[layer] = values[index]
        layers = self.anatomy.layers
        return {
            choice: {layer: found[choice][layer] for layer in _ordered(found[choice], layers)}
            for choice in _ordered(found, VECTORS)
        }

    def _tokens(self, rows: slice) -> Tokens:
        tokens = self.groups["tokens"]
        ends = self.text_ends[rows.start : rows.stop + 1].tolist()
        text = tokens["bytes"][ends[0] : ends[-1]].tobytes()
        spelling = tuple(text[first - ends[0] : last - ends[0]] for first, last in pairwise(ends))
        return Tokens(
            ids=tokens["ids"][rows],
            spelling=spelling,
            surprisal=tokens["surprisal"][rows],
            entropy=tokens["entropy"][rows],
            generated=tokens["generated"][rows],
            special=tokens["special"][rows],
        )

    def _tensor(self, layer: str, rows: slice) -> NDArray[Any]:
        values = self.groups["tensors"][layer][rows]
        if layer in self.bits:
            return (values.astype("<u4") << 16).view("<f4")
        return values


def _ends(tensors: Mapping[str, Tensor], group: str, count: int, where: str) -> NDArray[np.int64]:
    """Return where each of `count` texts ends in the bytes of a group, after 0.

    Raises:
        FileFormatError: The lengths of the texts are not those of the bytes.
    """
    text, lengths = tensors.get(f"{group}/bytes"), tensors.get(f"{group}/lengths")
    if text is None or text.tag != "U8" or text.values.ndim != 1:
        raise FileFormatError(where, f"{group}/bytes are not bytes in a row")
    if lengths is None or (lengths.tag, lengths.values.shape) != ("I64", (count,)):
        raise FileFormatError(where, f"{group}/lengths are not {count} numbers")
    values = lengths.values
    if values.min(initial=0) < 0 or values.max(initial=0) > len(text.values):
        raise FileFormatError(where, f"the lengths of the {group} are wrong")
    if int(values.sum()) != len(text.values):
        raise FileFormatError(where, f"the lengths of the {group} do not add up to their bytes")
    return np.concatenate(([0], np.cumsum(values)))


def _ordered(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """Return the names, those in `first` in that order, then the others by alphabet."""
    found = set(names)
    return [name for name in first if name in found] + sorted(found.difference(first))
