"""Repair a scan whose manifest was lost or damaged.

`torchfmri repair` and `torchfmri.repair` call `repair`. Each segment lists its own sequences in its
header, so the manifest can be written again. Nothing is ever deleted: what is replaced or not
needed is renamed, because the user may know better than we do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torchfmri._arguments import check_path
from torchfmri._files import (
    held_alone,
    list_names,
    map_file,
    new_file,
    parse_tensors,
    read_regular,
    recover,
)
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.store.folder import (
    MANIFEST,
    PENDING,
    SEGMENT,
    final_name,
    manifest_name,
    number_of,
    rank_of,
)
from torchfmri._scan.store.manifest import (
    MANIFEST_BYTES,
    Manifest,
    SegmentEntry,
    describe_segment,
    read_manifest,
)
from torchfmri._scan.store.meta import read_meta
from torchfmri._scan.store.packing import PackedSegment
from torchfmri.exceptions import FileFormatError


@dataclass(frozen=True)
class Repair:
    """The result of a repair.

    Attributes:
        added: Segment -> the names of its sequences that are in the scan again.
        spare: Segments whose sequences are all there already; they were given another ending.
        rewritten: Manifests that were written anew; the old ones have the ending `.damaged`.
        lost: Segment -> why it cannot be added.
    """

    added: dict[str, tuple[str, ...]]
    spare: tuple[str, ...]
    rewritten: tuple[str, ...]
    lost: dict[str, str]


def repair(path: str | os.PathLike[str]) -> Repair:
    """Add the segments that no line of a manifest names, and write damaged manifests anew.

    Nothing is deleted.

    Args:
        path: The folder of the scan.

    Raises:
        FileFormatError: It is not a scan, or its meta.json is damaged.
        InspectionError: Somebody is writing it.
    """
    folder = check_path("path", path)
    recover(folder)
    list_names(folder)  # raises where there is no folder
    with held_alone(folder):
        anatomy, _ = read_meta(folder)
        return _repair(folder, anatomy)


def _repair(folder: Path, anatomy: Anatomy) -> Repair:
    names = list_names(folder)
    manifests = {name: read_manifest(folder / name) for name in filter(MANIFEST.fullmatch, names)}
    lines = [segment for manifest in manifests.values() for segment in manifest.segments]
    named = {segment.name for segment in lines}
    known = {entry.name for segment in lines for entry in segment.sequences}
    added: list[SegmentEntry] = []
    again: dict[str, tuple[str, ...]] = {}
    spare: list[str] = []
    lost: dict[str, str] = {}
    for name in names:
        if not (SEGMENT.fullmatch(name) or PENDING.fullmatch(name)) or final_name(name) in named:
            continue
        try:
            segment = describe_checked(folder / name, anatomy)
        except FileFormatError as error:
            manifest = manifests.get(manifest_name(int(rank_of(name))))
            if SEGMENT.fullmatch(name) or manifest is None or manifest.problems or manifest.torn:
                lost[name] = error.reason
            continue  # a pending one was being written: no line has ever named it
        if known.issuperset(new := [each.name for each in segment.sequences]):
            (folder / name).rename((folder / name).with_suffix(".spare"))
            spare.append(name)
        else:
            (folder / name).rename(folder / segment.name)
            added.append(segment)
            again[segment.name] = tuple(each for each in new if each not in known)
            known.update(new)
    return Repair(
        again,
        tuple(spare),
        tuple(_write_manifests(folder, manifests, added)),
        lost,
    )


def describe_checked(path: Path, anatomy: Anatomy) -> SegmentEntry:
    """Return the line of a segment, whose tensors are those of its sequences.

    Raises:
        FileFormatError: They are not, or as `describe_segment` does.
    """
    segment = describe_segment(path)
    tensors, _ = parse_tensors(map_file(path, segment.size), path.name)
    PackedSegment(tensors, segment.sequences, anatomy, path.name)
    return segment


def _write_manifests(
    folder: Path, manifests: dict[str, Manifest], added: list[SegmentEntry]
) -> list[str]:
    """Write the manifests that change; returns those that were there before and are kept."""
    kept = []
    for rank in sorted({*map(rank_of, manifests), *(rank_of(each.name) for each in added)}):
        name = manifest_name(int(rank))
        manifest = manifests.get(name, Manifest((), (), 0, True))
        own = [each for each in added if rank_of(each.name) == rank]
        if not own and not manifest.problems and not manifest.torn:
            continue
        if name in manifests:
            _keep(folder / name)
            kept.append(name)
        lines = sorted([*manifest.segments, *own], key=lambda each: number_of(each.name))
        with new_file(folder / name) as new:
            new.write_bytes(b"".join(each.line() for each in lines))
    return kept


def _keep(manifest: Path) -> None:
    """Add what a manifest holds to the file of what earlier repairs found."""
    aside = manifest.with_suffix(".damaged")
    before = read_regular(aside, MANIFEST_BYTES) if aside.exists() else b""
    with new_file(aside) as new:
        new.write_bytes(before + read_regular(manifest, MANIFEST_BYTES))
