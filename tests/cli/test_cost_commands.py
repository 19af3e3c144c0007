"""`torchfmri cost` and `torchfmri advise` from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchfmri import cli

pytestmark = pytest.mark.usefixtures("one_thread")
FACTORY = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(block(), block()), torch.randn(4, 6, 8), lambda output: output.sum()
"""


@pytest.fixture
def subject(tmp_path: Path) -> str:
    path = tmp_path / "subject.py"
    path.write_text(FACTORY)
    return f"{path}:model"


def test_cost_prints_the_table(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cost", subject, "--rounds", "1", "--inside"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("cost of Sequential on cpu")
    assert "torchfmri cost: running Sequential" in output.err


def test_cost_predicts(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cost", subject, "--rounds", "0", "--batch", "1,2,4", "--length", "3,6"]
    assert cli.main([*arguments, "--predict", "8x12", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (predicted,) = data["predictions"]
    assert predicted["forward_flops"] == 2 * 2 * 8 * 12 * 64
    assert data["plain_seconds"] is None
    assert cli.main([*arguments, "--predict", "8x12"]) == 0
    assert "predicted batch 8, length 12: peak" in capsys.readouterr().out


def test_an_axis_of_one_size_is_predicted_at_that_size(
    subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cost", subject, "--rounds", "0", "--length", "2,3,6", "--predict", "4x12"]
    assert cli.main([*arguments, "--json"]) == 0
    (predicted,) = json.loads(capsys.readouterr().out)["predictions"]
    assert predicted["forward_flops"] == 2 * 2 * 4 * 12 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--predict", "8x12"], "--predict needs sizes"),
        (["--batch", "2"], "two sizes or more"),
        (
            ["--length", "2,3,6", "--predict", "64x12", "--rounds", "0"],
            "batch 4 alone was measured",
        ),
        (["--batch", "1,2", "--predict", "4x12", "--rounds", "0"], "length 6 alone was measured"),
        (["--rounds", "-1"], "rounds=-1"),
    ],
)
def test_cost_refuses(
    subject: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cost", subject, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--batch", "a,b"], ["--predict", "8"]])
def test_wrong_numbers_are_one_line(
    subject: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["cost", subject, *options])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_advise(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", subject, "--rounds", "1", "--combine", "0", "--optimizer", "SGD"]
    assert cli.main([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    names = [option["name"] for option in json.loads(output.out)["options"]]
    assert names[:2] == ["plain", "checkpoint"]
    assert "torchfmri advise: checkpoint" in output.err
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("one training step of Sequential on cpu")


def test_advise_refuses_an_unknown_optimizer(
    subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", subject, "--optimizer", "Adamm"]) == 2
    assert "There is no torch.optim.Adamm" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["cost", "advise", "verify"])
@pytest.mark.parametrize("data", ["(x, y)", "[x, y]", "x"])
def test_a_target_in_the_wrong_place_is_told_what_a_factory_returns(
    command: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "subject.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "x, y = torch.randn(4, 8), torch.zeros(4).long()\n"
        f"def model():\n    return nn.Linear(8, 3), {data}, nn.CrossEntropyLoss()\n"
    )
    assert cli.main([command, f"{path}:model"]) != 0
    assert "(model, x, lambda output: loss(output, y))" in capsys.readouterr().err
