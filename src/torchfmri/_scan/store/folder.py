"""The files of a scan's folder: their names, and opening them without trusting what they are."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from torchfmri.exceptions import ScanFormatError

META = "meta.json"
MANIFEST = re.compile(r"manifest-rank([0-9]{3,6})\.jsonl")
SEGMENT = re.compile(r"segment-rank([0-9]{3,6})-([0-9]{6,12})\.safetensors")
UNFINISHED = re.compile(r"\.meta-rank[0-9]{3,6}\.tmp")

# Neither follow a link nor wait for a pipe; Windows has no such flags.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFE |= getattr(os, "O_BINARY", 0)
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # no fault of the file's


def manifest_name(rank: int) -> str:
    """The file of a writer."""
    return f"manifest-rank{rank:03d}.jsonl"


def segment_name(rank: int, number: int) -> str:
    """The file of a writer's segment."""
    return f"segment-rank{rank:03d}-{number:06d}.safetensors"


def is_ours(name: str) -> bool:
    """Whether the store writes files of this name."""
    return name == META or any(
        pattern.fullmatch(name) for pattern in (MANIFEST, SEGMENT, UNFINISHED)
    )


def list_names(folder: Path) -> list[str]:
    """The names in a folder, sorted.

    Raises:
        ScanFormatError: There is no such folder.
    """
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError as error:
        raise ScanFormatError(str(folder), "there is no such folder") from error
    except (OSError, ValueError) as error:
        raise ScanFormatError(
            str(folder), f"it is not a folder that can be read: {error}"
        ) from error


def size_of(path: Path) -> int:
    """The bytes of a regular file.

    Raises:
        ScanFormatError: It is missing, or a link, a folder, a pipe or a device.
    """
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise ScanFormatError(path.name, "it is missing") from error
    except OSError as error:
        if error.errno in _OURS:
            raise
        raise ScanFormatError(path.name, f"it cannot be read: {error.strerror}") from error
    _require_regular(status, path.name)
    return status.st_size


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A file descriptor of a regular file.

    Args:
        path: The file.
        flags: Those of `os.open`.

    Raises:
        ScanFormatError: It is missing, cannot be opened, or is no regular file.
        OSError: It cannot be created, the disk fails, or too many files are open.
    """
    if os.path.lexists(path) or not flags & os.O_CREAT:
        size_of(path)  # merely opening a device may do something
    try:
        descriptor = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if error.errno in _OURS or flags & os.O_CREAT:
            raise
        raise ScanFormatError(path.name, f"it cannot be opened: {error.strerror}") from error
    try:
        _require_regular(os.fstat(descriptor), path.name)
    except ScanFormatError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that has at most `limit` of them.

    Raises:
        ScanFormatError: It is larger, or no regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ScanFormatError(path.name, f"it has {size:,} bytes, more than {limit:,}")
        return file.read(limit)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there; NTFS keeps a journal of names
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {
            stat.S_IFLNK: "a link",
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFSOCK: "a socket",
        }
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise ScanFormatError(name, f"it is {kind}, not a regular file")
