"""Folders that are damaged, or made to do harm: an error that names them, or the right scan."""

import json
import os
import random
import shutil
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored_scans import (
    ANATOMY,
    META,
    assert_same_anatomy,
    assert_same_sequence,
    make_sequence,
    read_everything,
    write_scan,
)

from torchfmri import ScanFormatError, ScannedSequence, load
from torchfmri._files import parse, seal
from torchfmri._scan.store.writer import ScanWriter

MANIFEST = "manifest-rank000.jsonl"
SEGMENT = "segment-rank000-000000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A scan of three segments, each with one sequence."""
    return write_scan(tmp_path / "x.fmri", ["a", "b", "c"], segment_bytes=1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def assert_only(folder: Path, names: str, problem: str) -> None:
    """The scan has just these sequences, they are right, and the problem names the file."""
    scan = load(folder)
    found = read_everything(scan)
    assert "".join(each.name for each in found) == names
    for each in found:
        assert_same_sequence(each, make_sequence(each.name, "abc".index(each.name)))
    assert [each for each in scan.problems if problem in each], scan.problems
    assert len(scan.problems) == 1


# -- damage --------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_when_the_segment_is_read(folder: Path) -> None:
    flip(folder / SEGMENT, -1)
    scan = load(folder)
    assert (len(scan), scan.problems) == (3, ())
    assert [each.name for each in scan] == ["b", "c"]
    with pytest.raises(ScanFormatError, match=SEGMENT):
        scan[0]
    assert len(scan.problems) == 1
    assert SEGMENT in scan.problems[0]
    assert load(folder).verify() == scan.problems
    assert_only(folder, "bc", SEGMENT)


def test_truncated_and_missing_segments_are_known_at_once(folder: Path) -> None:
    data = (folder / SEGMENT).read_bytes()
    for shorter in (data[:-1], data[:9], b"", data + b"\0"):
        (folder / SEGMENT).write_bytes(shorter)
        scan = load(folder)
        assert scan.names == ("b", "c")
        assert SEGMENT in scan.problems[0]
        assert "'a'" in scan.problems[0]
        assert_only(folder, "bc", SEGMENT)
    (folder / SEGMENT).unlink()
    assert_only(folder, "bc", "missing")


def test_resuming_scans_again_what_is_missing(folder: Path) -> None:
    (folder / SEGMENT).unlink()
    with ScanWriter(folder, ANATOMY, META) as writer:
        assert writer.names == {"b", "c"}
        writer.append(make_sequence("a", 0))
    assert sorted(each.name for each in load(folder)) == ["a", "b", "c"]


def test_a_damaged_line_is_named_and_its_segment_is_kept(folder: Path) -> None:
    flip(folder / MANIFEST, 30)
    assert_only(folder, "bc", f"{MANIFEST}, line 1")
    write_scan(folder, ["d"])
    assert (folder / SEGMENT).exists()
    assert load(folder).names == ("b", "c", "d")


def test_a_sequence_that_is_there_twice_counts_once(folder: Path) -> None:
    other = write_scan(folder.parent / "y.fmri", ["a", "z"], rank=1)
    for each in other.glob("*rank001*"):
        shutil.copy(each, folder)
    scan = load(folder)
    assert scan.names == ("a", "b", "c", "z")
    assert "'a' again" in scan.problems[0]


@pytest.mark.parametrize("name", ["meta.json"])
def test_without_its_meta_it_is_no_scan(folder: Path, name: str) -> None:
    flip(folder / name, 100)
    with pytest.raises(ScanFormatError, match=name):
        load(folder)
    (folder / name).unlink()
    with pytest.raises(ScanFormatError, match=r"x\.fmri' .* it has no meta\.json, and holds manif"):
        load(folder)


def test_the_folder_around_a_scan_names_it(folder: Path) -> None:
    with pytest.raises(ScanFormatError, match=r"holds x\.fmri\. Did you mean '.*x\.fmri'\?"):
        load(folder.parent)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty", "nowhere", "file/x", "null\0"):
        with pytest.raises(ScanFormatError):
            load(tmp_path / name)


# -- files that are something else ---------------------------------------------------------------


def replace_by_pipe(path: Path) -> None:
    os.mkfifo(path)


def replace_by_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


def replace_by_link_outside(path: Path) -> None:
    secret = path.parent.parent / f"secret-{path.name}"
    shutil.copy(path.parent.parent / "kept" / path.name, secret)
    path.symlink_to(secret)


def replace_by_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def replace_by_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def replace_by_device(path: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("needs the right to make a device")


@pytest.mark.parametrize("name", ["meta.json", MANIFEST, SEGMENT])
@pytest.mark.parametrize(
    "replace",
    [
        replace_by_pipe,
        replace_by_socket,
        replace_by_link_outside,
        replace_by_link_to_device,
        replace_by_link_to_itself,
        replace_by_device,
        Path.mkdir,
    ],
    ids=lambda function: function.__name__,
)
def test_only_regular_files_are_opened(
    folder: Path, name: str, replace: Callable[[Path], None]
) -> None:
    shutil.copytree(folder, folder.parent / "kept")
    before = {each: each.read_bytes() for each in (folder.parent / "kept").iterdir()}
    (folder / name).unlink()
    replace(folder / name)
    try:
        scan = load(folder)
    except ScanFormatError as error:
        assert (name, error.path) == ("meta.json", "meta.json")  # noqa: PT017
    else:
        assert [each.name for each in scan] == ([] if name == MANIFEST else ["b", "c"])
        assert name in scan.problems[0]
    if name != SEGMENT:
        with pytest.raises((ScanFormatError, OSError)):
            write_scan(folder, ["d"])
    secret = folder.parent / f"secret-{name}"
    if secret.exists():
        assert secret.read_bytes() == before[folder.parent / "kept" / name]  # nothing was written


def test_nothing_is_added_to_a_manifest_with_a_second_name(folder: Path) -> None:
    os.link(folder / MANIFEST, folder.parent / "backup")
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(ScanFormatError, match="second name"):
        write_scan(folder, ["d"])
    assert (folder.parent / "backup").read_bytes() == before
    assert load(folder).names == ("a", "b", "c")


# -- what a manifest may say ---------------------------------------------------------------------


def entry(folder: Path, **changes: Any) -> dict[str, Any]:
    line = (folder / MANIFEST).read_bytes().splitlines()[0]
    record = parse(line, "a line")
    del record["crc32"]
    return {**record, **changes}


def put_first_line(folder: Path, line: bytes) -> None:
    lines = (folder / MANIFEST).read_bytes().splitlines(keepends=True)
    (folder / MANIFEST).write_bytes(b"".join([line + b"\n", *lines[1:]]))


def reseal(body: bytes) -> bytes:
    """JSON of any kind with the right checksum: an enemy can compute it."""
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "..",
        "",
        "segment-rank000-000000.safetensors/../../secret",
        "segment-rank001-000000.safetensors",
        "SEGMENT-rank000-000000.safetensors",
        "segment-rank000-000000.safetensors\n",
        "segment-rank000-000000.safetensors\0",
        "segment-rank000-٠٠٠٠٠٠.safetensors",
        "a" * 100_000,
        None,
        7,
        ["segment-rank000-000000.safetensors"],
    ],
)
def test_segments_are_looked_for_nowhere_else(
    folder: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / SEGMENT, folder.parent / "secret.safetensors")
    put_first_line(folder, seal(entry(folder, segment=name), "a line"))
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: opened.append(str(path)) or real(path, *rest)
    )
    assert_only(folder, "bc", f"{MANIFEST}, line 1")
    assert {str(Path(each).parent) for each in opened} == {str(folder)}
    assert SEGMENT not in {Path(each).name for each in opened}


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": -1},
        {"bytes": 1 << 62},
        {"bytes": 10**400},
        {"bytes": 1.5},
        {"bytes": True},
        {"checksum": "zz"},
        {"checksum": ""},
        {"checksum": 5},
        {"sequences": None},
        {"sequences": [1]},
        {"sequences": [{}]},
        {"sequences": [{"name": "a", "tokens": -1}]},
        {"sequences": [{"name": "a", "tokens": 1 << 39}]},
        {"sequences": [{"name": "a", "tokens": 0}] * 2},
        {"sequences": [{"name": "a", "tokens": 0, "checks": []}]},
        {"sequences": [{"name": "a", "tokens": 0, "condition": 1}]},
        {"sequences": [{"name": 1, "tokens": 0}]},
    ],
    ids=str,
)
def test_a_line_that_makes_no_sense(folder: Path, changes: dict[str, Any]) -> None:
    body = {**entry(folder), "sequences": [{"name": "a", "tokens": 0}], **changes}
    put_first_line(folder, reseal(json.dumps(body)[:-1].encode()))
    scan = load(folder)
    assert [each.name for each in read_everything(scan)] == ["b", "c"]
    assert scan.problems


