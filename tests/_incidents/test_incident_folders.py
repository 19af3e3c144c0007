"""Folders of incidents: damaged, somebody else's, of version 0.1; which one is replayed."""

import io
import json
import os
import re
import resource
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks._mutations import relist
from benchmarks.fuzz import make_incident, make_old, make_old_incident
from torchfmri import Incidents, Monitor
from torchfmri.cli import main

FACTORY = "benchmarks.fuzz:make_subject"
FILES = (
    "incident.json", "rank-0/part.json", "rank-0/calls.json", "rank-0/calls.safetensors",
    "rank-0/weights.json", "rank-0/weights.safetensors",
)  # fmt: skip
OLD_FILES = tuple(name.replace("safetensors", "npz") for name in FILES)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An incident of today and one of version 0.1."""
    place = tmp_path_factory.mktemp("incidents")
    make_incident(place / "new")
    make_old_incident(place / "old")
    return {"new": place / "new", "old": place / "old"}


@pytest.fixture
def folder(written: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(written["new"], tmp_path / "incidents") / "step-000000"


@pytest.fixture
def old(written: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(written["old"], tmp_path / "old") / "step-000000"


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit code of a replay within ten seconds and a gigabyte, and what it printed."""

    def run(path: Path, *options: str) -> tuple[int, str]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.monotonic()
        code = main(["replay", str(path), *(options or ("--factory", FACTORY))])
        assert time.monotonic() - begun < 10
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6
        printed = capsys.readouterr()
        assert "\x1b" not in printed.out + printed.err
        return code, printed.out + printed.err

    return run


