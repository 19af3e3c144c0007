"""Load a scan from its folder: `torchfmri.load`.

The folder may be damaged, half written or made by an enemy: it is only read, nothing in it is run,
and what is wrong is either a `FileFormatError` or a line in `Scan.problems`. Which files there are
is the business of `store`; this file only finds the folder and puts a `Scan` together.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torchfmri._arguments import check_path, shown
from torchfmri._files import find_replaced, list_names
from torchfmri._scan.scan_record import Scan
from torchfmri._scan.store.folder import META
from torchfmri._scan.store.meta import read_meta
from torchfmri._scan.store.stored_sequences import StoredSequences
from torchfmri._text import printable
from torchfmri.exceptions import FileFormatError, InspectionError

_SHOWN = 5


def load(path: str | PathLike[str]) -> Scan:
    """Return the scan in a folder, without reading its sequences: they are mapped when asked for.

    A scan that is being written can be loaded: it has the sequences committed so far, and
    `Scan.refresh` adds those committed since. Files that are damaged are named in `Scan.problems`
    and passed over; the rest is readable. Nothing is ever written, and nothing in a scan is code.

    Args:
        path: What `Scan.save` or `torchfmri scan` wrote.

    Raises:
        FileFormatError: It is not a scan, or its meta.json is damaged.
    """
    try:
        place = check_path("path", path)
    except InspectionError as error:
        raise FileFormatError(shown(path), str(error)) from error
    folder = find_replaced(place.absolute())
    _require_meta(folder, list_names(folder))
    anatomy, meta = read_meta(folder)
    return Scan(anatomy, StoredSequences(folder, anatomy), meta)


def _require_meta(folder: Path, names: list[str]) -> None:
    """Raise for a folder that is none of ours, with what is in it: the scan may be one of these."""
    if META in names:
        return
    shown = ", ".join(map(printable, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    scans = [name for name in names if (folder / name / META).is_file()]
    hint = f" Did you mean {str(folder / scans[0])!r}?" if scans else ""
    raise FileFormatError(str(folder), f"it has no {META}, and holds {shown or 'nothing'}.{hint}")
