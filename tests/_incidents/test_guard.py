"""The guard of a Monitor: it works whatever fails beside it, and what it says is true."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import (
    GuardError,
    Incidents,
    Monitor,
    MonitorWarning,
    NonFiniteError,
    NonFiniteWarning,
    diagnose,
)
from torchfmri.cli import main


def refuse(*_: object) -> None:
    raise OSError("the disk is full")


def run(
    monitor: Monitor,
    step: Callable[[int], None],
    steps: int,
    attach: bool = False,
) -> None:
    """So many steps, followed in one of the two ways."""
    if attach:
        with monitor:
            for number in range(steps):
                step(number)
        return
    for number in range(steps):
        with monitor.step():
            step(number)


class Training:
    """A loop whose step `bad` has NaN in sample 7 of 16."""

    def __init__(self, model: nn.Module, bad: int = 3, **options: Any) -> None:
        self.model, self.bad = model, bad
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.monitor = Monitor(model, self.optimizer, loss=self.criterion, **options)

    def step(self, number: int) -> None:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        if number == self.bad:
            x[7, 2] = math.nan
        self.optimizer.zero_grad()
        self.criterion(self.model(x), x[:, :1].nan_to_num()).backward()
        self.optimizer.step()

    def finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in self.model.state_dict().values())


# -- what fails beside the guard ------------------------------------------------------------------


@pytest.mark.parametrize("attach", [False, True])
def test_a_failing_writer_does_not_switch_the_guard_off(attach: bool) -> None:
    training = Training(nn.Linear(4, 1), on_nonfinite="raise")
    training.monitor.add_writer(refuse)
    with (
        pytest.warns(MonitorWarning, match="on_nonfinite='raise' still looks at every step"),
        pytest.raises(NonFiniteError, match="sample 7"),
    ):
        run(training.monitor, training.step, 5, attach)
    assert training.finite()


@pytest.mark.parametrize("attach", [False, True])
def test_a_failing_writer_and_a_step_that_is_left_out(attach: bool) -> None:
    training = Training(nn.Linear(4, 1), on_nonfinite="skip")
    training.monitor.add_writer(refuse)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(training.monitor, training.step, 6, attach)
    assert [each.category for each in told] == [MonitorWarning, NonFiniteWarning]
    assert [each.step for each in training.monitor.incidents] == [3]
    assert training.finite()


class Scaler:
    """A GradScaler whose scale cannot be read any more."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        if name in ("scale", "unscale_", "step", "update", "get_scale"):
            return self.__getattr__  # it can be called, as that of a GradScaler
        raise self.kind("no scale")


@pytest.mark.parametrize("attach", [False, True])
def test_a_guard_that_cannot_look_raises(attach: bool) -> None:
    training = Training(nn.Linear(4, 1), bad=0, on_nonfinite="raise", scaler=Scaler(KeyError))
    before = {name: each.clone() for name, each in training.model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MonitorWarning)  # recording needs the scale as well
        with pytest.raises(GuardError, match="Step 0 is not applied") as caught:
            run(training.monitor, training.step, 1, attach)
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(
        torch.equal(before[name], each) for name, each in training.model.state_dict().items()
    )


@pytest.mark.filterwarnings("ignore:torchfmri.Monitor stopped at step:torchfmri.MonitorWarning")
def test_a_guard_that_cannot_look_says_that_it_is_off() -> None:
    training = Training(nn.Linear(4, 1), bad=9, on_nonfinite="skip", scaler=Scaler(KeyError))
    with pytest.warns(MonitorWarning, match="on_nonfinite='skip' is off, and NaN can reach"):
        run(training.monitor, training.step, 3)
    assert training.finite()


