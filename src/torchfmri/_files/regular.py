"""Opening files without trusting what they are.

Readers of our files open them with `open_limited` or `read_regular`, never with `open`. A path may
be a link, a pipe that waits for ever, a device, or a sparse file of terabytes: each is refused with
its reason. What is the file's fault raises FileFormatError; a failing disk or too many open files
stay an OSError. A size is asked before anything is read, and checked again on the open descriptor.
Limits may change freely; links, pipes and devices must stay refused.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from torchfmri.exceptions import FileFormatError

HOLES_FROM = 64 << 20
"""Larger files are looked at for holes: a sparse file takes no room, and reading it takes all."""
_HOLLOW = 64  # bytes of a file for each byte that is on the disk

# Neither follow a link nor wait for a pipe; Windows has no such flags.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFE |= getattr(os, "O_BINARY", 0)
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # no fault of the file's


def list_names(folder: Path, limit: int = 1_000_000) -> list[str]:
    """Return the names in a folder, sorted.

    Args:
        folder: The folder.
        limit: How many names there may be.

    Raises:
        FileFormatError: There is no such folder, or it holds more.
    """
    try:
        with os.scandir(folder) as entries:
            names = [each.name for each in islice(entries, limit + 1)]
    except FileNotFoundError as error:
        raise FileFormatError(str(folder), "there is no such folder") from error
    except (OSError, ValueError) as error:
        raise FileFormatError(
            str(folder), f"give a folder that can be read; this is not one: {_words(error)}"
        ) from error
    if len(names) > limit:
        raise FileFormatError(str(folder), f"it holds more than {limit:,} files")
    return sorted(names)


def size_of(path: Path) -> int:
    """Return how many bytes a regular file has.

    Raises:
        FileFormatError: It is missing, or a link, a folder, a pipe or a device.
    """
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise FileFormatError(path.name, "it is missing") from error
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in _OURS:
            raise
        raise FileFormatError(path.name, f"it cannot be read: {_words(error)}") from error
    _require_regular(status, path.name)
    return status.st_size


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a file descriptor of a regular file.

    Args:
        path: The file.
        flags: The flags of `os.open`.

    Raises:
        FileFormatError: It is missing, cannot be opened, or is not a regular file.
        OSError: It cannot be created, the disk fails, or too many files are open.
    """
    if os.path.lexists(path) or not flags & os.O_CREAT:
        size_of(path)  # merely opening a device may do something
    try:
        descriptor = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if error.errno in _OURS or flags & os.O_CREAT:
            raise
        raise FileFormatError(path.name, f"it cannot be opened: {error.strerror}") from error
    try:
        _require_regular(os.fstat(descriptor), path.name)
    except FileFormatError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file that has at most `limit` bytes.

    Raises:
        FileFormatError: It is larger, or no regular file.
    """
    with open_limited(path, limit) as file:
        return file.read(limit)


def open_limited(path: Path, limit: int | None = None) -> BinaryIO:
    """Return a regular file, opened for reading: at most `limit` bytes, no large holes.

    Raises:
        FileFormatError: It is larger, mostly holes, or no regular file.
    """
    file = os.fdopen(open_regular(path), "rb")
    try:
        status = os.fstat(file.fileno())
        if limit is not None and status.st_size > limit:
            reason = f"it has {status.st_size:,} bytes, more than {limit:,}"
            raise FileFormatError(path.name, reason)
        _require_dense(file.fileno(), status, path.name)
    except FileFormatError:
        file.close()
        raise
    return file


def write_all(descriptor: int, data: bytes, at: int | None = None) -> None:
    """Write everything, at a position if one is given, and wait until it is on the disk."""
    if at is not None:
        os.lseek(descriptor, at, os.SEEK_SET)
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there; NTFS keeps a journal of names
    with opened(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or folder of our own for the block, which gets its descriptor."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file or folder until it is closed or the process ends; return whether it is locked.

    Returns:
        False if there are no locks: on Windows, and on some network file systems.

    Raises:
        BlockingIOError: Somebody else holds it.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _require_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {
            stat.S_IFLNK: "a link",
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFSOCK: "a socket",
        }
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise FileFormatError(name, f"it is {kind}, not a regular file")


def _require_dense(descriptor: int, status: os.stat_result, name: str) -> None:
    """Raise for a large file that is mostly holes: nothing of ours writes one."""
    size, blocks = status.st_size, getattr(status, "st_blocks", None)
    if size <= HOLES_FROM or blocks is None or blocks * 512 * _HOLLOW >= size:
        return
    # Some file systems count no blocks, others compress: only they know whether there are holes.
    if hasattr(os, "SEEK_HOLE"):
        first = os.lseek(descriptor, 0, os.SEEK_HOLE)
        os.lseek(descriptor, 0, os.SEEK_SET)
        if first < size:
            raise FileFormatError(
                name, f"it has {size:,} bytes, but only {blocks * 512:,} are on the disk"
            )


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
