"""Describe a scan as labelled arrays: all tokens of all sequences in a row, by layer and voxel.

`Scan.to_xarray` and the exports to Zarr and NetCDF use this. The names of variables, dimensions and
coordinates are public: users' notebooks rely on them. A `Variable` yields its rows one sequence at
a time, so that an export does not hold the scan in memory. A new name must also stand in
`_RESERVED`, otherwise a field of a dataset may take it.
"""

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
from torchfmri._scan.record.sequence import METRICS, STATISTICS, ScannedSequence, Tokens
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
        """Return all rows, (token, width)."""
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
    """Return the quantities of a scan by name, nan where a sequence does not have one.

    Args:
        anatomy: The anatomy of the scan.
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
        raise InspectionError(
            f"The tensors of {layer!r} have different widths: {sorted(widths)}. Save sequences of "
            "different models in scans of their own."
        )
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
    """Return the coordinates of a scan and the statistics of its layers, without the quantities.

    Raises:
        InspectionError: xarray is not installed.
    """
    with from_extra("Labelled arrays need xarray and zarr", "export"):
        import xarray
    parts = [_token_labels(0, Tokens.none())]
    prompt: dict[str, list[Any]] = {"name": [], "padding": []}
    names = [*parts[0], *prompt, *_RESERVED, *METRICS]
    columns = [each for each in field_columns(sequences, names) if each.field != "condition"]
    rows: dict[str, list[Any]] = {"condition": [], **{each.name: [] for each in columns}}
    lengths: list[int] = []
    statistics: list[Mapping[str, NDArray[np.float64]]] = []
    for index, sequence in enumerate(sequences):
        parts.append(_token_labels(index, sequence.tokens))
        for key in prompt:
            prompt[key].append(getattr(sequence, key))
        rows["condition"].append(sequence.condition)
        for each in columns:
            rows[each.name].append(each.value(sequence.fields))
        lengths.append(len(sequence))
        statistics.append(sequence.statistics)
    coordinates: dict[str, Any] = {
        key: ("token", np.concatenate([part[key] for part in parts])) for key in parts[0]
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


def _token_labels(index: int, tokens: Tokens) -> dict[str, NDArray[Any]]:
    """Return the coordinates of the tokens of one sequence, the `index`-th of its scan."""
    return {
        "sequence": np.full(len(tokens), index),
        "position": np.arange(len(tokens)),
        "id": tokens.ids,
        "text": np.array([*tokens.pieces, None], dtype=object)[:-1],
        **{key: getattr(tokens, key) for key in ("surprisal", "entropy", "generated", "special")},
    }


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
    """Return the whole scan as a labelled Dataset in memory; see `Scan.to_xarray`."""
    dataset = labels(anatomy, sequences, meta)
    return dataset.assign(
        {
            name: (variable.dimensions, variable.together(), {"long_name": variable.note})
            for name, variable in find_variables(anatomy, sequences).items()
        }
    )
