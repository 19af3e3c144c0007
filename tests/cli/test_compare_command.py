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
    ],
)
def test_bad_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err
