"""Two training runs: the first step and layer where they part; identical ones are silent."""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from benchmarks.compare import train
from torchfmri import FileFormatError, History, InspectionError, Monitor, compare
from torchfmri._records import STORED, HistoryFolder, Step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base() -> Monitor:
    return train()


def test_identical_runs_are_silent(base: Monitor) -> None:
    found = compare(base, train())
    assert found.agree
    assert "equal to the last bit" in found.summary()


@pytest.mark.parametrize(
    ("change", "step", "layer", "what"),
    [
        ({"changed": 37}, 37, "0", "activations"),
        ({"rate": 0.0505}, 0, "0.weight", "updates"),
        ({"seed": 5}, 0, "0.weight", "parameters"),
    ],
)
def test_first_step_and_layer_are_named(
    base: Monitor, change: dict[str, Any], step: int, layer: str, what: str
) -> None:
    first = compare(base, train(**change)).first
    assert first is not None
    assert (first.step, first.layer, first.what) == (step, layer, what)
    assert first.before == 0.0


@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_that_is_frozen_at_a_step_is_named(base: Monitor, turned: bool) -> None:
    frozen = History.load(base.history.save(_place("frozen")))
    column = frozen.series.index(("2.weight", "parameter_gradients"))
    for step in frozen:
        if step.number >= 20:
            step.table[column] = math.nan
    first = compare(*(frozen, base)[:: 1 if turned else -1]).first
    assert first is not None
    assert (first.step, first.layer, first.what) == (20, "2.weight", "parameter_gradients")
    assert first.reason == f"only {'b' if turned else 'a'} has any in that step"
    assert compare(frozen, frozen).agree


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rate", "steps"), [(0.1, 5), (0.0, 5), (0.1, 1)])
def test_a_parameter_that_is_frozen_from_the_start_is_named(
    rate: float, steps: int, turned: bool
) -> None:
    free, frozen = (_froze(each, rate, steps) for each in (False, True))
    first = compare(*(free, frozen)[:: -1 if turned else 1]).first
    assert first is not None
    assert (first.step, first.layer, first.what) == (0, "2.weight", "parameter_gradients")
    has, lacks = ("b", "a") if turned else ("a", "b")
    assert first.reason == f"only {has} has any: not trained in {lacks}"
    assert compare(frozen, _froze(True, rate, steps)).agree