DEEP = b'{"a":' * 100_000
JSONS = {
    "deep": DEEP,
    "deep list": b'{"a":' + b"[" * 100_000,
    "deeper than allowed": b'{"a":' + b"[" * 100 + b"]" * 100,
    "invalid utf-8": b'{"a":"\xff\xfe"',
    "nan": b'{"a":NaN',
    "infinity": b'{"a":-Infinity',
    "too large": b'{"a":1e999',
    "many digits": b'{"a":' + b"9" * 10_000,
    "half a character": b'{"a":"\\ud800"',
    "duplicate keys": b'{"segment":"x","segment":"y"',
    "duplicate checksum": b'{"crc32":1',
    "float": b'{"a":{"$float":"7"}',
    "a list": b'[{"a":1}',
    "nul": b'{"a":"\0"',
    "empty": b"",
    "bom": b"\xef\xbb\xbf{",
}


@pytest.mark.parametrize("body", JSONS.values(), ids=JSONS)
def test_json_that_is_none(folder: Path, body: bytes) -> None:
    header = body + b"}"
    make_segment(folder, struct.pack("<Q", len(header)) + header)
    assert_only(folder, "bc", SEGMENT)
    put_first_line(folder, reseal(body))
    assert_only(folder, "bc", f"{MANIFEST}, line 1")
    (folder / "meta.json").write_bytes(reseal(body))
    with pytest.raises(ScanFormatError, match=r"meta\.json"):
        load(folder)


