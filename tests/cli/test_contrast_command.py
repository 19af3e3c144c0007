"""`torchfmri contrast`: from a dataset to tables, pictures and pages."""

import json
from pathlib import Path

import pytest

from torchfmri import load_contrast
from torchfmri.cli import main

ROWS = [
    {"prompt": f"{name} {what}", "kind": kind, "pair": number, "id": f"{kind}-{name}"}
    for number, name in enumerate(("Tom", "Ann", "Sue", "Ben", "Max"))
    for kind, what in (("park", "went to the park"), ("food", "ate a red apple"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contrast")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    command = ["scan", "--dataset", str(folder / "rows.jsonl"), "--out", str(folder / "x.fmri")]
    options = ["--max-new-tokens", "2", "--per", "none", "--id-field", "id", "--vectors", "last"]
    assert main([*command, *options, "--condition-field", "kind"]) == 0
    return folder


def test_a_table_and_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--out": "x.contrast", "--table": "x.json", "--picture": "x.png", "--report": "x.html"}
    options = [part for name, file in files.items() for part in (name, str(folder / file))]
    assert main(["contrast", str(folder / "x.fmri"), "--tokens", "last", *options,
                 "--calibrate", "5", "--peaks", "3"]) == 0  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())  # where lines break depends on the numbers
    assert "park - food: activation by voxel, the last token; 5 prompts of 'park'" in said
    assert "of 5 relabellings found anything" in said
    assert "(false discovery rate)" in said
    assert (folder / "x.png").stat().st_size > 10_000
    assert "<h2>Peaks</h2>" in (folder / "x.html").read_text()
    assert len(json.loads((folder / "x.json").read_text())) == 289
    kept = load_contrast(folder / "x.contrast")
    assert kept.calibration == ("Welch t by voxel, fdr", 5, 0, 0.05)
    assert kept.scans == ("x.fmri",)


def test_json_and_other_questions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = str(folder / "x.fmri")
    command = ["contrast", scan, "--json", "--contrast", "food - park", "--paired", "pair"]
    assert main([*command, "--level", "layer", "--tokens", "match:park|apple"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["question"] == "food - park"
    assert data["peaks"][0]["n_a"] == 5
    assert main(["contrast", scan, "--by", "kind", "--level", "unit", "--tokens", "last",
                 "--height-control", "max", "--one-sided"]) == 0  # fmt: skip
    assert "signed activation by unit" in capsys.readouterr().out
    assert main(["contrast", scan, "--level", "head", "--test", "permutation", "--seed", "1"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by", "id"], "The conditions in 'id' are 'park-Tom' (1)"),
        (["--by", "colour"], "The conditions in 'colour' are none"),
        (["--contrast", "park - x"], "a condition should follow"),
        (["--tokens", "some"], "--tokens 'some': give all, prompt"),
        (["--paired"], "--paired needs the field"),
        (["--metric", "gradient"], "This scan has no gradient"),
        (["--picture", "x.what"], "'.what' is not a format of pictures"),
        (["--level", "unit"], "no mean vectors over all tokens; it has those over 'last'"),
    ],
)
def test_what_cannot_be_compared(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["contrast", str(folder / "x.fmri"), *options]) == 2
    assert message in capsys.readouterr().err


def test_two_scans_of_the_same_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = str(folder / "x.fmri")
    assert main(["contrast", scan, scan]) == 2
    assert "is in both groups" in capsys.readouterr().err
    assert main(["contrast", scan, scan, "--paired", "--level", "layer"]) == 0
    assert "10 prompts of 'a' and 10 prompts of 'b'" in capsys.readouterr().out
    assert main(["contrast", scan, scan, "--contrast", "park - food"]) == 2
