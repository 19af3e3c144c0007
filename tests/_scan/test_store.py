"""A scan in a folder: what is written is what is read, added to, and replaced."""

import errno
import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored_scans import (
    ANATOMY,
    META,
    assert_same_anatomy,
    assert_same_sequence,
    make_sequence,
    write_scan,
)

from torchfmri import (
    Anatomy,
    InspectionError,
    Scan,
    ScanFormatError,
    ScannedSequence,
    Tokens,
    load,
)
from torchfmri._files import FileColumn, read_tensors, tensor_file, write_tensors
from torchfmri._scan.record.sequence import METRICS, STATISTICS
from torchfmri._scan.store import manifest
from torchfmri._scan.store import writer as store
from torchfmri._scan.store.manifest import read_manifest
from torchfmri._scan.store.writer import ScanWriter

# -- the same again ------------------------------------------------------------------------------


def test_load_gives_back_what_was_saved(tmp_path: Path) -> None:
    sequences = [make_sequence(f"s{number}", number) for number in range(5)]
    Scan(ANATOMY, sequences, META).save(tmp_path / "x.fmri")
    scan = load(tmp_path / "x.fmri")
    assert (len(scan), scan.problems) == (5, ())
    assert scan.names == ("s0", "s1", "s2", "s3", "s4")
    assert repr(scan.meta) == repr(META)
    assert_same_anatomy(scan.anatomy, ANATOMY)
    for found, expected in zip(scan, sequences, strict=True):
        assert_same_sequence(found, expected)
    assert_same_sequence(scan[-1], sequences[-1])
    assert list(scan[0].layers) == list(METRICS)  # in their order, not by alphabet


def test_a_comparison_that_must_fail(tmp_path: Path) -> None:
    sequence = make_sequence("s")
    changed = sequence.voxels["gradient"].copy()
    changed.view(np.uint32)[1, 2] ^= 1  # the last bit of one value
    other = ScannedSequence(
        **{**vars(sequence), "voxels": {**sequence.voxels, "gradient": changed}}
    )
    Scan(ANATOMY, [other], META).save(tmp_path / "x.fmri")
    with pytest.raises(AssertionError):
        assert_same_sequence(load(tmp_path / "x.fmri")[0], sequence)


NAMES = st.text(min_size=1, max_size=8)
WILD = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=5).filter(lambda key: key != "$float"), inner, max_size=3
        )
    ),
    max_leaves=6,
)
TENSORS = st.sampled_from(["?", "u1", "i1", "<i2", "<f2", "<i4", "<f4", ">f4", "<f8", "<i8", "<u8"])


@st.composite
def scans(draw: st.DrawFn) -> Scan:
    layers = draw(st.lists(NAMES, unique=True, max_size=3))
    widths = [draw(st.integers(0, 5)) for _ in layers]
    anatomy = Anatomy.of_widths(layers, [draw(NAMES) for _ in layers], widths, [2] * len(layers))
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    return Scan(anatomy, [draw(sequences(name, anatomy)) for name in names], draw(metas()))


def metas() -> st.SearchStrategy[dict[str, Any]]:
    keys = st.text(max_size=5).filter(lambda key: key != "$float")
    return st.dictionaries(keys, JSON, max_size=3)