def reseal(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a record, and put its checksum right, and the digest of it."""
    record = json.loads(path.read_bytes())
    record.pop("crc32", None)
    changed = change(record)
    body = json.dumps(record if changed is None else changed).encode()[:-1]
    path.write_bytes(body + b',"crc32":"%08x"}' % zlib.crc32(body))
    relist(path)


def change_calls(folder: Path, change: Callable[[str], str]) -> None:
    """Change the structure of the calls, which is text."""

    def apply(record: Any) -> None:
        text = json.dumps(record["data"])
        assert change(text) != text
        record["data"] = json.loads(change(text))

    reseal(folder / "rank-0" / "calls.json", apply)


def test_both_kinds_are_replayed(
    folder: Path, old: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    for each in (folder, old):
        code, text = replay(each)
        assert code == 1, text
        assert "run again: nonfinite_forward" in text
        assert "Note" not in text  # the weights are those of the incident
    assert {each.suffix for each in (old / "rank-0").iterdir()} == {".json", ".jsonl", ".npz"}


# -- files that are something else ---------------------------------------------------------------


def link_elsewhere(path: Path) -> None:
    shutil.copy(path.with_name("kept"), path.parent.parent.parent / "secret")
    path.symlink_to(path.parent.parent.parent / "secret")


def make_sparse(path: Path) -> None:
    shutil.copy(path.with_name("kept"), path)
    os.truncate(path, 16 << 30)


REPLACEMENTS: list[Callable[[Path], Any]] = [
    os.mkfifo, Path.mkdir, link_elsewhere, make_sparse, lambda path: path.symlink_to(path),
    lambda path: path.symlink_to("/dev/zero"),
]  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, *OLD_FILES[3::2]])
def test_only_regular_files_are_read(
    name: str, folder: Path, old: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    path = (old if name.endswith("npz") else folder) / name
    path.rename(path.with_name("kept"))
    for replacement in REPLACEMENTS:
        replacement(path)
        code, text = replay(path.parent if name == "incident.json" else path.parent.parent)
        assert code == 2, text
        assert path.stem in text
        assert "The model raised" not in text
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize(
    "wrong", ["[]", '["float32"]', "{}", "3", "null", '"load"', '"qint8"', '"complex"', '"bits8"']
)
def test_a_malformed_dtype_is_damage_and_not_the_model_s(
    wrong: str, folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    change_calls(folder, lambda text: text.replace('"dtype": "float32"', f'"dtype": {wrong}', 1))
    code, text = replay(folder)
    assert code == 2
    assert "The model raised" not in text
    assert "calls.json" in text


def test_folders_behind_links_are_not_read(
    folder: Path, tmp_path: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    (folder / "rank-0").rename(tmp_path / "elsewhere")
    (folder / "rank-0").symlink_to(tmp_path / "elsewhere")
    code, text = replay(folder)
    assert (code, "without the part of any process" in text) == (2, True)
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "step-000000").symlink_to(folder)
    assert replay(tmp_path / "several")[0] == 2
    (folder / "rank-²").mkdir()
    assert replay(folder)[0] == 2


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_damage_is_called_damage(
    name: str, folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    path = folder / name
    data = path.read_bytes()
    places = [0, len(data) // 3, len(data) // 2, len(data) - 2]
    wrong = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in places]
    for changed in (*wrong, data[:-9], data[: len(data) // 2], b"", b"\0" * len(data)):
        path.write_bytes(changed)
        code, text = replay(folder)
        assert code == 2, text
        assert f"'{path.name}' cannot be read" in text
        assert "The model raised" not in text
    path.unlink()
    code, text = replay(folder)
    if name != "incident.json":  # a process that was killed may not have written it
        assert f"'{path.name}' cannot be read: it is missing" in text


@pytest.mark.parametrize("name", OLD_FILES[3::2])
def test_damaged_arrays_of_version_0_1(
    name: str, old: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    data = (old / name).read_bytes()
    places = [*range(0, len(data), len(data) // 12), len(data) - 12]
    refused = 0
    for at in places:
        (old / name).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        code, text = replay(old)
        assert "The model raised" not in text
        refused += code == 2
        (old / name).write_bytes(data[:at])
        code, text = replay(old)
        assert (code, f"{Path(name).stem}.npz" in text) == (2, True)
    assert refused > len(places) // 2  # the list at a zip file's end is not needed


# -- what an enemy writes ------------------------------------------------------------------------


def savez(path: Path, compression: int, **arrays: Any) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for key, values in arrays.items():
            content = io.BytesIO()
            np.save(content, values)
            file.writestr(f"{key}.npy", content.getvalue())


def test_a_small_npz_stays_small(old: Path, replay: Callable[..., tuple[int, str]]) -> None:
    savez(old / "rank-0/calls.npz", zipfile.ZIP_DEFLATED, **{"0": np.zeros(1 << 27, np.uint8)})
    assert (old / "rank-0/calls.npz").stat().st_size < 1 << 20
    code, text = replay(old)
    assert (code, "it is compressed" in text) == (2, True)


@pytest.mark.parametrize(
    "values",
    [np.zeros(4, np.float32), np.zeros((2, 2), np.uint8), np.array([None], object)],
    ids=["floats", "a matrix", "objects"],
)
def test_an_npz_holds_bytes(old: Path, values: Any, replay: Callable[..., tuple[int, str]]) -> None:
    savez(old / "rank-0/calls.npz", zipfile.ZIP_STORED, **{"0": values})
    code, text = replay(old)
    assert (code, "not an array of bytes" in text) == (2, True)


@pytest.mark.parametrize("name", ["load", "save", "float", "Tensor", "hub", "__name__", ""])
def test_a_dtype_is_a_dtype(
    name: str, folder: Path, old: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    change_calls(
        folder, lambda text: text.replace('{"dtype": "bfloat16"}', f'{{"dtype": "{name}"}}')
    )
    path = old / "rank-0" / "calls.json"
    text = path.read_text()
    path.write_text(text.replace('"dtype": "float32"', f'"dtype": "{name}"', 1))
    assert path.read_text() != text
    for each in (folder, old):
        code, text = replay(each)
        assert code == 2
        assert "'calls.json' cannot be read" in text


CALLS: dict[str, Callable[[str], str]] = {
    "a tensor of nothing": lambda text: text.replace('"shape": [2, 4]', '"shape": [0, 4]', 1),
    "a larger tensor": lambda text: text.replace('"shape": [2, 4]', '"shape": [200, 4]', 1),
    "an absurd tensor": lambda text: text.replace('"shape": [2, 4]', f'"shape": [0, {1 << 39}]', 1),
    "a negative shape": lambda text: text.replace('"shape": [2, 4]', '"shape": [-2, -4]', 1),
    "a tensor twice": lambda text: text.replace('"tensor": "1"', '"tensor": "0"', 1),
    "another tensor": lambda text: text.replace('"tensor": "1"', '"tensor": "99"', 1),
    "a position beyond": lambda text: text.replace("MT19937", "PCG64"),
    "an unknown value": lambda text: text.replace('{"tuple": [', '{"eval": [', 1),
    "a list as key": lambda text: text.replace('["arguments", ', '[{"list": []}, ', 1),
    "no arguments": lambda text: text.replace('["arguments", ', '["others", ', 1),
    "autocast of nothing": lambda text: text.replace('"cpu"', '"evil"', 1),
    "a number that is none": lambda text: text.replace('"gauss", null', '"gauss", "x"', 1),
}


@pytest.mark.parametrize("change", CALLS.values(), ids=CALLS)
def test_calls_that_make_no_sense(
    folder: Path, change: Callable[[str], str], replay: Callable[..., tuple[int, str]]
) -> None:
    change_calls(folder, change)
    code, text = replay(folder)
    assert code == 2, text
    assert "cannot be read" in text
    assert "The model raised" not in text


def test_the_position_of_a_generator_lies_among_its_numbers(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    change_calls(
        folder, lambda text: re.sub(r'\["rest", \{"list": \[\d+', '["rest", {"list": [9999', text)
    )
    code, text = replay(folder)
    assert (code, "NumPy's generator" in text) == (2, True)


@pytest.mark.parametrize("states", ["os", "cuda", "mps"])
def test_states_of_devices_are_states(
    folder: Path, states: str, replay: Callable[..., tuple[int, str]]
) -> None:
    found = f'["devices", {{"dict": [["{states}", {{"list": []}}]]}}], ["python", '
    change_calls(folder, lambda text: text.replace('["python", ', found))
    code, text = replay(folder)
    assert (code, f"no states of generators of '{states}'" in text) == (2, True), text


PARTS: dict[str, Callable[[Any], Any]] = {
    "no finding": lambda part: part.pop("finding") and None,
    "a finding without text": lambda part: part["finding"].pop("text") and None,
    "a text that is none": lambda part: part["finding"].update(text=5),
    "an unknown phase": lambda part: part["finding"].update(phase="x"),
    "a step that is none": lambda part: part.update(step="x"),
    "norms that are none": lambda part: part.update(norms={"0.weight": "x"}),
    "a scale that is none": lambda part: part.update(scaler={"scale": "x"}),
    "a scale too large": lambda part: part.update(scaler={"scale": 10**400}),
}


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
def test_parts_that_make_no_sense(
    folder: Path, change: Callable[[Any], Any], replay: Callable[..., tuple[int, str]]
) -> None:
    reseal(folder / "rank-0" / "part.json", change)
    for options in ((), ("--rank", "0")):
        code, text = replay(folder, *options)
        assert code == 2, text
        assert "'part.json' cannot be read" in text


def test_nothing_written_controls_a_terminal(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    escape = "\x1b]0;owned\x07"
    reseal(
        folder / "rank-0" / "part.json",
        lambda part: part["finding"].update(text=escape, advice=escape, problem=escape),
    )
    code, text = replay(folder, "--rank", "0")
    assert (code, "?]0;owned?" in text) == (1, True)
    change_calls(folder, lambda text: text.replace('"told"', json.dumps({"eval": escape})))
    code, text = replay(folder)
    assert (code, "owned" in text) == (2, True)


def test_a_tensor_file_of_another_size(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    """The sizes are compared with the file before anything is allocated."""
    header = json.dumps({"0": {"dtype": "U8", "shape": [1 << 36], "data_offsets": [0, 1 << 36]}})
    data = struct.pack("<Q", len(header)) + header.encode()
    (folder / "rank-0" / "calls.safetensors").write_bytes(data)
    reseal(
        folder / "rank-0" / "calls.json",
        lambda record: record.update(bytes=len(data), checksum=f"{zlib.crc32(data):08x}"),
    )
    code, text = replay(folder)
    assert (code, "lie outside the file" in text) == (2, True)


# -- which one, and what is kept -----------------------------------------------------------------


def test_the_highest_step_is_replayed_whatever_was_touched_last(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    names = ["step-000009", "step-000010", "step-000010-2", "step-000010-11", "notes"]
    for number, name in enumerate(names):
        copy = shutil.copytree(folder, folder.with_name(name))
        reseal(copy / "rank-0" / "part.json", lambda part, number=number: part.update(step=number))
        os.utime(copy, (1_000_000 - number,) * 2)
    assert "Step 3 of process 0" in replay(folder.parent)[1]
    shutil.rmtree(folder.with_name("step-000010-11"))
    assert "Step 2 of process 0" in replay(folder.parent)[1]


@pytest.mark.parametrize("is_link", [False, True])
def test_the_newest_is_not_passed_over_because_its_parts_are_gone(
    folder: Path, is_link: bool, tmp_path: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    newest = shutil.copytree(folder, folder.with_name("step-000009"))
    shutil.move(newest / "rank-0", tmp_path / "elsewhere")
    if is_link:
        (newest / "rank-0").symlink_to(tmp_path / "elsewhere")
    for place in (folder.parent, newest):
        code, text = replay(place)
        assert (code, "'step-000009' cannot be read" in text) == (2, True), text
        assert "without the part of any process" in text
    assert replay(folder)[0] == 1
    shutil.rmtree(newest)
    newest.mkdir()  # the process was killed before it wrote anything
    assert replay(folder.parent)[0] == 1


def test_odd_batches_are_kept_as_far_as_they_can_be(
    tmp_path: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="skip", incidents=Incidents(tmp_path / "x"))

    def train() -> None:
        with monitor.step() as step:
            step.batch({"deep": deep, "text": "\ud800", "large": 1 << 100, "x": torch.ones(1)})
            model(torch.tensor([[1.0, float("inf")]])).sum().backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="left out"):
        train()
    code, text = replay(tmp_path / "x", "--factory", "test_incident_folders:make_linear")
    assert code == 1, text
    assert "A str among the batch could not be kept" in text
    assert "A int among the batch could not be kept" in text


def make_linear() -> tuple[nn.Module, Any]:
    return nn.Linear(2, 1), torch.ones(1, 2)


def test_a_file_of_today_is_not_taken_for_an_old_one(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    """Only a whole folder of version 0.1 may do without checksums."""
    path = folder / "rank-0" / "part.json"
    kept = path.read_bytes()
    make_old(path)
    code, text = replay(folder)
    assert (code, "it belongs to another incident" in text) == (2, True), text
    path.write_bytes(kept)
    make_old(folder / "rank-0" / "calls.json")
    code, text = replay(folder)
    assert (code, "'calls.json' cannot be read" in text) == (2, True), text
    path.write_bytes(path.read_bytes()[:-30] + b"}")
    code, text = replay(folder)
    assert (code, "'part.json' cannot be read: its checksum is wrong" in text) == (2, True)


# -- which files belong together -----------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "rank-0", "rank-0/calls.*", "rank-0/weights.*"])
def test_files_of_another_incident_are_refused(
    name: str, folder: Path, tmp_path: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    """The other incident is one of the same model at the same step, with other numbers."""
    make_incident(tmp_path / "other", value=2.0)
    other = tmp_path / "other" / "step-000000"
    assert replay(other)[0] == 1
    place, _, pattern = name.rpartition("/")
    for path in (other / place).glob(pattern):
        target = folder / place / path.name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        shutil.move(path, target)
    code, text = replay(folder)
    assert (code, "another" in text) == (2, True), text


def test_files_of_another_process_are_refused(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    shutil.copytree(folder / "rank-0", folder / "rank-1")
    code, text = replay(folder, "--rank", "1")
    assert (code, "it is not the part of process 1" in text) == (2, True), text


def test_what_was_added_or_is_not_needed_is_told(
    folder: Path, replay: Callable[..., tuple[int, str]]
) -> None:
    (folder / "notes \x1b.txt").write_text("mine")
    (folder / "rank-0" / "picture.png").write_bytes(b"mine")
    (folder / "rank-0" / "history.jsonl").unlink()
    (folder / "incident.json").unlink()
    for options in ((), ("--rank", "0")):
        code, text = replay(folder, *options)
        assert code == 1, text
        assert "'step-000000' also holds 'notes \\x1b.txt', which no Monitor wrote." in text
        assert "'rank-0' also holds 'picture.png', which no Monitor wrote." in text
        assert "'history.jsonl' cannot be read: it is missing." in text
        assert "'incident.json' is missing" in text
    (folder / "rank-0" / "calls.safetensors").unlink()
    code, text = replay(folder, "--rank", "0")  # nothing is run: the finding is all there
    assert (code, "'calls.safetensors' cannot be read: it is missing." in text) == (1, True)


LISTINGS: dict[str, Callable[[Any], Any]] = {
    "no files": lambda part: part.pop("files") and None,
    "a file elsewhere": lambda part: part["files"].update(
        {"../incident.json": part["files"]["calls.json"]}
    ),
    "a size that is none": lambda part: part["files"]["calls.json"].update(bytes="1"),
    "a digest that is none": lambda part: part["files"]["calls.json"].update(sha256=None),
    "no calls": lambda part: part["files"].pop("calls.json") and None,
    "a list": lambda part: part.update(files=["calls.json"]),
    "no incident": lambda part: part.update(incident=7),
    "another format": lambda part: part.update(format="x"),
}


@pytest.mark.parametrize("change", LISTINGS.values(), ids=LISTINGS)
def test_lists_of_files_that_make_no_sense(
    folder: Path, change: Callable[[Any], Any], replay: Callable[..., tuple[int, str]]
) -> None:
    (folder / "incident.json").unlink()
    reseal(folder / "rank-0" / "part.json", change)
    for options in ((), ("--rank", "0")):
        code, text = replay(folder, *options)
        assert (code, "'part.json' cannot be read" in text) == (2, True), text