def test_a_line_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchfmri._scan.store import manifest

    monkeypatch.setattr(manifest, "LINE_BYTES", 10_000)
    put_first_line(folder, b"x" * 1_000_000)
    scan = load(folder)
    assert scan.names == ("b", "c")
    assert scan.problems


def test_a_meta_of_gigabytes_is_not_read(folder: Path) -> None:
    os.truncate(folder / "meta.json", 1 << 40)  # sparse
    with pytest.raises(ScanFormatError, match="more than"):
        load(folder)


# -- what a segment may say ----------------------------------------------------------------------


def make_segment(folder: Path, data: bytes) -> None:
    """Put these bytes into the first segment, with the right size and checksum in the manifest."""
    (folder / SEGMENT).write_bytes(data)
    put_first_line(
        folder,
        seal(entry(folder, bytes=len(data), checksum=f"{zlib.crc32(data):08x}"), "a line"),
    )


def read_header(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / SEGMENT).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any], more: bytes = b"") -> None:
    header, data = read_header(folder)
    change(header)
    text = json.dumps(header).encode()
    make_segment(folder, struct.pack("<Q", len(text)) + text + data + more)


IDS = "tokens/ids"
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "absurd size": lambda h: h[IDS].update(shape=[1 << 39], data_offsets=[0, 1 << 42]),
    "absurd shape": lambda h: h[IDS].update(shape=[1 << 62, 1 << 62]),
    "absurd and empty": lambda h: h[IDS].update(shape=[0, 1 << 39, 1 << 39]),
    "many axes": lambda h: h[IDS].update(shape=[1] * 100),
    "negative shape": lambda h: h[IDS].update(shape=[-1]),
    "negative offset": lambda h: h[IDS].update(data_offsets=[-8, 0]),
    "reversed offsets": lambda h: h[IDS].update(data_offsets=[8, 0]),
    "outside": lambda h: h[IDS].update(data_offsets=[1 << 30, 1 << 30]),
    "float offset": lambda h: h[IDS].update(data_offsets=[0.0, 0.0]),
    "one offset": lambda h: h[IDS].update(data_offsets=[0]),
    "wrong dtype": lambda h: h[IDS].update(dtype="F64"),
    "unknown dtype": lambda h: h[IDS].update(dtype="O"),
    "dtype of numpy": lambda h: h[IDS].update(dtype="|O8"),
    "dtype that cannot be hashed": lambda h: h[IDS].update(dtype=["F32"]),
    "no dtype": lambda h: h[IDS].pop("dtype"),
    "entry is a list": lambda h: h.update({IDS: []}),
    "entry is nothing": lambda h: h.update({IDS: None}),
    "tensor missing": lambda h: h.pop(IDS),
    "one more, overlapping": lambda h: h.update(more=dict(h["layers/activation"])),
    "other shape": lambda h: h["layers/activation"].update(
        shape=h["layers/activation"]["shape"][::-1]
    ),
    "two names for one": lambda h: h.update({"voxels/gradient": h["voxels/activation"]}),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    folder = tmp_path / "x.fmri"
    with ScanWriter(folder, ANATOMY, META, segment_bytes=1) as writer:
        for name, length in (("a", 4), ("b", 1), ("c", 2)):
            writer.append(make_sequence(name, length))
    change_header(folder, lambda header: None)
    assert len(read_everything(load(folder))) == 3  # so it is the change that does it
    change_header(folder, change)
    assert_only(folder, "bc", SEGMENT)


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 1 << 63, (1 << 64) - 1])
def test_a_header_of_absurd_length(folder: Path, length: int) -> None:
    _, data = read_header(folder)
    make_segment(folder, struct.pack("<Q", length) + data)
    assert_only(folder, "bc", SEGMENT)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 8, b"\xff" * 100])
