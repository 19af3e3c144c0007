"""A training run on the board: of this process, and in a folder while it is written."""

import gc
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from browser import Page
from torch import nn

import torchfmri
from torchfmri import Monitor
from torchfmri._records import HistoryFolder, step_files
from torchfmri._scan import board_of
from torchfmri._viewer import LAYERS, TRACKS, Desk, RunBoard, View, ViewedRun
from torchfmri._viewer.tiles import Plane
from torchfmri.exceptions import FileFormatError, InspectionError


def train(steps: int, rate: float = 0.1, detach: bool = True, **options: Any) -> Monitor:
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
    if detach:
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


def test_a_run_in_a_folder_is_the_history(tmp_path: Path) -> None:
    monitor = train(12, folder=tmp_path / "run")
    board = board_of(tmp_path / "run")
    assert isinstance(board, RunBoard)
    check(board, monitor)
    file, _ = step_files(tmp_path / "run")
    assert board_of(file).length(0) == 1, "the first step is written at once"
    check(board_of(monitor.history), monitor)
    assert monitor.view is None


def test_parameters_stand_beneath_their_layers(tmp_path: Path) -> None:
    train(2, folder=tmp_path / "run")
    layers = board_of(tmp_path).layers
    assert layers.index("0") < layers.index("0.weight") < layers.index("1") < layers.index("2.bias")


def tell(folder: HistoryFolder, monitor: Monitor) -> None:
    """Write the steps of a monitor to a folder, one by one."""
    history = monitor.history
    for step in history:
        folder(step, {s: history.statistics(*s, step=step.number) for s in history.series})


def test_files_that_are_added_are_seen(tmp_path: Path) -> None:
    train(1, folder=tmp_path / "run")
    board = RunBoard(tmp_path / "run")
    desk = Desk(board)
    later = train(4)
    folder = HistoryFolder(tmp_path / "other", seconds=0)
    tell(folder, later)
    for number, file in enumerate(step_files(tmp_path / "other")[1:], 1):
        file.rename(tmp_path / "run" / file.name)
        board.refresh()
        plane, _ = desk.plane(0, "activations", LAYERS)
        assert plane.columns == board.length(0) == number + 1


def test_a_run_has_ended_as_soon_as_its_monitor_says_so(tmp_path: Path) -> None:
    monitor = train(2, folder=tmp_path / "run", detach=False)
    board = RunBoard(tmp_path / "run")
    assert board.going
    monitor.detach()
    assert board.refresh(), "pages are told"
    assert not board.going
    folder = HistoryFolder(tmp_path / "other", seconds=0)
    tell(folder, train(3))
    del folder
    gc.collect()
    assert not RunBoard(tmp_path / "other").going, "a program that simply ends says so, too"
    last = step_files(tmp_path / "other")[-1]
    last.rename(tmp_path / "run" / last.name)
    os.utime(tmp_path / "run" / last.name)
    assert board.refresh()
    assert board.going, "it goes on after all: a step is newer than the mark"


def test_a_run_goes_on_while_files_come(tmp_path: Path) -> None:
    monitor = train(2, folder=tmp_path / "run", detach=False)
    board = RunBoard(tmp_path / "run")
    assert board.going
    assert len(monitor.history) == 2, "it is not collected before"
    assert not board.refresh()
    for file in (tmp_path / "run").iterdir():
        os.utime(file, (1e9, 1e9))
    assert board.refresh(), "pages are told"
    assert not board.going


def test_findings_are_the_health_of_a_run(tmp_path: Path) -> None:
    monitor = train(24, rate=1e6, folder=tmp_path / "run")
    found = board_of(tmp_path).health(0)
    assert {each.text.split(":")[0] for each in found} >= {
        each.problem.replace("_", " ").capitalize() for each in monitor.findings[:1]
    }
    assert found[0].severity == "alarm"