def _froze(freeze: bool, rate: float, steps: int) -> Monitor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    net[2].weight.requires_grad_(not freeze)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with Monitor(net, optimizer) as monitor:
        for _ in range(steps):
            loss = net(torch.randn(6, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
    return monitor


def test_the_table_says_what_follows_and_what_is_equal(base: Monitor) -> None:
    found = compare(base, train(changed=37))
    assert "all steps before are equal to the last bit" in found.summary()
    rows = {line.split()[0]: line for line in found.text().splitlines() if line.strip()}
    assert "follows" in rows["updates"], "Adam makes them of gradients that differ"
    assert "updates differ by up to" in found.text()
    assert "none" not in found.text()
    same = compare(base, train(), tolerance=1e-3)
    assert same.summary() == (
        "no step differs by more than 0.001 in 60 steps: equal to the last bit"
    )
    assert same.text().count(" equal  ") == 6
    assert "noise" not in same.text()
    assert "noise" not in same.plot().get_title(loc="left")


def test_updates_that_turn_nan_part_at_that_step() -> None:
    def trained(nan_at: int | None) -> Monitor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Monitor(model, optimizer) as monitor:
            for step in range(6):
                loss = model(torch.randn(5, 4)).square().mean()
                loss = loss * math.nan if step == nan_at else loss
                optimizer.zero_grad()
                loss.backward()
                monitor.loss(loss)
                optimizer.step()
        return monitor

    found = compare(trained(None), trained(4))
    assert found.first is not None
    assert (found.first.step, found.first.what) == (4, "loss")
    kinds = found.to_dict()["kinds"]
    assert (kinds["updates"]["step"], kinds["updates"]["layer"]) == (4, "0.weight")
    assert kinds["gradients"]["layer"] == "2", "gradients arrive at the last layer first"
    assert "inf" not in str(found.first)
    assert compare(trained(4), trained(4)).agree


def test_series_that_only_one_run_has_are_named(base: Monitor) -> None:
    less = History.load(base.history.save(_place("less")))
    gone = less.series.index(("3", "activations"))
    less.series = [each for each in less.series if each != ("3", "activations")]
    for step in less:
        step.table = np.delete(step.table, gone, axis=0)
    found = compare(base, less)
    assert found.agree
    assert "only a has activations of '3': not compared" in found.notes


def test_steps_at_which_one_run_watched_less_are_no_difference(base: Monitor) -> None:
    sparse = History.load(base.history.save(_place("sparse")))
    columns = [at for at, each in enumerate(sparse.series) if each.what == "parameter_gradients"]
    for step in sparse:
        step.table[columns] = math.nan if step.number % 2 else step.table[columns]
    assert compare(base, sparse).agree


def test_a_tolerance_replaces_what_rounding_explains(base: Monitor) -> None:
    scaled = History.load(base.history.save(_place("scaled")))
    assert compare(base, scaled, tolerance=0).agree
    for step in scaled:
        step.loss *= 1 + 1e-7
    assert compare(base, scaled).agree
    first = compare(base, scaled, tolerance=0).first
    assert first is not None
    assert (first.step, first.what) == (0, "loss")
    assert compare(base, scaled, tolerance=1e-6).agree


def test_a_small_change_after_equal_steps_is_seen_where_it_enters() -> None:
    """In bfloat16 one changed token of many is less than what rounding may do to an embedding."""

    def trained(changed: int | None, rate: float = 1e-5) -> Monitor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 2)).bfloat16()
        with torch.no_grad():
            model[1].weight.mul_(20)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        data = torch.Generator().manual_seed(1)
        with Monitor(model, optimizer) as monitor:
            for step in range(6):
                ids = torch.randint(0, 49, (16, 40), generator=data)
                if step == changed:
                    ids[3, 5] += 1
                loss = model(ids)[3, 5].float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                monitor.loss(loss)
                optimizer.step()
        return monitor

    found = compare(trained(None), trained(4))
    first = found.first
    assert first is not None
    assert (first.step, first.layer, first.what) == (4, "0", "activations")
    column = found.series.index(("0", "activations"))
    assert found.gaps[4, column] < 1e-2, "less than rounding to bfloat16 may do"
    diverging = trained(None, rate=1e-2)
    assert diverging.history.loss[-1] == math.inf
    assert compare(diverging, trained(None, rate=1.01e-2)).first.step == 0, "without a warning"


def test_slow_drift_is_no_difference_and_a_jump_is(base: Monitor) -> None:
    """Rounding on another machine: differences that double every few steps."""
    drifted = History.load(base.history.save(_place("drift")))
    for step in drifted:
        step.table[:, 1:5] *= 1 + 1e-7 * 1.3**step.number
    assert compare(base, drifted).agree
    for step in drifted:
        if step.number >= 50:
            step.table[:, 1:5] *= 1.5
    first = compare(base, drifted).first
    assert first is not None
    assert first.step == 50


def _place(name: str) -> Path:
    import tempfile

    return Path(tempfile.mkdtemp()) / name


def test_repeated_runs_are_the_noise(base: Monitor) -> None:
    others = [train(seed=seed) for seed in (1, 2, 3)]
    assert compare([base, others[0]], others[1:]).agree, "seeds differ on both sides alike"
    far = train(seed=4, rate=3.0)
    assert not compare([base, *others], far).agree


def test_a_history_is_saved_and_loaded(base: Monitor, tmp_path: Path) -> None:
    before = base.history
    after = History.load(before.save(tmp_path / "run.history"))
    assert after.series == before.series
    assert np.array_equal(after.loss, before.loss)
    for series in before.series:
        for field in ("count", "mean", "std", "min", "max", "nan"):
            one, two = (each.values(*series, field) for each in (before, after))
            assert np.array_equal(one, two, equal_nan=True)
    assert np.array_equal(after.update_ratio("0.weight"), before.update_ratio("0.weight"))
    assert [step.seconds for step in after] == [step.seconds for step in before]
    assert compare(before, after).agree


