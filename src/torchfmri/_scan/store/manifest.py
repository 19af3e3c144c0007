"""The manifest of a scan: one line per committed segment.

`ScanWriter` appends lines, `StoredSequences` and `repair` read them. A whole line is the mark that
a segment is committed: readers must ignore a line that is cut off, and writers must not write a
line before its segment is on the disk. Lines come from files that may be damaged or hostile: every
value is checked and every count limited. Fields may be added with a default; none may be renamed.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchfmri._files import (
    is_intact,
    list_names,
    map_file,
    open_limited,
    parse,
    parse_tensors,
    plain,
    seal,
    size_of,
    to_json,
    unseal,
)
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.folder import (
    MANIFEST,
    PENDING,
    SEGMENT,
    final_name,
    rank_of,
    read_segment_file,
)
from torchfmri.exceptions import FileFormatError, InspectionError

MANIFEST_BYTES = 1 << 30
LINE_BYTES = 16 << 20
LINE_SEQUENCES = 1 << 16
"""Sequences of one line; writers put at most 1,024 into one."""
DAMAGED_LINES = 1_000
"""After so many damaged lines the rest of a manifest is not read."""
PROBLEMS = 2_000
"""So many problems of a scan are told apart; further ones are counted."""
WRITING_SECONDS = 0.05
"""A line of which no more arrives for so long is not being written."""
LARGEST = 1 << 40
"""No count in a manifest is larger."""


@dataclass(frozen=True)
class SequenceEntry:
    """The entry of a sequence in a manifest.

    Attributes:
        name: What identifies it.
        tokens: How many it has.
        condition: Its label, or "".
        padding: How many padded positions were left out.
        checks: What the scan proved about itself.
        text: How its text begins, to be listed; "" in scans of earlier versions.
    """

    name: str
    tokens: int
    condition: str = ""
    padding: int = 0
    checks: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    @classmethod
    def of(cls, sequence: ScannedSequence) -> SequenceEntry:
        """Return what a manifest says of this sequence."""
        return cls(
            name=sequence.name,
            tokens=len(sequence),
            condition=sequence.condition,
            padding=sequence.padding,
            checks=dict(sequence.checks),
            text=sequence.beginning,
        )

    def record(self) -> dict[str, Any]:
        """Return the entry as plain data; "text" is left out if empty, as older versions did."""
        return {key: value for key, value in vars(self).items() if key != "text" or value}


@dataclass(frozen=True)
class SegmentEntry:
    """The entry of a segment in a manifest: one line.

    Attributes:
        name: Its file.
        size: Its bytes.
        check: Their CRC-32.
        sequences: The sequences in it, in order.
    """

    name: str
    size: int
    check: int
    sequences: tuple[SequenceEntry, ...]

    def line(self) -> bytes:
        """Return the line of the manifest.

        Raises:
            InspectionError: Something about a sequence cannot be written.
        """
        record = {
            "segment": self.name,
            "bytes": self.size,
            "checksum": f"{self.check:08x}",
            "sequences": [each.record() for each in self.sequences],
        }
        names = [each.name for each in self.sequences]
        what = f"One of the sequences {names[:5]}" if len(names) > 1 else f"Sequence {names[0]!r}"
        return seal(record, what) + b"\n"


def describe(sequences: Sequence[SequenceEntry]) -> str:
    """Return the sequences as a segment's own header lists them, in case its line is lost."""
    return to_json([plain(each.record(), "A sequence") for each in sequences])


def parse_description(text: str, where: str) -> tuple[SequenceEntry, ...]:
    """Return the sequences that `describe` wrote.

    Raises:
        FileFormatError: It is something else.
    """
    return _parse_sequences(parse(text.encode(errors="surrogatepass"), where), where)


def require_readable(entry: SequenceEntry, manifest: str) -> int:
    """Return how many bytes a sequence takes in a manifest, in which it could be read again.

    Raises:
        InspectionError: It could not.
    """
    name = manifest.replace("manifest", "segment").replace(".jsonl", "-000000.safetensors")
    line = SegmentEntry(name, 0, 0, (entry,)).line()
    try:
        _parse_line(line.rstrip(b"\n"), manifest, f"What is known of sequence {entry.name!r}")
    except FileFormatError as error:
        raise InspectionError(f"Sequence {entry.name!r} cannot be kept: {error.reason}.") from error
    if len(line) > LINE_BYTES // 2:
        raise InspectionError(
            f"Sequence {entry.name[:100]!r} cannot be kept: its name, condition and checks take "
            f"{len(line):,} bytes, and {LINE_BYTES // 2:,} are allowed."
        )
    return len(line)


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        segments: The segments that are committed.
        problems: Lines that are damaged.
        size: The bytes up to the end of the last whole line; what follows was never committed.
        ended: Whether these end with the end of a line.
        torn: How many bytes of a line follow that is not whole: it is being written, or was cut.
    """

    segments: tuple[SegmentEntry, ...]
    problems: tuple[str, ...]
    size: int
    ended: bool
    torn: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all lines were looked at."""
        return len(self.problems) <= DAMAGED_LINES


