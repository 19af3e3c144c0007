"""Loading a scan from its folder."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torchfmri._scans.folder import list_names
from torchfmri._scans.meta import read_meta
from torchfmri._scans.scan import Scan
from torchfmri._scans.stored_sequences import StoredSequences


def load(path: str | PathLike[str]) -> Scan:
    """The scan in a folder, without reading its sequences: they are mapped when asked for.

    A scan that is being written can be loaded: it has the sequences committed so far, and
    `Scan.refresh` adds those committed since. Files that are damaged are named in `Scan.problems`
    and passed over; the rest is readable. Nothing is ever written, and nothing in a scan is code.

    Args:
        path: What `Scan.save` or `torchfmri scan` wrote.

    Raises:
        ScanFormatError: It is no scan, or its meta.json is damaged.
    """
    folder = Path(path).absolute()
    list_names(folder)  # says so where there is none
    anatomy, meta = read_meta(folder)
    return Scan(anatomy, StoredSequences(folder, anatomy), meta)
