"""What is written takes the place of what was there in one step, or not at all."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import ANATOMY, make_sequence, scan_of

import torchfmri
from benchmarks.fuzz import make_incident
from torchfmri import InspectionError, Scan


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """No file may have more than so many bytes.

    Only inside: pytest reports a test before its fixtures end, and may report into a file.
    """
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def history() -> torchfmri.History:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = torchfmri.Monitor(model, optimizer)
    with monitor.step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return monitor.history


WRITERS: dict[str, Callable[[Path], Any]] = {
    "x.html": lambda path: scan_of("a", "b").save_html(path, sequence=1),
    "x.png": lambda path: scan_of("a").draw(path),
    "x.csv": lambda path: history().export(path),
    "x.jsonl": lambda path: history().export(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)  # so that everything is imported, and there is room for it
    path.write_text("the old one")
    write = WRITERS[name]
    told = pytest.raises(OSError, match=r"File too large\. .* what was there stands")
    with told as caught, no_room(100):
        write(path)
    assert caught.value.filename == str(path)
    assert path.read_text() == "the old one"
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_full_disk_leaves_the_old_scan_and_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.fmri"
    scan_of("a").save(path)
    new = scan_of("b")
    told = pytest.raises(OSError, match=r"File too large\. .* what was there stands")
    with told as caught, no_room(100):
        new.save(path, overwrite=True)
    assert caught.value.filename == str(path)
    assert torchfmri.load(path).names == ("a",)
    assert [each.name for each in tmp_path.iterdir()] == ["x.fmri"]


@pytest.mark.parametrize("ending", ["nc", "csv", "parquet"])
def test_a_full_disk_leaves_the_old_export(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{ending}"
    scan_of("a").export(path)
    old, new = path.read_bytes(), scan_of("b", "c")
    told = pytest.raises(OSError, match=r"File too large\. .* what was there stands")
    with told as caught, no_room(100):
        new.export(path, overwrite=True)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == old
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.filterwarnings("ignore:.*is left out:torchfmri.NonFiniteWarning")
def test_an_incident_that_cannot_be_written_leaves_no_empty_folder(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = torchfmri.Monitor(model, optimizer, on_nonfinite="skip", incidents=tmp_path / "i")

    def step() -> None:
        with monitor.step():
            model(torch.full((2, 4), float("nan"))).sum().backward()
            optimizer.step()

    with pytest.warns(torchfmri.NonFiniteWarning, match="could not be written"), no_room(100):
        step()
    assert monitor.incidents[0].folder is None
    assert list(tmp_path.rglob("step-*")) == []


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_keeps_its_rights_and_a_link_its_place(name: str, tmp_path: Path) -> None:
    real, link = tmp_path / f"real-{name}", tmp_path / name
    real.write_text("the old one")
    real.chmod(0o640)
    link.symlink_to(real)
    WRITERS[name](link)
    assert link.is_symlink()
    assert real.stat().st_size > 100
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.html")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "x.html").read_text("utf-8")))
    reader.start()
    scan_of("a").save_html(tmp_path / "x.html")
    reader.join()
    assert read[0].endswith("</html>\n")


class Doing(Sequence[torchfmri.ScannedSequence]):
    """Two sequences; something happens before the second is asked for."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            self._act()
        return make_sequence("bc"[index], length=2 + index)


def test_a_folder_with_a_writer_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.fmri"
    scan_of("a").save(path)

    def overwrite() -> None:
        with pytest.raises(InspectionError, match=r"x\.fmri' is being written.* Close the writer"):
            scan_of("z").save(path, overwrite=True)

    Scan(ANATOMY, Doing(overwrite), {"model": "tiny"}).save(path, append=True)
    assert torchfmri.load(path).names == ("a", "b", "c")
    scan_of("z").save(path, overwrite=True)
    assert torchfmri.load(path).names == ("z",)
    assert [each.name for each in tmp_path.iterdir()] == ["x.fmri"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_writer_notices_that_its_folder_is_gone(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "x.fmri"
    scan_of("a").save(path)

    def take_away() -> None:
        path.rename(tmp_path / "elsewhere")
        if replaced:
            scan_of("z").save(path)

    writing = Scan(ANATOMY, Doing(take_away), {"model": "tiny"})
    with pytest.raises(InspectionError, match=r"moved, removed or replaced.*first: 'b'"):
        writing.save(path, append=True)
    assert torchfmri.load(tmp_path / "elsewhere").names == ("a",)
    assert path.exists() is replaced


def test_a_scan_that_stands_aside_is_found_and_put_back(tmp_path: Path) -> None:
    """What a kill leaves between the two steps, where folders cannot be exchanged in one."""
    path = tmp_path / "x.fmri"
    scan_of("a").save(path)
    path.rename(tmp_path / ".x.fmri.replaced")
    assert torchfmri.load(path).names == ("a",)
    assert not path.exists()  # reading never writes
    scan_of("b").save(path, append=True)
    assert torchfmri.load(path).names == ("a", "b")
    scan_of("old").save(tmp_path / ".x.fmri.replaced")  # the step after: the new one is in place
    scan_of("c").save(path, overwrite=True)
    assert torchfmri.load(path).names == ("c",)
    assert [each.name for each in tmp_path.iterdir()] == ["x.fmri"]


def test_what_killed_processes_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    new, old = (tmp_path / f".torchfmri-{digit * 16}" for digit in "01")
    for each in (new, old):
        scan_of("a").save(each)
    os.utime(old, (time.time() - 7200,) * 2)
    scan_of("a").save(tmp_path / "x.fmri")
    assert sorted(each.name for each in tmp_path.iterdir()) == [new.name, "x.fmri"]


def test_new_folders_have_the_rights_of_the_user(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        scan_of("a").save(tmp_path / "x.fmri")
        make_incident(tmp_path / "incidents")
    finally:
        os.umask(before)
    folders = [tmp_path / "x.fmri", *(tmp_path / "incidents").rglob("rank-0")]
    assert len(folders) == 2
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
        assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o640}


def test_an_export_stays_whole_until_it_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    scan_of("a").export(tmp_path / "x.zarr")
    inside: list[bool] = []

    class Looking(Doing):
        def __getitem__(self, index: Any) -> Any:
            inside.append((tmp_path / "x.zarr" / "zarr.json").exists())
            return super().__getitem__(index)

    scan = Scan(ANATOMY, Looking(lambda: None), {"model": "tiny"})
    scan.export(tmp_path / "x.zarr", overwrite=True)
    assert all(inside)
    assert [each.name for each in tmp_path.iterdir()] == ["x.zarr"]