@pytest.mark.parametrize("place", ["a file", "a link to nowhere"])
def test_what_was_not_written_is_not_said_to_be_written(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "incidents"
    training = Training(nn.Linear(4, 1), on_nonfinite="raise", incidents=folder)
    if place == "a file":  # had it been there before, the Monitor would have refused it
        folder.write_text("no folder")
    else:
        folder.symlink_to(tmp_path / "nowhere" / "at all")
    with (
        pytest.warns(NonFiniteWarning, match="could not be written"),
        pytest.raises(NonFiniteError) as caught,
    ):
        run(training.monitor, training.step, 5)
    assert caught.value.folder is None
    assert "Written to" not in str(caught.value)
    assert training.monitor.incidents[0].folder is None


# -- buffers --------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Parts(nn.Module):
    """A model of which the loop calls the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = normalised()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Puts a new buffer in the place of the old one, and has one of another kind."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return self.fc(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize("make", [normalised, Counting])
def test_a_bad_forward_pass_does_not_stay_in_the_buffers(
    make: Callable[[], nn.Module], action: str
) -> None:
    training = Training(make(), on_nonfinite=action)
    kept: dict[str, Tensor] = {}
    for number in range(4):
        if number == 3:
            kept = {name: each.clone() for name, each in training.model.named_buffers()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            try:
                with training.monitor.step():
                    training.step(number)
            except NonFiniteError:
                assert action == "raise"
    finding = training.monitor.incidents[0].finding
    assert finding.problem == "nonfinite_data"
    assert finding.evidence["rows"] == [7]
    now = dict(training.model.named_buffers())
    assert all(torch.equal(kept[name], now[name]) for name in kept)
    assert training.model.eval()(torch.randn(2, 4)).isfinite().all()


def test_buffers_of_a_model_whose_parts_are_called() -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, on_nonfinite="skip")

    def step(number: int) -> None:
        x = torch.randn(8, 4)
        if number == 2:
            x[1, 1] = math.inf
        model.body(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(NonFiniteWarning):
        run(monitor, step, 4, attach=True)
    assert all(bool(each.isfinite().all()) for each in model.state_dict().values())


class Table(nn.Module):
    """Writes into a table of two million values when it meets something that is not finite."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.register_buffer("table", torch.zeros(1 << 21))

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            self.table += x.sum()
        return self.fc(x)  # type: ignore[no-any-return]


def test_a_large_buffer_that_was_not_copied_is_named() -> None:
    training = Training(Table(), on_nonfinite="skip")
    with pytest.warns(NonFiniteWarning, match="left 'table' non-finite as well"):
        run(training.monitor, training.step, 5)


def test_continue_leaves_the_buffers_and_says_so() -> None:
    training = Training(normalised(), on_nonfinite="continue")
    with pytest.warns(NonFiniteWarning, match=r"left '1.running_mean', .* non-finite as well"):
        run(training.monitor, training.step, 4)
    finding = training.monitor.incidents[0].finding
    assert (finding.problem, finding.evidence["rows"]) == ("nonfinite_data", [7])
    assert dict(training.model.named_buffers())["1.running_mean"].isnan().any()


def test_the_weights_of_an_incident_are_those_before_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Incidents(tmp_path / "incidents", weights=True)
    training = Training(normalised(), on_nonfinite="raise", incidents=options)
    with pytest.raises(NonFiniteError):
        run(training.monitor, training.step, 5)
    factory = tmp_path / "made.py"
    factory.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    body = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)\n"
        "    return nn.Sequential(*body), None, nn.MSELoss()\n"
    )
    assert main(["replay", str(tmp_path / "incidents"), "--factory", f"{factory}:make"]) == 1
    assert "NaN in sample 7 of argument 0" in capsys.readouterr().out


def test_a_diagnosis_names_the_sample_and_not_the_running_statistics() -> None:
    x = torch.randn(16, 4)
    x[7, 2] = math.nan
    healthy = torch.randn(16, 4)
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(healthy, healthy[:, :1]), (x, healthy[:, :1])]
    found = diagnose(model, batches, nn.MSELoss(), optimizer, steps=4, show=False)
    assert found[0].problem == "nonfinite_data"
    assert found[0].evidence["rows"] == [7]


def test_running_statistics_that_were_bad_before_are_called_so() -> None:
    model = normalised().eval()
    dict(model.named_buffers())["1.running_var"][2] = math.nan
    training = Training(model, bad=9, on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match=r"buffer '1.running_var' held NaN") as caught:
        run(training.monitor, training.step, 2)
    assert "learning rate" not in str(caught.value)
    assert "reset_running_stats" in str(caught.value)


