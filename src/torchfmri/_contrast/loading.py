"""Load a contrast from its file: `torchfmri.load_contrast`.

The file may be damaged or made by an enemy: nothing in it is run, the forms and lengths of all
parts are checked, and whatever is wrong becomes a `FileFormatError`. `saving` has the format; a
field that it adds must be optional here, because older files do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_path
from torchfmri._contrast.calibration import Calibration
from torchfmri._contrast.prompt_table import PromptColumns
from torchfmri._contrast.record import Contrast
from torchfmri._contrast.saving import FLOATS, FORMAT, PLAIN, VERSION
from torchfmri._files import is_intact, map_file, parse_tensors, require_forms, size_of, unseal
from torchfmri.exceptions import FileFormatError

_FORMS = {**PLAIN, "layers": [str], "modules": {str: str}, "kinds": [str]}


def load_contrast(path: str | PathLike[str]) -> Contrast:
    """Return the contrast in a file that `Contrast.save` wrote.

    It cannot be calibrated again: the prompts' own values are in the scan.

    Raises:
        FileFormatError: It is not such a file, or it is damaged.
    """
    target = check_path("path", path)
    data = map_file(target, size_of(target))
    tensors, metadata = parse_tensors(data, target.name)
    if metadata.get("format") != FORMAT:
        raise FileFormatError(target.name, f"its format is not {FORMAT!r}")
    if metadata.get("version") != str(VERSION):
        raise FileFormatError(
            target.name,
            f"it has version {metadata.get('version', '?')[:20]} of the format, this torchfmri "
            f"reads version {VERSION}: install a newer one",
        )
    if not is_intact(data, metadata):
        raise FileFormatError(target.name, "its checksum is wrong: it was changed or damaged")
    record = unseal(metadata.get("record", "").encode(), target.name)
    arrays = {name: each.values for name, each in tensors.items()}
    try:
        return _contrast(record, arrays)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = f"its parts do not fit together ({type(error).__name__}: {error})"
        raise FileFormatError(target.name, reason) from error


def _contrast(record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Contrast:
    require_forms(record, _FORMS)
    if not record["conditions"] or not set(record["conditions"]) <= record["prompts"].keys():
        raise ValueError("its conditions are none of its prompts'")
    layers = np.array(record["layers"], object)
    modules, kinds = record["modules"], np.array(record["kinds"], object)
    layer = layers[arrays["column/layer"]]
    labels = record.get("labels")
    if labels is not None:
        require_forms(record, {"labels": [str]})
    columns = PromptColumns(
        layer=layer,
        module=np.array([modules[each] for each in layer], object),
        kind=kinds[arrays["column/kind"]],
        start=arrays["column/start"],
        count=arrays["column/count"],
        label=None if labels is None else np.array(labels, object),
    )
    lengths = {len(arrays[name]) for name in (*FLOATS, "n_a", "n_b", "survives", "column/start")}
    if columns.label is not None:
        lengths.add(len(columns.label))
    if lengths != {len(columns)}:
        raise ValueError(f"lengths {sorted(lengths)}")
    plain: dict[str, Any] = {name: record[name] for name in PLAIN}
    calibration = plain.pop("calibration")
    tested: dict[str, Any] = {
        name: arrays[name] for name in (*FLOATS, "weights", "n_a", "n_b", "survives")
    }
    return Contrast(
        **plain
        | {
            "conditions": tuple(record["conditions"]),
            "prompts": {name: tuple(each) for name, each in record["prompts"].items()},
            "notes": tuple(record["notes"]),
            "scans": tuple(record["scans"]),
        },
        calibration=None if calibration is None else Calibration(**calibration),
        columns=columns,
        p_max=arrays.get("p_max"),
        stored={
            name.partition("/")[2]: values
            for name, values in arrays.items()
            if name.startswith("difference/")
        },
        **tested,
    )
