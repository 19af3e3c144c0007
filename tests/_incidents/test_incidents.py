"""A Monitor that holds non-finite steps: raise, skip, continue; the folder; the replay."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchfmri import (
    GuardError,
    Incidents,
    InspectionError,
    Monitor,
    NonFiniteError,
    NonFiniteWarning,
)
from torchfmri._incidents import aftermath, hold, redone_step
from torchfmri._incidents.content import is_finite, total_size
from torchfmri._incidents.replay_run import replay
from torchfmri._incidents.stored_data import Omitted, load_data, omissions, save_data
from torchfmri._incidents.stored_incident import read_part
from torchfmri._model.factory import Subject
from torchfmri._model.generators import RandomState, random_state
from torchfmri._monitor import monitor as monitor_module
from torchfmri.cli import main

BAD = 2
"""The step that goes wrong."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd one by one": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Loop:
    """A training loop whose step `BAD` has NaN in sample 3, unless it is healthy."""

    def __init__(self, optimizer: str = "adam", healthy: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.uses_closure = optimizer == "lbfgs"
        self.healthy = healthy
        self.before: tuple[Any, Any] = (None, None)
        options.setdefault("loss", self.criterion)
        self.monitor = Monitor(self.model, self.optimizer, **options)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(6, 4, generator=generator)
        if number == BAD and not self.healthy:
            x[3, 1] = math.nan
        return x, torch.arange(6) % 3

    def step(self, number: int) -> None:
        x, y = self.batch(number)
        if number == BAD:
            self.before = self.state()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.criterion(self.model(x), y)
            loss.backward()
            return loss

        if self.uses_closure:
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            self.optimizer.step()

    def state(self) -> tuple[Any, Any]:
        weights = {name: each.clone() for name, each in self.model.state_dict().items()}
        states = {
            index: {k: v.clone() for k, v in each.items() if isinstance(v, Tensor)}
            for index, each in self.optimizer.state_dict()["state"].items()
        }
        return weights, states

    def run(self, steps: int = 4, attach: bool = False) -> "Loop":
        if attach:
            self.monitor.attach()
        try:
            for number in range(steps):
                if attach:
                    self.step(number)
                else:
                    with self.monitor.step():
                        self.step(number)
        finally:
            if attach:
                self.monitor.detach()
        return self


def failing(act: Callable[[], None]) -> NonFiniteError:
    """The error that this must raise."""
    with pytest.raises(NonFiniteError) as caught:
        act()
    return caught.value


def training(
    monitor: Monitor, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int = 1
) -> Callable[[], None]:
    """A loop of so many steps."""

    def run() -> None:
        for _ in range(steps):
            with monitor.step():
                loss().backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other)


def assert_no_trace(loop: Loop) -> None:
    for module in (*loop.model.modules(), loop.criterion):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    from torch.optim import optimizer as module_of_optimizer

    assert not module_of_optimizer._global_optimizer_pre_hooks
    assert not module_of_optimizer._global_optimizer_post_hooks


# -- the three actions ---------------------------------------------------------------------------


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_raise_before_anything_is_applied(optimizer: str, attach: bool) -> None:
    loop = Loop(optimizer, on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match="sample 3") as caught:
        loop.run(attach=attach)
    error = caught.value
    assert isinstance(error, InspectionError)
    assert (error.step, error.folder) == (BAD, None)
    assert error.finding.problem == "nonfinite_data"
    weights, states = loop.state()
    assert same(weights, loop.before[0])
    assert same(states, loop.before[1])
    assert_no_trace(loop)
    # The history ends with the step itself.
    assert list(loop.monitor.history.steps) == [0, 1, 2]
    assert loop.monitor.history.scalar("nonfinite")[-1] == 1


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_skip_changes_neither_weights_nor_state(optimizer: str, attach: bool) -> None:
    loop = Loop(optimizer, on_nonfinite="skip")
    with pytest.warns(NonFiniteWarning, match=f"Step {BAD} is left out"):
        loop.run(BAD + 1, attach=attach)
    weights, states = loop.state()
    assert same(weights, loop.before[0])
    assert same(states, loop.before[1]) or optimizer == "lbfgs"  # it starts on its way anew
    # The gradients are given back as they were.
    assert loop.model[0].weight.grad is not None
    assert loop.model[0].weight.grad.isnan().any()
    assert_no_trace(loop)
    assert loop.monitor.history.scalar("optimizer_skipped")[-1] == 1
    assert [each.step for each in loop.monitor.incidents] == [BAD]