# -- since when weights are bad -------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.rows(index))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::torchfmri.NonFiniteWarning")
@pytest.mark.parametrize("spoilt_at", [0, 3])
def test_weights_that_stay_bad_are_one_finding_without_the_advice_to_hold(spoilt_at: int) -> None:
    model = Lookup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="skip")

    def step(number: int) -> None:
        if number == spoilt_at:
            with torch.no_grad():
                model.rows.weight[5] = math.nan
        index = torch.tensor([5 if number >= 3 else 1])
        model(index).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run(monitor, step, 12)
    assert [each.step for each in monitor.incidents] == list(range(3, 12))
    (found,) = monitor.findings
    assert (found.problem, found.step) == ("nonfinite_weights", 3)
    assert "It was the same in 8 later steps, up to step 11." in found.text
    assert "on_nonfinite" not in found.advice
    assert ("initialised" in found.advice) == (spoilt_at == 0)


@pytest.mark.parametrize(
    ("spoilt_at", "problem", "words"),
    [
        (None, "nonfinite_weights", "They did so at step 0 already"),
        (2, "nonfinite_update", "The optimizer's update in step 2 made 'rows.weight' NaN"),
    ],
)
def test_a_row_that_is_looked_up_long_after_it_went_bad(
    spoilt_at: int | None, problem: str, words: str
) -> None:
    model = Lookup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")

    def spoil(*_: Any) -> None:
        with torch.no_grad():
            model.rows.weight[5] = math.nan

    if spoilt_at is None:
        spoil()

    def step(number: int) -> None:
        index = torch.tensor([number])
        model(index).square().mean().backward()
        hook = optimizer.register_step_pre_hook(spoil) if number == spoilt_at else None
        optimizer.step()
        if hook is not None:
            hook.remove()
        optimizer.zero_grad()

    with pytest.raises(NonFiniteError) as caught:
        run(monitor, step, 6)
    assert (caught.value.step, caught.value.finding.problem) == (5, problem)
    assert words in caught.value.finding.text
    if spoilt_at is None:
        assert "update" not in caught.value.finding.text


