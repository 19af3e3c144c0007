"""Writers that are interrupted: killed before any of their file operations, or by a power cut.

    python faults.py FOLDER KILLS IMAGES

Each task writes something of ours and says what it has finished. A kill is a forked process that
ends itself with SIGKILL before its n-th file operation. For a power cut the operations are recorded
once; then the disk is put together as it may look after each of them: what was flushed is there,
of everything else any earlier version, part or nothing (drawn). Afterwards a reader must find what
was said to be finished, whole, once, and nothing half. What was wrong is printed as JSON.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfmri
from benchmarks.fuzz import REPLAY, make_incident, make_subject
from torchfmri import Anatomy, Scan, ScannedSequence, Tokens
from torchfmri._files import replacing
from torchfmri.cli import main as command_line

Report = Callable[[str], None]
ANATOMY = Anatomy.of_widths(["embed", "mlp"], ["Embedding", "MLP"], [8, 6], [4, 4])
NAMES = ("a", "b", "c", "d")


def make_sequence(name: str, length: int = 3) -> ScannedSequence:
    """A sequence whose values follow from its name."""
    values = np.random.default_rng(list(name.encode())).random((length, 8), np.float32)
    tokens = Tokens(
        np.arange(length), (b"x",) * length, values[:, 0].copy(), values[:, 1].copy(),
        values[:, 2] > 0.5, values[:, 3] > 0.5,
    )  # fmt: skip
    tables = {"activation": values[:, :2].copy()}, {"activation": values[:, :4].copy()}
    return ScannedSequence(name, tokens, *tables)


def scan_of(*names: str) -> Scan:
    return Scan(ANATOMY, [make_sequence(name) for name in names], {"model": "tiny"})


# -- tasks ---------------------------------------------------------------------------------------


class Task:
    """Something that writes into a folder.

    `prepare` makes what is there before; `act` writes and reports what it has finished; `judge`
    raises AssertionError for what must not be found afterwards.
    """

    def prepare(self, folder: Path) -> None: ...

    def act(self, folder: Path, report: Report) -> None:
        raise NotImplementedError

    def judge(self, folder: Path, reported: list[str]) -> None:
        raise NotImplementedError


def assert_scan(path: Path, *allowed: set[str]) -> None:
    """The folder holds one of these sets of sequences, each once, bit by bit, without a problem."""
    scan = torchfmri.load(path)
    assert not scan.verify(), scan.problems
    assert len(set(scan.names)) == len(scan.names)
    assert set(scan.names) in allowed, (scan.names, allowed)
    for found in scan:
        expected = make_sequence(found.name)
        assert found.voxels["activation"].tobytes() == expected.voxels["activation"].tobytes()
        assert found.tokens.ids.tobytes() == expected.tokens.ids.tobytes()


class Write(Task):
    """Sequences added one by one: a scan that is written, and resumed where it is there."""

    def act(self, folder: Path, report: Report) -> None:
        path = folder / "x.fmri"
        there = torchfmri.load(path).names if (path / "meta.json").exists() else ()
        for name in NAMES:
            if name not in there:
                scan_of(name).save(path, append=True)
                report(name)

    def judge(self, folder: Path, reported: list[str]) -> None:
        path = folder / "x.fmri"
        if not reported and not (path / "meta.json").exists():
            return
        several = [set(NAMES[:number]) for number in range(len(reported), len(NAMES) + 1)]
        assert_scan(path, *several)


class Resume(Write):
    """The same where two sequences are there."""

    def prepare(self, folder: Path) -> None:
        scan_of(*NAMES[:2]).save(folder / "x.fmri")

    def judge(self, folder: Path, reported: list[str]) -> None:
        super().judge(folder, [*NAMES[:2], *reported])


class Merge(Task):
    """Several sequences, in segments of their own, added to a scan at once."""

    def prepare(self, folder: Path) -> None:
        scan_of("a").save(folder / "x.fmri")

    def act(self, folder: Path, report: Report) -> None:
        path = folder / "x.fmri"
        bare = ScannedSequence("bare", make_sequence("bare").tokens, {}, {})
        there = torchfmri.load(path).names
        new = [each for each in (make_sequence("b"), bare) if each.name not in there]
        Scan(ANATOMY, new, {"model": "tiny"}).save(path, append=True)
        report("both")

    def judge(self, folder: Path, reported: list[str]) -> None:
        scan = torchfmri.load(folder / "x.fmri")
        assert not scan.verify(), scan.problems
        assert scan.names in [("a", "b", "bare")] + [("a",), ("a", "b")] * (not reported)
        assert len(list(scan)) == len(scan)


class Save(Task):
    """A scan saved where there is none."""

    def act(self, folder: Path, report: Report) -> None:
        path = folder / "runs" / "x.fmri"
        scan_of("a", "b").save(path, overwrite=True)
        report("saved")

    def judge(self, folder: Path, reported: list[str]) -> None:
        path = folder / "runs" / "x.fmri"
        if reported or path.exists():
            assert_scan(path, {"a", "b"})


class Overwrite(Task):
    """A scan saved in place of another."""

    def prepare(self, folder: Path) -> None:
        scan_of("a").save(folder / "x.fmri")

    def act(self, folder: Path, report: Report) -> None:
        scan_of("b", "c").save(folder / "x.fmri", overwrite=True)
        report("saved")

    def judge(self, folder: Path, reported: list[str]) -> None:
        assert_scan(folder / "x.fmri", {"b", "c"}, *([] if reported else [{"a"}]))


class OverwriteInTwoSteps(Overwrite):
    """The same where the system cannot exchange two folders."""

    def act(self, folder: Path, report: Report) -> None:
        real, replacing._exchange = replacing._exchange, lambda one, other: False
        try:
            super().act(folder, report)
        finally:
            replacing._exchange = real


class Files(Task):
    """A page and a table, each in place of another."""

    def prepare(self, folder: Path) -> None:
        self._write(folder, "a", lambda name: None)

    def act(self, folder: Path, report: Report) -> None:
        self._write(folder, "b", report)

    def _write(self, folder: Path, name: str, report: Report) -> None:
        scan_of(name).save_html(folder / "x.html")
        report("page")
        scan_of(name).export(folder / "x.parquet", overwrite=True)
        report("table")

    def judge(self, folder: Path, reported: list[str]) -> None:
        from pyarrow import parquet

        if not _pages:
            for name in "ab":
                scan_of(name).save_html(f"{name}.html")
                _pages[Path(f"{name}.html").read_bytes()] = name
        page = _pages.get((folder / "x.html").read_bytes(), "half")
        table = parquet.read_table(folder / "x.parquet", use_threads=False).to_pydict()
        assert len(table["sequence"]) == 3 * len(ANATOMY.layers)
        assert page == "b" or (page == "a" and "page" not in reported), page
        assert set(table["sequence"]) <= ({"b"} if "table" in reported else {"a", "b"})


_pages: dict[bytes, str] = {}


class Export(Task):
    """A Zarr store in place of another."""

    def prepare(self, folder: Path) -> None:
        scan_of("a").export(folder / "x.zarr")

    def act(self, folder: Path, report: Report) -> None:
        scan_of("b", "c").export(folder / "x.zarr", overwrite=True)
        report("exported")

    def judge(self, folder: Path, reported: list[str]) -> None:
        found = _tree(folder / "x.zarr")
        if "old" not in _stores:
            scan_of("a").export(Path("old.zarr"))
            scan_of("b", "c").export(Path("new.zarr"))
            _stores.update(old=_tree(Path("old.zarr")), new=_tree(Path("new.zarr")))
        assert found in [_stores["new"]] + [_stores["old"]] * (not reported)


_stores: dict[str, dict[str, bytes]] = {}


def _tree(folder: Path) -> dict[str, bytes]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


class WriteIncident(Task):
    """What a Monitor keeps of a step that turned NaN."""

    def act(self, folder: Path, report: Report) -> None:
        make_incident(folder / "incidents")
        report("written")

    def judge(self, folder: Path, reported: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command_line(
                ["replay", str(folder / "incidents"), "--factory", "benchmarks.fuzz:make_subject"],
                REPLAY,
            )
        absent = "holds no incident" in err.getvalue() or "no folder" in err.getvalue()
        assert code == 1 or (not reported and absent), err.getvalue()
        assert code == 2 or "nonfinite_forward" in out.getvalue(), out.getvalue()


TASKS: dict[str, Task] = {
    each.__name__: each()
    for each in (
        Write, Resume, Merge, Save, Overwrite, OverwriteInTwoSteps, Files, Export, WriteIncident,
    )
}  # fmt: skip


# -- file operations -----------------------------------------------------------------------------

_CHANGES = {
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "os.symlink",
}  # fmt: skip
_listeners: list[Callable[[], None]] = []
_inside = threading.local()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    if _listeners and (writes or event in _CHANGES):
        _tell()


def _tell() -> None:
    if getattr(_inside, "busy", False):
        return
    _inside.busy = True
    try:
        for listener in _listeners:
            listener()
    finally:
        _inside.busy = False


sys.addaudithook(_audit)


@contextlib.contextmanager
def listening(listener: Callable[[], None], synced: Callable[[int], None]) -> Iterator[None]:
    """Call `listener` before each operation that changes a disk, `synced` after each fsync."""
    real = {name: getattr(os, name) for name in ("fsync", "write", "ftruncate", "lseek")}

    def fsync(descriptor: int) -> None:
        _tell()
        real["fsync"](descriptor)
        synced(descriptor)

    def write(descriptor: int, data: Any) -> int:
        _tell()
        return int(real["write"](descriptor, data))

    os.fsync, os.write = fsync, write  # type: ignore[assignment]
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        os.fsync, os.write = real["fsync"], real["write"]


def count_operations(task: Task, folder: Path) -> int:
    """How many operations a task takes, counted in a process of its own."""
    reading, writing = os.pipe()
    if not os.fork():
        counted = [0]

        def count() -> None:
            counted[0] += 1

        _quietly(lambda: _run_counted(task, folder, count, writing, counted))
    os.close(writing)
    os.wait()
    with os.fdopen(reading) as pipe:
        return int(pipe.read() or 0)


def _run_counted(
    task: Task, folder: Path, count: Callable[[], None], writing: int, counted: list[int]
) -> None:
    with listening(count, lambda descriptor: None):
        task.act(folder, lambda name: None)
    os.write(writing, str(counted[0]).encode())


def _quietly(act: Callable[[], None]) -> None:
    """Run in a forked process, which ends here."""
    code = 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act()
        code = 0
    finally:
        os._exit(code)


# -- kills ---------------------------------------------------------------------------------------


def run_and_kill(task: Task, folder: Path, operation: int | None) -> tuple[list[str], bool]:
    """What a task said it had finished before it was killed, and whether it was."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        real, left = os.write, [operation]

        def count() -> None:
            if left[0] is not None:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        def act() -> None:
            with listening(count, lambda descriptor: None):
                task.act(folder, lambda name: real(writing, f"{name}\n".encode()) and None)

        _quietly(act)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        reported = pipe.read().split()
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, "the task failed by itself"
    return reported, killed


