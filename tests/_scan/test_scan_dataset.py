"""Scans of datasets: what a row is, and that nothing is lost or done twice, whatever happens."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_scans import ANATOMY, assert_same_sequence, make_sequence, read_everything
from torch import nn
from transformers import GenerationConfig

import torchfmri
from torchfmri import (
    InspectionError,
    LayerNotFoundError,
    Scan,
    Scanner,
    ScanOptions,
    load,
    load_model,
)
from torchfmri._scan.run import dataset
from torchfmri._scan.run.dataset import scan_rows
from torchfmri._scan.run.dataset_rows import DatasetRow, rows_of

pytestmark = pytest.mark.usefixtures("one_thread")
LIGHT = ScanOptions(per=None, layers="mlp")


class Model(nn.Module):
    """A few units from ids to logits; no transformers needed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.mlp = nn.Linear(width, width)
        self.head = nn.Linear(width, 300)

    def forward(self, ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return self.head(torch.tanh(self.mlp(self.embed(ids))))


def make_model(seed: int = 0, width: int = 8) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model(width).eval()


class Tokenizer:
    """A token for each byte."""

    chat_template = None
    pad_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def scan(dataset: Any, out: Path, new: int = 1, **options: Any) -> torchfmri.DatasetScan:
    options.setdefault("options", LIGHT)
    model = options.pop("model", None) or make_model()
    return torchfmri.scan_dataset(model, Tokenizer(), dataset, out, new, **options)


def write_lines(path: Path, *lines: Any) -> Path:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


# -- rows ------------------------------------------------------------------------------------------


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl",
        {"prompt": "größer", "condition": "a", "text": "not this"},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "condition": 3},
        "   ",
        {"text": "plain"},
        {"ids": [1, 2], "condition": None},
    )
    rows = rows_of(path)
    assert [row.prompt for row in rows] == [
        "größer", [{"role": "user", "content": "Hi"}], "plain", [1, 2],
    ]  # fmt: skip
    assert [row.condition for row in rows] == ["a", "3", "", ""]
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert rows[-1] == rows[3]
    assert rows[1:3] == [rows[1], rows[2]]
    assert rows[2].place == f"Line 5 of {str(path)!r}"
    with pytest.raises(IndexError):
        rows[4]


def test_line_ends_and_marks_of_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert [row.prompt for row in rows_of(path)] == ["a", "b"]


def test_fields_by_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"question": "why", "prompt": "no", "group": "g"})
    (row,) = rows_of(path, "question", "group")
    assert (row.prompt, row.condition) == ("why", "g")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "is not JSON"),
        ('["a"]', "is a list. A dataset has one JSON object in each line"),
        ("7", "is a int"),
        ("[" * 100_000, "is not JSON"),
        ('{"question": "why"}', "has no prompt in 'prompt', 'messages', 'text', 'ids'; its fields"),
        ('{"prompt": null}', "its fields are 'prompt'. Name the one with the prompt"),
        ("{}", "its fields are none"),
        ('{"prompt": 5}', "is '5': a prompt is a text, a list of chat messages or a list of token"),
        ('{"text": {"role": "user"}}', "'text' in line 3 of"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(InspectionError, match=r"(?i)line 3 of .*x\.jsonl") as caught:
        rows_of(path, strict=True)
    assert said in str(caught.value)
    good, bad = rows_of(path)
    assert (good.problem, bad.problem) == ("", str(caught.value))


def test_a_line_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff\xfe"}\n')
    with pytest.raises(InspectionError, match=r"Line 1 .* is not JSON"):
        rows_of(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("missing.jsonl", "There is no file 'missing.jsonl'"),
        (iter("ab"), "with a length, not str"),
        ({"prompt": "a"}, "not dict"),
        ([], "has no rows"),
    ],
)
def test_what_is_no_dataset(source: Any, said: str) -> None:
    with pytest.raises(InspectionError, match=said):
        rows_of(source)


