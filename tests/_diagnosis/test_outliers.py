"""One batch that is unlike the others is named, and not the learning rate."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Diagnosis, Finding, Monitor, diagnose

Batches = list[tuple[Tensor, Tensor]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def batches(count: int, bad: int | None, part: int, factor: float) -> Batches:
    """Batches of which one has a sample whose inputs or targets are multiplied."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        x = torch.randn(32, 8, generator=generator)
        batch = x, x[:, :1].clone()
        if number == bad:
            batch[part][3] *= factor
        found.append(batch)
    return found


def checked(data: Batches) -> Diagnosis:
    subject = model()
    optimizer = torch.optim.SGD(subject.parameters(), lr=1e-2)
    return diagnose(subject, data, nn.MSELoss(), optimizer, len(data), show=False)


def followed(data: Batches) -> list[Finding]:
    subject = model()
    optimizer = torch.optim.SGD(subject.parameters(), lr=1e-2)
    monitor = Monitor(subject, optimizer)
    for x, y in data:
        with monitor.step() as step:
            loss = nn.functional.mse_loss(subject(x), y)
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.findings


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "targets"])
@pytest.mark.parametrize(("bad", "factor"), [(0, 1e6), (10, 1e6), (10, 1e15), (24, 1e18)])
def test_a_corrupt_batch_is_named(part: int, bad: int, factor: float) -> None:
    found = checked(batches(25, bad, part, factor))
    assert [(each.problem, each.step) for each in found] == [("outlier_batch", bad)]
    assert found.alarms
    assert "clip_grad_norm_" in found[0].advice
    assert "learning rate" not in found[0].text + found[0].advice


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "targets"])
@pytest.mark.parametrize(("bad", "factor"), [(10, 1e4), (24, 1e8)])
def test_a_corrupt_batch_is_named_where_updates_are_bounded(
    kind: type[torch.optim.Optimizer], part: int, bad: int, factor: float
) -> None:
    subject = model()
    data = batches(25, bad, part, factor)
    found = diagnose(subject, data, nn.MSELoss(), kind(subject.parameters()), 25, show=False)
    assert [(each.problem, each.step) for each in found] == [("outlier_batch", bad)]
    if kind is torch.optim.AdamW:
        assert "its gradient is" in found[0].text


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_corrupt_batch_stays_in_running_statistics(place: int) -> None:
    layers = list(model())
    layers.insert(place, nn.BatchNorm1d(8 if place == 0 else 32 if place < 3 else 1))
    subject = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(subject.parameters())
    data = batches(25, 10, 0, 1e5)
    found = diagnose(subject, data, nn.MSELoss(), optimizer, 25, show=False)
    assert [(each.problem, each.step) for each in found] == [("outlier_batch", 10)]
    if place != 1:  # there the gradient is odd as well
        assert "running statistics" in found[0].text


@pytest.mark.parametrize("limit", [1.0, None])
def test_a_clipped_gradient_leaves_nothing_behind(limit: float | None) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        return loss

    subject = model()
    optimizer = torch.optim.AdamW(subject.parameters())
    found = diagnose(subject, batches(25, 10, 0, 1e3), None, optimizer, 25, step=step, show=False)
    named = "outlier_batch" in [each.problem for each in found]
    assert named == (limit is None)


@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "targets"])
def test_an_infinite_batch_is_all_that_is_named(part: int) -> None:
    found = checked(batches(25, 10, part, math.inf))
    assert [each.problem for each in found] == ["nonfinite_data"]


def test_a_run_that_ends_in_infinity_is_an_alarm() -> None:
    subject = model()
    optimizer = torch.optim.SGD(subject.parameters(), lr=1e-2)
    data = [(1e6 * x, y) for x, y in batches(8, None, 0, 1)]
    found = diagnose(subject, data, nn.MSELoss(), optimizer, 8, show=False)
    assert found.alarms
    assert found[0].problem == "unscaled_inputs"
    assert any(each.problem.startswith("nonfinite") for each in found[0].consequences)


@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "targets"])
@pytest.mark.parametrize("bad", [5, 30])
def test_a_monitor_names_it_too_and_once(part: int, bad: int) -> None:
    found = followed(batches(60, bad, part, 1e6))
    assert [(each.problem, each.step, each.severity) for each in found] == [
        ("outlier_batch", bad, "alarm")
    ]
    problems = [each.problem for each in found[0].consequences]
    assert len(problems) == len(set(problems))
    assert any(each.startswith("nonfinite") for each in problems)


@pytest.mark.parametrize("look", [checked, followed])
def test_runs_without_one_name_none(look: Callable[[Batches], list[Finding]]) -> None:
    for factor in (1.0, 10.0):
        found = look(batches(25, 10, 0, factor))
        assert "outlier_batch" not in [each.problem for each in found]


def test_a_rate_that_is_too_high_is_still_called_so() -> None:
    subject = model()
    optimizer = torch.optim.SGD(subject.parameters(), lr=3.0)
    data = batches(25, None, 0, 1)
    found = diagnose(subject, data, nn.MSELoss(), optimizer, 25, show=False)
    assert found[0].problem == "learning_rate_too_high"


def normalised(
    factor: float, *, first: bool, every: int = 1, later: float = 1.0
) -> tuple[nn.Module, list[Finding]]:
    """A run with a batch norm: one sample of step 12 is multiplied, or all batches then on."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)]
    layers.insert(0 if first else 1, nn.BatchNorm1d(8 if first else 32))
    subject = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(subject.parameters(), lr=1e-3)
    monitor = Monitor(subject, optimizer, every=every)
    for number, (x, y) in enumerate(batches(30, 12, 0, factor)):
        with monitor.step() as step:
            loss = nn.functional.mse_loss(subject(x * later if number >= 12 else x), y)
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return subject, monitor.findings


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("factor", "every"), [(1e5, 1), (1e5, 4), (1e10, 1), (1e25, 1)])
def test_a_monitor_names_a_batch_that_a_batch_norm_hides(
    first: bool, factor: float, every: int
) -> None:
    subject, found = normalised(factor, first=first, every=every)
    (norm,) = [name for name, each in subject.named_children() if isinstance(each, nn.BatchNorm1d)]
    assert [(each.problem, each.step) for each in found] == [("outlier_batch", 12)]
    assert f"what comes to '{norm}' at least" in found[0].text
    assert "the running statistics hold it, which evaluation uses" in found[0].text
    assert "reset_running_stats()" in found[0].advice
    assert "lip" not in found[0].advice  # clipping does not help


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_running_statistics_of_ordinary_batches_are_silent(first: bool, factor: float) -> None:
    assert normalised(factor, first=first)[1] == []


def test_batches_that_are_larger_from_then_on_are_not_one_that_is_unlike_the_others() -> None:
    found = normalised(1.0, first=True, later=1e4)[1]
    assert "outlier_batch" not in [each.problem for each in found]