def kill(name: str, place: Path, trials: int, choose: random.Random) -> dict[str, Any]:
    """Kill a task at drawn operations; then run it again to its end, as a user would."""
    task, wrong, kills = TASKS[name], [], 0
    original = place / name
    original.mkdir()
    _in_child(lambda: task.prepare(original))
    scratch = place / f"{name}-count"
    shutil.copytree(original, scratch)
    most = count_operations(task, scratch)
    for trial in range(trials):
        folder = place / f"{name}-{trial}"
        shutil.copytree(original, folder)
        # Every operation is reached if there are enough trials, else they are drawn.
        operation = 1 + trial % most if trials >= most else choose.randint(1, most)
        try:
            reported, killed = run_and_kill(task, folder, operation)
            kills += killed
            task.judge(folder, reported)
            if name == "Export":  # what zarr starts does not survive forks of this process
                again, _ = run_and_kill(task, folder, None)
            else:
                task.act(folder, (again := []).append)
            task.judge(folder, [*reported, *again])
        except Exception as error:
            wrong.append(f"{name}, killed before operation {operation}: {_words(error)}")
        shutil.rmtree(folder)
    return {"kills": kills, "operations": most, "wrong": wrong}


def _in_child(act: Callable[[], None]) -> None:
    """Run in a forked process: what zarr starts does not survive forks of this one."""
    child = os.fork()
    if not child:
        _quietly(act)
    _, status = os.waitpid(child, 0)
    assert status == 0


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# -- power cuts ----------------------------------------------------------------------------------

