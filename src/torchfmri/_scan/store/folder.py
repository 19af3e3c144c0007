"""The names of the files in a scan's folder.

Everything in `store` uses these names, and no other file makes one up. They are the stored format:
changing a pattern makes older scans unreadable. A new kind of file needs a line in `is_ours`,
otherwise `overwrite=True` refuses the folder as something foreign.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchfmri.exceptions import FileFormatError

T = TypeVar("T")

META = "meta.json"
MANIFEST = re.compile(r"manifest-rank([0-9]{3,6})\.jsonl")
SEGMENT = re.compile(r"segment-rank([0-9]{3,6})-([0-9]{6,12})\.safetensors")
PENDING = re.compile(r"segment-rank([0-9]{3,6})-([0-9]{6,12})\.pending")
SET_ASIDE = re.compile(r"manifest-rank[0-9]{3,6}\.damaged|segment-rank[0-9-]{10,19}\.spare")
UNFINISHED = re.compile(r"\.meta-rank[0-9]{3,6}\.tmp")


def manifest_name(rank: int) -> str:
    """Return the name of a writer's manifest."""
    return f"manifest-rank{rank:03d}.jsonl"


def segment_name(rank: int, number: int) -> str:
    """Return the name of a writer's segment."""
    return f"segment-rank{rank:03d}-{number:06d}.safetensors"


def rank_of(name: str) -> str:
    """Return the digits of the writer in the name of a manifest or a segment."""
    return name.partition("-rank")[2][:6].partition(".")[0].partition("-")[0]


def number_of(name: str) -> int:
    """Return the number of a segment among those of its writer; -1 for another file."""
    matched = SEGMENT.fullmatch(name) or PENDING.fullmatch(name)
    return int(matched[2]) if matched else -1


def pending_name(segment: str) -> str:
    """Return the name of a segment until the manifest names it, and the moment after."""
    return segment.removesuffix(".safetensors") + ".pending"


def final_name(segment: str) -> str:
    """Return the name of a segment, pending or not, once the manifest names it."""
    return segment.replace(".pending", ".safetensors")


def read_segment_file(folder: Path, name: str, read: Callable[[Path], T]) -> T:
    """Return what `read` makes of a segment, which a crash may have left under its pending name.

    Raises:
        FileFormatError: As `read` does.
    """
    final, pending = folder / name, folder / pending_name(name)
    for path in (final, pending):
        try:
            return read(path)
        except FileFormatError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return read(final)  # a writer may have renamed it between the two


def is_ours(name: str) -> bool:
    """Return whether the store writes files of this name."""
    return name == META or any(
        pattern.fullmatch(name) for pattern in (MANIFEST, SEGMENT, PENDING, SET_ASIDE, UNFINISHED)
    )