def read_manifest(path: Path) -> Manifest:
    """Return the lines of a manifest, but for an incomplete one at its end: it is being written.

    Raises:
        FileFormatError: It is not a regular file, or too large.
    """
    segments: list[SegmentEntry] = []
    problems: list[str] = []
    size, ended, torn = 0, True, 0
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path.name}, line {number}"
        whole = line.endswith(b"\n")
        try:
            segments.append(_parse_line(line.removesuffix(b"\n"), path.name, where))
        except FileFormatError as error:
            if not whole and len(line) <= LINE_BYTES:
                torn = len(line)
                break
            problems.append(str(error))
            if len(problems) == DAMAGED_LINES:
                reason = f"{DAMAGED_LINES:,} of its lines are damaged: the others are not read"
                problems.append(str(FileFormatError(path.name, reason)))
                break
        size, ended = size + len(line), whole
    return Manifest(tuple(segments), tuple(problems), size, ended, torn)


def _read_settled(path: Path) -> Manifest:
    """Return a manifest, read again a moment later if its last line was being written.

    Raises:
        FileFormatError: As `read_manifest` does.
    """
    manifest = read_manifest(path)
    if manifest.torn:
        time.sleep(WRITING_SECONDS)
        manifest = read_manifest(path)
    return manifest


def read_committed(folder: Path) -> tuple[list[SegmentEntry], list[str]]:
    """Return the segments of all writers that have their size, and what is wrong with others.

    Raises:
        FileFormatError: There is no such folder.
    """
    # A segment gets its final name after its line was written: whatever is listed now has a line
    # when the manifests are read.
    names = list_names(folder)
    found: dict[str, SegmentEntry] = {}
    named, problems = set[str](), list[str]()
    damaged: dict[str, Sequence[str]] = {}
    torn: dict[str, Manifest] = {}
    for name in filter(MANIFEST.fullmatch, names):
        try:
            manifest = _read_settled(folder / name)
        except FileFormatError as error:
            damaged[name] = [str(error)]
            continue
        if manifest.problems:
            damaged[name] = manifest.problems
        for segment in manifest.segments:
            problem = _problem_of(folder, segment, name if segment.name in named else "")
            named.add(segment.name)
            if problem:
                problems.append(problem)
            else:
                found[segment.name] = segment
        if manifest.torn:
            torn[name] = manifest
    for name, manifest in torn.items():
        begun, problem = _read_begun(folder, names, name, manifest, list(found.values()))
        found |= {segment.name: segment for segment in begun}
        if problem:
            damaged[name] = [*manifest.problems, problem]
    unnamed = [name for name in names if SEGMENT.fullmatch(name) and name not in named]
    return list(found.values()), limited([*_lost_lines(damaged, unnamed), *problems])


def _read_begun(
    folder: Path,
    names: Sequence[str],
    name: str,
    manifest: Manifest,
    committed: Sequence[SegmentEntry],
) -> tuple[list[SegmentEntry], str]:
    """Return the segments whose line was begun, and what is wrong if there is none.

    A segment is on the disk before its line is begun, so that it counts from that moment on. One
    that was left before, and whose sequences were scanned again since, does not.
    """
    lines = {each.name for each in manifest.segments}
    known = {sequence.name for segment in committed for sequence in segment.sequences}
    own = [each for each in names if PENDING.fullmatch(each) and rank_of(each) == rank_of(name)]
    begun, reasons = [], [f"its last line is cut off after {manifest.torn:,} bytes"]
    for pending in own:
        if final_name(pending) not in lines:
            try:
                segment = describe_segment(folder / pending)
            except FileFormatError as error:
                reasons.append(str(error))
                continue
            if known.isdisjoint(each.name for each in segment.sequences):
                begun.append(segment)
    return begun, "" if begun else str(FileFormatError(name, ". ".join(reasons)))


