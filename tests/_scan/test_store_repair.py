"""Scans whose manifest is lost or damaged: reported, kept and repaired; limits; what is shown."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stored_scans import ANATOMY, META, assert_same_sequence, make_sequence

from torchfmri import Anatomy, FileFormatError, InspectionError, Scan, ScannedSequence, load
from torchfmri.cli import main

MANIFEST = "manifest-rank000.jsonl"
LAST = "segment-rank000-000002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A scan of three segments with one, two and one sequences."""
    for names in (["a"], ["b", "c"], ["d"]):
        scan = Scan(ANATOMY, [make_sequence(name) for name in names], META)
        scan.save(tmp_path / "x.fmri", append=True)
    return tmp_path / "x.fmri"


def reseal(record: dict[str, Any]) -> bytes:
    """A record with the right checksum: an enemy can compute it."""
    body = json.dumps({key: each for key, each in record.items() if key != "crc32"}).encode()[:-1]
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


def change(path: Path, **values: Any) -> None:
    path.write_bytes(reseal({**json.loads(path.read_bytes()), **values}))


# -- lost lines ----------------------------------------------------------------------------------


def cut_last_line(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


LOSSES: dict[str, Callable[[bytes], bytes | None]] = {
    "removed": lambda data: None,
    "emptied": lambda data: b"",
    "cut at a line": cut_last_line,
    "cut in a line": lambda data: data[:-30],
    "last byte": lambda data: data[:-1] + b"x",
    "bit in the middle": lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_without_a_line_are_reported_kept_and_repaired(
    loss: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = LOSSES[loss]((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).unlink()
    if data is not None:
        (folder / MANIFEST).write_bytes(data)
    scan = load(folder)
    assert len(scan) < 4
    assert "torchfmri repair" in " ".join(scan.verify())
    segments = {each.name: each.read_bytes() for each in folder.glob("segment*")}
    Scan(ANATOMY, [make_sequence("later")], META).save(folder, append=True)  # the next writer
    assert segments.items() <= {each.name: each.read_bytes() for each in folder.iterdir()}.items()
    assert "torchfmri repair" in " ".join(load(folder).problems)
    assert main(["repair", str(folder)]) == 0
    assert "5 sequences, 0 problems" in capsys.readouterr().out
    repaired = load(folder)
    assert repaired.verify() == ()
    assert set(repaired.names) == {"a", "b", "c", "d", "later"}
    for sequence in repaired:
        assert_same_sequence(sequence, make_sequence(sequence.name))
    assert main(["repair", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["added"] == {}  # there is nothing left to do


def test_every_cut_of_the_manifest_is_reported(folder: Path) -> None:
    data = (folder / MANIFEST).read_bytes()
    whole = data[:-1]  # all but the end of the last line
    for end in sorted({*range(0, len(data), 23), *range(len(data) - 3, len(data))}):
        (folder / MANIFEST).write_bytes(data[:end])
        scan = load(folder)
        assert (len(scan) == 4) == (data[:end] == whole)
        assert bool(scan.problems) == (data[:end] != whole), end


def test_repair_adds_no_damaged_segment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / MANIFEST).write_bytes(cut_last_line((folder / MANIFEST).read_bytes()))
    data = bytearray((folder / LAST).read_bytes())
    data[-1] ^= 1
    (folder / LAST).write_bytes(data)
    assert main(["repair", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert f"cannot be added: {LAST}: its checksum is wrong" in printed
    assert load(folder).names == ("a", "b", "c")
    assert (folder / LAST).read_bytes() == data


def test_repair_sets_aside_what_was_scanned_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / MANIFEST).write_bytes(cut_last_line((folder / MANIFEST).read_bytes()))
    Scan(ANATOMY, [make_sequence("d")], META).save(folder, append=True)
    assert main(["repair", str(folder)]) == 0
    assert f"set aside {LAST}" in capsys.readouterr().out
    scan = load(folder)
    assert (sorted(scan.names), scan.problems) == (["a", "b", "c", "d"], ())
    scan.save(folder, overwrite=True)  # what repair leaves is known as ours


def test_repair_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["repair", str(tmp_path)]) == 2
    assert "meta.json" in capsys.readouterr().err


def test_a_segment_must_list_what_the_manifest_lists(folder: Path) -> None:
    first, second, third = (folder / MANIFEST).read_bytes().splitlines()
    record = json.loads(second)
    record["sequences"][0]["condition"] = "another"
    (folder / MANIFEST).write_bytes(b"\n".join([first, reseal(record), third, b""]))
    scan = load(folder)
    assert [each.name for each in scan] == ["a", "d"]
    assert "lists other sequences than the manifest" in " ".join(scan.problems)


def test_a_scan_of_version_0_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its segments do not list their sequences: it is read as before, and nothing is deleted."""
    lines = []
    for line in (folder / MANIFEST).read_bytes().splitlines():
        record = json.loads(line)
        path = folder / record["segment"]
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"] = {"format": "torchfmri-segment"}
        text = json.dumps(header).encode()
        changed = len(text).to_bytes(8, "little") + text + data[8 + length :]
        path.write_bytes(changed)
        lines.append(
            reseal({**record, "bytes": len(changed), "checksum": f"{zlib.crc32(changed):08x}"})
        )
    (folder / MANIFEST).write_bytes(b"\n".join([*lines, b""]))
    scan = load(folder)
    assert (scan.verify(), len(list(scan))) == ((), 4)
    (folder / MANIFEST).write_bytes(b"\n".join([*lines[:-1], b""]))
    assert main(["repair", str(folder)]) == 1
    assert f"cannot be added: {LAST}: it does not list its sequences" in capsys.readouterr().out
    assert (folder / LAST).exists()


# -- digest --------------------------------------------------------------------------------------


def test_digest_is_that_of_sha256sum(folder: Path) -> None:
    names = sorted(each.name for each in folder.iterdir())
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    digest = load(folder).digest()
    assert digest == hashlib.sha256("".join(lines).encode()).hexdigest()
    if shutil.which("sha256sum"):
        command = "sha256sum meta.json manifest-*.jsonl segment-*.safetensors | LC_ALL=C sort -k2"
        printed = subprocess.run(
            f"({command}) | sha256sum", shell=True, cwd=folder, capture_output=True, text=True
        )
        assert printed.stdout.split()[0] == digest
    shutil.copytree(folder, folder.parent / "copy")
    assert load(folder.parent / "copy").digest() == digest
    record = json.loads((folder / "meta.json").read_bytes())
    change(folder / "meta.json", meta={**record["meta"], "model": "another"})
    assert load(folder).verify() == ()  # a checksum can be put right
    assert load(folder).digest() != digest


def test_a_scan_in_memory_has_no_digest() -> None:
    with pytest.raises(InspectionError, match="in memory: save it"):
        Scan(ANATOMY, [make_sequence("a")], META).digest()


# -- small files that cost much ------------------------------------------------------------------


@contextmanager
def within(seconds: float, megabytes: float) -> Iterator[None]:
    """The block takes no longer, and the process grows by no more."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    assert time.process_time() - begun < seconds
    assert grown < megabytes


def test_a_manifest_of_newlines(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\n" * (2 << 20))
    with within(1, 50):
        scan = load(folder)
    assert "lines are damaged: the others are not read" in " ".join(scan.problems)
    with pytest.raises(FileFormatError, match="torchfmri repair"):
        Scan(ANATOMY, [make_sequence("e")], META).save(folder, append=True)
    assert main(["repair", str(folder)]) == 0
    assert len(load(folder)) == 4


@pytest.mark.parametrize("name", [MANIFEST, "meta.json", LAST])
def test_sparse_files(folder: Path, name: str) -> None:
    record = json.loads((folder / MANIFEST).read_bytes().splitlines()[-1])
    os.truncate(folder / name, 16 << 30)
    if name == LAST:  # with the size in its line put right
        lines = (folder / MANIFEST).read_bytes().splitlines()
        lines[-1] = reseal({**record, "bytes": 16 << 30})
        (folder / MANIFEST).write_bytes(b"\n".join([*lines, b""]))
    with within(2, 50):
        try:
            words = load(folder).verify()
        except FileFormatError as error:
            words = (str(error),)
    assert re.search(r"17,179,869,184 bytes, (more than|but only)", " ".join(words))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("filling", ["[]", "{}", "7", '"ab"', '{"a":[]}', "keys"])
def test_a_meta_of_many_values(folder: Path, filling: str) -> None:
    values = [filling] * (30 << 20 >> 3)
    body = b'{"format":"torchfmri-scan","meta":[' + ",".join(values).encode() + b"]"
    if filling == "keys":
        body = b'{"format":"torchfmri-scan",'
        body += ",".join(f'"{number}":{number}' for number in range(3 << 20)).encode()
    (folder / "meta.json").write_bytes(body + b',"crc32":"%08x"}' % zlib.crc32(body))
    with within(5, 700), pytest.raises(FileFormatError, match=r"more than|version"):
        load(folder)


@pytest.mark.slow
def test_too_many_values_are_not_written(tmp_path: Path) -> None:
    many = {**META, "list": [[]] * 1_000_001}
    with pytest.raises(InspectionError, match="more than 1,000,000 lists"):
        Scan(ANATOMY, [make_sequence("a")], many).save(tmp_path / "x.fmri")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["x" * 200_000, "ab " * 70_000, "a." * 100_000, "字" * 100_000])
def test_long_names_are_cut(tmp_path: Path, name: str) -> None:
    anatomy = Anatomy.of_widths([name, "b"], [name, "B"], [4, 4], [4, 4])
    sequence = make_sequence("s", anatomy=anatomy)
    sequence = ScannedSequence(
        **{**vars(sequence), "condition": name, "name": name, "tensors": {}, "checks": {}}
    )
    other = ScannedSequence(**{**vars(sequence), "name": "other"})
    meta = {"model": name, "loss": name, "missed": {name: name}}
    Scan(anatomy, [sequence, other], meta).save(tmp_path / "x.fmri")
    with within(3, 100):
        scan = load(tmp_path / "x.fmri")
        scan.table(width=80, sequence=0)
        assert len(repr(scan)) < 1_000
        scan._repr_html_()


# -- what is shown -------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def test_nothing_stored_controls_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = {f"layer{ESCAPE}": f"because{ESCAPE}"}
    change(folder / "meta.json", meta={**META, "epsilon": 1, "model": ESCAPE, "missed": missed})
    (folder / f"segment-rank000-000009.safetensors{ESCAPE}").touch()
    scan = load(folder)
    shown = [repr(scan), str(scan), scan.table(sequence=0), *scan.problems]
    (folder / "meta.json").unlink()
    with pytest.raises(FileFormatError) as caught:
        load(folder)
    (folder / ESCAPE).mkdir()
    assert main(["repair", str(folder / ESCAPE)]) == 2
    shown += [str(caught.value), capsys.readouterr().err]
    for text in shown:
        assert not set(ESCAPE) & set(text) & set("\x1b\x07\x9b\u202e"), repr(text)


@pytest.mark.parametrize(
    ("meta", "checks", "words"),
    [
        ({"missed": "abc"}, {}, "`missed` is 'abc', not names by layer"),
        ({"missed": [1, 2]}, {}, r"`missed` is \[1, 2\]"),
        ({"missed": {"mlp": 5}}, {}, "not captured: mlp .*5"),
        ({"model": 7, "loss": [1]}, {}, "of 7"),
        ({"notes": 1}, {}, "the notes of this scan cannot be read: '1'"),
        ({"notes": [[]]}, {}, "the notes of this scan cannot be read"),
        ({}, {"live_difference": "abc"}, "'live_difference' is 'abc', not a number"),
        ({}, {"gradient_residual": [1]}, r"'gradient_residual' is \[1\], not a number"),
        ({}, {"live_difference": {"a": 1}, "tokens_identical": 0}, "not a number"),
    ],
)
def test_malformed_values_are_noted(
    tmp_path: Path, meta: dict[str, Any], checks: dict[str, Any], words: str
) -> None:
    sequence = ScannedSequence(**{**vars(make_sequence("a")), "checks": checks})
    Scan(ANATOMY, [sequence], meta).save(tmp_path / "x.fmri")
    scan = load(tmp_path / "x.fmri")
    text = " ".join(scan.table(width=200).split())
    assert re.search(words, text), text
    assert scan._repr_html_()