def test_without_the_hold_the_same_step_ruins_the_weights() -> None:
    loop = Loop("adam").run(BAD + 1)
    assert loop.model[0].weight.isnan().any()
    assert loop.monitor.incidents == []


@pytest.mark.parametrize("attach", [False, True])
def test_training_goes_on_after_a_skip_as_without_that_batch(attach: bool) -> None:
    loop = Loop("adam", on_nonfinite="skip")
    with pytest.warns(NonFiniteWarning):
        loop.run(5, attach=attach)
    expected = Loop("adam", healthy=True)
    for number in range(5):
        if number == BAD:
            expected.model(expected.batch(number)[0])  # draws the dropout of that step
        else:
            expected.step(number)
    assert same(loop.state()[0], expected.state()[0])


@pytest.mark.parametrize("attach", [False, True])
def test_continue_tells_and_applies(attach: bool) -> None:
    loop = Loop("adam", on_nonfinite="continue")
    with pytest.warns(NonFiniteWarning) as told:
        loop.run(6, attach=attach)
    assert len(told) == 1  # the steps after it are the same trouble
    assert "applied all the same" in str(told[0].message)
    assert loop.model[0].weight.isnan().any()
    assert len(loop.monitor.incidents) == 1


@pytest.mark.parametrize("action", ["raise", "skip", "continue"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused", "lbfgs"])
def test_healthy_steps_are_not_changed_by_a_bit(optimizer: str, action: str) -> None:
    watched = Loop(optimizer, healthy=True, on_nonfinite=action, every=3).run(5)
    plain = Loop(optimizer, healthy=True)
    for number in range(5):
        plain.step(number)
    assert same(watched.state()[0], plain.state()[0])
    assert same(watched.state()[1], plain.state()[1])
    assert watched.monitor.incidents == []


def test_steps_between_the_watched_ones_are_held_too() -> None:
    loop = Loop("adam", on_nonfinite="raise", every=100)
    with pytest.raises(NonFiniteError):
        loop.run()
    assert list(loop.monitor.history.steps) == [0]


def test_the_user_may_go_on_after_the_error() -> None:
    loop = Loop("adam", on_nonfinite="raise")
    loop.monitor.attach()
    for number in range(5):
        try:
            loop.step(number)
        except NonFiniteError:
            assert number == BAD
    loop.monitor.detach()
    assert list(loop.monitor.history.steps) == [0, 1, 2, 3, 4]
    assert not loop.model[0].weight.isnan().any()


def test_running_the_step_again_leaves_no_statistics() -> None:
    loop = Loop("adam", on_nonfinite="skip")
    with pytest.warns(NonFiniteWarning):
        loop.run()
    assert set(loop.monitor.history.values("0", field="count")) == {6 * 8.0}


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    loop = Loop("adam", on_nonfinite="raise").run()
    assert loop.monitor.incidents == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_nonfinite": "stop"}, "'stop'.*'raise'"),
        ({"incidents": 3}, "neither a folder"),
        ({"incidents": Incidents("x", most=0)}, "at least 1"),
    ],
)
def test_wrong_options_are_explained(options: Any, words: str) -> None:
    with pytest.raises(InspectionError, match=words):
        Loop("adam", **options)


# -- origins that a live step can know -----------------------------------------------------------


