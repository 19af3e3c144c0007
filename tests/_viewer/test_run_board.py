"""A training run on the board: in this process, and through a file while it is written."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Page
from torch import nn

import torchfmri
from torchfmri import Monitor
from torchfmri._scan import board_of
from torchfmri._viewer import LAYERS, TRACKS, Desk, RunBoard, RunView
from torchfmri.exceptions import FileFormatError, InspectionError


def train(steps: int, rate: float = 0.1, **options: Any) -> Monitor:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    monitor = Monitor(model, optimizer, **options)
    for _ in range(steps):
        with monitor.step() as step:
            loss = model(torch.randn(16, 4)).square().mean()
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    monitor.detach()
    return monitor


def check(board: RunBoard, monitor: Monitor) -> None:
    """Every number of the board is the history's."""
    assert board.length(0) == len(monitor.history)
    for metric in board.metrics(0):
        names, values = monitor.history.matrix(metric.name, "rms")
        table = board.values(0, metric.name, LAYERS)
        for name, row in zip(names, values, strict=True):
            np.testing.assert_allclose(table[:, board.layers.index(name)], row, rtol=1e-5)
    assert [each.name for each in board.metrics(0)] == [
        "activations", "gradients", "parameters", "parameter_gradients", "updates",
    ]  # fmt: skip
    np.testing.assert_allclose(
        board.values(0, "tracks", TRACKS)[:, 0], monitor.history.loss, rtol=1e-5
    )


def test_a_run_in_a_file_is_the_history(tmp_path: Path) -> None:
    monitor = train(12, view=tmp_path / "runs")
    board = board_of(tmp_path / "runs")
    assert isinstance(board, RunBoard)
    check(board, monitor)
    (file,) = (tmp_path / "runs").iterdir()
    check(board_of(file), monitor)
    check(board_of(monitor.history), monitor)
    assert monitor.view is None


def test_parameters_stand_beneath_their_layers(tmp_path: Path) -> None:
    train(2, view=tmp_path)
    layers = board_of(tmp_path).layers
    assert layers.index("0") < layers.index("0.weight") < layers.index("1") < layers.index("2.bias")


def test_lines_that_are_added_are_seen_and_half_a_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.run.jsonl"
    view = RunView(path, "model")
    board = RunBoard(path)
    desk = Desk(board)
    assert board.length(0) == 0
    monitor = train(3)
    for step in monitor.history:
        found = {
            s: monitor.history.statistics(*s, step=step.number) for s in monitor.history.series
        }
        view(step, found)
        board.refresh()
        plane, _ = desk.plane(0, "activations", LAYERS)
        assert plane.columns == board.length(0) == step.number + 1
    text = path.read_text("utf-8").splitlines()[-1]
    with path.open("a", encoding="utf-8") as file:
        file.write(text[:40])
        file.flush()
        assert not board.refresh()
        assert board.length(0) == 3
        file.write(text[40:] + "\n")
    board.refresh()
    assert board.length(0) == 4


def test_findings_are_the_health_of_a_run(tmp_path: Path) -> None:
    monitor = train(24, rate=1e6, view=tmp_path)
    found = board_of(tmp_path).health(0)
    assert {each.text.split(":")[0] for each in found} >= {
        each.problem for each in monitor.findings[:1]
    }
    assert found[0].severity == "alarm"


def test_several_runs_are_sequences(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(3, view=tmp_path / f"{name}.run.jsonl")
    assert [each.name for each in board_of(tmp_path).entries()] == ["a", "b"]


def test_only_the_first_process_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    train(2, view=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_training_goes_on_where_a_run_cannot_be_written(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, view=tmp_path)
    monitor._view._writer._file.close()  # type: ignore[union-attr]

    def steps() -> None:
        for _ in range(3):
            with monitor.step():
                model(torch.randn(3, 2)).sum().backward()
                optimizer.step()

    with pytest.warns(torchfmri.MonitorWarning, match="shows this run no longer"):
        steps()
    assert len(monitor.history) == 3


@pytest.mark.parametrize(
    "text", ["nonsense\n", "{}\n", '{"format": "other", "model": "x"}\n', "[1]\n",
             '{"format":"torchfmri-run","model":"x"}\n{"step":0,"rms":[1,2,3]}\n',
             '{"format":"torchfmri-run","model":"x"}\n{"step":"a","rms":[]}\n'],
)  # fmt: skip
def test_a_file_that_is_no_run_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.run.jsonl"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"x\.run\.jsonl.*no run of a Monitor"):
        RunBoard(path)


def test_what_cannot_be_viewed_is_said(tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match="neither a scan nor a run"):
        board_of(tmp_path)
    with pytest.raises(FileFormatError):
        board_of(tmp_path / "nothing.fmri")
    with pytest.raises(InspectionError, match="what=7"):
        torchfmri.view(7)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match="view=7"):
        train(0, view=7)


def test_not_finite_values_are_holes(tmp_path: Path) -> None:
    monitor = train(6, rate=1e30, view=tmp_path)
    table = board_of(tmp_path).values(0, "activations", LAYERS)
    assert math.isnan(table[-1, 0])
    again = board_of(monitor.history).values(0, "activations", LAYERS)
    np.testing.assert_array_equal(np.isnan(table), np.isnan(again))


def test_the_page_of_a_run_grows_with_it(page: Page, tmp_path: Path) -> None:
    train(5, view=tmp_path / "x.run.jsonl")
    line = (tmp_path / "x.run.jsonl").read_text("utf-8").splitlines()[-1]
    with torchfmri.view(tmp_path, browser=False) as view:
        page.open(view.url)
        assert "5 steps" in page.text("header")
        with (tmp_path / "x.run.jsonl").open("a") as file:
            for number in range(5, 305):
                file.write(json.dumps({**json.loads(line), "step": number}) + "\n")
        page.until("app.data.columns === 305")
        page.settle()
        assert page.js("app.plane('layers').header.columns") == 305


def test_a_monitor_that_shows_itself(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monitor = train(4, view=True)
    assert monitor.view is not None
    try:
        assert opened == [monitor.view.url]
        page.open(monitor.view.url)
        assert "4 steps" in page.text("header")
    finally:
        monitor.view.close()
