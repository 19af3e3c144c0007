"""Writing beside and exchanging: at a path stands the old or the new, whole, at every moment.

All that is saved goes through `new_file` and `new_folder`; the store of scans uses `recover` and
`held_alone`. The order matters: write beside, wait for the disk, rename, wait for the folder. Names
of unfinished files (`.torchfmri-...`) and of folders set aside (`.NAME.replaced`) are looked for
after a crash, by older versions too: they stay. tests/_files/test_faults.py kills writers and cuts
their power. `_OLD_SECONDS` may change freely.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchfmri._files.regular import lock, opened, sync_folder
from torchfmri.exceptions import InspectionError

_UNFINISHED = re.compile(r"\.torchfmri-[0-9a-f]{16}(\.[^/]*)?")
_OLD_SECONDS = 3600
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_ABSENT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield where to write a file, which takes the place of `path` if the block ends well.

    Whatever happens, `path` then holds the old file or the new one, whole. A link is followed. A
    pipe or a terminal is written to directly.
    """
    target = Path(path)
    target = target.resolve() if target.is_symlink() else target
    if target.exists() and not target.is_file():
        yield target
        return
    new = _beside(target)
    try:
        with _naming(target, new):
            yield new
            if target.exists():
                new.chmod(target.stat().st_mode & 0o7777)
            _sync_file(new)
            new.replace(target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


@contextmanager
def new_folder(
    target: Path, require_free: Callable[[], None] = lambda: None, ending: str = ""
) -> Iterator[Path]:
    """Yield a new folder to fill, which takes the place of `target` if the block ends well.

    Whatever happens, `target` then is the old folder or the new one, whole and on the disk. Where
    the system cannot exchange two folders in one step, there is a moment without either; the old
    one then stands beside it, where `find_replaced` and `recover` look for it.

    Args:
        target: The folder.
        require_free: Raises if what is there may not be replaced; asked before and after the block.
        ending: The ending of the new folder's name, for writers that look at it.

    Raises:
        InspectionError: A writer holds the folder that is there.
    """
    make_folder(target.parent)
    recover(target)
    require_free()
    _remove_unfinished(target.parent)
    new = _beside(target, ending)
    new.mkdir()
    try:
        with _naming(target, new), _held(new, shared=True), held_alone(target):
            yield new
            _sync_tree(new)
            require_free()
            _put(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # an unfinished one, or what was replaced


@contextmanager
def _naming(target: Path, new: Path) -> Iterator[None]:
    """Let an error of the system in the block name the target, and say what stands there.

    A full disk is reported without a name, or with that of the unfinished file.
    """
    try:
        yield
    except OSError as error:
        if not _is_about(error, new):
            raise
        stands = "what was there stands" if os.path.lexists(target) else "nothing stands there"
        reason = error.strerror or str(error) or type(error).__name__
        told = f"{reason}. Writing failed, and {stands}"
        raise OSError(error.errno or errno.EIO, told, str(target)) from error


def _is_about(error: OSError, new: Path) -> bool:
    """Whether an error names nothing, or something of the unfinished file or folder."""
    if error.filename is None:
        return True
    return isinstance(error.filename, (str, bytes)) and new.name in os.fsdecode(error.filename)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and wait until their names are on the disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def find_replaced(path: Path) -> Path:
    """Return where the folder `path` is: beside it, if replacing it was interrupted half-way."""
    aside = _aside(path)
    return aside if not os.path.lexists(path) and aside.is_dir() else path


def recover(path: Path) -> None:
    """Put a folder back that stands beside its place; remove one that has been replaced.

    Raises:
        InspectionError: Somebody is replacing it.
    """
    aside = _aside(path)
    if not aside.is_dir():
        return
    with held_alone(aside):  # whoever is replacing it just now holds it
        if os.path.lexists(path):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(path)
            sync_folder(path.parent)


def _beside(target: Path, ending: str | None = None) -> Path:
    ending = target.suffix if ending is None else ending
    return target.absolute().parent / f".torchfmri-{secrets.token_hex(8)}{ending}"


def _aside(target: Path) -> Path:
    whole = target.absolute()  # "." has no name of its own
    return whole.parent / f".{whole.name}.replaced"


def _put(new: Path, target: Path) -> None:
    """Put the new folder in its place; in two steps if the system cannot exchange folders."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not _exchange(new, target):
        aside = _aside(target)
        target.rename(aside)
        sync_folder(target.parent)
        try:
            new.rename(target)
        except OSError:
            aside.rename(target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Whether two paths were exchanged in one step; False if the system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _ABSENT:
        return False
    raise OSError(number, os.strerror(number), str(other))


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[[int, bytes, int, bytes, int], int] | None
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return found


@contextmanager
def _held(folder: Path, *, shared: bool = False) -> Iterator[None]:
    if os.name == "nt":  # a folder cannot be opened there
        yield
        return
    with opened(folder) as descriptor:
        lock(descriptor, shared=shared)
        yield


@contextmanager
def held_alone(target: Path) -> Iterator[None]:
    """Keep others from writing into a folder of ours while the block runs; it may not exist.

    Raises:
        InspectionError: Somebody does.
    """
    if not target.is_dir():
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_held(target))
        except BlockingIOError as error:
            raise InspectionError(
                f"{str(target)!r} is being written, by another process or by a writer of this one. "
                "Close the writer first, or choose another folder."
            ) from error
        yield


def _remove_unfinished(parent: Path) -> None:
    """Remove folders that killed processes left behind: old ones that nobody has locked."""
    if sys.platform == "win32":
        return
    for path in parent.glob(".torchfmri-*"):
        with contextlib.suppress(OSError):  # in use, or removed by somebody else just now
            # A new one may be there and not locked yet.
            old = time.time() - path.lstat().st_mtime > _OLD_SECONDS
            if not old or not _UNFINISHED.fullmatch(path.name) or path.is_symlink():
                continue
            with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                if lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with opened(path, os.O_RDWR) as descriptor:
        os.fsync(descriptor)


def _sync_tree(folder: Path) -> None:
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_file(Path(path, name))
        sync_folder(Path(path))