def test_records_of_any_sequence() -> None:
    class Dataset:
        """As one of Hugging Face: a length, and a record by number."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            if not 0 <= index < 3:
                raise IndexError(index)
            return {"text": f"row {index}", "condition": "ab"[index % 2]}

    rows = rows_of(Dataset())
    assert [(row.prompt, row.condition) for row in rows] == [
        ("row 0", "a"), ("row 1", "b"), ("row 2", "a"),
    ]  # fmt: skip
    plain = rows_of(["a text", [1, 2], torch.tensor([3, 4]), np.array([5])])
    assert [row.prompt for row in plain] == ["a text", [1, 2], [3, 4], [5]]
    with pytest.raises(InspectionError, match="Record 1 has no prompt in 'text'"):
        list(rows_of([{"text": "a"}, {"prompt": "b"}], "text", strict=True))


def test_names_tell_rows_apart() -> None:
    rows = [
        DatasetRow(0, "a"), DatasetRow(1, "a"), DatasetRow(0, "b"), DatasetRow(0, "a", "x"),
        DatasetRow(0, [1, 2]), DatasetRow(0, [1, 3]),
        *rows_of([torch.arange(2000), torch.arange(2000).flip(0)]),
    ]  # fmt: skip
    assert len({row.name for row in rows}) == len(rows)
    assert DatasetRow(3, "a", "x", place="somewhere").name == DatasetRow(3, "a", "x").name


# -- scanning --------------------------------------------------------------------------------------


def test_every_row_is_a_sequence_with_its_condition(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl",
        {"prompt": "first", "condition": "a"}, {"ids": [1, 2, 3], "condition": "b"},
    )  # fmt: skip
    told: list[tuple[int, int, str]] = []
    found = scan(path, tmp_path / "x.fmri", 2, on_row=lambda *each: told.append(each))
    assert (found.scanned, found.found, found.failed) == (2, 0, {})
    result = load(tmp_path / "x.fmri")
    assert result.names == tuple(row.name for row in rows_of(path))
    assert [each.condition for each in result] == ["a", "b"]
    assert [len(each) for each in result] == [7, 5]
    assert result[0].text.startswith("first")
    assert told == [(0, 2, result.names[0]), (1, 2, result.names[1])]
    # What is stored is what scanning the prompt alone gives.
    alone = torchfmri.scan(make_model(), Tokenizer(), "first", 2, None, "mlp")
    for metric in ("layers", "voxels"):
        stored, expected = getattr(result[0], metric), getattr(alone[0], metric)
        np.testing.assert_array_equal(stored["activation"], expected["activation"])


def test_a_second_run_finds_everything_and_does_nothing(tmp_path: Path) -> None:
    model = make_model()
    runs: list[int] = []
    scan(["one", "two"], tmp_path / "x.fmri")
    before = {each.name: each.read_bytes() for each in (tmp_path / "x.fmri").iterdir()}
    model.register_forward_hook(lambda *_: runs.append(1))
    found = scan(["one", "two"], tmp_path / "x.fmri", model=model)
    assert (found.scanned, found.found) == (0, 2)
    assert {each.name: each.read_bytes() for each in (tmp_path / "x.fmri").iterdir()} == before
    assert len(runs) == 2  # the two short passes that tell the layers, and no row


def test_rows_that_were_added_are_scanned(tmp_path: Path) -> None:
    scan(["one", "two"], tmp_path / "x.fmri")
    found = scan(["one", "two", "three"], tmp_path / "x.fmri")
    assert (found.scanned, found.found) == (1, 2)
    assert [each.text[:3] for each in load(tmp_path / "x.fmri")] == ["one", "two", "thr"]


class StopError(Exception):
    """What a test raises in the middle."""


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
def test_an_interruption_keeps_what_was_done(tmp_path: Path, error: type[BaseException]) -> None:
    prompts = [f"row {number}" for number in range(5)]

    def interrupt(done: int, total: int, name: str) -> None:
        if done == 3:
            raise error

    with pytest.raises(error):
        scan(prompts, tmp_path / "x.fmri", on_row=interrupt)
    assert len(load(tmp_path / "x.fmri")) == 3
    found = scan(prompts, tmp_path / "x.fmri")
    assert (found.scanned, found.found) == (2, 3)
    scan(prompts, tmp_path / "whole.fmri")
    assert_same_scan(load(tmp_path / "x.fmri"), load(tmp_path / "whole.fmri"))


def test_an_interrupt_in_the_middle_of_a_row(tmp_path: Path) -> None:
    model = make_model()
    rows: list[int] = []

    def interrupt(module: nn.Module, inputs: Any, output: Any) -> None:
        rows.append(1)
        if len(rows) == 8:
            raise KeyboardInterrupt

    handle = model.head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        scan(["one", "two", "three", "four"], tmp_path / "x.fmri", 2, model=model)
    handle.remove()
    assert 0 < len(load(tmp_path / "x.fmri")) < 4
    assert not any(each._forward_hooks for each in model.modules())
    found = scan(["one", "two", "three", "four"], tmp_path / "x.fmri", 2, model=model)
    assert found.scanned + found.found == 4
    assert found.scanned > 0
    scan(["one", "two", "three", "four"], tmp_path / "whole.fmri", 2)
    assert_same_scan(load(tmp_path / "x.fmri"), load(tmp_path / "whole.fmri"))


def test_a_segment_that_lost_its_end_is_made_up_for(tmp_path: Path) -> None:
    rows = rows_of(["one", "two", "three"])
    scanner = Scanner(make_model(), Tokenizer(), LIGHT)
    scan_rows(scanner, rows, tmp_path / "whole.fmri", 1)
    scan_rows(scanner, rows, tmp_path / "x.fmri", 1, commit_seconds=0)  # a segment for each
    damaged = tmp_path / "x.fmri" / "segment-rank000-000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = load(tmp_path / "x.fmri")
    assert len(result) == 2
    assert damaged.name in result.problems[0]
    found = scan_rows(scanner, rows, tmp_path / "x.fmri", 1)
    assert (found.scanned, found.found) == (1, 2)
    result = load(tmp_path / "x.fmri")
    whole = {each.name: each for each in load(tmp_path / "whole.fmri")}
    assert sorted(result.names) == sorted(whole)
    for each in result:
        assert_same_sequence(each, whole[each.name])


def assert_same_scan(found: Scan, expected: Scan) -> None:
    assert found.problems == expected.problems == ()
    assert sorted(found.names) == sorted(expected.names)
    assert len(set(found.names)) == len(found.names)
    others = {each.name: each for each in expected}
    for each in read_everything(found):
        assert_same_sequence(each, others[each.name])


def assert_equal_scan(found: Scan, expected: Scan) -> None:
    """The same sequences and tokens; numbers up to the rounding of another process."""
    assert found.problems == expected.problems == ()
    assert sorted(found.names) == sorted(expected.names)
    others = {each.name: each for each in expected}
    for each in read_everything(found):
        other = others[each.name]
        assert (each.condition, each.text) == (other.condition, other.text)
        assert each.fields == other.fields
        assert each.tokens.ids.tolist() == other.tokens.ids.tolist()
        for field in ("layers", "voxels"):
            for metric, values in getattr(other, field).items():
                np.testing.assert_allclose(getattr(each, field)[metric], values, 1e-4, 1e-7)


def test_a_batch_gives_what_rows_alone_give(tmp_path: Path) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    prompts = ["What is the capital of France?", "Hi", "Two and two", "One", "x"]
    for batch in (1, 2):
        scanner = Scanner(model, tokenizer, ScanOptions(layers="*.down_proj"))
        path = tmp_path / f"{batch}.fmri"
        assert scan_rows(scanner, rows_of(prompts), path, 2, batch=batch).scanned == 5
    alone, together = load(tmp_path / "1.fmri"), load(tmp_path / "2.fmri")
    assert alone.names == together.names
    assert [each.padding for each in alone] == [0] * 5
    assert [each.padding for each in together] != [0] * 5
    for one, other in zip(alone, together, strict=True):
        assert one.tokens.ids.tolist() == other.tokens.ids.tolist()
        for metric, values in one.layers.items():
            largest = np.nanmax(values)
            np.testing.assert_allclose(other.layers[metric], values, 1e-3, 1e-5 * largest)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per": None}, r"per= is one of.*ScanOptions\(per=None\)"),
        ({"layers": "*.mlp"}, r"ScanOptions\(layers='\*\.mlp'\)"),
        ({"do_sample": True}, "give a seed=, or do_sample=False"),
        ({"generation_config": GenerationConfig(do_sample=True)}, "give a seed="),
    ],
    ids=str,
)
def test_what_would_be_taken_for_an_option_of_generate(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """`per=None` would be passed over by generate(), and gradients taken all the same."""
    model, tokenizer = load_model("tiny")
    with pytest.raises(InspectionError, match=words):
        torchfmri.scan_dataset(model, tokenizer, ["One"], tmp_path / "x.fmri", 2, **options)
    assert list(tmp_path.iterdir()) == []


def test_sampling_does_not_depend_on_interruptions(tmp_path: Path) -> None:
    prompts = [f"row {number}" for number in range(4)]

    def sample(out: str, seed: int, rows: Sequence[str] = prompts) -> Scan:
        scan(rows, tmp_path / out, 6, do_sample=True, seed=seed)
        return load(tmp_path / out)

    whole, other = sample("whole.fmri", 1), sample("other.fmri", 2)
    sample("parts.fmri", 1, prompts[:2])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    parts = sample("parts.fmri", 1)
    assert torch.equal(torch.rand(3), expected)
    assert_same_scan(parts, whole)
    assert [each.tokens.ids.tolist() for each in other] != [
        each.tokens.ids.tolist() for each in whole
    ]
    # Rows with the same text are drawn differently: each has a seed of its own.
    same = sample("same.fmri", 1, ["row", "row", "row"])
    assert len({each.text for each in same}) == 3
    with pytest.raises(InspectionError, match="'seed' is 1 there and 2 here"):
        sample("whole.fmri", 2)


# -- rows that fail --------------------------------------------------------------------------------


def broken_rows(*numbers: int, count: int = 6) -> list[Any]:
    """Texts, and at these places ids that the model does not have."""
    return [[100_000] if number in numbers else f"row {number}" for number in range(count)]


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_fail_are_named_and_tried_again(tmp_path: Path, batch: int) -> None:
    rows = broken_rows(1, 4)
    found = scan(rows, tmp_path / "x.fmri", batch=batch)
    assert (found.scanned, found.found) == (4, 0)
    names = [row.name for row in rows_of(rows)]
    assert set(found.failed) == {names[1], names[4]}
    assert found.failed[names[4]].startswith("Record 4: InspectionError: Token id 100000")
    assert sorted(load(tmp_path / "x.fmri").names) == [names[i] for i in (0, 2, 3, 5)]
    again = scan(rows, tmp_path / "x.fmri", batch=batch)
    assert (again.scanned, again.found, len(again.failed)) == (0, 4, 2)


def test_a_failing_row_does_not_stop_where_it_stands_first(tmp_path: Path) -> None:
    found = scan(broken_rows(0, 1), tmp_path / "x.fmri")
    assert (found.scanned, len(found.failed)) == (4, 2)


def test_it_gives_up_when_the_first_rows_all_fail(tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match=r"The first 3 rows could not be scanned\. Record 2"):
        scan(broken_rows(0, 1, 2), tmp_path / "x.fmri")
    with pytest.raises(InspectionError, match="The first row could not be scanned"):
        scan([[100_000]], tmp_path / "y.fmri")
    assert not (tmp_path / "y.fmri").exists()


def test_rows_that_fail_in_the_model_alone(tmp_path: Path) -> None:
    """The short passes that tell the layers succeed; only scanning the rows fails."""

    def run(rows: Sequence[int], out: str) -> torchfmri.DatasetScan:
        model = make_model()

        def refuse(module: nn.Module, inputs: Any) -> None:
            if inputs[0].shape[1] > 12:
                raise ValueError("too long")

        model.register_forward_pre_hook(refuse)
        return scan(["x" * length for length in rows], tmp_path / out, model=model)

    found = run([3, 20, 4, 30, 40, 50], "x.fmri")
    assert (found.scanned, len(found.failed)) == (2, 4)
    assert all(why.endswith("ValueError: too long") for why in found.failed.values())
    found = run([3, 20, 4, 30, 40, 50], "x.fmri")  # only rows that fail are left: no giving up
    assert (found.found, len(found.failed)) == (2, 4)
    with pytest.raises(InspectionError, match=r"The first 3 rows .*too long"):
        run([20, 30, 40, 5], "y.fmri")


def test_out_of_memory_with_several_rows_is_tried_with_one(tmp_path: Path) -> None:
    model = make_model()

    def refuse(module: nn.Module, inputs: Any) -> None:
        if inputs[0].shape[0] > 2:  # the short passes have two rows
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(refuse)
    rows = ["aa", "bb", "cc", "dd"]
    found = scan(rows, tmp_path / "x.fmri", batch=4, model=model)
    assert (found.scanned, found.failed) == (4, {})


def test_a_disk_that_fails_is_no_failing_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchfmri._scan.store.writer.write_tensors", full)
    with pytest.raises(OSError, match="No space left on device: 2 sequences"):
        scan(["one", "two"], tmp_path / "x.fmri")
    monkeypatch.undo()
    assert len(load(tmp_path / "x.fmri")) == 0
    assert scan(["one", "two"], tmp_path / "x.fmri").scanned == 2


# -- folders that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": make_model(width=12)}, "has the same layers but other voxels|differ|otherwise"),
        ({"model": make_model(seed=1)}, "'weights' is"),
        ({"options": ScanOptions(per="position", layers="mlp")}, "'per' is None there and 'posit"),
        ({"options": ScanOptions(per=None, layers="*")}, "holds a scan of 1 layers, yours has 3"),
        ({"options": ScanOptions(per=None, layers="mlp", voxel=4)}, "other voxels"),
        ({"new": 2}, "'max_new_tokens' is 1 there and 2 here"),
        (
            {"temperature": 0.5, "do_sample": True, "seed": 1},
            "'decoding' is {} there and {'temperature': 0.5",
        ),
    ],
)
@pytest.mark.parametrize("rows", [["one"], ["one", "two"]], ids=["done", "more"])
def test_a_folder_of_another_scan_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str, rows: list[str]
) -> None:
    scan(["one"], tmp_path / "x.fmri")
    with pytest.raises(InspectionError, match=said):
        scan(rows, tmp_path / "x.fmri", **change)
    assert len(load(tmp_path / "x.fmri")) == 1


def test_chat_is_part_of_what_was_measured(tmp_path: Path) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    options = ScanOptions(per=None, layers="*.0.mlp")
    arguments = (["Hi"], tmp_path / "x.fmri", 1)
    torchfmri.scan_dataset(model, tokenizer, *arguments, options=options)
    with pytest.raises(InspectionError, match="'chat' is False there and True here"):
        torchfmri.scan_dataset(model, tokenizer, *arguments, options=options, chat=True)


def test_what_is_no_scan_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InspectionError, match=r"is not a scan, and not empty \('notes.txt'\)"):
        scan(["one"], tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("batch", [0, -1, 1.5])
def test_a_batch_is_a_number(tmp_path: Path, batch: Any) -> None:
    with pytest.raises(InspectionError, match=f"batch={batch}: how many rows"):
        scan(["one"], tmp_path / "x.fmri", batch=batch)


def test_a_pattern_without_layers_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(LayerNotFoundError, match=r"No layer matches 'mpl'.*'mlp'"):
        scan(["one", "two"], tmp_path / "x.fmri", options=ScanOptions(None, "mpl"))
    assert not (tmp_path / "x.fmri").exists()


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    def again(done: int, total: int, name: str) -> None:
        with pytest.raises(InspectionError, match="Another process, or another writer"):
            scan(["one", "two"], tmp_path / "x.fmri")

    assert scan(["one", "two"], tmp_path / "x.fmri", on_row=again).scanned == 2


def test_what_a_run_added_that_was_just_ending_is_not_scanned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = dataset._pending

    def list_then_be_overtaken(*arguments: Any) -> list[int]:
        pending = listed(*arguments)
        monkeypatch.setattr(dataset, "_pending", listed)
        scan(["one", "two"], tmp_path / "x.fmri")
        return pending

    monkeypatch.setattr(dataset, "_pending", list_then_be_overtaken)
    assert scan(["one", "two", "three"], tmp_path / "x.fmri").scanned == 1
    assert len(load(tmp_path / "x.fmri")) == 3


# -- memory ----------------------------------------------------------------------------------------


class FakeScanner:
    """Scans in no time: a sequence of some 500 kB per prompt."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def samples(self, generate: Any) -> bool:
        return False

    def describe(self, prompt: Any, *_: Any, **__: Any) -> tuple[Any, dict[str, Any]]:
        return ANATOMY, {"model": "fake"}

    def scan(self, prompts: Sequence[Any], *_: Any, names: Sequence[str], **__: Any) -> Scan:
        return Scan(ANATOMY, [make_sequence(name, 2500) for name in names], {"model": "fake"})


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """Rows are read one by one, and sequences leave as segments: 50 MB pass through 16."""

    class Record(dict[str, str]):
        alive = most = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            Record.alive += 1
            Record.most = max(Record.most, Record.alive)

        def __del__(self) -> None:
            Record.alive -= 1

    class Endless(Sequence[Record]):
        def __len__(self) -> int:
            return 120

        def __getitem__(self, index: Any) -> Any:
            return Record({"text": f"{index} " + "x" * 10_000})

    scanner: Any = FakeScanner()
    tracemalloc.start()
    try:
        found = scan_rows(scanner, rows_of(Endless()), tmp_path / "x.fmri", batch=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.scanned == 120
    written = sum(each.stat().st_size for each in (tmp_path / "x.fmri").glob("segment*"))
    assert written > 50e6
    assert len(list((tmp_path / "x.fmri").glob("segment*"))) > 10
    assert peak < 16e6
    assert Record.most <= 2


# -- killed ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """50 runs on a real model end by kill -9 at random moments, 8 of them in two processes."""
    script = Path(__file__).with_name("killed_scans.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "42", "8"],
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert sum(run["killed"] for run in runs) >= 50
    assert all(code == 0 for run in runs for code in run["codes"]), done.stderr
    reference = load(tmp_path / "reference.fmri")
    assert len(reference) == 6
    assert {each.fields["difficulty"] for each in reference} == {None, 1, 2, 4, 5}
    scans = {run["scan"] for run in runs}
    assert {name[0] for name in scans} == {"1", "2"}
    for name in scans:
        own = [run for run in runs if run["scan"] == name]
        committed: list[str] = []
        for run in own:
            committed += run["committed"]
            assert set(committed) <= set(run["names"])  # what was committed is there
            assert len(set(run["names"])) == len(run["names"])
            assert run["problems"] == []
        assert len(set(committed)) == len(committed)  # and was never scanned again
        assert_equal_scan(load(tmp_path / name), reference)
    # Not all kills fell into the time before the first row was done.
    assert sum(bool(run["committed"]) for run in runs if run["killed"]) >= 10


# -- several processes -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_torchrun_shares_a_dataset(tmp_path: Path) -> None:
    lines = [{"text": f"row {number}", "condition": str(number)} for number in range(5)]
    path, out = write_lines(tmp_path / "x.jsonl", *lines), tmp_path / "x.fmri"
    arguments = ["--layers", "*.mlp", "--max-new-tokens", "1", "--per", "none"]
    # Two rows are there already, of one process.
    model, tokenizer = torchfmri.load_model("tiny")
    torchfmri.scan_dataset(
        model, tokenizer, lines[:2], out, 1,
        options=ScanOptions(per=None, layers=["*.mlp"]), do_sample=False,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "torchfmri", "scan", "--dataset", str(path), "--out", str(out), "--json",
         *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # of both processes only one has written
    assert (data["scanned"], data["found"], data["failed"]) == (3, 2, {})
    result = load(out)
    assert sorted(result.names) == [row.name for row in rows_of(path)]
    assert result.problems == ()
    assert {each.name for each in out.glob("manifest*")} == {
        "manifest-rank000.jsonl", "manifest-rank001.jsonl",
    }  # fmt: skip


# -- interruptions of batches ----------------------------------------------------------------------


@contextmanager
def ended_at_write(number: int) -> Iterator[None]:
    """Commit every row at once, and interrupt the program when so many writes have been flushed."""
    writes, seconds = 0, 0.0
    flush = os.fsync

    def clock() -> float:
        nonlocal seconds
        seconds += 10
        return seconds

    def interrupt(descriptor: int) -> None:
        nonlocal writes
        flush(descriptor)
        writes += 1
        if writes == number:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        patch.setattr(os, "fsync", interrupt)
        yield


@pytest.mark.one_in(3)
@pytest.mark.parametrize("batch", [2, 4, 5])
def test_interruptions_within_a_batch_change_no_sampled_token(tmp_path: Path, batch: int) -> None:
    prompts = [f"row {number}" for number in range(8)]

    def sample(out: str) -> None:
        scan(prompts, tmp_path / out, 6, batch=batch, do_sample=True, seed=1)

    sample("whole.fmri")
    whole = {each.name: each.tokens.ids.tolist() for each in load(tmp_path / "whole.fmri")}
    partly = 0
    for write in range(4, 24, 2):
        out = f"{write}.fmri"
        with ended_at_write(write), pytest.raises(KeyboardInterrupt):
            sample(out)
        partly += len(load(tmp_path / out)) % batch > 0
        sample(out)
        found = {each.name: each.tokens.ids.tolist() for each in load(tmp_path / out)}
        assert found == whole
    assert partly > 3  # of the interruptions these left a batch unfinished


def test_a_batch_is_what_generate_draws_for_its_rows(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny")
    prompts = ["Once upon", "The big dog", "A red ball", "We all saw"]
    options = ScanOptions(per=None, layers="*.0.mlp")
    torchfmri.scan_dataset(
        model, tokenizer, prompts, tmp_path / "x.fmri", 6,
        options=options, batch=2, seed=5, do_sample=True,
    )  # fmt: skip
    for start in (0, 2):
        rows = prompts[start : start + 2]
        name = rows_of(prompts)[start].name
        digest = hashlib.sha256(f"5 {name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        encoded = tokenizer(rows, padding=True, padding_side="left", return_tensors="pt")
        expected = model.generate(**encoded, max_new_tokens=6, do_sample=True)
        for row, sequence in enumerate(load(tmp_path / "x.fmri")[start : start + 2]):
            ids = sequence.tokens.ids.tolist()
            first = int((encoded["attention_mask"][row] == 0).sum())
            assert expected[row, first : first + len(ids)].tolist() == ids


@pytest.mark.parametrize("failing", [[3], [3, 4], [3, 4, 5], range(3, 99)])
def test_an_error_in_a_batch_changes_no_sampled_token(
    tmp_path: Path, failing: Sequence[int]
) -> None:
    """The 3rd batch fails, and it depends on how often what is tried next fails as well."""
    model = make_model()
    prompts = [f"row {number}" for number in range(8)]
    calls = [0]

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] in failing:
            raise RuntimeError("out of memory, for once")

    def sample(out: str) -> torchfmri.DatasetScan:
        return scan(prompts, tmp_path / out, 6, batch=2, model=model, do_sample=True, seed=1)

    sample("whole.fmri")
    whole = {each.name: each.tokens.ids.tolist() for each in load(tmp_path / "whole.fmri")}
    with pytest.MonkeyPatch.context() as patch:
        run = Scanner.scan
        patch.setattr(Scanner, "scan", lambda *args, **options: fail() or run(*args, **options))
        done = sample("x.fmri")
    found = {each.name: each.tokens.ids.tolist() for each in load(tmp_path / "x.fmri")}
    assert found == {name: ids for name, ids in whole.items() if name not in done.failed}
    if len(failing) < 5:
        assert not done.failed
    sample("x.fmri")
    assert {e.name: e.tokens.ids.tolist() for e in load(tmp_path / "x.fmri")} == whole


def test_a_row_that_fails_is_left_out_of_its_sampled_batch(tmp_path: Path) -> None:
    prompts = [f"row {number}" for number in range(6)]
    run = Scanner.scan

    def scan_but_one(self: Scanner, texts: list[str], *arguments: Any, **options: Any) -> Any:
        if "row 2" in texts:
            raise RuntimeError("no such row")
        return run(self, texts, *arguments, **options)

    def sample(out: str, rows: list[str]) -> torchfmri.DatasetScan:
        return scan(rows, tmp_path / out, 6, batch=3, do_sample=True, seed=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scanner, "scan", scan_but_one)
        done = sample("x.fmri", prompts)
        again = sample("x.fmri", prompts)
    assert [*done.failed] == [*again.failed]
    assert "no such row" in next(iter(done.failed.values()))
    assert len(load(tmp_path / "x.fmri")) == 5


def test_sampling_with_another_batch_is_another_scan(tmp_path: Path) -> None:
    rows = ["one", "two", "thr"]
    scan(rows[:2], tmp_path / "x.fmri", 2, batch=2, do_sample=True, seed=1)
    with pytest.raises(InspectionError, match="'batch' is 2 there and 3 here"):
        scan(rows, tmp_path / "x.fmri", 2, batch=3, do_sample=True, seed=1)
    scan(rows[:2], tmp_path / "y.fmri", 2, batch=2)
    assert scan(rows, tmp_path / "y.fmri", 2, batch=3).scanned == 1  # the likeliest tokens


# -- rows that cannot be read ----------------------------------------------------------------------

BAD_LINES = {
    "condition": r'{"prompt": "x", "condition": "\ud800"}',
    "prompt": r'{"prompt": "a \udfff b"}',
    "message": r'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "no JSON": "{broken",
    "no object": "[1, 2]",
    "no prompt": '{"question": "why"}',
    "a number": '{"prompt": 7}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_row_is_named_and_does_not_stop_the_others(
    tmp_path: Path, line: str, batch: int
) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"text": "one"}, line, {"text": "two"}, {"ids": [1]})
    for found, scanned in ((0, 3), (3, 0)):
        done = scan(path, tmp_path / "x.fmri", batch=batch)
        assert (done.found, done.scanned, len(done.failed)) == (found, scanned, 1)
        (why,) = done.failed.values()
        assert f"ine 2 of {str(path)!r}" in why
    assert [each.tokens.ids[0] for each in load(tmp_path / "x.fmri")] == [ord("o"), ord("t"), 1]
    with pytest.raises(InspectionError, match="ine 2 of"):
        scan(path, tmp_path / "strict.fmri", batch=batch, strict=True)
    assert not (tmp_path / "strict.fmri").exists()


def test_bad_rows_stop_nothing_where_they_stand_first(tmp_path: Path) -> None:
    lines = [*BAD_LINES.values(), '{"text": "fine"}']
    done = scan(write_lines(tmp_path / "x.jsonl", *lines), tmp_path / "x.fmri")
    assert (done.scanned, len(done.failed)) == (1, len(BAD_LINES))


def test_a_file_without_a_single_row_is_refused_at_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", *[{"question": "why"}] * 3)
    with pytest.raises(InspectionError, match=r"Line 1 .* has no prompt in 'prompt'"):
        scan(path, tmp_path / "x.fmri")


@pytest.mark.parametrize(
    "bad", [{"prompt": [{1: "a", "b": 2}]}, {"other": "x"}, {"text": "\ud800"}, 3, None], ids=str
)
def test_a_bad_record_is_passed_over(tmp_path: Path, bad: Any) -> None:
    done = scan(["one", bad, "two"], tmp_path / "x.fmri")
    assert (done.scanned, len(done.failed)) == (2, 1)
    assert "Record 1" in next(iter(done.failed.values()))


def test_a_record_that_cannot_be_fetched_is_passed_over(tmp_path: Path) -> None:
    class Dataset:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> str:
            if index == 1:
                raise OSError("the disk is gone")
            return "text"

    done = scan(Dataset(), tmp_path / "x.fmri")
    assert done.scanned == 2
    assert "OSError: the disk is gone" in next(iter(done.failed.values()))


def test_strict_stops_at_the_first_row_that_fails_and_keeps_the_others(tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match=r"Record 2: .*Token id 100000 .*strict"):
        scan(broken_rows(2), tmp_path / "x.fmri", strict=True)
    assert len(load(tmp_path / "x.fmri")) == 2


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_the_program_keeps_what_was_scanned(tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)

    def end(done: int, total: int, _: str) -> None:
        if done == 2:
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as caught:
        scan(["one", "two", "three"], tmp_path / "x.fmri", on_row=end)
    assert caught.value.code == 128 + number
    assert len(load(tmp_path / "x.fmri")) == 2
    assert signal.getsignal(number) is before
    assert scan(["one", "two", "three"], tmp_path / "x.fmri").scanned == 1


def test_a_handler_of_the_user_s_is_left_alone(tmp_path: Path) -> None:
    said: list[int] = []
    outer = signal.signal(signal.SIGTERM, lambda number, _: said.append(number))
    try:
        done = scan(["one", "two"], tmp_path / "x.fmri", on_row=lambda *_: signal.raise_signal(15))
    finally:
        signal.signal(signal.SIGTERM, outer)
    assert (done.scanned, said) == (2, [signal.SIGTERM] * 2)