def live(
    step: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, told: bool, steps: int = 1
) -> Any:
    """The finding of a loop whose loss is computed by the user's own code."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")

    def loss() -> Tensor:
        found = step(model, torch.ones(4, 4))
        if told:
            monitor.loss(found)
        return found

    return failing(training(monitor, optimizer, loss, steps)).finding


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ((x * 0) ** 2).sqrt()


@pytest.mark.parametrize("told", [False, True])
def test_a_loss_of_the_users_own_code(told: bool) -> None:
    torch.manual_seed(0)
    finding = live(lambda m, x: (m(x) * 0).log().mean(), nn.Linear(4, 4), told)
    if told:
        assert finding.problem == "nonfinite_loss"
        assert "log" in finding.evidence["operations"]
        assert "log of 0" in finding.advice
    else:  # only the gradients are known
        assert finding.problem == "nonfinite_backward"
        assert set(finding.evidence["parameters"]) == {"weight", "bias"}


def test_backward_with_a_stand_in_for_the_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Root())
    finding = live(lambda m, x: m(x).sum(), model, told=True)
    assert (finding.problem, finding.layers) == ("nonfinite_backward", ("1",))
    assert finding.evidence["operation"] == "sqrt"
    assert finding.evidence["stand_in"] is True


def test_an_update_that_ruins_the_weights() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")
    x = torch.ones(2, 4)
    error = failing(training(monitor, optimizer, lambda: model(x).square().sum(), 3))
    finding = error.finding
    assert (finding.problem, finding.phase, finding.step) == ("nonfinite_update", "optimizer", 0)
    assert error.step == 1


def test_micro_batches() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")

    def losses() -> Tensor:
        for number in range(4):
            x = torch.ones(2, 4)
            if number == 2:
                x[1, 0] = math.inf
            loss: Tensor = model(x).sum()
            if number < 3:
                loss.backward()
        return loss

    error = failing(training(monitor, optimizer, losses))
    assert "micro-batch 2 of 4" in str(error)
    assert error.finding.evidence["micro_batch"] == 2
    assert error.finding.evidence["rows"] == [1]


def test_evaluation_is_not_part_of_the_step() -> None:
    loop = Loop("adam", healthy=True, on_nonfinite="raise")
    with loop.monitor.step():
        loop.step(0)
        with torch.no_grad():
            loop.criterion(loop.model(torch.full((2, 4), math.nan)), torch.tensor([0, 1]))
    assert loop.monitor.incidents == []


def test_a_failing_search_does_not_stop_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(aftermath, "redo", fail)
    loop = Loop("adam", on_nonfinite="skip")
    with pytest.warns(NonFiniteWarning) as told:
        loop.run()
    assert any("could not be run again: MemoryError: no room" in str(w.message) for w in told)
    assert not loop.model[0].weight.isnan().any()


@pytest.mark.parametrize("action", ["skip", "continue"])
def test_our_own_failure_never_stops_training(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(hold, "total_size", fail)
    loop = Loop("adam", healthy=True, on_nonfinite=action)
    with pytest.warns(monitor_module.MonitorWarning, match="a mistake of ours") as told:
        loop.run()
    assert len(told) == 1
    assert len(loop.monitor.history) == 4
    assert_no_trace(loop)


def test_our_own_failure_is_raised_if_bad_steps_are_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(hold, "total_size", fail)
    loop = Loop("adam", healthy=True, on_nonfinite="raise")
    with pytest.raises(GuardError, match="a mistake of ours"):
        loop.run()
    assert_no_trace(loop)


# -- the GradScaler ------------------------------------------------------------------------------


def scaled_loop(action: str, bad_steps: set[int], loss_too: bool, steps: int, attach: bool) -> Any:
    """Steps of which some overflow once they are scaled; with `loss_too` their loss as well."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    monitor = Monitor(model, optimizer, on_nonfinite=action, scaler=scaler)

    def step(number: int) -> None:
        loss = model(torch.ones(2, 4)).sum()
        if number in bad_steps:
            loss = loss * (math.nan if loss_too else 1.0)
            monitor.loss(loss)
            loss = loss * (1.0 if loss_too else 1e38)
        else:
            monitor.loss(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    if attach:
        with monitor:
            for number in range(steps):
                step(number)
    else:
        for number in range(steps):
            with monitor.step():
                step(number)
    return monitor


@pytest.mark.parametrize("attach", [False, True])
def test_ordinary_skips_of_a_scaler_are_no_incidents(attach: bool) -> None:
    monitor = scaled_loop("raise", {1, 2, 5}, False, 8, attach)
    assert monitor.incidents == []


@pytest.mark.parametrize("attach", [False, True])
def test_a_bad_loss_is_one_also_with_a_scaler(attach: bool) -> None:
    with pytest.raises(NonFiniteError):
        scaled_loop("raise", {2}, True, 6, attach)


@pytest.mark.parametrize("attach", [False, True])
def test_a_scaler_that_skips_all_the_time(attach: bool) -> None:
    with pytest.raises(NonFiniteError):
        scaled_loop("raise", set(range(40)), False, 40, attach)


# -- the folder ----------------------------------------------------------------------------------


def test_folder_and_replay(tmp_path: Path) -> None:
    options = Incidents(tmp_path / "incidents", weights=True, steps=2)
    loop = Loop("adam", on_nonfinite="raise", incidents=options)
    with pytest.raises(NonFiniteError) as caught:
        loop.run()
    folder = caught.value.folder
    assert folder == tmp_path / "incidents" / "step-000002"
    assert sorted(each.name for each in folder.iterdir()) == ["incident.json", "rank-0"]
    summary = json.loads((folder / "incident.json").read_text())
    assert (summary["step"], summary["action"], summary["processes"]) == (BAD, "raise", 1)
    rows = (folder / "rank-0" / "history.jsonl").read_text().splitlines()
    assert {json.loads(row)["step"] for row in rows} == {1, 2}
    part = read_part(tmp_path / "incidents")
    x, y = loop.batch(BAD)
    (call,) = part.calls
    assert torch.equal(call.arguments[0].nan_to_num(7), x.nan_to_num(7))
    assert call.loss_arguments is not None
    assert torch.equal(call.loss_arguments[1], y)
    assert part.weights is not None
    assert same(part.weights, loop.before[0])
    assert sorted(each.name for each in (folder / "rank-0").iterdir()) == [
        "calls.json", "calls.safetensors", "history.jsonl", "part.json",
        "weights.json", "weights.safetensors",
    ]  # fmt: skip
    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    outcome = replay(folder, Subject(other, None, nn.CrossEntropyLoss()))
    assert outcome.was_run
    assert outcome.finding.problem == "nonfinite_data"
    assert outcome.finding.evidence["rows"] == [3]
    assert outcome.notes == ()  # the weights were written: no need for the right ones


def test_replay_has_the_same_dropout(tmp_path: Path) -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / torch.dropout(x.abs() + 1, 0.1, True)  # inf where it drops

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), Dropped())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Incidents(tmp_path, weights=True)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", incidents=options)
    error = failing(training(monitor, optimizer, lambda: model(torch.ones(3, 4)).sum(), 50))
    live_finding = error.finding
    torch.manual_seed(123)
    again = replay(tmp_path, Subject(nn.Sequential(nn.Linear(4, 5), Dropped()), None))
    assert again.finding.evidence["element"] == live_finding.evidence["element"]
    assert again.finding.evidence["line"] == live_finding.evidence["line"]


