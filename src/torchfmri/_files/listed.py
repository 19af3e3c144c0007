"""Lists of files with their sizes and digests, by which the files of a folder belong together.

Incidents list their files with it, and scans use `sha256_of`. The list itself stands in a sealed
record: without that seal, whoever changes a file could change its digest. Digests protect against
damage and mixed-up files, not against an author who writes a whole new folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchfmri._files.regular import list_names, open_limited, size_of
from torchfmri.exceptions import FileFormatError

_DIGEST = re.compile("[0-9a-f]{64}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal digits.

    Raises:
        FileFormatError: It is missing, or no regular file.
    """
    with open_limited(path) as file:
        found = hashlib.sha256()
        while piece := file.read(1 << 20):
            found.update(piece)
        return found.hexdigest()


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> size and digest of every file in a folder, for JSON."""
    return {
        name: {"bytes": size_of(folder / name), "sha256": sha256_of(folder / name)}
        for name in list_names(folder)
    }


def compare_files(folder: Path, listed: Mapping[str, Any]) -> dict[str, FileFormatError]:
    """Return name -> what is wrong, for each file that is not the one that `list_files` listed.

    The sizes are compared first, so a file of another size is not read. If the list
    comes from elsewhere, check its names first: a name must not lead out of the folder.
    """
    found = {}
    for name, entry in listed.items():
        try:
            size = size_of(folder / name)
            if size != entry["bytes"]:
                reason = f"it has {size:,} bytes instead of {entry['bytes']:,}"
                raise FileFormatError(name, f"{reason}: it is damaged, or is another file")
            if sha256_of(folder / name) != entry["sha256"]:
                reason = "its SHA-256 is another: it is damaged, or is another file"
                raise FileFormatError(name, reason)
        except FileFormatError as error:
            found[name] = error
    return found


def is_listing(value: Any) -> bool:
    """Whether a value has the form of what `list_files` returns."""
    return isinstance(value, dict) and all(
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and _DIGEST.fullmatch(str(entry.get("sha256"))) is not None
        for entry in value.values()
    )