def describe_segment(path: Path) -> SegmentEntry:
    """Return the line of a segment, final or pending, that its own header makes.

    Raises:
        FileFormatError: It is damaged, or of a version that wrote no such header.
    """
    data = map_file(path, size_of(path))
    _, metadata = parse_tensors(data, path.name)
    if "sequences" not in metadata:
        reason = (
            "it does not list its sequences. If torchfmri 0.1 was interrupted when it wrote it, it "
            "was never part of the scan and can be deleted"
        )
        raise FileFormatError(path.name, reason)
    if not is_intact(data, metadata):
        raise FileFormatError(path.name, "its checksum is wrong: the file was changed or damaged")
    sequences = parse_description(metadata["sequences"], path.name)
    return SegmentEntry(final_name(path.name), len(data), zlib.crc32(data), sequences)


def _lost_lines(damaged: Mapping[str, Sequence[str]], unnamed: Sequence[str]) -> list[str]:
    """List damaged lines and segments that no line names, as one problem if one explains both."""
    cure = "so its sequences are missing here; `torchfmri repair FOLDER` adds them"
    found: list[str] = []
    for manifest, problems in damaged.items():
        own = [name for name in unnamed if rank_of(name) == rank_of(manifest)]
        found += problems
        found[-1] += "".join(f" No line names {name!r}, {cure}." for name in own)
        unnamed = [name for name in unnamed if name not in own]
    return found + [
        str(FileFormatError(name, f"no line of a manifest names it, {cure}")) for name in unnamed
    ]


def limited(problems: list[str]) -> list[str]:
    """Return the problems; of very many, the first ones and the number of the others."""
    more = len(problems) - PROBLEMS
    return problems if more <= 0 else [*problems[:PROBLEMS], f"There are {more:,} more problems."]


def _problem_of(folder: Path, segment: SegmentEntry, again: str) -> str:
    """Return why a segment cannot be read, as far as its size tells; empty if it can."""
    try:
        if again:
            raise FileFormatError(segment.name, f"{again} names it twice")
        found = read_segment_file(folder, segment.name, size_of)
        if found == segment.size:
            return ""
        reason = f"it has {found:,} bytes instead of {segment.size:,}: it is damaged"
        raise FileFormatError(segment.name, reason)
    except FileFormatError as error:
        lost = ", ".join(repr(each.name[:100]) for each in segment.sequences[:5])
        more = f" and {len(segment.sequences) - 5} more" * (len(segment.sequences) > 5)
        return f"{error} (with the sequences {lost}{more})"


def _lines(path: Path) -> Iterator[bytes]:
    with open_limited(path, MANIFEST_BYTES) as file:
        while line := file.readline(LINE_BYTES + 1):
            yield line


def _parse_line(line: bytes, manifest: str, where: str) -> SegmentEntry:
    record = unseal(line, where)
    name = _text(record, "segment", where)
    matched = SEGMENT.fullmatch(name)
    if matched is None or f"-rank{matched[1]}." not in manifest:
        raise FileFormatError(where, f"{name[:100]!r} is not the name of a segment of this writer")
    checksum = _text(record, "checksum", where)
    if re.fullmatch("[0-9a-f]{8}", checksum) is None:
        raise FileFormatError(where, f"{checksum[:40]!r} is not a checksum")
    entries = _parse_sequences(record.get("sequences"), where)
    return SegmentEntry(name, _count(record, "bytes", where), int(checksum, 16), entries)


def _parse_sequences(records: Any, where: str) -> tuple[SequenceEntry, ...]:
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise FileFormatError(where, "it has no list of sequences")
    if len(records) > LINE_SEQUENCES:
        raise FileFormatError(where, f"it has more than {LINE_SEQUENCES:,} sequences")
    return tuple(_parse_sequence(each, where) for each in records)


def _parse_sequence(record: Mapping[str, Any], where: str) -> SequenceEntry:
    checks = record.get("checks", {})
    if not isinstance(checks, dict):
        raise FileFormatError(where, "the checks of a sequence are not a JSON object")
    return SequenceEntry(
        name=_text(record, "name", where),
        tokens=_count(record, "tokens", where),
        condition=_text({"condition": "", **record}, "condition", where),
        padding=_count({"padding": 0, **record}, "padding", where),
        checks=checks,
        text=_text({"text": "", **record}, "text", where),
    )


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise FileFormatError(where, f"{key!r} is not a text")
    return value


def _count(record: Mapping[str, Any], key: str, where: str) -> int:
    value = record.get(key)
    if type(value) is not int or not 0 <= value < LARGEST:
        raise FileFormatError(where, f"{key!r} is not a count")
    return value
