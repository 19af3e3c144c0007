"""Save a contrast in one file: its arrays as safetensors, everything else in the header.

`Contrast.save` calls `write_contrast`, and `loading` reads the file. `FLOATS`, `PLAIN` and the
names of the tensors are the stored format: files written before must still be read, so that names
may be added and none may change. The header is sealed with a checksum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._files import TAGS, FileColumn, new_file, seal, write_tensors
from torchfmri.exceptions import InspectionError

if TYPE_CHECKING:
    from torchfmri._contrast.record import Contrast

FORMAT = "torchfmri-contrast"
VERSION = 1
FLOATS = ("effect", "g", "ci_low", "ci_high", "statistic", "dof", "p", "q")
PLAIN: dict[str, Any] = {
    "question": str, "conditions": [str], "test": str, "alpha": float, "two_sided": bool,
    "height_control": (str, None), "metric": str, "level": str, "tokens": str, "model": str,
    "prompts": {str: [str]}, "dof_num": (int, None), "permutations": int, "notes": [str],
    "calibration": ({str: (str, float)}, None), "scans": [str],
}  # fmt: skip
"""The fields of a contrast that stand in the header as JSON, with the form of each."""


def write_contrast(contrast: Contrast, path: Path) -> None:
    """Write the file, completely or not at all."""
    columns = contrast.columns
    layers = list(dict.fromkeys(columns.layer.tolist()))
    place = {layer: index for index, layer in enumerate(layers)}
    modules = {
        str(layer): str(kind) for layer, kind in zip(columns.layer, columns.module, strict=True)
    }
    kinds = sorted(set(columns.kind.tolist()))
    tensors: dict[str, NDArray[Any]] = {
        **{name: getattr(contrast, name).astype("<f8") for name in (*FLOATS, "weights")},
        **{name: getattr(contrast, name).astype("<i8") for name in ("n_a", "n_b")},
        "survives": contrast.survives.astype("?"),
        "column/layer": np.array([place[each] for each in columns.layer], "<i8"),
        "column/kind": np.array([kinds.index(each) for each in columns.kind], "<i8"),
        **{f"column/{name}": getattr(columns, name).astype("<i8") for name in ("start", "count")},
    }
    if contrast.p_max is not None:
        tensors["p_max"] = contrast.p_max.astype("<f8")
    differences: Mapping[str, NDArray[np.float64]] = {}
    with contextlib.suppress(InspectionError):  # a scan may have been made without mean vectors
        differences = contrast.differences
    for layer, vector in differences.items():
        tensors[f"difference/{layer}"] = np.asarray(vector, "<f8")
    record = {name: getattr(contrast, name) for name in PLAIN}
    if contrast.calibration is not None:
        record["calibration"] = contrast.calibration._asdict()
    record |= {"layers": layers, "modules": modules, "kinds": kinds}
    if columns.label is not None:
        record["labels"] = [str(each) for each in columns.label]
    parts = {
        name: FileColumn(TAGS[each.dtype], [np.ascontiguousarray(each)])
        for name, each in tensors.items()
    }
    sealed = seal(record, "The contrast").decode()
    header = {"format": FORMAT, "version": str(VERSION), "record": sealed}
    with new_file(path) as new:
        write_tensors(new, parts, header)
