"""A scan as labelled arrays: all tokens of all sequences in a row, beside layers and voxels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import from_extra
from torchfmri._files import plain
from torchfmri._scan.record.anatomy import KINDS, Anatomy
from torchfmri._scan.record.readouts import PATTERN
from torchfmri._scan.record.sequence import METRICS, STATISTICS, ScannedSequence
from torchfmri._scan.store.fields import field_columns
from torchfmri.exceptions import InspectionError

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True, eq=False)
class Variable:
    """One quantity of all tokens, in parts.

    Attributes:
        dimensions: Their names; the first is "token".
        width: The size of the second.
        dtype: The type of its values.
        note: What it is.
        parts: Gives the rows of each sequence in turn, (s, width) each.
    """

    dimensions: tuple[str, str]
    width: int
    dtype: np.dtype[Any]
    note: str
    parts: Callable[[], Iterator[NDArray[Any]]]

    def together(self) -> NDArray[Any]:
        """All rows, (token, width)."""
        parts = list(self.parts())
        if len(parts) == 1:
            return parts[0].astype(self.dtype, copy=False)
        empty = np.empty((0, self.width), self.dtype)
        return np.concatenate([empty, *parts], dtype=self.dtype)


NOTES = {
    "activation": "root mean square of the activation",
    "gradient": "norm of dL/d output",
    "learning_cost": "norm of the gradient of the parameters",
}


def find_variables(anatomy: Anatomy, sequences: Iterable[ScannedSequence]) -> dict[str, Variable]:
    """The quantities of a scan by name, nan where a sequence does not have one.

    Args:
        anatomy: That of the scan.
        sequences: Something that can be iterated over several times.

    Raises:
        InspectionError: A layer's full tensors have different widths.
    """
    metrics: dict[str, None] = dict.fromkeys(METRICS)
    layers, voxels = set[str](), set[str]()
    tensors: dict[str, list[NDArray[Any]]] = {}
    count = 0
    for sequence in sequences:
        count += 1
        layers, voxels = layers | set(sequence.layers), voxels | set(sequence.voxels)
        for layer, tensor in sequence.tensors.items():
            if layer.endswith(f"@{PATTERN}"):  # has another width in each sequence
                continue
            tensors.setdefault(layer, []).append(np.empty((0, tensor.shape[1]), tensor.dtype))
    metrics |= dict.fromkeys(sorted(layers | voxels))
    float32 = np.dtype(np.float32)
    found = {}
    for metric in metrics:
        note = NOTES.get(metric, metric)
        if metric in voxels:
            parts = _parts(sequences, "voxels", metric, len(anatomy.layer))
            dimensions = ("token", "voxel")
            found[metric] = Variable(dimensions, len(anatomy.layer), float32, note, parts)
        if metric in layers:
            parts = _parts(sequences, "layers", metric, len(anatomy.layers))
            dimensions = ("token", "layer")
            name = f"layer_{metric}"
            found[name] = Variable(dimensions, len(anatomy.layers), float32, note, parts)
    for layer, samples in tensors.items():
        found[f"tensor_{layer}"] = _tensor(
            layer, samples, sequences, complete=len(samples) == count
        )
    return found


def _tensor(
    layer: str,
    samples: Sequence[NDArray[Any]],
    sequences: Iterable[ScannedSequence],
    *,
    complete: bool,
) -> Variable:
    widths = {sample.shape[1] for sample in samples}
    if len(widths) > 1:
        raise InspectionError(f"The tensors of {layer!r} have different widths: {sorted(widths)}.")
    dtype = np.result_type(*samples, *([] if complete else [np.float16]))  # room for nan
    (width,) = widths
    parts = _parts(sequences, "tensors", layer, width)
    note = f"readout {layer}" if "@" in layer else "the activations themselves"
    return Variable(("token", f"unit_{layer}"), width, dtype, note, parts)


def _parts(
    sequences: Iterable[ScannedSequence], table: str, key: str, width: int
) -> Callable[[], Iterator[NDArray[Any]]]:
    def parts() -> Iterator[NDArray[Any]]:
        for sequence in sequences:
            found = getattr(sequence, table).get(key)
            yield np.full((len(sequence), width), np.nan, np.float16) if found is None else found

    return parts


def labels(
    anatomy: Anatomy, sequences: Iterable[ScannedSequence], meta: Mapping[str, Any]
) -> xarray.Dataset:
    """The coordinates of a scan and the statistics of its layers, without the quantities.

    Raises:
        InspectionError: xarray is not installed.
    """
    with from_extra("Labelled arrays need xarray and zarr", "export"):
        import xarray
    token: dict[str, list[NDArray[Any]]] = {
        "sequence": [np.empty(0, np.int64)],
        "position": [np.empty(0, np.int64)],
        "id": [np.empty(0, np.int64)],
        "text": [np.empty(0, object)],
        "surprisal": [np.empty(0, np.float32)],
        "entropy": [np.empty(0, np.float32)],
        "generated": [np.empty(0, bool)],
        "special": [np.empty(0, bool)],
    }
    prompt: dict[str, list[Any]] = {"name": [], "padding": []}
    names = [*token, *prompt, *_RESERVED, *METRICS]
    columns = [each for each in field_columns(sequences, names) if each.field != "condition"]
    rows: dict[str, list[Any]] = {"condition": [], **{each.name: [] for each in columns}}
    lengths: list[int] = []
    statistics: list[Mapping[str, NDArray[np.float64]]] = []
    for index, sequence in enumerate(sequences):
        tokens = sequence.tokens
        token["sequence"].append(np.full(len(tokens), index))
        token["position"].append(np.arange(len(tokens)))
        token["id"].append(tokens.ids)
        token["text"].append(np.array([*tokens.pieces, None], dtype=object)[:-1])
        for key in ("surprisal", "entropy", "generated", "special"):
            token[key].append(getattr(tokens, key))
        for key in prompt:
            prompt[key].append(getattr(sequence, key))
        rows["condition"].append(sequence.condition)
        for each in columns:
            rows[each.name].append(each.value(sequence.fields))
        lengths.append(len(tokens))
        statistics.append(sequence.statistics)
    coordinates: dict[str, Any] = {
        key: ("token", np.concatenate(parts)) for key, parts in token.items()
    }
    coordinates |= {
        key: ("prompt", np.array(values, dtype=np.int64 if key == "padding" else object))
        for key, values in prompt.items()
    }
    # Of tokens, so that dataset.groupby("condition") groups what was measured.
    texts = np.array([*rows.pop("condition"), None], object)[:-1]
    coordinates["condition"] = ("token", np.repeat(texts, lengths))
    coordinates["prompt_condition"] = ("prompt", texts)
    coordinates |= {
        each.name: ("token", np.repeat(each.array(rows[each.name]), lengths)) for each in columns
    }
    coordinates |= _anatomy_labels(anatomy)
    return xarray.Dataset(
        _statistics(anatomy, statistics),
        coordinates,
        {"meta": json.dumps(plain(meta, "The meta of the scan"))},
    ).set_xindex("name")


_RESERVED = (
    "token", "prompt", "layer", "voxel", "statistic", "layer_type", "voxel_layer", "voxel_start",
    "voxel_count", "voxel_kind", "prompt_condition", "statistics_activations",
    "statistics_gradients", "layer_activation", "layer_gradient", "layer_learning_cost",
)  # fmt: skip


def _anatomy_labels(anatomy: Anatomy) -> dict[str, Any]:
    layers, kinds = np.array(anatomy.layers, object), np.array(KINDS, object)
    return {
        "layer": ("layer", layers),
        "layer_type": ("layer", np.array(anatomy.types, object)),
        "voxel_layer": ("voxel", layers[anatomy.layer]),
        "voxel_start": ("voxel", anatomy.start),
        "voxel_count": ("voxel", anatomy.count),
        "voxel_kind": ("voxel", kinds[anatomy.kind]),
        "statistic": ("statistic", np.array(STATISTICS, object)),
    }


def _statistics(
    anatomy: Anatomy, statistics: Sequence[Mapping[str, NDArray[np.float64]]]
) -> dict[str, Any]:
    absent = np.full((len(anatomy.layers), len(STATISTICS)), np.nan)
    return {
        f"statistics_{what}": (
            ("prompt", "layer", "statistic"),
            np.stack([each.get(what, absent) for each in statistics]),
        )
        for what in sorted({what for each in statistics for what in each})
    }


def to_xarray(
    anatomy: Anatomy, sequences: Iterable[ScannedSequence], meta: Mapping[str, Any]
) -> xarray.Dataset:
    """The whole scan as a labelled Dataset in memory; see `Scan.to_xarray`."""
    dataset = labels(anatomy, sequences, meta)
    return dataset.assign(
        {
            name: (variable.dimensions, variable.together(), {"long_name": variable.note})
            for name, variable in find_variables(anatomy, sequences).items()
        }
    )
