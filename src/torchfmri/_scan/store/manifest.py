"""The manifest: one line per committed segment; a line that is whole is the commit mark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchfmri._scan.store.folder import MANIFEST, SEGMENT, list_names, open_regular, size_of
from torchfmri._scan.store.sealed import seal, unseal
from torchfmri.exceptions import InspectionError, ScanFormatError

LINE_BYTES = 16 << 20
LARGEST = 1 << 40
"""No count in a manifest is larger."""


@dataclass(frozen=True)
class SequenceEntry:
    """What a manifest says of a sequence.

    Attributes:
        name: What identifies it.
        tokens: How many it has.
        condition: Its label, or "".
        padding: How many padded positions were left out.
        checks: What the scan proved about itself.
    """

    name: str
    tokens: int
    condition: str = ""
    padding: int = 0
    checks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SegmentEntry:
    """What a manifest says of a segment.

    Attributes:
        name: Its file.
        size: Its bytes.
        check: Their CRC-32.
        sequences: Those in it, in order.
    """

    name: str
    size: int
    check: int
    sequences: tuple[SequenceEntry, ...]

    def line(self) -> bytes:
        """The line of the manifest.

        Raises:
            InspectionError: Something about a sequence cannot be written.
        """
        sequences = [
            {
                "name": each.name,
                "tokens": each.tokens,
                "condition": each.condition,
                "padding": each.padding,
                "checks": each.checks,
            }
            for each in self.sequences
        ]
        record = {
            "segment": self.name,
            "bytes": self.size,
            "checksum": f"{self.check:08x}",
            "sequences": sequences,
        }
        names = [each.name for each in self.sequences]
        what = f"One of the sequences {names[:5]}" if len(names) > 1 else f"Sequence {names[0]!r}"
        return seal(record, what) + b"\n"


def require_readable(entry: SequenceEntry, manifest: str) -> int:
    """How many bytes a sequence takes in a manifest, in which it could be read again.

    Raises:
        InspectionError: It could not.
    """
    name = manifest.replace("manifest", "segment").replace(".jsonl", "-000000.safetensors")
    line = SegmentEntry(name, 0, 0, (entry,)).line()
    try:
        _parse_line(line.rstrip(b"\n"), manifest, f"What is known of sequence {entry.name!r}")
    except ScanFormatError as error:
        raise InspectionError(f"Sequence {entry.name!r} cannot be kept: {error.reason}.") from error
    if len(line) > LINE_BYTES // 2:
        raise InspectionError(
            f"Sequence {entry.name[:100]!r} cannot be kept: its name, condition and checks take "
            f"{len(line):,} bytes, and {LINE_BYTES // 2:,} are allowed."
        )
    return len(line)


@dataclass(frozen=True)
class Manifest:
    """What a manifest holds.

    Attributes:
        segments: Those that are committed.
        problems: Lines that are damaged.
        size: The bytes up to the end of the last whole line; what follows was never committed.
        ended: Whether these end with the end of a line.
    """

    segments: tuple[SegmentEntry, ...]
    problems: tuple[str, ...]
    size: int
    ended: bool


def read_manifest(path: Path) -> Manifest:
    """The lines of a manifest; an incomplete one at its end is left out, it is being written.

    Raises:
        ScanFormatError: It is not a regular file.
    """
    segments: list[SegmentEntry] = []
    problems: list[str] = []
    size, ended = 0, True
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path.name}, line {number}"
        whole = line.endswith(b"\n")
        try:
            segments.append(_parse_line(line.removesuffix(b"\n"), path.name, where))
        except ScanFormatError as error:
            if not whole and len(line) <= LINE_BYTES:
                break
            problems.append(str(error))
        size, ended = size + len(line), whole
    return Manifest(tuple(segments), tuple(problems), size, ended)


def read_committed(folder: Path) -> tuple[list[SegmentEntry], list[str]]:
    """The segments of all writers of a scan that have their size, and what is wrong with others.

    Raises:
        ScanFormatError: There is no such folder.
    """
    segments: dict[str, SegmentEntry] = {}
    problems: list[str] = []
    for name in filter(MANIFEST.fullmatch, list_names(folder)):
        try:
            manifest = read_manifest(folder / name)
        except ScanFormatError as error:
            problems.append(str(error))
            continue
        problems += manifest.problems
        for segment in manifest.segments:
            try:
                if segment.name in segments:
                    raise ScanFormatError(segment.name, f"{name} names it twice")
                found = size_of(folder / segment.name)
                if found != segment.size:
                    reason = f"it has {found:,} bytes instead of {segment.size:,}: it is damaged"
                    raise ScanFormatError(segment.name, reason)
                segments[segment.name] = segment
            except ScanFormatError as error:
                lost = ", ".join(repr(each.name) for each in segment.sequences[:5])
                more = f" and {len(segment.sequences) - 5} more" * (len(segment.sequences) > 5)
                problems.append(f"{error} (with the sequences {lost}{more})")
    return list(segments.values()), problems


def _lines(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(LINE_BYTES + 1):
            yield line


def _parse_line(line: bytes, manifest: str, where: str) -> SegmentEntry:
    record = unseal(line, where)
    name = _text(record, "segment", where)
    matched = SEGMENT.fullmatch(name)
    if matched is None or f"-rank{matched[1]}." not in manifest:
        raise ScanFormatError(where, f"{name[:100]!r} is no name of a segment of this writer")
    checksum, sequences = _text(record, "checksum", where), record.get("sequences")
    if re.fullmatch("[0-9a-f]{8}", checksum) is None:
        raise ScanFormatError(where, f"{checksum[:40]!r} is no checksum")
    if not isinstance(sequences, list) or not all(isinstance(each, dict) for each in sequences):
        raise ScanFormatError(where, "it has no list of sequences")
    entries = tuple(_parse_sequence(each, where) for each in sequences)
    return SegmentEntry(name, _count(record, "bytes", where), int(checksum, 16), entries)


def _parse_sequence(record: Mapping[str, Any], where: str) -> SequenceEntry:
    checks = record.get("checks", {})
    if not isinstance(checks, dict):
        raise ScanFormatError(where, "the checks of a sequence are no JSON object")
    return SequenceEntry(
        _text(record, "name", where),
        _count(record, "tokens", where),
        _text({"condition": "", **record}, "condition", where),
        _count({"padding": 0, **record}, "padding", where),
        checks,
    )


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ScanFormatError(where, f"{key!r} is not a text")
    return value


def _count(record: Mapping[str, Any], key: str, where: str) -> int:
    value = record.get(key)
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ScanFormatError(where, f"{key!r} is not a count")
    return value
