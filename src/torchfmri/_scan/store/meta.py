"""`meta.json` of a scan: the format's version, the anatomy, what was measured and how.

`ScanWriter` writes it once, and `loading` reads it first. Two writers may start at the same moment:
only one file is made, and the others compare theirs with it (`require_same`), so that no scan holds
two kinds of measurements. Keys in `VOLATILE` may differ. Keys may be added to `meta`; another
layout needs another `VERSION`, and older versions must still be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchfmri._files import open_regular, plain, read_regular, seal, sync_folder, unseal, write_all
from torchfmri._scan.record.anatomy import KINDS, Anatomy
from torchfmri._scan.record.sequence import STATISTICS
from torchfmri._scan.store.folder import META
from torchfmri.exceptions import FileFormatError, InspectionError

FORMAT = "torchfmri-scan"
VERSION = 1
META_BYTES = 64 << 20
VOLATILE = ("created", "device", "missed", "notes", "order", "places", "run", "versions")
"""Keys of a scan's meta that may differ when sequences are added to it later."""
_VOXELS: dict[str, type[np.integer[Any]]] = {
    "layer": np.int32,
    "start": np.int32,
    "count": np.int32,
    "kind": np.uint8,
}


def sealed_meta(anatomy: Anatomy, meta: Mapping[str, Any]) -> bytes:
    """Return the content of meta.json.

    Raises:
        InspectionError: The meta has something that cannot be kept.
    """
    record = {
        "format": FORMAT,
        "version": VERSION,
        "meta": meta,
        "layers": anatomy.layers,
        "types": anatomy.types,
        "kinds": KINDS,
        "statistics": STATISTICS,
        "voxels": {name: getattr(anatomy, name) for name in _VOXELS},
    }
    data = seal(record, "The meta of the scan", ",\n")
    if len(data) > META_BYTES:
        raise InspectionError(
            f"The layers, voxels and meta of the scan take {len(data):,} bytes, and "
            f"{META_BYTES:,} are allowed. Use larger voxels or fewer layers."
        )
    return data


def write_meta(folder: Path, anatomy: Anatomy, meta: Mapping[str, Any], rank: int) -> bool:
    """Write the file, and return whether it is ours: False if another process was first.

    It is there completely or not at all, and on the disk when this returns.

    Raises:
        InspectionError: The meta has something that cannot be kept.
    """
    data = sealed_meta(anatomy, meta)
    unfinished = folder / f".meta-rank{rank:03d}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    descriptor = open_regular(unfinished, flags)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)
    try:
        os.link(unfinished, folder / META)  # unlike renaming, never replaces one that is there
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if (folder / META).exists():
            return False
        unfinished.rename(folder / META)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(folder)
    return True


def read_meta(folder: Path) -> tuple[Anatomy, dict[str, Any]]:
    """Return the anatomy and the meta of a scan.

    Raises:
        FileFormatError: The file is missing or damaged, or of a later version.
    """
    record = unseal(read_regular(folder / META, META_BYTES), META)
    if record.get("format") != FORMAT:
        raise FileFormatError(META, f"its format is not {FORMAT!r}")
    if record.get("version") != VERSION:
        raise FileFormatError(
            META,
            f"it has version {str(record.get('version'))[:20]} of the format, this torchfmri reads "
            f"version {VERSION}: install a newer one",
        )
    if record.get("kinds") != list(KINDS) or record.get("statistics") != list(STATISTICS):
        raise FileFormatError(META, "its kinds of voxels or its statistics are not those we know")
    meta, voxels = record.get("meta"), record.get("voxels")
    if not isinstance(meta, dict) or not isinstance(voxels, dict):
        raise FileFormatError(META, "it has no meta or no voxels")
    parts = (_names(record.get("layers"), "layers"), _names(record.get("types"), "types"))
    numbers = {name: _numbers(voxels.get(name), name, dtype) for name, dtype in _VOXELS.items()}
    try:
        return Anatomy(*parts, **numbers), meta
    except InspectionError as error:
        raise FileFormatError(META, str(error)) from error


def require_same(
    found: tuple[Anatomy, Mapping[str, Any]], anatomy: Anatomy, meta: Mapping[str, Any], path: Path
) -> None:
    """Raise where a stored scan and sequences that are to be added to it do not belong together.

    Raises:
        InspectionError: It says what differs.
    """
    stored = found[0]
    for name in ("layers", "types"):
        ours, theirs = getattr(anatomy, name), getattr(stored, name)
        if ours != theirs:
            both = zip(ours, theirs, strict=False)
            at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(ours), len(theirs)))
            raise InspectionError(
                f"{str(path)!r} holds a scan of {len(theirs)} layers, yours has {len(ours)}; their "
                f"{name} differ first at {at}: {theirs[at : at + 1]} and {ours[at : at + 1]}. "
                "Scan the same model and layers, or save elsewhere."
            )
    if not all(np.array_equal(getattr(anatomy, name), getattr(stored, name)) for name in _VOXELS):
        raise InspectionError(
            f"{str(path)!r} has the same layers but other voxels ({len(stored.layer)}, yours "
            f"{len(anatomy.layer)}). Use the same voxel size, or save elsewhere."
        )
    # What was read has lists for tuples: write ours the same way.
    ours, theirs = plain(meta, "The meta of the scan"), plain(found[1], META)
    keys = [key for key in {**theirs, **ours} if key not in VOLATILE]
    for key in keys:
        if (key in ours, ours.get(key)) != (key in theirs, theirs.get(key)):
            raise InspectionError(
                f"{str(path)!r} was measured otherwise: {key!r} is {_short(theirs, key)} there and "
                f"{_short(ours, key)} here. Scan with the same settings, or save elsewhere."
            )


def _short(meta: Mapping[str, Any], key: str) -> str:
    return repr(meta[key])[:200] if key in meta else "absent"


def _names(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise FileFormatError(META, f"its {what} are not a list of names")
    if what == "layers" and len(set(values)) != len(values):
        raise FileFormatError(META, "it has a layer twice")
    return tuple(values)


def _numbers(values: Any, what: str, dtype: type[np.integer[Any]]) -> Any:
    limit = np.iinfo(dtype).max
    if not isinstance(values, list) or not all(
        type(each) is int and 0 <= each <= limit for each in values
    ):
        raise FileFormatError(META, f"the {what} of its voxels is not a list of numbers")
    return np.array(values, dtype=dtype)