@pytest.mark.parametrize("by_data", [True, False], ids=["data", "load_state_dict"])
@pytest.mark.parametrize(
    ("every", "at", "words"),
    [
        (1, 2, "They were changed between step 1 and step 2, not by the optimizer."),
        (3, 4, "They were changed between step 3 and step 4, not by the optimizer."),
        (3, 3, "An update in steps 1 to 2 made them so, or something else"),
        (3, 5, "An update in step 4 made them so, or something else"),
    ],
)
def test_weights_that_the_loop_changes_are_not_blamed_on_the_optimizer(
    by_data: bool, every: int, at: int, words: str
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", every=every)

    def train() -> None:
        for number in range(6):
            if number == at and by_data:
                model.weight.data[0, 0] = math.nan
            elif number == at:
                weights = {"weight": torch.full((2, 4), math.nan), "bias": torch.zeros(2)}
                model.load_state_dict(weights)
            with monitor.step():
                model(torch.ones(3, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(NonFiniteError) as caught:
        train()
    found = caught.value.finding
    assert (found.problem, found.step) == ("nonfinite_weights", at)
    assert words in found.text
    assert "The optimizer's update in" not in found.text
    assert "load_state_dict" in found.advice


def test_nothing_is_claimed_where_the_weights_were_not_recorded() -> None:
    model = Lookup()
    with torch.no_grad():
        model.rows.weight[5] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, what="gradients", on_nonfinite="raise")

    def step(number: int) -> None:
        model(torch.tensor([number])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(NonFiniteError, match=r"'rows.weight' held NaN before step 5") as caught:
        run(monitor, step, 6)
    assert "update" not in caught.value.finding.text


# -- what a step that is left out is said to be ---------------------------------------------------


@pytest.mark.filterwarnings("ignore::torchfmri.NonFiniteWarning")
def test_a_step_that_was_not_run_again_is_not_said_to_have_been() -> None:
    training = Training(nn.Linear(4, 1), on_nonfinite="skip", incidents=Incidents(most=2))
    for _ in range(4):
        with training.monitor.step():
            training.step(training.bad)
    texts = [each.finding.text for each in training.monitor.incidents]
    assert ["NaN in sample 7" in text for text in texts] == [True] * 4
    assert ["not traced" in text for text in texts] == [False, False, True, True]
    assert not any("called again" in text for text in texts)


@pytest.mark.filterwarnings("ignore::torchfmri.NonFiniteWarning")
def test_nothing_is_found_in_what_the_monitor_took_away() -> None:
    training = Training(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        on_nonfinite="skip",
        incidents=Incidents(most=1),
    )
    for _ in range(30):
        with training.monitor.step():
            training.step(training.bad)
    problems = {
        each.problem
        for finding in training.monitor.findings
        for each in (finding, *finding.consequences)
    }
    assert problems == {"nonfinite_data"}


# -- the next step --------------------------------------------------------------------------------


def functional(batch_told: bool, target: float, tmp_path: Path | None) -> NonFiniteError:
    """The error of a step whose loss is a function: log of 0, or of a target that is bad."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", incidents=tmp_path)
    x, y = torch.randn(4, 4), torch.ones(4, 1)
    y[2] = target

    def step(_: int) -> None:
        if batch_told:
            monitor.batch((x, y))
        loss = (y.log() - model(x)).square().mean()
        monitor.loss(loss)
        loss.backward()
        optimizer.step()

    with pytest.raises(NonFiniteError) as caught:
        run(monitor, step, 1)
    return caught.value


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_the_next_step_is_one_that_is_left_to_do(told: bool, written: bool, tmp_path: Path) -> None:
    error = functional(told, 0.0, tmp_path if written else None)
    assert ("have incidents written" in error.finding.advice.lower()) is not written
    assert ("step.batch((x, y))" in error.finding.advice) is not told
    assert "torchfmri replay" in error.finding.advice


@pytest.mark.parametrize("target", [math.nan, math.inf])
def test_targets_of_a_functional_loss_are_looked_at(target: float) -> None:
    finding = functional(True, target, None).finding
    assert finding.problem == "nonfinite_data"
    assert "in sample 2 of batch[1]" in finding.text


def test_targets_of_a_loss_module_are_named() -> None:
    training = Training(nn.Linear(4, 1), on_nonfinite="raise")
    y = torch.zeros(16, 1)
    y[5] = math.nan

    def step(_: int) -> None:
        training.criterion(training.model(torch.randn(16, 4)), y).backward()
        training.optimizer.step()

    with pytest.raises(NonFiniteError, match="in sample 5 of loss argument 1"):
        run(training.monitor, step, 1)


FACTORY = """
import torch
from torch import nn
def make():
    torch.manual_seed(0)
    return nn.Linear(4, 1), {data}, lambda output, y: (y.log() - output).square().mean()
"""


@pytest.mark.parametrize("told", [False, True])
def test_a_replay_says_what_it_could_not_run(
    told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functional(told, 0.0, tmp_path / "incidents")
    (tmp_path / "made.py").write_text(FACTORY.format(data="None"))
    factory = f"{tmp_path / 'made.py'}:make"
    assert main(["replay", str(tmp_path / "incidents"), "--factory", factory]) == 1
    said = capsys.readouterr().out
    if told:
        assert "log of 0" in said
    else:
        assert "The loss was not run, because its targets were not written" in said
        assert "step.batch((x, y))" in said
        assert "The step, run again, is finite" not in said


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def test_a_derivative_names_its_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")
    x = torch.randn(8, 4)
    x[6] = 0.0

    def step(_: int) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(NonFiniteError, match="sample 6 of the batch") as caught:
        run(monitor, step, 1)
    assert caught.value.finding.problem == "nonfinite_backward"
    assert caught.value.finding.evidence["rows"] == [6]


@pytest.mark.filterwarnings("ignore:torchfmri. Step:torchfmri.NonFiniteWarning")
@pytest.mark.parametrize("attach", [False, True])
def test_a_bad_step_of_two_optimizers_is_one_incident(attach: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizers = [
        torch.optim.SGD(model[:2].parameters(), 0.1),
        torch.optim.Adam(model[2].parameters()),
    ]
    monitor = Monitor(model, optimizers, on_nonfinite="skip")
    if attach:
        monitor.attach()
    for number in range(6):
        with nullcontext() if attach else monitor.step():
            x = torch.randn(8, 4)
            if number in (2, 3):
                x[1] = math.nan
            loss = model(x).square().mean()
            monitor.loss(loss)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    monitor.detach()
    assert [each.step for each in monitor.incidents] == [2, 3]
    assert all(each.isfinite().all() for each in model.state_dict().values())


@pytest.mark.parametrize("attach", [False, True])
def test_where_warnings_are_errors_the_step_is_held_and_the_error_says_why(attach: bool) -> None:
    torch.manual_seed(0)
    training = Training(nn.Linear(4, 1), bad=2, on_nonfinite="skip")
    with pytest.raises(NonFiniteWarning, match="holds NaN"):  # our own are errors in tests
        run(training.monitor, training.step, 5, attach)
    assert training.finite()


# -- batches that somebody writes into ------------------------------------------------------------


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= x.mean(1, keepdim=True)
        x /= x.std(1, keepdim=True)
        return self.head(x)  # type: ignore[no-any-return]


def with_buffer(
    model: nn.Module, bad: int, value: float, folder: Path, *, clears: bool = False, tells: int = 0
) -> NonFiniteError:
    """A loop with one buffer for all batches; sample 1 of step `bad` is `value` throughout.

    Args:
        model: That is trained.
        bad: The step that is not finite.
        value: All values of the sample.
        folder: For incidents.
        clears: Whether the loop writes into the buffer once the gradients are there.
        tells: Whether it tells the batch before the model is called (1), after (2), or not at all.
    """
    torch.manual_seed(0)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: Any = {"on_nonfinite": "raise", "incidents": Incidents(folder, weights=True)}
    loss = None if tells else criterion
    monitor = Monitor(model, optimizer, loss=loss, **options)
    buffer, target = torch.zeros(4, 8), torch.zeros(4, 3)

    def step(number: int) -> None:
        if tells == 1:
            monitor.batch((buffer, target))
        found = criterion(model(buffer), target)
        if tells == 2:
            monitor.batch((buffer, target))
        if tells:
            monitor.loss(found)
        found.backward()
        if clears:
            buffer.zero_()
        optimizer.step()
        optimizer.zero_grad()

    def train() -> None:
        for number in range(4):
            buffer.copy_(torch.randn(4, 8))
            if number == bad:
                buffer[1] = value
            with monitor.step():
                step(number)

    with pytest.raises(NonFiniteError) as caught:
        train()
    assert caught.value.step == bad
    return caught.value


@pytest.mark.parametrize("tells", [0, 1, 2])
def test_a_finite_batch_that_the_model_writes_into_is_not_accused(
    tells: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = with_buffer(WritesIntoItsInput(), 0, 3.0, tmp_path / "first", tells=tells).finding
    assert first.problem == "nonfinite_loss"
    assert "The batch was written into by the model" in first.text
    assert "repair" not in first.advice
    assert "replay" not in first.advice
    assert main(["replay", str(tmp_path / "first"), "--factory", f"{__name__}:make_writer"]) == 1
    said = capsys.readouterr().out
    assert "nonfinite_not_reproduced" in said
    assert "holds NaN" not in said
    # Earlier steps have shown what the model does: the batch was copied, and the origin is found.
    later = with_buffer(WritesIntoItsInput(), 2, 3.0, tmp_path / "later", tells=tells).finding
    assert later.problem == "nonfinite_forward"
    assert "0 / 0" in later.text
    assert later.evidence["operation"] == "div_"
    assert later.evidence["rows"] == [1]
    assert main(["replay", str(tmp_path / "later"), "--factory", f"{__name__}:make_writer"]) == 1
    assert "0 / 0" in capsys.readouterr().out


def make_writer() -> tuple[nn.Module, None, nn.Module]:
    return WritesIntoItsInput(), None, nn.MSELoss()


def test_a_batch_that_the_loop_clears(tmp_path: Path) -> None:
    first = with_buffer(nn.Linear(8, 3), 0, math.nan, tmp_path, clears=True).finding
    assert first.problem == "nonfinite_loss"
    assert "The batch was written into after the model had returned" in first.text
    assert "in the same way" not in first.text
    assert "replay" not in first.advice
    later = with_buffer(nn.Linear(8, 3), 2, math.nan, tmp_path, clears=True).finding
    assert later.problem == "nonfinite_data"
    assert "holds NaN in sample 1 of argument 0: 8 of 32 values" in later.text


def test_bad_weights_are_named_whatever_happened_to_the_batch(tmp_path: Path) -> None:
    model = WritesIntoItsInput()
    model.head.weight.data[0, 0] = math.nan
    assert with_buffer(model, 0, 3.0, tmp_path).finding.problem == "nonfinite_weights"
