"""Write a scan into a folder so that what is committed stays, whatever happens next.

`save` and `run/dataset` use `ScanWriter`. The order of its steps is the promise: the segment is
written and flushed, then its line is appended to the manifest, then the segment gets its final
name. A crash between any two steps leaves a scan that can be read and written on. Sizes of segments
and the time between commits may change freely; the order may not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torchfmri._files import (
    open_regular,
    sync_folder,
    write_all,
    write_tensors,
)
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.folder import (
    META,
    manifest_name,
    pending_name,
    rank_of,
    segment_name,
)
from torchfmri._scan.store.leftovers import Leftovers
from torchfmri._scan.store.locks import hold_folder, lock_manifest, make_scan_folder
from torchfmri._scan.store.manifest import (
    LINE_BYTES,
    SegmentEntry,
    SequenceEntry,
    describe,
    read_committed,
    read_manifest,
    require_readable,
)
from torchfmri._scan.store.meta import read_meta, require_same, sealed_meta, write_meta
from torchfmri._scan.store.packing import Packed, join, pack, signature
from torchfmri.exceptions import FileFormatError, InspectionError

SEGMENT_SEQUENCES = 1024
"""Sequences of one segment at most, however short they are."""
DESCRIPTION_BYTES = 4 << 20
"""A segment lists its own sequences if that takes no more."""


class ScanWriter:
    """Adds sequences to a scan's folder, which it creates where there is none.

    Sequences are collected until they fill a segment. Then the segment is written and flushed to
    the disk, and after it one line of the manifest: the mark that they are committed. Whatever
    interrupts this, a reader sees the sequences of the lines that are whole, and no others. Until
    its line is there a segment has the ending `.pending`, so that one which was never finished and
    one whose line was lost later can be told apart.

    Args:
        path: The folder.
        anatomy: The anatomy of the scanned model.
        meta: What was measured and how; what is in `meta.VOLATILE` may differ from that of an
            existing scan, everything else must agree.
        rank: Which of several writers this is; each has a manifest and segments of its own.
        segment_bytes: How much is collected before it is committed.
        commit_seconds: How long a sequence waits at most until the next `append` or
            `commit_when_due` commits it; 0 commits each at once.

    Attributes:
        names: The sequences that were committed when this writer was opened, by all writers. Those
            of segments that are missing or too short are not among them, so that resuming scans
            them again.

    Raises:
        InspectionError: The folder holds something else, or another process writes it.
        FileFormatError: The folder holds a scan that is damaged so that nothing may be added.

    Examples:
        >>> import tempfile, numpy as np
        >>> from torchfmri._scan.record.sequence import Tokens
        >>> folder = tempfile.mkdtemp()
        >>> anatomy = Anatomy.of_widths(["mlp"], ["Linear"], [4], [2])
        >>> nan, no = np.full(1, np.nan, np.float32), np.zeros(1, bool)
        >>> tokens = Tokens(np.array([7]), (b"Hi",), nan, nan, no, no)
        >>> with ScanWriter(folder, anatomy, {"model": "tiny"}) as writer:
        ...     writer.append(ScannedSequence("first", tokens, {}, {}))
        >>> ScanWriter(folder, anatomy, {"model": "tiny"}).names
        frozenset({'first'})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        anatomy: Anatomy,
        meta: Mapping[str, Any],
        *,
        rank: int = 0,
        segment_bytes: int = 4 << 20,
        commit_seconds: float = 5.0,
    ) -> None:
        if not 0 <= rank < 1_000_000:
            raise InspectionError(f"rank is {rank}; it is a number from 0 to 999,999.")
        self.path, self.anatomy, self.rank = Path(path), anatomy, rank
        self.segment_bytes, self.commit_seconds = segment_bytes, commit_seconds
        self._pending: list[tuple[SequenceEntry, Packed]] = []
        self._pending_bytes, self._line_bytes, self._oldest = 0, 0, 0.0
        self._failed = False
        anatomy.check()
        sealed_meta(anatomy, meta)  # refuse before anything is made
        make_scan_folder(self.path)
        name = manifest_name(rank)
        self._manifest: int | None = None
        self._folder = hold_folder(self.path)
        try:
            self._manifest = open_regular(self.path / name, os.O_RDWR | os.O_CREAT)
            lock_manifest(self._manifest, self.path / name)
            if not write_meta_once(self.path, anatomy, meta, rank):
                require_same(read_meta(self.path), anatomy, meta, self.path)
            committed, _ = read_committed(self.path)
            own = read_manifest(self.path / name)
            lines = {each.name for each in own.segments}
            self._names = {
                sequence.name
                for segment in committed
                if segment.name in lines or rank_of(segment.name) != rank_of(name)
                for sequence in segment.sequences
            }
            if not own.is_whole:
                raise FileFormatError(name, f"{own.problems[-1]} Repair it first: torchfmri repair")
            leftovers = Leftovers(self.path, rank, anatomy, self._names)
            self._number, self._size = leftovers.tidy(self._manifest, own)
            self.names = frozenset(self._names)
            sync_folder(self.path)
        except BaseException:
            self._release()
            raise

    def append(self, sequence: ScannedSequence) -> None:
        """Add a sequence; it is committed when a segment is full or is due.

        Its arrays are kept as they are until then: do not write to them.

        Raises:
            InspectionError: The scan has a sequence of this name, or the sequence does not fit the
                anatomy.
            OSError: The disk is full, or the like; see `commit`.
        """
        self._require_open()
        if sequence.name in self._names:
            raise InspectionError(
                f"{str(self.path)!r} has a sequence {sequence.name!r} already. Leave out those in "
                "writer.names, or give this one another name."
            )
        entry = SequenceEntry.of(sequence)
        packed = pack(sequence, self.anatomy)
        line_bytes = require_readable(entry, manifest_name(self.rank))  # refuse now, not later
        if self._pending and (
            signature(packed) != signature(self._pending[0][1])
            or self._line_bytes + line_bytes > LINE_BYTES // 2
        ):
            self.commit()
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending.append((entry, packed))
        self._names.add(sequence.name)
        self._line_bytes += line_bytes
        self._pending_bytes += sum(values.nbytes for _, values in packed.values())
        if self._pending_bytes >= self.segment_bytes or len(self._pending) >= SEGMENT_SEQUENCES:
            self.commit()
        self.commit_when_due()

    def commit_when_due(self) -> None:
        """Commit if a sequence has waited for `commit_seconds`; call it at every token if you like.

        Raises:
            OSError: As in `commit`.
        """
        if self._pending and time.monotonic() - self._oldest >= self.commit_seconds:
            self.commit()

    def commit(self) -> None:
        """Put everything that was appended on the disk, so that it survives whatever comes.

        Raises:
            OSError: The disk is full, or the like. What was committed before is intact; the rest is
                still here, and `commit` can be tried again.
        """
        if not self._pending:
            return
        manifest = self._require_open()
        self._require_place(manifest)
        name = segment_name(self.rank, self._number)
        pending = self.path / pending_name(name)
        self._number += 1
        try:
            os.ftruncate(manifest, self._size)  # a line that an interruption left half written
            entries, packed = zip(*self._pending, strict=True)
            size, check = write_tensors(pending, join(packed), _metadata(entries))
            sync_folder(self.path)
            line = SegmentEntry(name, size, check, entries).line()
            write_all(manifest, line, self._size)
        except OSError as error:
            self._failed = True
            with contextlib.suppress(OSError):
                os.ftruncate(manifest, self._size)
                pending.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"{error.strerror or error}: {len(self._pending)} sequences of {str(self.path)!r} "
                f"could not be written (first: {self._pending[0][0].name!r}). Those committed "
                "before are intact. Make room and call commit() again, or scan again: it resumes",
            ) from error
        with contextlib.suppress(OSError):  # it is committed; readers know both names
            pending.rename(self.path / name)
        self._size += len(line)
        self._pending, self._failed = [], False
        self._pending_bytes = self._line_bytes = 0

    def close(self) -> None:
        """Commit, and let go of the folder.

        Raises:
            OSError: As in `commit`; the folder is let go nevertheless.
        """
        try:
            if self._manifest is not None:
                self.commit()
        finally:
            self._release()

    def __enter__(self) -> ScanWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._failed:
            self._release()  # it is on its way up already; another attempt would fail the same way
        else:
            self.close()

    def _require_open(self) -> int:
        if self._manifest is None:
            raise InspectionError(f"The writer of {str(self.path)!r} is closed. Open a new one.")
        return self._manifest

    def _require_place(self, manifest: int) -> None:
        """Raise if the folder is no longer where it was: what is written now would be lost."""
        ours = os.fstat(manifest)
        try:
            same = os.path.samestat(ours, (self.path / manifest_name(self.rank)).stat())
        except FileNotFoundError:
            same = False
        if not same:
            self._failed = True
            raise InspectionError(
                f"{str(self.path)!r} was moved, removed or replaced while it was written: "
                f"{len(self._pending)} sequences are not on the disk (first: "
                f"{self._pending[0][0].name!r}). Scan them again into another folder."
            )

    def _release(self) -> None:
        for descriptor in (self._manifest, self._folder):
            if descriptor is not None:
                os.close(descriptor)  # this unlocks it too
        self._manifest = self._folder = None


def _metadata(sequences: Sequence[SequenceEntry]) -> dict[str, str]:
    """Return what a segment says of itself, so that it can be read without its manifest."""
    text = describe(sequences)
    own = {"sequences": text} if len(text) <= DESCRIPTION_BYTES else {}
    return {"format": "torchfmri-segment", **own}


def write_meta_once(folder: Path, anatomy: Anatomy, meta: Mapping[str, Any], rank: int) -> bool:
    """Write meta.json unless there is one, and return whether it was written."""
    return not os.path.lexists(folder / META) and write_meta(folder, anatomy, meta, rank)
