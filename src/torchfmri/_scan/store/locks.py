"""Make the folder of a scan, and lock it while somebody writes into it.

`ScanWriter` calls these functions before it writes. The folder is locked shared, so that several
writers work in it and nobody replaces it; each manifest is locked alone. Locks are those of the
operating system, which lets go of them when a process dies: nothing has to be cleaned up.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchfmri._files import list_names, lock, make_folder, recover
from torchfmri._scan.store.folder import META, is_ours
from torchfmri.exceptions import FileFormatError, InspectionError


def make_scan_folder(path: Path) -> None:
    """Make the folder of a scan; refuse one that holds something else."""
    recover(path)
    make_folder(path)
    foreign = [name for name in list_names(path) if not is_ours(name)]
    if foreign and not (path / META).exists():
        raise InspectionError(
            f"{str(path)!r} is not a scan, and not empty ({foreign[0]!r}). Choose another folder."
        )


def hold_folder(path: Path) -> int | None:
    """Return a descriptor of the folder, locked: nobody replaces it, other writers may hold it."""
    if sys.platform == "win32":
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        lock(descriptor, shared=True)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(descriptor)
        raise InspectionError(
            f"{str(path)!r} is being replaced by another process. Try again when it is done."
        ) from error
    return descriptor


def lock_manifest(manifest: int, path: Path) -> None:
    """Refuse a second writer of the same rank; the system lets go when the process ends."""
    if os.fstat(manifest).st_nlink > 1:
        raise FileFormatError(path.name, "it has a second name elsewhere; copy the scan first")
    try:
        lock(manifest)
    except BlockingIOError as error:
        raise InspectionError(
            f"Another process, or another writer of this one, is writing {str(path)!r}. Close it, "
            "or give each writer a rank of its own."
        ) from error