@st.composite
def sequences(draw: st.DrawFn, name: str, anatomy: Anatomy) -> ScannedSequence:
    length = draw(st.integers(0, 3))

    def array(dtype: Any, *shape: int) -> np.ndarray:
        elements = WILD if dtype == np.float32 else None
        return draw(arrays.arrays(dtype, shape, elements=elements))

    def table(width: int) -> dict[str, np.ndarray]:
        keys = draw(st.lists(st.sampled_from([*METRICS, "o/wn"]), unique=True))
        return {key: array(np.float32, length, width) for key in keys}

    tokens = Tokens(
        array(np.int64, length),
        tuple(draw(st.binary(max_size=4)) for _ in range(length)),
        array(np.float32, length),
        array(np.float32, length),
        array(np.bool_, length),
        array(np.bool_, length),
    )
    full = draw(st.lists(st.sampled_from(anatomy.layers), unique=True)) if anatomy.layers else []
    return ScannedSequence(
        name,
        tokens,
        table(len(anatomy.layers)),
        table(len(anatomy.layer)),
        {
            what: array(np.float64, len(anatomy.layers), len(STATISTICS))
            for what in draw(st.lists(st.sampled_from(["activations", "gradients"]), unique=True))
        },
        {layer: array(draw(TENSORS), length, draw(st.integers(0, 3))) for layer in full},
        draw(st.text(max_size=5)),
        draw(st.integers(0, 2**31)),
        draw(metas()),
    )


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(scans(), st.sampled_from([0, 1, 200, 1 << 20]))
def test_save_then_load_is_identity(
    tmp_path_factory: pytest.TempPathFactory, scan: Scan, size: int
) -> None:
    path = tmp_path_factory.mktemp("scan") / "x.fmri"
    with ScanWriter(path, scan.anatomy, scan.meta, segment_bytes=size) as writer:
        for sequence in scan:
            writer.append(sequence)
    found = load(path)
    assert found.problems == ()
    assert repr(found.meta) == repr(scan.meta)
    assert_same_anatomy(found.anatomy, scan.anatomy)
    assert found.names == scan.names
    for one, other in zip(found, scan, strict=True):
        little = {
            layer: values.astype(values.dtype.newbyteorder("<"))
            for layer, values in other.tensors.items()
        }
        assert_same_sequence(one, ScannedSequence(**{**vars(other), "tensors": little}))


def test_bfloat16_takes_half_the_room_and_stays_exact(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).reshape(4, -1) << 16  # every bfloat16, NaN and all
    exact = bits.view(np.float32)
    sequence = make_sequence("s")
    sizes = []
    for tensor in (exact, (bits | 1).view(np.float32)):
        stored = ScannedSequence(**{**vars(sequence), "tensors": {"embed": tensor}})
        path = tmp_path / f"{len(sizes)}.fmri"
        Scan(ANATOMY, [stored], META).save(path)
        assert_same_sequence(load(path)[0], stored)
        sizes.append(next(path.glob("segment*")).stat().st_size)
    assert sizes[1] - sizes[0] == pytest.approx(exact.nbytes / 2, abs=64)


def test_segments_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    random = np.random.default_rng(0)
    tensors = {
        f"{dtype}/é\n": random.integers(0, 2, (2, 3)).astype(dtype)
        for dtype in ("?", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "f8", "i8", "u8")
    }
    tensors["none"] = np.empty((0, 4), np.float32)
    columns = {
        name: FileColumn(tensor_file.TAGS[values.dtype], [values[:1], values[1:]])
        for name, values in tensors.items()
    }
    path = tmp_path / "ours.safetensors"
    size, check = write_tensors(path, columns, {"format": "torchfmri-segment"})
    found, metadata = read_tensors(path, size, check)
    expected, data = library.save(tensors, metadata), path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    assert json.loads(data[8:length]) == json.loads(expected[8:length])  # metadata in any order
    assert (data[:8], data[length:]) == (expected[:8], expected[length:])
    for name, values in library.load(expected).items():
        assert found[name].values.tobytes() == values.tobytes() == tensors[name].tobytes()
        assert found[name].values.shape == values.shape


def test_the_library_reads_our_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    values = torch.randn(4, 5).bfloat16()
    sequence = ScannedSequence(
        **{**vars(make_sequence("s")), "tensors": {"embed": values.float().numpy()}}
    )
    Scan(ANATOMY, [sequence], META).save(tmp_path / "x.fmri")
    found = library.load_file(next((tmp_path / "x.fmri").glob("segment*")))
    assert torch.equal(found["tensors/embed"], values)


# -- mapped, lazily ------------------------------------------------------------------------------


def test_arrays_are_views_of_the_file_that_cannot_be_written_to(tmp_path: Path) -> None:
    scan = load(write_scan(tmp_path / "x.fmri", ["a", "b", "c"]))
    values = scan[2].voxels["activation"]
    assert not values.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1


