"""`torchfmri compare`: settings of a model, saved sides, training runs; words for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.compare import train
from torchfmri import Inspector, load_model
from torchfmri.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_two_settings_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--model", "tiny", "--a", "attn=eager", "--b", "attn=sdpa", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agree"]
    assert {each["direction"] for each in found["tensors"]} == {"forward", "backward", "parameters"}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ("cache=on", 0),
        ("dtype=bfloat16", 0),
        ("autocast=bfloat16", 0),
        ("padding=left", 0),
        ("quantize=int8", 1),
    ],
)
@pytest.mark.one_in(3)
def test_other_settings(settings: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--model", "tiny", "--b", settings]) == code
    said = capsys.readouterr().out
    assert ("they part" in said) == bool(code)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_and_prompts_of_different_lengths(side: str) -> None:
    """The cached run is told of the padding, as the other one is."""
    sides = ["--a", f"padding={side}", "--b", f"cache=on,padding={side}"]
    prompts = ["--prompt", "Once upon", "--prompt", "Once upon a time there was a dog"]
    assert main(["compare", "--model", "tiny", *sides, *prompts]) == 0


def test_two_training_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder=tmp_path / "a")
    train(folder=tmp_path / "b", changed=37)
    picture = tmp_path / "runs.png"
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--picture", str(picture)]
    assert main(words) == 1
    assert "part at step 37" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0


def test_two_saved_inspections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model("tiny")
    inspector = Inspector(model, keep="tensors")
    data = dict(tokenizer("The capital of France", return_tensors="pt"))
    inspector.run_inspection(data).save(tmp_path / "a")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    inspector.run_inspection(data).save(tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "'model.layers.1.mlp.up_proj'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x"], "two sides, not 1"),
        (["/no/such/run", "/no/such/run"], "no such file"),
        (["--model", "tiny"], "--a attn=eager"),
        (["--model", "tiny", "--a", "atn=eager"], "'atn=eager' is not a setting"),
        (["--model", "tiny", "--a", "attn=none"], "attn=none"),
        (["--model", "tiny", "--a", "cache=maybe"], "choose on or off"),
        (["--model", "tiny", "--a", "padding=up"], "choose left or right"),
        (["a", "b", "--model", "tiny"], "both given"),
        (["a", "b", "--prompt", "x"], "needs --model"),
        (["a", "b", "--picture", "x.doc"], "not a format of pictures"),
        (["--model", "tiny", "--a", "autocast=float64"], "choose bfloat16 or float16"),
        (["--model", "tiny", "--a", "attn=sdpa,attn=eager"], "'sdpa' and as 'eager'. Give it once"),
    ],
)
def test_bad_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_raises_is_an_error_and_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("def make():\n    raise RuntimeError('no such checkpoint')\n")
    assert main(["compare", f"{script}:make", f"{script}:make"]) == 2
    assert "fails.py:make' raised RuntimeError: no such checkpoint" in capsys.readouterr().err


def test_prompts_that_predict_nothing_are_compared_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The loss of a single token is NaN in every model."""
    assert main(["compare", "--model", "tiny", "--b", "attn=sdpa", "--prompt", ""]) == 0
    assert "there is no loss" in capsys.readouterr().out


def test_a_tolerance_for_training_runs(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, rate in zip(folders, (0.05, 0.0505), strict=True):
        train(folder=folder, rate=rate, steps=4)
    assert main(["compare", *folders, "--tolerance", "0.5"]) == 0
    assert main(["compare", *folders, "--tolerance", "0.005"]) == 1