def test_several_runs_are_sequences(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(3, folder=tmp_path / name)
    assert [each.name for each in board_of(tmp_path).entries()] == ["a", "b"]


def test_only_the_first_process_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert train(2, folder=tmp_path / "run", view=True).view is None
    assert not (tmp_path / "run").exists()


def test_training_goes_on_where_a_run_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, view=True)
    assert monitor._view is not None
    assert monitor.view is not None
    page = monitor.view

    def fail(*_: object) -> None:
        raise OSError("no page")

    monkeypatch.setattr(monitor._view._run, "add", fail)

    def steps() -> None:
        for _ in range(3):
            with monitor.step():
                model(torch.randn(3, 2)).sum().backward()
                optimizer.step()

    try:
        with pytest.warns(torchfmri.MonitorWarning, match="shows this run no longer"):
            steps()
        assert len(monitor.history) == 3
    finally:
        page.close()


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    train(2, folder=tmp_path / "run")
    file, _ = step_files(tmp_path / "run")
    file.write_bytes(file.read_bytes()[:-7])
    board = board_of(tmp_path / "run")  # the other step is shown
    assert board.length(0) == 1
    [problem] = board.about()["problems"]
    assert problem.startswith("run: ")
    assert file.name in problem
    _, other = step_files(tmp_path / "run")
    other.write_bytes(b"")
    with pytest.raises(FileFormatError, match="steps-"):
        board_of(tmp_path / "run")


def test_a_damaged_file_does_not_end_a_page_that_is_open(page: Page, tmp_path: Path) -> None:
    train(3, folder=tmp_path / "run")
    files = step_files(tmp_path / "run")
    kept = {each: each.read_bytes() for each in files[1:]}
    for each in kept:
        each.unlink()
    with torchfmri.view(tmp_path / "run", browser=False) as view:
        page.open(view.url)
        first = page.js("app.data.columns")
        broken = next(iter(kept))
        broken.write_bytes(b"no steps")
        page.until("app.data.board.problems.length === 1")
        (tmp_path / "run" / "steps-000000009.safetensors").write_bytes(kept[broken])
        page.until(f"app.data.columns > {first}")
        assert "not read" in page.text(".health")


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
    monitor = train(6, rate=1e30, folder=tmp_path / "run")
    stored = board_of(tmp_path / "run")
    table = stored.values(0, "activations", LAYERS)
    assert not np.isfinite(table[-1, 0])
    missing = stored.missing(0, "activations", LAYERS)
    assert missing is not None
    assert not missing[-1, 0], "it was watched"
    again = board_of(monitor.history).values(0, "activations", LAYERS)
    np.testing.assert_array_equal(table, again)
    plane, _ = Desk(board_of(tmp_path / "run")).plane(0, "activations", LAYERS)
    assert plane.coded(5, 6)[0, 0] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_nan_and_infinite_is_infinite(tmp_path: Path, value: float) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    monitor = Monitor(model, folder=tmp_path / "run")
    for step in range(2):
        with monitor.step():
            model(torch.full((1, 2), value if step else 1.0))
    monitor.detach()
    history, shown = monitor.history, ViewedRun()
    for at, step in enumerate(history):
        shown.add(step, {e: history.statistics(e.layer, e.what, at) for e in history.series})
    for board in (board_of(tmp_path / "run"), board_of(history), RunBoard(run=shown)):
        row = board.layers.index("0")
        table = board.values(0, "activations", LAYERS)
        np.testing.assert_array_equal(table[:, row], [1.0, value])
        missing = board.missing(0, "activations", LAYERS)
        assert missing is not None
        assert not missing[:, row].any(), "it was watched"