def test_opening_reads_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_scan(tmp_path / "x.fmri", [f"s{number}" for number in range(20)], segment_bytes=1)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: opened.append(str(path)) or real(path, *rest)
    )
    scan = load(path)
    assert (len(scan), len(scan.names)) == (20, 20)
    assert not [name for name in opened if ".safetensors" in name]
    assert len(scan[3]) == 3
    assert len([name for name in opened if ".safetensors" in name]) == 1


def test_more_segments_can_be_held_than_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "MAPPINGS", 3)
    names = [f"s{number}" for number in range(12)]
    scan = load(write_scan(tmp_path / "x.fmri", names, segment_bytes=1))
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    held = list(scan)
    if before:
        assert len(list(descriptors.iterdir())) - before <= 3
    for number, sequence in enumerate(held):
        assert_same_sequence(sequence, make_sequence(names[number], number % 5))


# -- commits -------------------------------------------------------------------------------------


def test_short_sequences_share_a_segment_and_long_ones_do_not(tmp_path: Path) -> None:
    with ScanWriter(tmp_path, ANATOMY, META, segment_bytes=5_000) as writer:
        for number in range(12):
            writer.append(make_sequence(f"s{number}", 4))
        writer.append(make_sequence("long", 500))
    sizes = [
        len(each.sequences) for each in read_manifest(tmp_path / "manifest-rank000.jsonl").segments
    ]
    assert sum(sizes) == 13
    assert max(sizes) > 2
    assert all(each.stat().st_size > 5_000 for each in sorted(tmp_path.glob("segment*"))[:-1])


def test_sequences_with_other_tensors_get_a_segment_of_their_own(tmp_path: Path) -> None:
    plain = make_sequence("plain")
    bare = ScannedSequence("bare", plain.tokens, {}, {})
    with ScanWriter(tmp_path, ANATOMY, META) as writer:
        for sequence in (plain, bare, make_sequence("last")):
            writer.append(sequence)
    assert len(list(tmp_path.glob("segment*"))) == 3
    assert_same_sequence(load(tmp_path)[1], bare)


def test_nothing_is_seen_before_its_commit(tmp_path: Path) -> None:
    with ScanWriter(tmp_path, ANATOMY, META, commit_seconds=1e9) as writer:
        writer.append(make_sequence("a"))
        scan = load(tmp_path)
        assert len(scan) == 0
        writer.commit()
        assert len(scan) == 0
        assert scan.refresh() == 1
        assert_same_sequence(scan[0], make_sequence("a"))
        writer.append(make_sequence("b"))
        assert scan.refresh() == 0
    assert scan.refresh() == 1
    assert scan.names == ("a", "b")


def test_live_mode_commits_every_sequence(tmp_path: Path) -> None:
    with ScanWriter(tmp_path, ANATOMY, META, commit_seconds=0) as writer:
        for name in "abc":
            writer.append(make_sequence(name))
            assert load(tmp_path).names[-1] == name


def test_a_sequence_does_not_wait_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ScanWriter(tmp_path, ANATOMY, META, commit_seconds=5) as writer:
        writer.append(make_sequence("a"))
        now[0] += 4.9
        writer.append(make_sequence("b"))
        assert len(load(tmp_path)) == 0
        now[0] += 0.2
        writer.commit_when_due()
        assert len(load(tmp_path)) == 2


def test_everything_is_flushed_before_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_write = os.fsync, os.write

    def name(descriptor: int) -> str:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        return "folder" if target == tmp_path else target.name.split("-")[0]

    def sync(descriptor: int) -> None:
        events.append(f"fsync {name(descriptor)}")
        real_sync(descriptor)

    def write(descriptor: int, data: Any) -> int:
        events.append(f"write {name(descriptor)}")
        return real_write(descriptor, data)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    with ScanWriter(tmp_path, ANATOMY, META) as writer:
        writer.append(make_sequence("a"))
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "write", write)
        writer.commit()
    assert events == ["fsync segment", "fsync folder", "write manifest", "fsync manifest"]