def test_other_weights_are_noticed(tmp_path: Path) -> None:
    loop = Loop("adam", on_nonfinite="raise", incidents=tmp_path)
    with pytest.raises(NonFiniteError):
        loop.run()
    outcome = replay(tmp_path, Subject(loop.model, None, loop.criterion))
    assert outcome.notes == ()
    with torch.no_grad():
        loop.model[0].weight.add_(1)
    outcome = replay(tmp_path, Subject(loop.model, None, loop.criterion))
    assert "weights are not those" in outcome.notes[0]


@pytest.mark.parametrize(
    "told",
    [
        lambda x, y: (x, y),
        lambda x, y: {"x": x, "y": y},
        lambda x, y: {"labels": y, "pixels": x, "name": ["a"]},
        lambda x, y: {"pixels": 255 * x, "weights": 2 * x, "target": y},
        lambda x, y: [x, x.clone(), y],
    ],
)
def test_targets_in_what_was_told(tmp_path: Path, told: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", incidents=tmp_path)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    y[1, 0] = math.nan

    def step() -> Tensor:
        monitor.batch(told(x, y))
        return nn.functional.mse_loss(model(x), y)

    failing(training(monitor, optimizer, step))
    outcome = replay(tmp_path, Subject(model, None, nn.functional.mse_loss))
    assert outcome.finding.problem == "nonfinite_data"
    assert not outcome.notes


def test_targets_that_were_told(tmp_path: Path) -> None:
    """A loss that is a function: the batch is told, the factory brings the function."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output * 0).log() * target).mean()  # -inf, whatever the model does

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", incidents=tmp_path)
    x, y = torch.ones(3, 4), torch.ones(3, 2)

    def told() -> Tensor:
        monitor.batch((x, y))
        return loss(model(x), y)

    failing(training(monitor, optimizer, told))
    outcome = replay(tmp_path, Subject(model, None, loss))
    assert outcome.finding.problem == "nonfinite_loss"
    assert outcome.finding.evidence["operation"] == "log"
    assert outcome.finding.evidence["code"].startswith("return ((output * 0).log()")


def test_targets_that_were_not_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", incidents=tmp_path)
    failing(training(monitor, optimizer, lambda: (model(torch.ones(3, 4)) * 0).log().sum()))
    outcome = replay(tmp_path, Subject(model, None, nn.MSELoss()))
    assert "targets were not written" in outcome.notes[0]
    assert outcome.finding.problem == "nonfinite_not_reproduced"


def test_what_compiled_code_did_and_eager_code_does_not(tmp_path: Path) -> None:
    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            return tuple(
                each * math.nan if isinstance(each, Tensor) and each.is_floating_point() else each
                for each in graph(*arguments)
            )

        return run

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(
        compiled,  # type: ignore[arg-type]
        optimizer,
        on_nonfinite="raise",
        incidents=tmp_path,
        every=2,
    )
    compiled(torch.ones(3, 4))
    error = failing(training(monitor, optimizer, lambda: compiled(torch.ones(3, 4)).sum(), 3))
    assert "compiled code gave what eager code does not" in str(error)
    outcome = replay(tmp_path, Subject(model, None))
    assert outcome.finding.problem == "nonfinite_not_reproduced"
    assert "eager code does not reproduce it" in outcome.finding.text
    torch.compiler.reset()


def test_no_more_than_a_few_are_written(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).log()

    model = nn.Sequential(nn.Linear(2, 2), Broken())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="skip", incidents=Incidents(tmp_path, most=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        training(monitor, optimizer, lambda: model(torch.ones(1, 2)).sum(), 4)()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000", "step-000001"]
    assert len(monitor.incidents) == 4


def test_a_folder_alone_means_continue(tmp_path: Path) -> None:
    loop = Loop("adam", incidents=tmp_path)
    with pytest.warns(NonFiniteWarning, match="applied all the same"):
        loop.run()
    assert loop.monitor.incidents[0].action == "continue"
    assert (tmp_path / "step-000002" / "rank-0" / "part.json").is_file()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    loop = Loop("adam", on_nonfinite="skip", incidents=file)
    file.write_text("in the way")
    with pytest.warns(NonFiniteWarning) as told:
        loop.run()
    assert any("could not be written" in str(each.message) for each in told)
    assert not loop.model[0].weight.isnan().any()


def test_an_unfinished_part_is_not_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchfmri._incidents import stored_incident

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(stored_incident, "save_data", fail)
    loop = Loop("adam", on_nonfinite="skip", incidents=tmp_path)
    with pytest.warns(NonFiniteWarning):
        loop.run()
    assert list(tmp_path.iterdir()) == []  # no empty folder either


# -- the command ---------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn

class Spread(nn.Module):
    def forward(self, x):
        return x / x.std(1, keepdim=True)

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Spread()), torch.ones(1, 4), nn.MSELoss()
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train_replayed.py"
    script.write_text(FACTORY)
    space: dict[str, Any] = {}
    exec(compile(FACTORY, str(script), "exec"), space)
    model, _, criterion = space["make"]()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Incidents(tmp_path / "incidents", weights=True)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", incidents=options, loss=criterion)
    ones = torch.ones(2, 4)
    failing(training(monitor, optimizer, lambda: criterion(model(ones), ones)))
    folder = str(tmp_path / "incidents")
    assert main(["replay", folder, "--factory", f"{script}:make", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["was_run"] is True
    assert printed["finding"]["layers"] == ["1"]
    assert printed["finding"]["evidence"]["operation"] == "div"
    assert printed["finding"]["evidence"]["line"] == "train_replayed.py:7"
    assert main(["replay", folder, "--rank", "0", "--factory", f"{script}:make"]) == 1
    assert "return x / x.std(1, keepdim=True)" in capsys.readouterr().out
    assert main(["replay", folder]) == 1
    assert "as it was written down" in capsys.readouterr().out
    assert main(["replay", folder, "--rank", "3"]) == 2
    assert "There is no rank 3" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no incident" in capsys.readouterr().err


# -- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -math.inf])
def test_alarm_against_reading_every_value(dtype: torch.dtype, value: float) -> None:
    gradients = [torch.randn(7, 3, dtype=dtype), torch.randn(5, dtype=dtype)]
    gradients[1][2] = value
    number = total_size([torch.tensor(1.0)], gradients)
    assert number is not None
    assert bool(number.isfinite()) == math.isfinite(value) == all(map(is_finite, gradients))
    loss = total_size([torch.tensor(value)], gradients[:1])
    assert loss is not None
    assert bool(loss.isfinite()) == math.isfinite(value)


def test_a_norm_that_overflows_is_no_incident() -> None:
    gradients = [torch.full((4,), 1e30)]
    number = total_size([], gradients)
    assert number is not None
    assert not number.isfinite()
    assert all(map(is_finite, gradients))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")
    with monitor.step():
        (model(torch.ones(1, 4)).sum() * 1e30).backward()
        optimizer.step()
    assert monitor.incidents == []


def test_alarm_of_nothing() -> None:
    assert total_size([], []) is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
def test_stored_data_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    data = {
        "x": tensor, 3: [tensor[:, :0], (1, 2.5, None)], "inf": -math.inf, "text": "é",
        "array": np.arange(3, dtype=np.int16), "scalar": torch.tensor(1).to(dtype),
    }  # fmt: skip
    save_data(tmp_path / "data", data)
    back = load_data(tmp_path / "data")
    assert list(back) == list(data)
    for one, other in (
        (back["x"], tensor),
        (back[3][0], tensor[:, :0]),
        (back["scalar"], data["scalar"]),
    ):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert bytes(one.reshape(-1).view(torch.uint8).tolist()) == bytes(
            other.reshape(-1).contiguous().view(torch.uint8).tolist()
        )
    assert back[3][1] == (1, 2.5, None)
    assert back["inf"] == -math.inf
    assert back["text"] == "é"
    assert (back["array"] == data["array"]).all()


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    save_data(tmp_path / "data", {"cache": object(), "x": [1, {2, 3}]})
    back = load_data(tmp_path / "data")
    assert isinstance(back["cache"], Omitted)
    assert omissions(back) == ["object", "set"]
    (tmp_path / "data.json").write_text('{"unknown": 1}')
    with pytest.raises(InspectionError, match="cannot be read"):
        load_data(tmp_path / "data")
    with pytest.raises(InspectionError, match=r"'nothing\.json' cannot be read: it is missing"):
        load_data(tmp_path / "nothing")


def test_random_state_comes_back(tmp_path: Path) -> None:
    import random

    def draw() -> tuple[Any, ...]:
        return (
            torch.rand(3).tolist(),
            random.random(),
            np.random.rand(3).tolist(),
            random.gauss(0, 1),
        )

    random.gauss(0, 1)  # leaves a second variate in store
    state = random_state()
    drawn = draw()
    save_data(tmp_path / "random", state.to_data())
    assert draw() != drawn
    state.restore()
    assert draw() == drawn
    RandomState.from_data(load_data(tmp_path / "random")).restore()
    assert draw() == drawn


def test_models_that_cannot_be_run_alone() -> None:
    assert redone_step.why_not(nn.Linear(2, 2)) == ""
    assert "SyncBatchNorm" in redone_step.why_not(nn.SyncBatchNorm(2))
