"""Tasks, puzzles, runs that are killed and go on, the command, the figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchfmri
from torchfmri.cli import main
from torchfmri.routing import (
    Divergence,
    LearningDynamics,
    RoutingConfig,
    RoutingLanguageModel,
    UnitRates,
    computation_parameters,
    helpfulness,
    map_prototypes,
    plot_prototypes,
    plot_selectivity,
    routing_parameters,
)
from torchfmri.routing.experiment.many_runs import Experiment
from torchfmri.routing.experiment.report import draw_figures, read_results, summarise, table
from torchfmri.routing.experiment.tasks import (
    ARROW,
    END,
    NEWLINE,
    SYMBOLS,
    GridPuzzles,
    SequenceTasks,
    write_puzzles,
)
from torchfmri.routing.experiment.training_run import VARIANTS, RunPlan, TrainingRun, judge_routing
from torchfmri.routing.prototype_map import principal_plane
from torchfmri.routing.routing_history import history_from_data, history_to_data

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = RunPlan(
    "token", steps=6, batch=4, hidden_size=16, blocks=3, heads=2, lengths=(2, 3), tested=16
)
OPTIONS = [
    "--steps",
    "6",
    "--batch",
    "4",
    "--hidden-size",
    "16",
    "--blocks",
    "3",
    "--heads",
    "2",
    "--lengths",
    "2",
    "3",
    "--seeds",
    "2",
    "--signal",
    "token",
    "--signal",
    "l1",
]


# -- tasks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("copy", lambda x: x),
        ("reverse", lambda x: x[::-1]),
        ("increment", lambda x: [(each + 1) % SYMBOLS for each in x]),
        ("sort", sorted),
    ],
)
def test_answers(name: str, answer: Any) -> None:
    tasks = SequenceTasks(lengths=(5,), names=(name,))
    batch = tasks.train(20, torch.Generator().manual_seed(0))
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        assert ids[7:] == list(answer(ids[1:6]))
        assert labels == [-100] * 7 + ids[7:]


def test_a_batch_mixes_tasks_and_names_them() -> None:
    batch = SequenceTasks().train(64, torch.Generator().manual_seed(0))
    assert set(batch.tasks.tolist()) == {0, 1, 2, 3}
    assert torch.equal(batch.ids[:, 0], SYMBOLS + batch.tasks)
    assert int(batch.ids.max()) < SequenceTasks().vocab_size


def test_wrong_tasks_say_so() -> None:
    with pytest.raises(torchfmri.InspectionError, match="There is no task 'dance'"):
        SequenceTasks(names=("dance",))
    with pytest.raises(torchfmri.InspectionError, match="at least one length"):
        SequenceTasks(lengths=())


# -- puzzles ---------------------------------------------------------------------------------


def test_made_puzzles_follow_their_rules(tmp_path: Path) -> None:
    write_puzzles(tmp_path, count=8)
    rules = {"mirror": np.fliplr, "flip": np.flipud, "transpose": np.transpose}
    for file in tmp_path.glob("*.json"):
        task = json.loads(file.read_text())
        assert set(task) == {"train", "test", "rule"}
        for pair in task["train"] + task["test"]:
            act = rules.get(task["rule"], lambda grid: np.roll(grid, 1, axis=1))
            assert np.array_equal(act(np.array(pair["input"])), pair["output"])


def test_a_puzzle_of_arc_becomes_tokens(tmp_path: Path) -> None:
    task = {
        "train": [{"input": [[1, 2]], "output": [[2, 1]]}, {"input": [[3]], "output": [[4]]}],
        "test": [{"input": [[5, 6]], "output": [[6, 5]]}],
    }
    (tmp_path / "0a1b.json").write_text(json.dumps(task))
    puzzles = GridPuzzles.read(tmp_path)
    assert puzzles.names == ("0a1b",)
    first = [1, 2, NEWLINE, ARROW, 2, 1, NEWLINE, END]
    second = [3, NEWLINE, ARROW, 4, NEWLINE, END]
    test = [5, 6, NEWLINE, ARROW, 6, 5, NEWLINE, END]
    assert puzzles.test_puzzles.ids.tolist() == [first + second + test]
    assert puzzles.test_puzzles.labels.tolist() == [[-100] * 18 + test[4:]]
    assert puzzles.train_puzzles.ids.tolist() == [second + first, first + second]
    assert puzzles.train_puzzles.labels[0].tolist() == [-100] * 10 + first[4:]


def test_colours_are_exchanged_consistently(tmp_path: Path) -> None:
    write_puzzles(tmp_path, count=4)
    puzzles = GridPuzzles.read(tmp_path)
    batch = puzzles.train(50, torch.Generator().manual_seed(0))
    originals = puzzles.train_puzzles.ids.tolist()
    different = 0
    rows = (each.tolist() for each in (batch.ids, batch.mask, batch.labels))
    for row, mask, labels in zip(*rows, strict=True):
        assert all(mask)  # made puzzles have one size
        pairs = [set(zip(each, row, strict=True)) for each in originals]
        fitting = [each for each in pairs if len({a for a, _ in each}) == len(each)]
        assert fitting  # some original, under a map of colours that is one to one
        different += row not in originals
        answers = [(a, b) for a, b in zip(row, labels, strict=True) if b != -100]
        assert answers
        assert all(a == b for a, b in answers)
    assert different > 40


def test_long_puzzles_are_counted_and_wrong_files_named(tmp_path: Path) -> None:
    write_puzzles(tmp_path, count=4, size=3)
    write_puzzles(tmp_path / "large", count=4, size=9)
    for file in (tmp_path / "large").glob("*.json"):
        file.rename(tmp_path / f"large_{file.name}")
    assert GridPuzzles.read(tmp_path, max_tokens=100).skipped == 12
    with pytest.raises(torchfmri.InspectionError, match="fits into 10 tokens"):
        GridPuzzles.read(tmp_path, max_tokens=10)
    (tmp_path / "bad.json").write_text(
        '{"train": [{"input": [[11]], "output": [[1]]}], "test": []}'
    )
    with pytest.raises(torchfmri.InspectionError, match=r"bad\.json is not an ARC task"):
        GridPuzzles.read(tmp_path)
    with pytest.raises(torchfmri.InspectionError, match=r"no \.json file"):
        GridPuzzles.read(tmp_path / "nothing")


# -- measuring -------------------------------------------------------------------------------


def tiny_model() -> RoutingLanguageModel:
    torch.manual_seed(0)
    return RoutingLanguageModel(RoutingConfig(21, hidden_size=16, blocks=3, heads=2))


def test_unit_rates_are_counts() -> None:
    model, ids = tiny_model(), torch.randint(21, (6, 5))
    tasks = torch.tensor([0, 1, 1, 0, 2, 0])
    mask = torch.ones(6, 5)
    mask[1, 3:] = 0
    outputs = {}
    layer = model.blocks[1].value
    handle = layer.register_forward_hook(lambda module, x, out: outputs.update(out=out.detach()))
    rates = UnitRates(model, tasks=4)
    with torch.no_grad():
        rates.run(lambda: model(ids, mask), tasks, mask)
    handle.remove()
    found = rates.rates["blocks.1.value"]
    for task in range(4):
        chosen = outputs["out"][(tasks == task)[:, None] & (mask > 0)]
        expected = (chosen != 0).float().mean(0) if len(chosen) else torch.zeros(16)
        torch.testing.assert_close(found[task], expected)


def test_judgement_of_known_rates() -> None:
    """One unit always on, one for a task only, one dead, in three blocks of one layer."""
    unit = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = judge_routing({"a": unit, "b": unit * 0, "c": unit}, blocks=3)
    assert found["activation_by_block"] == pytest.approx([0.5, 0, 0.5])
    assert found["middle_activation"] == 0
    assert found["dead_units"] == pytest.approx(5 / 9)
    assert found["selectivity"] == pytest.approx(2 * 0.5 / 9)
    assert found["relative_selectivity"] == pytest.approx((0 + 1) / 2)


def test_history_of_a_training_loop_is_shown_by_what_shows_histories(tmp_path: Path) -> None:
    from torchfmri.visualization.history_plots import plot_history

    model, ids = tiny_model(), torch.randint(21, (4, 5))
    main_optimizer = torch.optim.SGD(computation_parameters(model), lr=0.1)
    meta = torch.optim.SGD(routing_parameters(model), lr=0.1)
    with LearningDynamics(model, main_optimizer, meta, history_every=2) as dynamics:
        for _ in range(5):
            dynamics.compute_and_apply_gradients(model(ids, labels=ids).loss)
    history = dynamics.history
    assert history.steps.tolist() == [0, 2, 4]
    values = history.values("blocks.1.value", "activation_rate", "mean")
    assert ((values > 0) & (values < 1)).all()
    assert plot_history(history, "mean", "activation_rate").get_title(loc="left")
    assert history.export(tmp_path / "routing.csv").exists()
    again = history_from_data(json.loads(json.dumps(history_to_data(history))))
    assert list(again.rows()) == list(history.rows())


def test_principal_plane() -> None:
    torch.manual_seed(0)
    rows = torch.randn(30, 2).double() @ torch.randn(2, 7).double() + 5
    points, variance = principal_plane(rows)
    assert variance == pytest.approx(1)
    distances = [torch.cdist(each, each) for each in (points, rows)]
    torch.testing.assert_close(*distances, rtol=1e-6, atol=1e-6)
    points, variance = principal_plane(torch.randn(40, 9).double())
    assert 0.2 < variance < 1


def test_prototype_maps_leave_no_trace() -> None:
    model, ids = tiny_model(), torch.randint(21, (4, 5))
    model(ids, labels=ids).loss.backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    maps = map_prototypes(model, ids, ids)
    after = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [each.layer for each in maps][:2] == ["blocks.0.query", "blocks.0.key"]
    assert {state for each in maps for state in each.states} <= {"good", "bad", "inactive"}
    assert len(plot_prototypes(maps).axes) == 12


# -- runs ------------------------------------------------------------------------------------


def without_time(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "seconds"}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_runs(variant: str, tmp_path: Path) -> None:
    plan = replace(TINY, variant=variant, steps=2)
    result = TrainingRun(plan, tmp_path).run()
    assert 0 <= result["accuracy"] <= 1
    assert len(result["activation_by_block"]) == 3


class KilledError(Exception):
    """As a kill would: nothing after it runs."""


@pytest.mark.parametrize("at", [1, 4, 5])
def test_a_run_that_was_killed_goes_on_to_the_same_result(at: int, tmp_path: Path) -> None:
    whole = TrainingRun(TINY, tmp_path / "whole", checkpoint_every=2)
    (tmp_path / "whole").mkdir()
    expected = whole.run()
    (tmp_path / "parts").mkdir()

    def kill(step: int) -> None:
        if step == at:
            raise KilledError

    with pytest.raises(KilledError):
        TrainingRun(TINY, tmp_path / "parts", checkpoint_every=2).run(kill)
    seen: list[int] = []
    found = TrainingRun(TINY, tmp_path / "parts", checkpoint_every=2).run(seen.append)
    assert seen[0] == at // 2 * 2 + 1  # it did not begin again
    assert without_time(found) == without_time(expected)
    assert [each.name for each in (tmp_path / "parts").iterdir()] == ["token-0.json"]


def test_a_finished_run_is_read_and_another_plan_is_not(tmp_path: Path) -> None:
    first = TrainingRun(TINY, tmp_path).run()
    stamp = (tmp_path / "token-0.json").stat().st_mtime_ns
    assert TrainingRun(TINY, tmp_path).run() == json.loads(json.dumps(first))
    assert (tmp_path / "token-0.json").stat().st_mtime_ns == stamp
    longer = replace(TINY, steps=7)
    assert TrainingRun(longer, tmp_path).run()["plan"]["steps"] == 7


@pytest.mark.parametrize("name", ["token-0.pt", "token-0.json"])
@pytest.mark.parametrize("content", ["{", "[]", "a tensor"])
def test_a_damaged_file_of_a_run_is_named(content: str, name: str, tmp_path: Path) -> None:
    if content == "a tensor":
        torch.save(torch.zeros(2), tmp_path / name)
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(torchfmri.FileFormatError, match=f"{name}.*Move it away"):
        TrainingRun(TINY, tmp_path).run()


def test_a_checkpoint_of_another_plan_is_not_used(tmp_path: Path) -> None:
    torch.save({"plan": replace(TINY, steps=7).to_dict()}, tmp_path / "token-0.pt")
    seen: list[int] = []
    TrainingRun(TINY, tmp_path).run(seen.append)
    assert seen == list(range(1, TINY.steps + 1))


def test_what_cannot_be_drawn_or_learnt_from_is_named() -> None:
    with pytest.raises(torchfmri.InspectionError, match="There are no prototypes to draw"):
        plot_prototypes([])
    with pytest.raises(torchfmri.InspectionError, match="There are no rates to draw"):
        plot_selectivity({}, [])
    with pytest.raises(torchfmri.InspectionError, match="over='sample': choose one of"):
        Divergence(goodness=helpfulness, over="sample")  # type: ignore[arg-type]


@pytest.mark.slow
def test_processes_bring_the_same_results(tmp_path: Path) -> None:
    found = {}
    for workers in (1, 2):
        experiment = Experiment(
            TINY, ("token", "dense"), 1, tmp_path / str(workers), "cpu", workers
        )
        found[workers] = [without_time(each) for each in experiment.run()]
    assert found[1] == found[2]
    assert [each["plan"]["variant"] for each in found[1]] == ["token", "dense"]


def test_wrong_experiments_say_so(tmp_path: Path) -> None:
    with pytest.raises(torchfmri.InspectionError, match="There is no variant 'nothing'"):
        Experiment(TINY, ("nothing",), 1, tmp_path)
    with pytest.raises(torchfmri.InspectionError, match="seeds=0"):
        Experiment(TINY, ("token",), 0, tmp_path)
    with pytest.raises(torchfmri.InspectionError, match="There are no results"):
        read_results(tmp_path)


# -- the command -----------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routing", *OPTIONS, "--out", str(tmp_path)]) == 0
    text, said = capsys.readouterr()
    assert "copy, reverse, increment, sort" in text
    assert "4 runs of 6 steps" in said
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}
    results = read_results(tmp_path)
    summary = summarise(results)
    values = [each["accuracy"] for each in results if each["plan"]["variant"] == "l1"]
    assert summary["l1"]["accuracy"].mean == pytest.approx(np.mean(values))
    assert summary["l1"]["accuracy"].spread == pytest.approx(np.std(values, ddof=1))
    assert str(summary["l1"]["accuracy"]) in table(results).text(200)
    assert main(["routing", *OPTIONS, "--out", str(tmp_path), "--no-figures", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["summary"]) == {"token", "l1"}
    assert len(data["runs"]) == 4
    assert set(draw_figures(results)) >= {"activation", "prototypes_token", "units_l1"}


def test_command_on_puzzles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--steps 3 --batch 4 --hidden-size 8 --blocks 1 --heads 1 --seeds 1 --signal token"
    options = [*small.split(), "--out", str(tmp_path), "--no-figures", "--puzzles"]
    assert main(["routing", *options, "made"]) == 0
    assert "flip, mirror, shift, transpose" in capsys.readouterr().out
    assert main(["routing", *options, str(tmp_path / "none")]) == 2
    assert "no .json file" in capsys.readouterr().err


@pytest.mark.slow
def test_command_that_is_killed_goes_on(tmp_path: Path) -> None:
    """A real process and a real SIGKILL."""
    options = [
        sys.executable, "-m", "torchfmri", "routing", *OPTIONS, "--steps", "60",
        "--checkpoint-every", "10", "--no-figures",
    ]  # fmt: skip
    source = str(Path(torchfmri.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*options, "--out", str(tmp_path / "killed")],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "killed").glob("*.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((tmp_path / "killed").glob("*.pt")), "no checkpoint was written"
    plan = replace(TINY, steps=60, tested=1024)
    results = []
    for name in ("killed", "whole"):
        experiment = Experiment(plan, ("token",), 1, tmp_path / name)
        results.append([without_time(each) for each in experiment.run()])
    assert results[0] == results[1]