def test_the_page_of_a_run_grows_with_it(page: Page, tmp_path: Path) -> None:
    train(1, folder=tmp_path / "run")
    tell(HistoryFolder(tmp_path / "other", seconds=0), train(9))
    with torchfmri.view(tmp_path / "run", browser=False) as view:
        page.open(view.url)
        assert "1 step" in page.text("header")
        assert page.text("h1").split() == ["torchfmri", "run", "run"], "the run's own name"
        for file in step_files(tmp_path / "other")[1:]:
            file.rename(tmp_path / "run" / file.name)
        page.until("app.data.columns === 9")
        # The header is asked for anew if columns came that the page had not been told of.
        page.until("app.plane('layers').header?.columns === 9")
        board = view.board
        page.until("app.ui.headline.textContent.startsWith('9 steps: the loss went from')")
        assert page.text(".headline") == board.headline(0)
        # What the colours and the bars end at is that of all steps, not of the first.
        whole = Plane(board.values(0, "activations", LAYERS), "activations")
        page.until(f"app.plane('layers').header?.tops[0] === {float(np.float32(whole.tops[0]))}")
        loss = board.values(0, "loss", TRACKS)[:, 0]
        page.until("app.data.plane('tracks', 'tracks').header?.columns === 9")
        assert page.js("app.data.plane('tracks', 'tracks').header.tops[0]") == loss.max()
        assert not any(name.endswith("weight") for name in page.js("app.rows.map(r => r.name)"))


