"""The command `torchfmri lesion`."""

import json
from pathlib import Path

import pytest

from torchfmri import LesionMap
from torchfmri.cli import main

ONE = ["lesion", "--prompt", "Once upon a", "--answer", " time", "--of", "mlps"]


def test_one_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, out = tmp_path / "map.png", tmp_path / "map.json"
    assert main([*ONE, "--picture", str(picture), "--out", str(out), "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "5 lesions (zero), 1 prompt" in text
    assert text.count(".mlp") == 2
    assert picture.exists()
    assert len(LesionMap.load(out).names) == 5


def test_several_prompts_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"{name} had a", "answer": " dog", "foil": " cat"} for name in ("Tom", "Lily")
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["lesion", "--prompts", str(path), "--of", "L0H*", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["metric"] == "logit_difference"
    assert data["names"] == ["L0H0", "L0H1", "L0H2", "L0H3"]
    assert len(data["lesioned"]) == 2


@pytest.mark.parametrize(("lines", "words"), [
    ("", "no lines"), ('{"prompt": "a"}', "line 1 is not of the form"), ("[1]", "line 1"),
    ('{"prompt": "a", "answer": " b"}\n{"prompt": "a", "answer": " b", "foil": " c"}', "1 of 2"),
])  # fmt: skip
def test_bad_files(
    lines: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    assert main(["lesion", "--prompts", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesion", "--prompt", "a"]) == 2
    assert "--prompt needs --answer" in capsys.readouterr().err
    assert main(["lesion", "--prompts", "x.jsonl", "--answer", "b"]) == 2
    assert "--answer does nothing with --prompts" in capsys.readouterr().err