Inode = tuple[int, int]  # its number, and how often that was used before


class Recorder:
    """What a task did to a folder, operation by operation, and what had reached the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reported: list[str] = []
        self._uses: dict[int, int] = {}
        self._alive: set[int] = set()
        # Versions since the last flush, the flushed one first.
        self.files: dict[Inode, list[bytes]] = {}
        self.folders: dict[Inode, list[dict[str, Inode]]] = {}
        self.moments: list[tuple[Any, Any, list[str]]] = []
        self._look(flushed=True)

    def before(self) -> None:
        self._look()
        files = {inode: list(each) for inode, each in self.files.items()}
        folders = {inode: list(each) for inode, each in self.folders.items()}
        self.moments.append((files, folders, list(self.reported)))

    def synced(self, descriptor: int) -> None:
        self._look()
        inode = self._inode(os.fstat(descriptor).st_ino)
        for table in (self.files, self.folders):
            if inode in table:
                del table[inode][:-1]  # type: ignore[attr-defined]

    def _inode(self, number: int) -> Inode:
        return number, self._uses.get(number, 0)

    def _look(self, flushed: bool = False) -> None:
        found = {Path(path): names for path, *names in os.walk(self.root)}
        numbers = {path: path.stat().st_ino for path in found}
        for path, (_, names) in found.items():
            numbers |= {path / name: (path / name).stat().st_ino for name in names}
        for number in set(numbers.values()) - self._alive:
            self._uses[number] = self._uses.get(number, 0) + 1
        self._alive = set(numbers.values())
        for path, (below, names) in found.items():
            entries = {name: self._inode(numbers[path / name]) for name in [*below, *names]}
            self._add(self.folders, self._inode(numbers[path]), entries, {}, flushed)
            for name in names:
                inode = self._inode(numbers[path / name])
                self._add(self.files, inode, (path / name).read_bytes(), b"", flushed)

    def _add(self, table: Any, inode: Inode, now: Any, nothing: Any, flushed: bool) -> None:
        versions = table.setdefault(inode, [now] if flushed else [nothing])
        if versions[-1] != now:
            versions.append(now)

    def image(self, moment: int, place: Path, choose: random.Random) -> list[str]:
        """Put a disk together as a power cut may leave it; returns what was reported by then."""
        files, folders, reported = self.moments[moment]
        root = next(iter(folders))
        # Half of the images lose everything that was not flushed, or nothing of it.
        style = choose.choice(["flushed", "latest", "any", "any"])

        def pick(versions: list[Any]) -> Any:
            at = {"flushed": 0, "latest": -1}.get(style, choose.randrange(len(versions)))
            return versions[at]

        def build(inode: Inode, path: Path) -> None:
            path.mkdir()
            for name, inner in pick(folders[inode]).items():
                if inner in folders:
                    build(inner, path / name)
                else:
                    content, flushed = pick(files[inner]), files[inner][0]
                    kept = len(flushed) if content.startswith(flushed) else 0
                    if style == "any" and choose.random() < 0.4:  # a part of what was added
                        content = content[: choose.randint(kept, len(content))]
                    (path / name).write_bytes(content)

        build(root, place)
        return reported


def cut_power(
    name: str, place: Path, images: int, choose: random.Random, *, flushes: bool = True
) -> dict[str, Any]:
    """Record a task, and judge disks as they may look after each of its operations.

    Without `flushes` the disk ignores them: then something must be lost.
    """
    task, wrong = TASKS[name], []
    folder = place / f"{name}-recorded"
    folder.mkdir()
    task.prepare(folder)
    recorder = Recorder(folder)
    with listening(recorder.before, recorder.synced if flushes else lambda descriptor: None):
        task.act(folder, recorder.reported.append)
        recorder.before()
    count = 0
    for moment in range(len(recorder.moments)):
        for _ in range(images):
            image = place / f"{name}-image"
            reported = recorder.image(moment, image, choose)
            count += 1
            try:
                task.judge(image, reported)
            except Exception as error:
                wrong.append(f"{name}, power cut at {moment}: {_words(error)}")
            shutil.rmtree(image)
    return {"images": count, "operations": len(recorder.moments), "wrong": wrong}


def main() -> None:
    folder, kills, images = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chosen = sys.argv[4:] or list(TASKS)
    torch.set_num_threads(1)
    os.chdir(folder)
    make_subject()
    choose = random.Random(0)
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "WriteIncident" in chosen:
            make_incident(folder / "warm")  # what it imports is there for all that are forked
        for name in chosen:
            found[name] = kill(name, folder, kills, choose)
            if name != "Export":  # Zarr writes in threads of its own
                found[name]["power"] = cut_power(name, folder, images, choose)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
