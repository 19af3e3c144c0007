"""Histories, inspections, contrasts and lesion maps: damage is called damage."""

import contextlib
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import _single_files as files
from torchfmri import FileFormatError, History, Inspection, LesionMap, load_contrast
from torchfmri._files import seal, unseal

KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], files.Reading], str]] = {
    "inspection": (files.make_inspection, files.read_inspection, "run.inspection"),
    "contrast": (files.make_contrast, files.read_contrast, "a.contrast"),
    "lesions": (files.make_lesions, files.read_lesions, "lesions.json"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_goes_unnoticed(kind: str, tmp_path: Path) -> None:
    make, read, name = KINDS[kind]
    make(tmp_path / "x")
    whole = read(tmp_path / "x")
    path = tmp_path / "x" / name
    data = path.read_bytes()
    unharmed = 0
    for at in range(0, len(data), max(1, len(data) // 97)):
        path.unlink()  # it may be mapped
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with contextlib.suppress(FileFormatError):
            assert read(tmp_path / "x").rows == whole.rows
            unharmed += 1
    assert unharmed <= 1  # the name of a checksum may be damaged


def test_a_dtype_in_an_inspection_is_a_dtype(tmp_path: Path) -> None:
    files.make_inspection(tmp_path / "x")
    path = tmp_path / "x" / "run.inspection"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    said = json.loads(header["__metadata__"]["torchfmri"])
    del said["crc32"]
    body = json.dumps(said).replace('"dtype": "float32"', '"dtype": "load"').encode()[:-1]
    sealed = body + b',"crc32":"%08x"}' % zlib.crc32(body)
    header["__metadata__"]["torchfmri"] = sealed.decode()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(FileFormatError, match="'load' is not a dtype"):
        Inspection.load(path)


def test_no_text_of_a_foreign_contrast_reaches_a_terminal_raw(tmp_path: Path) -> None:
    files.make_contrast(tmp_path / "x")
    found = load_contrast(tmp_path / "x" / "a.contrast")
    texts = [each.name for each in fields(found) if isinstance(getattr(found, each.name), str)]
    assert {"question", "level", "model"} <= set(texts)
    for name in texts:
        hostile = replace(found, **{name: "\x1b[31mred"})
        assert "\x1b" not in repr(hostile) + hostile.table(), name


@pytest.mark.parametrize("name", ["kinds", "blocks", "columns", "answers", "foils", "intact"])
def test_every_list_of_a_lesion_map_has_its_length(name: str, tmp_path: Path) -> None:
    files.make_lesions(tmp_path / "x")
    path = tmp_path / "x" / "lesions.json"
    record = unseal(path.read_bytes(), "lesions")
    record[name] = record[name][:-1]
    path.write_bytes(seal(record, "lesions"))
    with pytest.raises(FileFormatError, match="other sizes"):
        LesionMap.load(path)


@pytest.mark.parametrize("value", [3, [[0]], [], None, [0, [1]] * 9])
@pytest.mark.parametrize("name", ["names", "prompts", "blocks", "intact", "lesioned"])
def test_a_field_of_a_lesion_map_that_is_no_such_list_is_refused(
    name: str, value: object, tmp_path: Path
) -> None:
    files.make_lesions(tmp_path / "x")
    path = tmp_path / "x" / "lesions.json"
    record = {**unseal(path.read_bytes(), "lesions"), name: value}
    path.write_bytes(seal(record, "lesions"))
    with pytest.raises(FileFormatError, match="its tables"):
        LesionMap.load(path)


def test_steps_are_neither_lost_nor_doubled_without_a_word(tmp_path: Path) -> None:
    files.make_history(tmp_path / "x")
    whole = files.read_history(tmp_path / "x")
    assert (len(whole.rows), whole.words) == (4, ())
    names = [f"steps-{number:09d}.safetensors" for number in (1, 2, 7)]
    first, second, other = (tmp_path / "x" / name for name in names)
    shutil.copy(first, other)
    copied = files.read_history(tmp_path / "x")
    assert copied.rows == whole.rows
    assert copied.words[0].startswith(f"'{other.name}' cannot be read: its first step is 1")
    other.unlink()
    second.unlink()
    gap = History.load(tmp_path / "x")
    assert [step.number for step in gap] == [0, 1, 3]
    (note,) = gap.notes
    assert note.startswith("Before step 3 the run wrote 3 steps, of which 2 can be found: a file")
    data = first.read_bytes()
    first.unlink()
    first.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    damaged = History.load(tmp_path / "x")
    assert [step.number for step in damaged] == [0, 3]
    assert "its checksum is wrong" in next(iter(damaged.notes))


def test_the_name_of_a_model_in_a_foreign_inspection_reaches_no_terminal_raw() -> None:
    inspection = Inspection("\x1b[2J", {})
    assert "\x1b" not in repr(inspection) + inspection.table()
    assert "[2J" in repr(inspection)