def break_off(folder: Path) -> None:
    """Train for 12 steps into a folder; from step 7 on the data is NaN."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, folder=folder)
    for number in range(12):
        with monitor.step() as step:
            loss = model(torch.full((8, 4), math.nan if number > 6 else 1.0)).square().mean()
            step.loss(loss)
            loss.backward()
    monitor.detach()


def test_a_longer_run_that_is_turned_to_opens_at_its_alarm(page: Page, tmp_path: Path) -> None:
    """Its further steps were asked for as if they had just come, and followed."""
    train(3, folder=tmp_path / "a")
    break_off(tmp_path / "b")
    with torchfmri.view(tmp_path, browser=False) as view:
        page.open(view.url)
        page.press("PageDown")
        page.until("app.data.index === 1 && app.data.columns === 12")
        page.until("app.ui.live.textContent === 'ended'")
        page.page.locator(".details[data-column='7']:not([aria-busy])").wait_for()
        assert page.js("[app.state.column, app.state.first, app.state.last]") == [7, 0, 0]


def test_each_run_of_a_folder_is_opened_as_if_it_were_alone(page: Page, tmp_path: Path) -> None:
    going = train(5, folder=tmp_path / "going", detach=False)
    break_off(tmp_path / "broken")
    with torchfmri.view(tmp_path, browser=False) as view:
        board = view.board
        assert [(each.name, board.is_going(at)) for at, each in enumerate(board.entries())] == [
            ("broken", False), ("going", True),
        ]  # fmt: skip
        page.open(f"{view.url}#sequence=1")
        page.until("app.ui.live.textContent === 'LIVE'")
        page.press("PageUp")
        page.until("app.state.sequence === 0 && app.ui.live.textContent === 'ended'")
        page.settle()
        assert page.js("app.state.column") == 7, "at the first alarm"
        assert not any(name.endswith("weight") for name in page.js("app.rows.map(r => r.name)"))
        page.press("PageDown")
        page.until("app.state.sequence === 1 && app.ui.live.textContent === 'LIVE'")
        page.until("app.state.column === app.data.columns - 1")
        page.page.locator(".details h2:text-is('This step')").wait_for()
        assert "loss" in page.text(".details h2:text-is('This step') + dl")
        # An address that is saved on the way to a run would name the column of the run before.
        saved = page.js(
            "(app.share(), app.set({sequence: 0, column: 0}), app.share(), location.hash)"
        )
        assert "sequence=1" in saved
        page.page.goto("about:blank")
        page.open(f"{view.url}#sequence=0")
        page.page.reload()
        page.until("app.ready && app.data.index === 0 && app.data.board.going")
        assert page.js("app.state.column") == 7, "another run that goes on does not matter"
        page.set(sequence=1, follow=True)
        page.until("app.data.index === 1 && app.ui.live.textContent === 'LIVE'")
        going.detach()
        page.until("app.ui.live.textContent === 'ended'")


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
        code = page.js("app.python()")
        names: dict[str, Any] = {"monitor": monitor}
        exec(code.replace("state=", "browser=False, state="), names)
        names["view"].close()
    finally:
        monitor.view.close()


def test_the_callbacks_of_trainers_show_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    huggingface = pytest.importorskip("torchfmri.integrations.huggingface")
    callback = huggingface.MonitorCallback(view=True, dashboards=False)
    callback.on_train_begin(None, None, None, model=model)
    assert callback.monitor.view.url.startswith("http://127.0.0.1:")
    callback.monitor.detach()
    callback.monitor.view.close()
    lightning = pytest.importorskip("torchfmri.integrations.lightning")
    callback = lightning.MonitorCallback(view=True, dashboards=False)
    trainer = SimpleNamespace(precision_plugin=None, optimizers=[optimizer], loggers=[])
    callback.on_train_start(trainer, model)
    assert callback.monitor.view.url.startswith("http://127.0.0.1:")
    callback.monitor.detach()
    callback.monitor.view.close()


def test_a_page_that_is_open_before_the_first_step_shows_the_layers(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), view=True)
    assert monitor.view is not None
    with monitor.view as view:
        page.page.goto(view.url)
        page.page.wait_for_selector(".cover h2")
        for _ in range(3):
            with monitor.step() as step:
                loss = model(torch.randn(2, 5, 16)).square().mean()
                step.loss(loss)
                loss.backward()
        page.until("app.data.columns === 3 && app.rows.length > 3")
        assert page.js("app.state.depth") == "all", "21 layers fit on a page"
        assert page.js("app.rows.length") == 21
        assert page.page.locator(".cover").is_hidden()
        assert "layers.2.linear1" in page.js("app.rows.map((row) => row.name)")


def test_a_run_that_is_over_is_not_live_and_shows_types(page: Page) -> None:
    monitor = train(4, view=True, detach=False)
    view = monitor.view
    assert view is not None
    with view:
        page.open(view.url)
        page.until("app.ui.live.textContent.startsWith('LIVE')")
        types = page.js("app.data.board.types")
        assert "Linear" in types
        monitor.detach()
        page.until("app.ui.live.textContent === 'ended'")


def test_rows_without_the_metric_are_left_out(page: Page, tmp_path: Path) -> None:
    train(6, folder=tmp_path / "run")
    with torchfmri.view(tmp_path / "run", browser=False) as view:
        page.open(view.url)
        shown = {row["name"] for row in page.js("app.rows")}
        assert shown
        assert not any(name.endswith(("weight", "bias")) for name in shown)
        page.set(metric="parameters")
        page.until("app.rows.some(row => row.name.endsWith('weight'))")
        page.settle()
        names = [row["name"] for row in page.js("app.rows")]
        assert all(name.endswith(("weight", "bias")) for name in names)
        assert page.js("app.state.layer") in names
        labels = page.page.locator("[role=treeitem] .name").all_inner_texts()
        assert labels == names, "whole names: the rows of their layers are not there"


def test_parameters_of_a_large_model_can_be_unfolded(page: Page) -> None:
    """Layers without the metric in view must not hide the parameters that are folded into them."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(3, 3) for _ in range(30))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    with monitor.step() as step:
        out = torch.randn(2, 3)
        for layer in model["layers"]:
            out = layer(out)
        step.loss(out.square().mean())
        out.square().mean().backward()
        optimizer.step()
    with torchfmri.view(monitor.history, browser=False) as view:
        page.open(view.url)
        assert page.js("app.rows.length") == 30
        page.press("3")
        page.until("app.state.metric === 'parameters'")
        page.settle()
        names = [row["name"] for row in page.js("app.rows")]
        assert sorted(names) == sorted(dict(model.named_parameters()))


def test_a_run_without_steps_waits(page: Page) -> None:
    with View(RunBoard(run=ViewedRun("net")), token="0123456789abcdef") as view:
        page.page.goto(view.url)
        page.page.wait_for_selector(".cover h2:text('Waiting for the first step')")
