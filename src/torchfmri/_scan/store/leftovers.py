"""Finish or undo what an interrupted writer left in a scan's folder.

`ScanWriter` calls `tidy` once, after it has locked its manifest and before it writes anything. A
complete segment without a line in the manifest is committed if the manifest ends in a line that was
cut off and its sequences are new. It is deleted if all its sequences are committed already, and
left for `repair` otherwise. An unfinished segment is deleted, unless a damaged line may have named
it. A file with its final name is never deleted, because it was committed once, even if its line is
lost. `test_store_kills.py` kills writers at every step and checks that nothing committed is lost.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchfmri._files import list_names, write_all
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.store.folder import (
    PENDING,
    SEGMENT,
    final_name,
    number_of,
    pending_name,
    rank_of,
)
from torchfmri._scan.store.manifest import Manifest, SegmentEntry
from torchfmri._scan.store.repair import describe_checked
from torchfmri.exceptions import FileFormatError


class Leftovers:
    """The segments of one writer that its manifest may fail to list.

    Args:
        path: The folder.
        rank: The number of the writer.
        anatomy: The anatomy of the scanned model.
        names: The committed sequences. Recovered ones are added to it.
    """

    def __init__(self, path: Path, rank: int, anatomy: Anatomy, names: set[str]) -> None:
        self._path, self._rank, self._anatomy, self._names = path, rank, anatomy, names

    def tidy(self, manifest: int, own: Manifest) -> tuple[int, int]:
        """Return the next segment number and the offset to append at, after tidying up.

        A file with its final name is never removed, even if its line was lost.

        Args:
            manifest: A descriptor of the writer's manifest, which it has locked.
            own: What that manifest says.
        """
        committed = {each.name for each in own.segments}
        names = [name for name in list_names(self._path) if _number(name, self._rank) >= 0]
        unnamed = [name for name in names if SEGMENT.fullmatch(name) and name not in committed]
        finished: list[SegmentEntry] = []
        for name in sorted(filter(PENDING.fullmatch, names), key=number_of):
            final = final_name(name)
            if final not in committed:
                found = self._look_at(name, own)
                finished += [found] if isinstance(found, SegmentEntry) else []
                unnamed += [name] if found == "unclear" else []
            elif final not in names:
                (self._path / name).rename(self._path / final)
            else:
                (self._path / name).unlink()
        size, end = own.size, os.fstat(manifest).st_size
        if unnamed:
            size = end  # the rest may be the damaged line of one of these segments
        else:
            os.ftruncate(manifest, size)
        if size > own.size or not own.ended:
            write_all(manifest, b"\n", size)
            size += 1
        os.fsync(manifest)
        for segment in finished:
            size += self._adopt(segment, manifest, size)
        numbers = (_number(name, self._rank) for name in {*names, *committed})
        return 1 + max(numbers, default=-1), size

    def _look_at(self, name: str, own: Manifest) -> SegmentEntry | str:
        """Return the entry to commit for a segment without a line, or what became of it.

        "gone": it was deleted. "kept": it was left alone. "unclear": it may have lost its line.
        """
        try:
            segment = describe_checked(self._path / name, self._anatomy)
        except FileFormatError:
            # It is unfinished, unless its line is the one that is damaged or cut off.
            if own.problems or own.torn:
                return "unclear"
        else:
            sequences = {each.name for each in segment.sequences}
            if own.torn and sequences.isdisjoint(self._names):
                self._names |= sequences
                return segment
            if not sequences <= self._names:
                # These were never committed: they can be scanned again, or repaired.
                return "unclear" if own.problems or own.torn else "kept"
        (self._path / name).unlink()
        return "gone"

    def _adopt(self, segment: SegmentEntry, manifest: int, size: int) -> int:
        """Commit a segment that is whole but has no line; returns how long its line is."""
        line = segment.line()
        write_all(manifest, line, size)
        (self._path / pending_name(segment.name)).rename(self._path / segment.name)
        return len(line)


def _number(name: str, rank: int) -> int:
    return number_of(name) if rank_of(name) == f"{rank:03d}" else -1
