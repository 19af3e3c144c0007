"""Save a whole scan: into a new folder, in place of another, or added to one.

`Scan.save` calls `save`. A new or replaced scan is written beside its place and moved there when it
is complete, so that an error leaves what was there. `require_replaceable` refuses to replace a
folder that has anything in it that we did not write: it may be the user's home.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_target
from torchfmri._files import list_names, new_folder
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.folder import META, is_ours
from torchfmri._scan.store.writer import ScanWriter
from torchfmri.exceptions import InspectionError


def save(
    path: str | os.PathLike[str],
    anatomy: Anatomy,
    sequences: Iterable[ScannedSequence],
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
    append: bool = False,
) -> None:
    """Write a scan into a folder: completely, or not at all.

    Args:
        path: The folder.
        anatomy: The anatomy of the scanned model.
        sequences: What to write.
        meta: What was measured and how.
        overwrite: Whether a scan that is there is replaced.
        append: Whether the sequences are added to a scan that is there.

    Raises:
        InspectionError: There is something already, and neither was asked for; or it is not a scan.
        OSError: The disk is full, or the like.
    """
    target = check_target("path", path)
    if overwrite and append:
        raise InspectionError(
            f"overwrite=True replaces the scan in {str(target)!r}, append=True adds to it. Choose "
            "one of the two."
        )
    target = target.resolve() if target.is_symlink() else target
    if append:
        with ScanWriter(target, anatomy, meta, commit_seconds=float("inf")) as writer:
            for sequence in sequences:
                writer.append(sequence)
        return

    def require_free() -> None:
        require_replaceable(target, overwrite)

    with (
        new_folder(target, require_free) as new,
        ScanWriter(new, anatomy, meta, commit_seconds=float("inf")) as writer,
    ):
        for sequence in sequences:
            writer.append(sequence)


def require_replaceable(path: Path, overwrite: bool) -> None:
    """Raise where a scan cannot be saved under this name: something is there that must stay."""
    if not os.path.lexists(path) or (path.is_dir() and not list_names(path)):
        return
    if not overwrite:
        raise InspectionError(
            f"{str(path)!r} exists. Write overwrite=True to replace it, append=True to add to it, "
            "or choose another folder."
        )
    foreign = [name for name in list_names(path) if not is_ours(name)]
    if foreign or not (path / META).is_file():
        reason = f"has {foreign[0]!r} in it" if foreign else "has no meta.json"
        raise InspectionError(
            f"{str(path)!r} {reason}: it is not a scan that torchfmri wrote, so it is not "
            "replaced. Choose another folder."
        )