def test_a_segment_without_a_header(folder: Path, data: bytes) -> None:
    make_segment(folder, data)
    assert_only(folder, "bc", SEGMENT)


def test_bytes_after_the_tensors(folder: Path) -> None:
    change_header(folder, lambda header: None, b"\0" * 8)
    assert_only(folder, "bc", "do not fill the file")


@pytest.mark.parametrize(
    ("field", "value"), [("generated", 2), ("special", 255), ("lengths", -1), ("lengths", 1 << 60)]
)
def test_values_that_cannot_be(tmp_path: Path, field: str, value: int) -> None:
    folder = tmp_path / "x.fmri"
    with ScanWriter(folder, ANATOMY, META, segment_bytes=1) as writer:
        for name, length in (("a", 4), ("b", 1), ("c", 2)):
            writer.append(make_sequence(name, length))
    header, data = read_header(folder)
    first, _ = header[f"tokens/{field}"]["data_offsets"]
    changed = bytearray(data)
    if field == "lengths":
        changed[first : first + 8] = struct.pack("<q", value)
    else:
        changed[first] = value
    text = json.dumps(header).encode()
    make_segment(folder, struct.pack("<Q", len(text)) + text + bytes(changed))
    assert_only(folder, "bc", SEGMENT)


METAS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format": lambda m: m.update(format="other"),
    "version": lambda m: m.update(version=2),
    "no meta": lambda m: m.pop("meta"),
    "layers": lambda m: m.update(layers=[1, 2, 3]),
    "a layer twice": lambda m: m.update(layers=["a", "a", "b"]),
    "types": lambda m: m.update(types=["Linear"]),
    "no voxels": lambda m: m.update(voxels=None),
    "voxels of no layer": lambda m: m["voxels"].update(layer=[99] * len(m["voxels"]["layer"])),
    "negative": lambda m: m["voxels"].update(start=[-1] * len(m["voxels"]["start"])),
    "too large": lambda m: m["voxels"].update(count=[1 << 40] * len(m["voxels"]["count"])),
    "not numbers": lambda m: m["voxels"].update(kind=["0"]),
    "kinds": lambda m: m.update(kinds=["units"]),
}


@pytest.mark.parametrize("change", METAS.values(), ids=METAS)
def test_a_meta_that_makes_no_sense(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = parse((folder / "meta.json").read_bytes(), "meta")
    del record["crc32"]
    change(record)
    (folder / "meta.json").write_bytes(seal(record, "the meta"))
    with pytest.raises(ScanFormatError, match=r"meta\.json"):
        load(folder)


def test_a_later_version_says_what_to_do(folder: Path) -> None:
    record = parse((folder / "meta.json").read_bytes(), "meta")
    del record["crc32"]
    (folder / "meta.json").write_bytes(seal({**record, "version": 2}, "the meta"))
    with pytest.raises(ScanFormatError, match=r"version 2 of the format.*install a newer one"):
        load(folder)


def test_tensors_that_we_do_not_know_are_left_alone(folder: Path) -> None:
    """A later version may add some without a new version of the format."""
    header, data = read_header(folder)
    end = len(data)
    header["later/values"] = {"dtype": "U8", "shape": [3], "data_offsets": [end, end + 3]}
    text = json.dumps(header).encode()
    make_segment(folder, struct.pack("<Q", len(text)) + text + data + b"abc")
    scan = load(folder)
    assert len(read_everything(scan)) == 3
    assert scan.problems == ()


# -- anything ------------------------------------------------------------------------------------


def mutate(data: bytes, choose: random.Random) -> bytes:
    """The data with one to three random changes."""
    changed = bytearray(data)
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        at = choose.randrange(len(changed) + 1)
        kind = choose.randrange(8)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = choose.randrange(256)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + choose.randrange(1, 30)]
        elif kind == 4:
            changed[at:at] = choose.randbytes(choose.randrange(1, 30))
        elif kind == 5:
            end = min(len(changed), at + choose.randrange(1, 30))
            changed[at:end] = bytes(end - at)
        elif kind == 6:
            changed[at:at] = changed[at : at + choose.randrange(1, 200)]
        else:
            digits = [i for i in range(len(changed)) if 48 <= changed[i] <= 57]
            if digits:
                changed[choose.choice(digits)] = choose.choice(b"0123456789-e.")
    return bytes(changed)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
