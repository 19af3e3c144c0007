"""The guide for coding agents: every command of its tables runs and prints what the table names."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfmri
from torchfmri import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "agents.md"
ROW = re.compile(r"^\| (?P<question>.+?) \| (?P<commands>`torchfmri .+`) \| (?P<keys>.+) \|$")
ROWS = [found for line in PAGE.read_text().splitlines() if (found := ROW.match(line))]
TASK = re.compile(r"```python\n# task\.py\n(?P<code>.+?)```", re.DOTALL)


def nonfinite_step(task: dict[str, Any]) -> None:
    """Train one step on a batch with a NaN, so that there is an incident to replay."""
    model, batches, loss, optimizer = task["training"]()
    x, target = batches[0]
    x = x.index_fill(0, torch.tensor([7]), torch.nan)
    incidents = torchfmri.Incidents("incidents", weights=True)
    monitor = torchfmri.Monitor(model, optimizer, on_nonfinite="raise", incidents=incidents)
    with monitor:
        monitor.batch((x, target))
        loss(model(x), target).backward()
        with pytest.raises(torchfmri.NonFiniteError):
            optimizer.step()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    task = TASK.search(PAGE.read_text())
    assert task is not None
    (tmp_path / "task.py").write_text(task["code"])
    prompts = [
        {"prompt": text.format(word), "kind": kind}
        for kind, text in (("city", "The capital of {} is"), ("sum", "{} plus two is"))
        for word in ("France", "Italy", "Spain", "Japan", "Peru", "Cuba")
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guide_has_its_rows() -> None:
    assert {shlex.split(row["commands"].strip("`"))[1] for row in ROWS} >= {
        "diagnose", "verify", "cost", "replay", "scan", "lens", "lesion", "compare",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["question"])
def test_commands_of_the_guide_print_what_it_names(
    row: re.Match[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [shlex.split(each) for each in re.findall(r"`torchfmri ([^`]+)`", row["commands"])]
    if commands[0][0] == "replay":
        task: dict[str, Any] = {}
        exec((folder / "task.py").read_text(), task)
        nonfinite_step(task)
    for command in commands:
        assert cli.main(command) in (0, 1)
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    whole, inside = re.sub(r"\(.*?\)", "", row["keys"]), re.findall(r"\((.*?)\)", row["keys"])
    for key in re.findall(r"`(\w+)`", whole):
        assert key in printed
    for key in re.findall(r"`(\w+)`", " ".join(inside)):
        parts = printed[re.findall(r"`(\w+)`", whole)[0]]
        assert key in (parts[0] if isinstance(parts, list) else parts)
