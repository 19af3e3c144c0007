"""The sequences of a scan, in memory or on disk, behind one interface.

A `Scan` holds `SequencesInMemory` or `StoredSequences` and asks both the same questions. Stored
ones are read when they are asked for: opening a scan reads manifests and sizes only, a segment is
checked and mapped when one of its sequences is read, and a few segments stay open. The viewer reads
from several threads, hence the lock. A damaged segment is entered in `problems` and never read
again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from torchfmri._files import Tensor, list_names, read_tensors, sha256_of
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.folder import MANIFEST, META, read_segment_file
from torchfmri._scan.store.manifest import (
    SegmentEntry,
    SequenceEntry,
    describe,
    limited,
    read_committed,
)
from torchfmri._scan.store.packing import PackedSegment
from torchfmri.exceptions import FileFormatError, InspectionError

KEPT = 8
"""Segments that stay open."""


class _Place(NamedTuple):
    segment: SegmentEntry
    number: int

    @property
    def entry(self) -> SequenceEntry:
        return self.segment.sequences[self.number]


class LazySequences(Sequence[ScannedSequence]):
    """Sequences that are made when they are asked for; a subclass says how one is read."""

    def read(self, index: int) -> ScannedSequence:
        """Return the sequence with this number, from 0."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> ScannedSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScannedSequence]: ...
    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        return self.read(chosen) if isinstance(chosen, int) else [self.read(k) for k in chosen]


class SequencesInMemory(LazySequences):
    """The sequences of a scan that is not stored; it answers what `StoredSequences` answers.

    Args:
        sequences: They are not copied, so that a list may grow.
    """

    folder: Path | None = None

    def __init__(self, sequences: Sequence[ScannedSequence]) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[ScannedSequence]:
        return iter(self._sequences)

    def read(self, index: int) -> ScannedSequence:
        """Return the sequence with this number, from 0."""
        return self._sequences[index]

    @property
    def problems(self) -> tuple[str, ...]:
        """Nothing: there is no file that could be damaged."""
        return ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each sequence."""
        return tuple(each.name for each in self)

    @property
    def entries(self) -> list[SequenceEntry]:
        """Name, length and condition of each sequence."""
        return [SequenceEntry.of(each) for each in self]

    def refresh(self) -> int:
        """Return 0: nobody adds to it but its owner."""
        return 0

    def verify(self) -> tuple[str, ...]:
        """Return no problem."""
        return ()

    def digest(self) -> str:
        """Raise: only files have a digest.

        Raises:
            InspectionError: Always.
        """
        raise InspectionError("This scan is in memory: save it, and load it from its folder.")


class StoredSequences(LazySequences):
    """The committed sequences of a folder, those of each writer in the order of their commits.

    At opening the manifests are read and the sizes of the segments compared. The checksum of a
    segment is compared when one of its sequences is read for the first time. A damaged one is
    entered in `problems`; `[]` raises for its sequences and iterating passes over them.

    Args:
        folder: The scan.
        anatomy: Its anatomy.
    """

    def __init__(self, folder: Path, anatomy: Anatomy) -> None:
        self.folder, self.anatomy = folder, anatomy
        self._places: list[_Place] = []
        self._opening_problems: list[str] = []
        self._damaged: dict[str, FileFormatError] = {}
        self._open: OrderedDict[str, PackedSegment] = OrderedDict()
        self._lock = threading.Lock()
        self.refresh()

    @property
    def problems(self) -> tuple[str, ...]:
        """The files that could not be read, as far as is known."""
        return (*self._opening_problems, *(str(error) for error in self._damaged.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each sequence, without reading its segment."""
        return tuple(place.entry.name for place in self._places)

    @property
    def entries(self) -> list[SequenceEntry]:
        """Name, length and condition of each sequence, without reading its segment."""
        return [place.entry for place in self._places]

    def refresh(self) -> int:
        """Read what was committed since the last time, and return how many sequences were added."""
        segments, problems = read_committed(self.folder)
        known = {place.entry.name: place for place in self._places}
        added = 0
        for segment in segments:
            for number, entry in enumerate(segment.sequences):
                place = _Place(segment, number)
                other = known.setdefault(entry.name, place)
                if other is place:
                    self._places.append(place)
                    added += 1
                elif (other.segment.name, other.number) != (segment.name, number):
                    problems.append(
                        f"{segment.name!r} has {entry.name[:100]!r} again, which is in "
                        f"{other.segment.name!r} already; the first one counts."
                    )
        self._opening_problems = limited(problems)
        return added

    def verify(self) -> tuple[str, ...]:
        """Compare the checksum of every segment, reading the whole scan; return all problems."""
        for segment in {place.segment.name: place.segment for place in self._places}.values():
            try:
                self._segment(segment)
            except FileFormatError:
                continue  # it has been entered
        return self.problems

    def digest(self) -> str:
        """Return the SHA-256 of the list of files with theirs, as `sha256sum` prints it.

        Raises:
            FileFormatError: A file is missing.
        """
        manifests = filter(MANIFEST.fullmatch, list_names(self.folder))
        lines = {name: sha256_of(self.folder / name) for name in (META, *manifests)}
        for name in {place.segment.name for place in self._places}:
            lines[name] = read_segment_file(self.folder, name, sha256_of)
        text = "".join(f"{lines[name]}  {name}\n" for name in sorted(lines))
        return hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> ScannedSequence:
        """Return the sequence with this number, from 0.

        Raises:
            FileFormatError: Its segment is damaged.
        """
        return self._read(self._places[index])

    def __iter__(self) -> Iterator[ScannedSequence]:
        for place in tuple(self._places):
            try:
                sequence = self._read(place)
            except FileFormatError:
                continue  # it has been entered in the problems
            yield sequence

    def _read(self, place: _Place) -> ScannedSequence:
        return self._segment(place.segment).sequence(place.number)

    def _segment(self, entry: SegmentEntry) -> PackedSegment:
        with self._lock:
            if entry.name in self._damaged:
                raise self._damaged[entry.name]
            if entry.name not in self._open:
                try:
                    read = self._read_segment(entry)
                except FileFormatError as error:
                    self._damaged[entry.name] = error
                    raise
                self._open[entry.name] = read
            self._open.move_to_end(entry.name)
            while len(self._open) > KEPT:
                self._open.popitem(last=False)
            return self._open[entry.name]

    def _read_segment(self, entry: SegmentEntry) -> PackedSegment:
        def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
            return read_tensors(path, entry.size, entry.check)

        tensors, metadata = read_segment_file(self.folder, entry.name, read)
        if metadata.get("sequences", described := describe(entry.sequences)) != described:
            raise FileFormatError(entry.name, "it lists other sequences than the manifest does")
        return PackedSegment(tensors, entry.sequences, self.anatomy, entry.name)