def test_an_exception_inside_commits_what_is_complete(tmp_path: Path) -> None:
    def scan_until_interrupted() -> None:
        with ScanWriter(tmp_path, ANATOMY, META, commit_seconds=1e9) as writer:
            writer.append(make_sequence("a"))
            writer.append(make_sequence("b"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_until_interrupted()
    assert load(tmp_path).names == ("a", "b")


@pytest.mark.parametrize("moment", ["segment", "folder", "manifest", "after"])
def test_an_interrupted_commit_is_made_again_without_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real = os.fsync
    count = {"segment": 0, "folder": 1, "manifest": 2, "after": 2}[moment]
    calls = []

    def interrupted(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == count + 1:
            if moment == "after":
                real(descriptor)
            raise KeyboardInterrupt
        real(descriptor)

    def scan_until_interrupted() -> None:
        with ScanWriter(tmp_path, ANATOMY, META, commit_seconds=1e9) as writer:
            writer.append(make_sequence("a"))
            monkeypatch.setattr(os, "fsync", interrupted)
            writer.commit()

    with pytest.raises(KeyboardInterrupt):
        scan_until_interrupted()
    assert len(calls) > count
    scan = load(tmp_path)
    assert (scan.names, scan.problems) == (("a",), ())
    write_scan(tmp_path, ["b"])  # opening again removes what was left behind
    assert len(list(tmp_path.glob("segment*"))) == 2


# -- adding --------------------------------------------------------------------------------------


def test_a_second_writer_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    write_scan(tmp_path, ["a", "b"])
    with ScanWriter(tmp_path, ANATOMY, META) as writer:
        assert writer.names == {"a", "b"}
        with pytest.raises(InspectionError, match="has a sequence 'a' already"):
            writer.append(make_sequence("a"))
        writer.append(make_sequence("c"))
        with pytest.raises(InspectionError, match="'c' already"):
            writer.append(make_sequence("c"))
    assert load(tmp_path).names == ("a", "b", "c")


def test_several_ranks_write_one_scan(tmp_path: Path) -> None:
    writers = [ScanWriter(tmp_path, ANATOMY, META, rank=rank) for rank in (0, 1, 1234)]
    for number in range(9):
        writers[number % 3].append(make_sequence(f"s{number}"))
    for writer in writers:
        writer.close()
    scan = load(tmp_path)
    assert sorted(scan.names) == sorted(f"s{number}" for number in range(9))
    assert scan.problems == ()
    for sequence in scan:
        assert_same_sequence(sequence, make_sequence(sequence.name))
    with ScanWriter(tmp_path, ANATOMY, META, rank=1) as writer:
        assert len(writer.names) == 9


def test_ranks_that_start_at_the_same_time_agree_on_one_meta(tmp_path: Path) -> None:
    barrier = threading.Barrier(6)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        barrier.wait()
        try:
            write_scan(tmp_path / "x.fmri", [f"rank {rank}"], rank=rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(load(tmp_path / "x.fmri")) == 6
    assert not list((tmp_path / "x.fmri").glob(".*"))


def test_two_writers_of_one_rank_are_refused(tmp_path: Path) -> None:
    with (
        ScanWriter(tmp_path, ANATOMY, META),
        pytest.raises(InspectionError, match="Another process"),
    ):
        ScanWriter(tmp_path, ANATOMY, META)
    write_scan(tmp_path, ["a"])  # the lock is gone with its writer


@pytest.mark.parametrize(
    ("anatomy", "meta", "message"),
    [
        (ANATOMY, {**META, "per": "cached"}, "'per' is 'position' there and 'cached' here"),
        (ANATOMY, {**META, "extra": 1}, "'extra' is absent there and 1 here"),
        (
            Anatomy.of_widths(["embed", "other"], ["Embedding", "MLP"], [8, 6], [4, 4]),
            META,
            r"3 layers, yours has 2.*first at 1: \('layers.0.mlp',\) and \('other',\)",
        ),
        (
            Anatomy.of_widths(ANATOMY.layers, ANATOMY.types, [8, 6, 5], [2, 4, 4]),
            META,
            "other voxels",
        ),
    ],
)
def test_sequences_of_another_kind_are_not_added(
    tmp_path: Path, anatomy: Anatomy, meta: dict[str, Any], message: str
) -> None:
    write_scan(tmp_path, ["a"])
    with pytest.raises(InspectionError, match=message):
        ScanWriter(tmp_path, anatomy, meta)
    write_scan(tmp_path, ["b"])  # the attempt has left neither a lock nor a change
    assert load(tmp_path).names == ("a", "b")


def test_versions_and_dates_may_differ(tmp_path: Path) -> None:
    write_scan(tmp_path, ["a"])
    meta = {**META, "versions": {"torch": "9"}, "created": "later", "run": 7}
    ScanWriter(tmp_path, ANATOMY, meta).close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "\ud800"}, "not Unicode"),
        ({"checks": {"x": object()}}, "cannot be kept"),
        ({"checks": {1: 2}}, "Use strings"),
        ({"padding": -1}, "'padding' is not a count"),
        ({"condition": None}, "'condition' is not a text"),
        ({"layers": {"activation": np.zeros((4, 9), np.float32)}}, r"layers/activation of 's' is"),
        ({"voxels": {"activation": np.zeros((4, 7), np.float64)}}, "float64"),
        ({"tensors": {"embed": np.zeros((4, 2), np.complex64)}}, "complex64"),
        ({"tensors": {"embed": np.zeros((3, 2), np.float32)}}, r"not \(4, units\)"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_once(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    wrong = ScannedSequence(**{**vars(make_sequence("s")), **change})
    with ScanWriter(tmp_path, ANATOMY, META) as writer:
        writer.append(make_sequence("good"))
        with pytest.raises(InspectionError, match=message):
            writer.append(wrong)
    assert load(tmp_path).names == ("good",)


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = ScanWriter(tmp_path, ANATOMY, META)
    writer.close()
    writer.close()
    with pytest.raises(InspectionError, match="is closed"):
        writer.append(make_sequence("a"))


# -- saving --------------------------------------------------------------------------------------


def test_save_replaces_a_scan_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.fmri"
    first, second = (Scan(ANATOMY, [make_sequence(name)], META) for name in "ab")
    first.save(path)
    with pytest.raises(InspectionError, match="overwrite=True"):
        second.save(path)
    assert load(path).names == ("a",)
    second.save(path, overwrite=True)
    assert load(path).names == ("b",)
    first.save(path, append=True)
    assert load(path).names == ("b", "a")
    with pytest.raises(InspectionError, match="'a' already"):
        first.save(path, append=True)
    load(path).save(path, overwrite=True)  # onto itself, while it is mapped
    assert load(path).names == ("b", "a")
    assert [each.name for each in tmp_path.iterdir()] == ["x.fmri"]


def test_save_never_replaces_what_is_no_scan(tmp_path: Path) -> None:
    scan = Scan(ANATOMY, [make_sequence("a")], META)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    scan.save(tmp_path / "with notes")
    (tmp_path / "with notes" / "notes.txt").write_text("mine")
    for name in ("thesis", "file", "with notes"):
        with pytest.raises(InspectionError):
            scan.save(tmp_path / name, overwrite=True)
    with pytest.raises(InspectionError, match="not a scan, and not empty"):
        ScanWriter(tmp_path / "thesis", ANATOMY, META)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
    assert (tmp_path / "with notes" / "notes.txt").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "thesis", "with notes"]


def test_a_save_that_fails_leaves_the_old_scan(tmp_path: Path) -> None:
    path = tmp_path / "x.fmri"
    Scan(ANATOMY, [make_sequence("a")], META).save(path)
    wrong = ScannedSequence(**{**vars(make_sequence("b")), "checks": {"x": object()}})
    with pytest.raises(InspectionError):
        Scan(ANATOMY, [wrong], META).save(path, overwrite=True)
    assert load(path).names == ("a",)
    assert [each.name for each in tmp_path.iterdir()] == ["x.fmri"]


def test_a_damaged_scan_is_not_saved_without_a_word(tmp_path: Path) -> None:
    scan = load(write_scan(tmp_path / "x.fmri", ["a", "b"], segment_bytes=1))
    segment_path = sorted((tmp_path / "x.fmri").glob("segment*"))[1]
    data = bytearray(segment_path.read_bytes())
    data[-1] ^= 1
    segment_path.write_bytes(data)
    with pytest.raises(ScanFormatError, match="checksum"):
        scan.save(tmp_path / "y.fmri")
    Scan(scan.anatomy, list(scan), scan.meta).save(tmp_path / "y.fmri")
    assert load(tmp_path / "y.fmri").names == ("a",)


# -- a full disk ---------------------------------------------------------------------------------


def test_a_disk_that_is_full_leaves_what_was_committed(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = ScanWriter(tmp_path, ANATOMY, META, commit_seconds=0)
    writer.append(make_sequence("a"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))  # no file may be larger
    try:
        with pytest.raises(OSError, match="Those committed before are intact") as caught:
            writer.append(make_sequence("large", 500))
        assert caught.value.errno == errno.EFBIG
        assert load(tmp_path).names == ("a",)
        assert len(list(tmp_path.glob("segment*"))) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.commit()  # there is room again, and nothing was forgotten
    writer.close()
    scan = load(tmp_path)
    assert scan.problems == ()
    assert_same_sequence(scan[1], make_sequence("large", 500))


def test_a_disk_that_is_full_at_the_mark_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    room = [30]

    def write(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[: room[0]])
        room[0] -= written
        return written

    def scan_until_full() -> None:
        with ScanWriter(tmp_path, ANATOMY, META, commit_seconds=0) as writer:
            monkeypatch.setattr(os, "write", write)
            writer.append(make_sequence("b"))

    write_scan(tmp_path, ["a"])
    size = (tmp_path / "manifest-rank000.jsonl").stat().st_size
    with pytest.raises(OSError, match="No space left on device") as caught:
        scan_until_full()
    monkeypatch.undo()
    assert "first: 'b'" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "manifest-rank000.jsonl").stat().st_size == size
    assert len(list(tmp_path.glob("segment*"))) == 1
    write_scan(tmp_path, ["c"])
    assert load(tmp_path).names == ("a", "c")


def test_the_error_travels(tmp_path: Path) -> None:
    with pytest.raises(ScanFormatError) as caught:
        load(tmp_path / "nowhere")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.path, str(again)) == (caught.value.path, str(caught.value))
    assert isinstance(caught.value, ValueError)


def test_a_path_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scan(tmp_path / "x.fmri", ["a"])
    monkeypatch.chdir(tmp_path)
    scan = load("x.fmri")
    monkeypatch.chdir("/")
    assert_same_sequence(scan[0], make_sequence("a", 0))


def test_a_meta_that_cannot_be_kept_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match="The meta of the scan has a object"):
        ScanWriter(tmp_path / "x.fmri", ANATOMY, {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_lines_and_headers_stay_within_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "LINE_BYTES", 8_000)
    monkeypatch.setattr(store, "LINE_BYTES", 8_000)
    with ScanWriter(tmp_path, ANATOMY, META) as writer:
        for number in range(10):
            sequence = vars(make_sequence(f"s{number}"))
            writer.append(ScannedSequence(**{**sequence, "checks": {"x": "y" * 2_000}}))
        with pytest.raises(InspectionError, match="4,000 are allowed"):
            writer.append(ScannedSequence(**{**sequence, "name": "n" * 5_000}))
    scan = load(tmp_path)
    assert (len(list(scan)), scan.problems) == (10, ())
    monkeypatch.setattr(tensor_file, "HEADER_BYTES", 1_000)
    with pytest.raises(InspectionError, match="names of 20 tensors"):
        write_scan(tmp_path / "y.fmri", ["a"])


def test_a_scan_is_replaced_or_added_to_and_not_both(tmp_path: Path) -> None:
    scan = Scan(ANATOMY, [make_sequence("one")], META)
    scan.save(tmp_path / "x.fmri")
    with pytest.raises(InspectionError, match=r"overwrite=True replaces .* append=True adds"):
        scan.save(tmp_path / "x.fmri", overwrite=True, append=True)
    assert load(tmp_path / "x.fmri").names == ("one",)