SMALL = {
    "a": make_sequence("a", 3),
    "b": make_sequence("b", 0),
    "c": ScannedSequence(**{**vars(make_sequence("c", 2)), "voxels": {}, "layers": {}}),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A scan of two writers with a segment each."""
    folder = tmp_path / "x.fmri"
    for rank, names in enumerate(["ab", "c"]):
        with ScanWriter(folder, ANATOMY, META, rank=rank) as writer:
            for name in names:
                writer.append(SMALL[name])
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_random_mutations_never_give_wrong_values(small: Path, seed: int) -> None:
    """5 x 1,000 changes to any file: an error of ours, or sequences that are right bit by bit."""
    choose = random.Random(seed)
    originals = {each: each.read_bytes() for each in sorted(small.iterdir())}
    outside = sorted(small.parent.iterdir())
    outcomes = {"error": 0, "fewer": 0, "all": 0}
    for _ in range(1_000):
        path = choose.choice(list(originals))
        put(path, mutate(originals[path], choose))
        try:
            scan = load(small)
            found = read_everything(scan)
        except ScanFormatError:
            outcomes["error"] += 1
        else:
            assert_same_anatomy(scan.anatomy, ANATOMY)
            for each in found:
                assert_same_sequence(each, SMALL[each.name])
            outcomes["all" if len(found) == len(SMALL) else "fewer"] += 1
        put(path, originals[path])
    assert min(outcomes["error"], outcomes["fewer"]) > 50, outcomes
    assert sorted(small.parent.iterdir()) == outside
    assert sorted(small.iterdir()) == list(originals)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_mutations_with_the_right_checksum_do_no_harm(small: Path, seed: int) -> None:
    """5 x 1,000 changes by someone who can compute a checksum: an error of ours, or a scan."""
    choose = random.Random(100 + seed)
    originals = {each: each.read_bytes() for each in sorted(small.iterdir())}
    outside = sorted(small.parent.iterdir())
    outcomes = {"error": 0, "fewer": 0, "all": 0}
    for _ in range(1_000):
        path = choose.choice(list(originals))
        changed = mutate_sealed(path, originals, choose)
        try:
            found = read_everything(load(small))
        except ScanFormatError:
            outcomes["error"] += 1
        else:
            outcomes["all" if len(found) == 3 else "fewer"] += 1
        for each in changed:
            put(each, originals[each])
    assert min(outcomes["error"], outcomes["fewer"]) > 50, outcomes
    assert sorted(small.parent.iterdir()) == outside


def put(path: Path, data: bytes) -> None:
    path.unlink()  # it may still be mapped
    path.write_bytes(data)


def mutate_sealed(
    path: Path, originals: dict[Path, bytes], choose: random.Random
) -> tuple[Path, ...]:
    """The files that were changed."""
    data = originals[path]
    if path.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", data[:8])
        header = mutate(data[8 : 8 + length], choose)
        size = length if choose.random() < 0.1 else len(header)
        changed = struct.pack("<Q", size) + header + data[8 + length :]
        put(path, changed)
        manifest = path.with_name(path.name.replace("segment", "manifest")[:16] + ".jsonl")
        record = parse(originals[manifest], "a line")
        del record["crc32"]
        record |= {"bytes": len(changed), "checksum": f"{zlib.crc32(changed):08x}"}
        put(manifest, seal(record, "a line") + b"\n")
        return path, manifest
    ending = b"\n" if path.suffix == ".jsonl" else b""
    put(path, reseal(mutate(data.rstrip(b"\n")[:-20], choose)) + ending)
    return (path,)