def test_a_loss_that_was_nan_and_one_that_was_not_seen_stay_apart(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        with monitor.step() as step:
            loss = model(torch.ones(1, 2)).sum()
            if number:
                step.loss(loss * float("nan"))
            loss.backward()
    after = History.load(monitor.history.save(tmp_path / "x"))
    assert [step.has_loss for step in after] == [False, True]


def test_the_folder_of_a_monitor(tmp_path: Path) -> None:
    a, b = (train(folder=tmp_path / name, **more) for name, more in
            (("a", {}), ("b", {"changed": 37})))  # fmt: skip
    found = compare(tmp_path / "a", str(tmp_path / "b"))
    assert found.first is not None
    assert (found.first.step, found.first.layer) == (37, "0")
    assert compare(tmp_path / "a", a).agree
    assert [each.problem for each in History.load(tmp_path / "b").findings] == [
        each.problem for each in b.findings
    ]
    with pytest.raises(InspectionError, match="another run"):
        train(folder=tmp_path / "a", steps=1)


def test_runs_of_other_lengths_say_how_much_was_compared() -> None:
    short, long = train(steps=2), train(steps=4)
    assert "in the 2 of 4 steps in common: equal" in compare(short, long).summary()
    assert "in 2 steps: equal" in compare(short, train(steps=2)).summary()


@pytest.mark.parametrize("changed", [None, 4], ids=["as it was", "another sample"])
def test_a_resumed_run_is_compared_from_where_it_was_resumed(changed: int | None) -> None:
    def run(state: dict[str, Any], steps: range, changed: int | None = None) -> History:
        model = nn.Linear(6, 6)
        if state:
            model.load_state_dict(state["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if state:
            optimizer.load_state_dict(state["optimizer"])
        with Monitor(model, optimizer) as monitor:
            for step in steps:
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                loss = model(-x if step == changed else x).square().mean()
                loss.backward()
                monitor.loss(loss)
                optimizer.step()
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return monitor.history

    torch.manual_seed(0)
    state: dict[str, Any] = {}
    first = run(state, range(3))
    resumed = run(dict(state), range(3, 9), changed)
    torch.manual_seed(0)
    whole = run({}, range(9))
    assert compare(whole, first).agree
    for found in (compare(whole, resumed), compare(resumed, whole)):
        assert any("resumed" in note and "at step 3" in note for note in found.notes)
        assert found.steps[0] == 3
        assert (found.first and found.first.step) == changed


def test_the_folder_stays_where_it_was_when_the_program_changes_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, folder="runs/a") as monitor:  # writes what waits at its end
        for _ in range(3):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
        monkeypatch.chdir("elsewhere")
    assert len(History.load(tmp_path / "runs" / "a")) == 3


KILLED = """
import os, sys, torch
from torch import nn
from torchfmri import Monitor
from torchfmri._records import HistoryFolder
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = Monitor(model, optimizer)
monitor.add_writer(HistoryFolder(sys.argv[1], seconds=0.0))
for number in range(5):
    with monitor.step() as step:
        loss = model(torch.ones(1, 2)).sum()
        step.loss(loss)
        loss.backward()
        optimizer.step()
os._exit(9) if sys.argv[2] == "killed" else None
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_what_was_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x"), "killed"], check=False)
    history = History.load(tmp_path / "x")
    assert history.steps.tolist() == [0, 1, 2, 3, 4]
    files = sorted((tmp_path / "x").iterdir())
    files[2].write_bytes(files[2].read_bytes()[:50])
    history = History.load(tmp_path / "x")
    assert history.steps.tolist() == [0, 1, 3, 4]
    assert any(files[2].name in note for note in history.notes)


def test_steps_wait_and_are_written_at_the_end(tmp_path: Path) -> None:
    folder = HistoryFolder(tmp_path / "x", seconds=3600)
    for step in train(steps=3).history:
        folder(step, {})
    assert History.load(tmp_path / "x").steps.tolist() == [0], "a folder is never empty for long"
    folder.flush()
    assert History.load(tmp_path / "x").steps.tolist() == [0, 1, 2]


def test_a_run_whose_folder_was_removed_ends_without_an_error(tmp_path: Path) -> None:
    folder = HistoryFolder(tmp_path / "x", seconds=0)
    for step in train(steps=3).history:
        folder(step, {})
    shutil.rmtree(tmp_path / "x")
    folder.end()
    assert not (tmp_path / "x").exists()


def test_a_loss_that_turns_to_nan_is_written_at_once(tmp_path: Path) -> None:
    folder = HistoryFolder(tmp_path / "x", seconds=3600)
    written = []
    for number, loss in enumerate([1.0, 1.0, math.nan, math.nan, 1.0, math.inf]):
        folder(Step(number=number, loss=loss, has_loss=True), {})
        written.append(len(History.load(tmp_path / "x")))
    assert written == [1, 1, 3, 3, 3, 6]


def test_a_monitor_that_is_dropped_leaves_its_findings(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e20)
    monitor = Monitor(model, optimizer, folder=tmp_path / "x")
    for _ in range(6):
        with monitor.step() as step:
            loss = model(torch.ones(4, 2)).square().mean()
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    known, dropped = [each.problem for each in monitor.findings], weakref.ref(model)
    assert known
    del monitor, model, optimizer, loss, step
    gc.collect()
    kept = History.load(tmp_path / "x")
    assert [each.problem for each in kept.findings] == known
    assert len(kept) == 6
    assert dropped() is None, "what is written at the end does not keep the model"


# -- bad input and pictures ----------------------------------------------------------------------


def test_bad_input_is_explained(base: Monitor, tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match="b has no steps"):
        compare(base, History())
    with pytest.raises(FileFormatError, match="cannot be read: it is empty"):
        compare(base, tmp_path)
    with pytest.raises(FileFormatError, match="no such file"):
        compare(base, tmp_path / "nowhere")
    (tmp_path / "steps-000000000.safetensors").write_bytes(b"half")
    with pytest.raises(FileFormatError, match="none of its files can be read"):
        compare(base, tmp_path)
    with pytest.raises(InspectionError, match=r"names=.*training runs are compared as they are"):
        compare(base, base, names={"0": "1"})
    with pytest.raises(InspectionError, match="the other side is a training run"):
        compare(base, nn.Linear(2, 2))
    other = nn.Linear(2, 1)
    monitor = Monitor(nn.Sequential(nn.Sequential(other)))
    with monitor.step():
        other(torch.ones(1, 2)).sum().backward()
    with pytest.raises(InspectionError, match="no layer in common"):
        compare(base, monitor)


def test_a_run_that_turns_to_nan_differs_to_its_end(base: Monitor) -> None:
    broken = History.load(base.history.save(_place("broken")))
    columns = [at for at, each in enumerate(broken.series) if each.what == "activations"]
    for step in broken:
        if step.number >= 25:
            step.loss = math.nan
            step.table[columns, STORED.index("nan")] = 3
    found = compare(base, broken)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["first"]["step"] == 25
    expected = {"step": 25, "layer": "0", "difference": None, "last": None}
    assert data["kinds"]["activations"] == expected
    assert data["kinds"]["parameters"]["last"] == 0
    (row,) = (line for line in found.text().splitlines() if line.startswith("activations"))
    assert row.split()[1:] == ["25", "0", "inf", "inf"]
    axes = found.plot("activations")
    colours = axes.images[0].get_array()
    assert colours[:, 25:].min() > colours[:, :25].max(), "what is NaN is not drawn as equal"
    assert "brightest is NaN" in axes.get_xlabel()


def test_findings_stand_side_by_side_and_runs_are_drawn(base: Monitor) -> None:
    hot = train(rate=50.0)
    found = compare(base, hot)
    assert hot.findings
    assert f"found {hot.findings[0].problem}: b: " in found.text().replace("\n    ", " ")
    axes = found.plot("updates")
    assert any(line.get_marker() == "o" for line in axes.lines), "the first difference is marked"
    assert len(found.plot_curves().lines) >= 2
    assert found.to_dict()["first"]["step"] == 0
    with pytest.raises(InspectionError, match="no 'inputs' in both runs, only"):
        found.plot("inputs")


def test_the_picture_of_runs_shows_the_first_layer_and_round_steps(base: Monitor) -> None:
    found = compare(base, train(changed=37))
    above, *_ = found.draw().axes
    assert [tick.get_text() for tick in above.get_xticklabels()][:3] == ["0", "5", "10"]
    assert next(line.get_xdata()[0] for line in above.lines if line.get_marker() == "o") == 37
    assert "part" in above.get_title(loc="left")
    same = compare(base, train()).draw().axes[0]
    assert same.get_title(loc="left") == "No difference beyond noise: activations"


def test_the_picture_of_a_deep_model_shows_its_blocks() -> None:
    """A Monitor watches layers without parts, of which an overview would show none in a block."""

    def trained(scale: float) -> Monitor:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(40)]
        model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 2))
        with torch.no_grad():
            model.get_submodule("0.7.0").weight.mul_(scale)
        monitor = Monitor(model, what=["activations"])
        with monitor.step():
            model(torch.ones(2, 4)).sum().backward()
        return monitor

    found = compare(trained(1.0), trained(1.1))
    assert found.first.layer == "0.7.0"
    ax = found.plot()
    assert sum(image.get_array().shape[0] for image in ax.images) == 81
    assert any(line.get_marker() == "o" for line in ax.lines), "the ring"


# -- runs that differ by rounding ----------------------------------------------------------------


class Attending(nn.Module):
    """The bias of its keys has no gradient but rounding, of which Adam makes updates."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y, _ = self.attention(x, x, x)
        found: torch.Tensor = self.head(x + y)
        return found


def attended(
    *, turned: bool = False, rate: float = 1e-2, changed: int | None = None, lower: bool = False
) -> Monitor:
    """Train for 15 steps, with the rows of each batch in the opposite order if `turned`."""
    torch.manual_seed(0)
    model = Attending()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    data = torch.Generator().manual_seed(1)
    with Monitor(model, optimizer) as monitor:
        for step in range(15):
            ids = torch.randint(0, 20, (8, 10), generator=data)
            if step == changed:
                ids[3, 5] = (ids[3, 5] + 1) % 20
            ids = ids.flip(0) if turned else ids
            with torch.autocast("cpu", torch.bfloat16, enabled=lower):
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
    return monitor


@pytest.mark.parametrize("lower", [False, True], ids=["float32", "autocast"])
def test_runs_that_add_up_in_another_order_are_silent(lower: bool) -> None:
    a = attended(lower=lower)
    found = compare(a, attended(turned=True, lower=lower))
    assert found.agree, found.summary()
    assert np.nanmax(found.gaps) > 1e-7, "they do round differently"
    for change, step in (({"rate": 1.3e-2}, 0), ({"changed": 9}, 9)):
        first = compare(a, attended(turned=True, lower=lower, **change)).first
        assert first is not None, change
        assert first.step == step, change


def test_autocast_against_float32_is_silent() -> None:
    found = compare(attended(), attended(lower=True))
    assert found.agree, found.summary()


def test_a_changed_token_is_seen_at_the_embedding_in_autocast() -> None:
    first = compare(attended(lower=True), attended(lower=True, changed=9)).first
    assert first is not None
    assert (first.step, first.layer, first.what) == (9, "embed", "activations")
    assert first.relative > first.allowed


def test_steps_after_the_first_difference_differ_too() -> None:
    """What rounding may do is taken from before: the difference itself is no rounding."""
    found = compare(attended(), attended(changed=9))
    column = found.series.index(("head", "activations"))
    later = (found.gaps > found.allowed)[10:, column]
    assert later.all(), "updates of other gradients are no noise"


def convolved(*, turned: bool = False, fault: int | None = None) -> Monitor:
    """Train a convolution whose bias has no effect, because a BatchNorm follows it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(1)
    with Monitor(model, optimizer) as monitor:
        for step in range(8):
            x = torch.randn(8, 3, 6, 6, generator=data)
            loss = model(x.flip(0) if turned else x).square().mean()
            optimizer.zero_grad()
            with ExitStack() as stack:
                if step == fault:
                    stack.callback(model[0].bias.register_hook(lambda grad: grad + 1e-4).remove)
                loss.backward()
            monitor.loss(loss)
            optimizer.step()
    return monitor


def test_a_gradient_that_adds_up_to_zero_is_rounding_and_hides_no_fault() -> None:
    a = convolved()
    found = compare(a, convolved(turned=True))
    column = found.series.index(("0.bias", "parameter_gradients"))
    assert found.gaps[0, column] > 1e-2, "nothing but rounding is left of it"
    assert found.agree, found.summary()
    first = compare(a, convolved(turned=True, fault=5)).first
    assert first is not None
    assert (first.step, first.layer, first.what) == (5, "0.bias", "parameter_gradients")


def attention_run(
    attention: str, *, optimizer: Any = torch.optim.Adam, rate: float = 3e-3, every: int = 1,
    changed: int | None = None, **options: Any,
) -> Monitor:  # fmt: skip
    """Train a tiny Phi: part of its keys is not rotated, and the bias of these does nothing."""
    torch.manual_seed(3)
    config = transformers.PhiConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, attn_implementation=attention,
        resid_pdrop=0.0, attention_dropout=0.0, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    model = transformers.PhiForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    used = optimizer(model.parameters(), lr=rate, **options)
    with Monitor(model, used, every=every) as monitor:
        for step in range(8):
            generator = torch.Generator().manual_seed(1000 + step)
            ids = torch.randint(3, 61, (4, 12), generator=generator)
            if step == changed:
                ids[1, 3] = (ids[1, 3] + 5) % 61
            used.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            monitor.loss(loss)
            used.step()
    return monitor


@pytest.mark.slow
def test_adam_turns_the_rounding_of_attention_into_updates_and_hides_no_change() -> None:
    a = attention_run("eager")
    found = compare(a, attention_run("sdpa"))
    updates = [at for at, each in enumerate(found.series) if each.what == "updates"]
    assert np.nanmax(found.gaps[:, updates]) > 1e-3, "an update that is nothing but rounding"
    assert found.agree, found.summary()
    assert "they differ by rounding only" in found.summary()
    changes: list[tuple[dict[str, Any], int]] = [
        ({"rate": 3.03e-3}, 0), ({"betas": (0.9, 0.99)}, 1), ({"changed": 5}, 5),
        ({"weight_decay": 0.1}, 0),
    ]  # fmt: skip
    for change, step in changes:
        first = compare(a, attention_run("sdpa", **change)).first
        assert first is not None, change
        assert first.step == step, change


def at_the_kink(shift: float, fault: bool = False) -> Monitor:
    """Train a ReLU one of whose inputs is `shift`, which is no more than rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 8)
    with torch.no_grad():
        model[0].bias[0] -= model[0](x)[5, 0] - shift
    with Monitor(model, optimizer) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if fault:
                model[0].weight.grad.mul_(2)
            monitor.loss(loss)
            optimizer.step()
    return monitor


def test_a_relu_at_its_kink_is_rounding() -> None:
    a = at_the_kink(1e-8)
    found = compare(a, at_the_kink(-1e-8))
    column = found.series.index(("0.weight", "parameter_gradients"))
    assert found.gaps[0, column] > 1e-3, "the gradient passes on one side only"
    assert found.agree, found.summary()
    assert not compare(a, at_the_kink(-1e-8, fault=True)).agree


def test_a_loss_near_zero_has_the_rounding_of_its_terms(base: Monitor) -> None:
    near = [History.load(base.history.save(_place("near"))) for _ in range(2)]
    for history, loss in zip(near, (1e-7, 1.5e-7), strict=True):
        history[30].loss = loss
    assert compare(*near).agree
    near[1][30].loss = 1e-2
    first = compare(*near).first
    assert first is not None
    assert (first.step, first.what) == (30, "loss")


def test_values_that_are_not_finite_in_both_runs_are_noted(base: Monitor) -> None:
    assert not any("NaN" in note for note in compare(base, base).notes)
    broken = History.load(base.history.save(_place("broken")))
    for step in broken:
        if step.number >= 30:
            step.table[:, STORED.index("nan")] = 1
    notes = compare(broken, broken).notes
    assert any("both runs have NaN or infinite values from step 30 on" in note for note in notes)
