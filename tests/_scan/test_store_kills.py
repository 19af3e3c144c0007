"""Writers that are killed at any moment, and disks that are full: what was committed stays."""

import errno
import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored_scans import ANATOMY, META, assert_same_sequence, make_sequence, write_scan

from torchfmri import load
from torchfmri._scan import repair
from torchfmri._scan.store.folder import final_name
from torchfmri._scan.store.writer import ScanWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
KILLS = 50


def write_for_ever(path: Path, report: int, seed: int) -> None:
    """Resume a scan and add sequences; say which are committed, once they are."""
    pieces = random.Random(seed)
    options = {"segment_bytes": pieces.choice([1, 3_000, 20_000]), "commit_seconds": 1e9}
    with ScanWriter(path, ANATOMY, META, rank=seed % 2, **options) as writer:
        pending: list[str] = []
        for number in range(1_000_000):
            name = f"sequence {number}"
            if name in writer.names:
                continue
            writer.append(make_sequence(name, number % 7))
            pending.append(name)
            if not writer._pending:  # the append has committed
                os.write(report, "".join(json.dumps(each) + "\n" for each in pending).encode())
                pending = []


def run_and_kill(path: Path, seed: int, seconds: float, *, after_commit: bool) -> list[str]:
    """The sequences that a writer said were committed before it was killed.

    It is killed so many seconds after its start, or after its first commit.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            write_for_ever(path, writing, seed)
        finally:
            os._exit(1)
    os.close(writing)
    if after_commit:
        select.select([reading], [], [], 20)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    with os.fdopen(reading, "rb") as report:
        return [json.loads(line) for line in report.read().splitlines()]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.slow
def test_kills_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "x.fmri"
    moments = random.Random(7)
    committed: list[str] = []
    left_behind = 0
    for kill in range(KILLS):
        # Some before the folder exists or while it is opened, most while segments are written.
        after_commit = kill % 3 > 0
        seconds = moments.uniform(0, 0.02 if after_commit else 0.06)
        committed += run_and_kill(path, kill, seconds, after_commit=after_commit)
        if not (path / "meta.json").exists():
            assert committed == []
            continue
        scan = load(path)  # without repair
        assert scan.problems == ()
        assert len(set(scan.names)) == len(scan.names)
        assert set(committed) <= set(scan.names)
        left_behind += bool(list(path.glob("*.pending")))
    assert len(committed) >= KILLS // 2
    assert left_behind > 0  # some kills did fall between a segment and its mark
    assert len(set(committed)) == len(committed)  # none was scanned a second time
    for sequence in load(path):
        number = int(sequence.name.split()[1])
        assert_same_sequence(sequence, make_sequence(sequence.name, number % 7))
    for rank in (0, 1):
        ScanWriter(path, ANATOMY, META, rank=rank).close()  # resuming clears up
    scan = load(path)
    named = {place.segment.name for place in scan._sequences._places}
    assert {each.name for each in path.glob("segment*.safetensors")} == named
    # What is left was finished when it was killed. It comes back, unless a later writer, which was
    # killed too, had written the same sequences again: then one of the two is spare.
    finished = {final_name(each.name) for each in path.glob("segment*.pending")}
    done = repair(path)
    assert finished == done.added.keys() | {final_name(name) for name in done.spare}
    assert not {name for names in done.added.values() for name in names} & set(scan.names)
    names = load(path).names
    assert len(set(names)) == len(names)


def test_a_repair_names_what_was_not_there(tmp_path: Path) -> None:
    path = write_scan(tmp_path / "x.fmri", ["a", "b"], segment_bytes=1)
    other = write_scan(tmp_path / "y.fmri", ["b", "c"])
    (left,) = other.glob("segment*")
    left.rename(path / "segment-rank000-000007.pending")
    assert repair(path).added == {"segment-rank000-000007.safetensors": ("c",)}
    assert load(path).names == ("a", "b", "c")


@pytest.fixture
def torn(tmp_path: Path) -> tuple[Path, Path, bytes, int]:
    """A scan whose last segment is called pending, its manifest, and where its line begins."""
    path = write_scan(tmp_path / "x.fmri", ["a", "b"], segment_bytes=1)
    last = path / "segment-rank000-000001.safetensors"
    last.rename(last.with_suffix(".pending"))
    manifest = path / "manifest-rank000.jsonl"
    whole = manifest.read_bytes()
    return path, manifest, whole, whole.index(b"\n") + 1


def test_a_segment_counts_once_its_line_was_begun(torn: tuple[Path, Path, bytes, int]) -> None:
    path, manifest, whole, first = torn
    for end in [*range(first, len(whole), 11), len(whole) - 2, len(whole) - 1]:
        manifest.write_bytes(whole[:end])
        scan = load(path)
        assert scan.names == (("a", "b") if end > first else ("a",))
        assert scan.verify() == ()


@pytest.mark.parametrize("cut", [None, 10, -2, -1])
@pytest.mark.parametrize("cure", ["writer", "repair"])
def test_a_segment_whose_line_was_cut_off_is_added_again(
    torn: tuple[Path, Path, bytes, int], cut: int | None, cure: str
) -> None:
    path, manifest, whole, first = torn
    manifest.write_bytes(whole[: first if cut is None else cut if cut < 0 else first + cut])
    if cure == "writer":
        write_scan(path, ["c"])
    if cure == "repair" or cut is None:  # where nothing is left of the line, it is not used
        repair(path)
    scan = load(path)
    assert set(scan.names) == {"a", "b", "c"} - ({"c"} if cure == "repair" else set())
    assert scan.verify() == ()
    assert_same_sequence(scan[scan.names.index("b")], make_sequence("b", 1))


def test_a_segment_without_a_line_is_cleared_away_once_its_sequences_are_there(
    torn: tuple[Path, Path, bytes, int],
) -> None:
    path, manifest, whole, first = torn
    pending = path / "segment-rank000-000001.pending"
    manifest.write_bytes(whole[:first])
    write_scan(path, ["c"])
    assert load(path).names == ("a", "c")
    assert pending.exists()
    write_scan(path, ["b"])
    assert load(path).names == ("a", "c", "b")
    write_scan(path, ["d"])
    assert load(path).names == ("a", "c", "b", "d")
    assert not pending.exists()


@pytest.mark.parametrize("cut", [None, 10])
def test_a_segment_that_was_never_finished_is_cleared_away_unless_a_line_began(
    torn: tuple[Path, Path, bytes, int], cut: int | None
) -> None:
    path, manifest, whole, first = torn
    manifest.write_bytes(whole[: first + (cut or 0)])
    pending = path / "segment-rank000-000001.pending"
    pending.write_bytes(pending.read_bytes()[:-1])
    write_scan(path, ["c"])
    scan = load(path)
    assert scan.names == ("a", "c")
    assert pending.exists() == (cut is not None)  # only the line can say that it was whole
    assert bool(scan.problems) == (cut is not None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(where)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "x.fmri"
    done: list[str] = []

    def fill() -> None:
        with ScanWriter(path, ANATOMY, META, commit_seconds=0) as writer:
            for number in range(10_000):
                writer.append(make_sequence(f"s{number}", 20))
                done.append(f"s{number}")

    with pytest.raises(OSError, match="Those committed before are intact") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert len(done) > 10
    scan = load(path)
    assert (scan.names, scan.problems) == (tuple(done), ())
    for sequence in scan:
        assert_same_sequence(sequence, make_sequence(sequence.name, 20))
    with pytest.raises(OSError, match="No space left"):
        scan.save(small_disk / "copy.fmri")
    assert [each.name for each in small_disk.iterdir()] == ["x.fmri"]


def test_a_killed_process_lets_go_of_its_lock(tmp_path: Path) -> None:
    run_and_kill(tmp_path / "x.fmri", 0, 0, after_commit=True)
    write_scan(tmp_path / "x.fmri", ["after"])
    assert "after" in load(tmp_path / "x.fmri").names
