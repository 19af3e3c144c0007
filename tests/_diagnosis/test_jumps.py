"""Weights that jump: by one enormous update, or by something else than the optimizer."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchfmri import Finding, Monitor
from torchfmri._diagnosis.jumps import growth_outside
from torchfmri._diagnosis.signals import row_medians
from torchfmri._diagnosis.trace import RunTrace
from torchfmri._records import Step


def trained(
    optimizer_class: type[torch.optim.Optimizer], rates: dict[int, float], steps: int, **data: float
) -> list[Finding]:
    """The findings of a run whose learning rate is 0.01 except at some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = optimizer_class(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    monitor = Monitor(model, optimizer)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rates.get(number, 0.01)
        x, y = torch.randn(16, 8), torch.randint(3, (16,))
        with monitor.step() as step:
            loss = F.cross_entropy(model(x), y) * data.get(f"scale_{number}", 1.0)
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.findings


@pytest.mark.parametrize("rate", [1e3, 1e18, 1e30])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_update_is_named_with_its_step(kind: type, rate: float) -> None:
    found = trained(kind, {20: rate}, 40)
    assert [(each.problem, each.step) for each in found] == [("learning_rate_too_high", 20)]
    assert "The update of step 20 changed the weights" in found[0].text
    assert "from gradients of the usual size" in found[0].text
    assert "what set the learning rate of step 20" in found[0].advice
    consequences = [each.problem for each in found[0].consequences]
    assert "learning_rate_zero" not in consequences
    lost = [each.text for each in found[0].consequences if each.problem == "updates_lost"]
    assert all("updates are smaller than their last digit" in each for each in lost)


def test_a_single_step_is_enough() -> None:
    found = trained(torch.optim.SGD, {0: 1e30}, 1)
    assert [(each.problem, each.step) for each in found] == [("learning_rate_too_high", 0)]
    assert "too large for float32" in found[0].text


def test_large_gradients_are_not_blamed_on_the_learning_rate() -> None:
    (found,) = trained(torch.optim.SGD, {}, 40, scale_20=1e6)
    assert (found.problem, found.step) == ("outlier_batch", 20)
    jump = next(each for each in found.consequences if each.problem == "learning_rate_too_high")
    assert "times as large as before" in jump.text
    assert "Look at the batch of step 20, and clip" in jump.advice


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_run_without_jumps_is_silent(kind: type) -> None:
    assert trained(kind, {20: 0.02}, 40) == []


@pytest.mark.parametrize("factor", [100.0, 1e6, 1e30])
def test_weights_that_the_loop_multiplies_are_not_blamed_on_the_optimizer(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    for number in range(30):
        if number == 8:
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(factor)
        with monitor.step() as step:
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = monitor.findings
    assert (found.problem, found.step) == ("weights_changed_outside", 8)
    assert "it was not the optimizer" in found.text


@pytest.mark.parametrize("limit", [None, 0.7])
def test_a_scaler_that_the_monitor_was_not_given_is_not_taken_for_clipping(
    limit: float | None,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = Monitor(model, optimizer)
    for _ in range(30):
        with monitor.step() as step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
            step.loss(loss)
            scaler.scale(loss).backward()
            if limit is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
    assert monitor.findings == []


def multiplied(factors: list[float], kind: type[torch.optim.Optimizer], times: int = 1) -> Monitor:
    """A run whose loop multiplies the middle weight after each step, by these in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    monitor = Monitor(model, optimizer)
    for number in range(30):
        x = torch.randn(16, 8)
        with monitor.step() as step:
            for _ in range(times):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
                step.loss(loss)
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            model[2].weight.mul_(factors[number % len(factors)])
    return monitor


@pytest.mark.parametrize("factor", [1.5, 1.2, 1.05])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_weight_that_grows_a_little_at_each_step_is_named(kind: type, factor: float) -> None:
    (found,) = multiplied([factor], kind).findings
    assert found.problem == "weights_changed_outside"
    assert found.layers == ("2",)
    assert "'2.weight' became" in found.text
    assert "rate" not in found.advice


@pytest.mark.parametrize(("factors", "times"), [([1.0], 1), ([1.0], 4), ([4.0, 0.25], 1)], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_weights_that_only_the_optimizer_makes_grow_are_not_named(
    kind: type, factors: list[float], times: int
) -> None:
    found = multiplied(factors, kind, times).findings
    assert "weights_changed_outside" not in [each.problem for each in found]


@pytest.mark.parametrize("scale", ["scaler", "told", "by_hand"])
def test_a_limit_of_1_is_not_called_too_low_where_a_scale_may_be_the_cause(scale: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scale != "by_hand")
    monitor = Monitor(model, optimizer, scaler=scaler if scale == "told" else None)
    for _ in range(12):
        with monitor.step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
            (loss * 3000 if scale == "by_hand" else scaler.scale(loss)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scale == "by_hand":
                for each in model.parameters():
                    each.grad /= 3000
            scaler.step(optimizer)
            scaler.update()
    (found,) = monitor.findings
    assert "it is the limit" not in found.text
    assert "unscale_" in found.advice
    if scale == "told":
        assert found.problem == "clipped_before_unscaling"
        return
    assert found.problem == "clipping_too_strong"
    assert "while the loss is still scaled, by a GradScaler or by hand" in found.text
    assert ("is 1 / 4,096, a usual scale" in found.text) == (scale == "scaler")


def outside(factor: float, every: int = 1, once: int | None = None, rows: int = 0) -> Monitor:
    """A run whose loop multiplies one weight after each step, or after a single one."""
    torch.manual_seed(0)
    first = nn.Embedding(rows, 16) if rows else nn.Linear(8, 16)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, every=every)
    for number in range(40):
        x = torch.randint(rows, (32,)) if rows else torch.randn(32, 8)
        with monitor.step() as step:
            loss = F.cross_entropy(model(x), torch.randint(3, (32,)))
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if once is None or number == once:
            with torch.no_grad():
                model[0].weight.mul_(factor)
    return monitor


@pytest.mark.parametrize(("factor", "once"), [(1.2, None), (0.9, None), (30.0, 21)], ids=str)
@pytest.mark.parametrize("every", [2, 5])
def test_weights_that_change_between_watched_steps_are_named_with_what_is_not_known(
    factor: float, once: int | None, every: int
) -> None:
    (found,) = outside(factor, every, once).findings
    assert (found.problem, found.layers) == ("weights_changed_outside", ("0",))
    assert f"a step that was not watched ({every - 1} of {every})" in found.text
    assert "every=1" in found.advice
    expected = factor if once is not None else factor**every
    assert found.evidence["growth"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("factor", [0.95, 0.8, 0.5])
def test_weights_that_shrink_again_and_again_are_named(factor: float) -> None:
    (found,) = outside(factor).findings
    assert (found.problem, found.layers) == ("weights_changed_outside", ("0",))
    assert f"became {factor:g} times as large between one step and the next" in found.text
    assert "it was not the optimizer." in found.text


@pytest.mark.parametrize(("factor", "once"), [(1.1, None), (0.9, None), (50.0, 20)], ids=str)
def test_a_large_table_is_compared_with_its_own_sample(factor: float, once: int | None) -> None:
    monitor = outside(factor, once=once, rows=20_000)
    assert monitor.history.notes, "the ratio of a table of this size is an estimate"
    (found,) = monitor.findings
    assert (found.problem, found.layers) == ("weights_changed_outside", ("0",))


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("rows", [0, 20_000])
@pytest.mark.parametrize(("factor", "once"), [(1.0, None), (0.999, None), (0.3, 20)], ids=str)
def test_the_optimizer_alone_a_little_decay_and_one_projection_are_silent(
    factor: float, once: int | None, rows: int, every: int
) -> None:
    assert outside(factor, every, once, rows).findings == []


@pytest.mark.parametrize("every", [1, 4])
def test_rows_that_an_update_makes_grow_are_not_said_to_be_written_by_others(every: int) -> None:
    """The few rows in use grow a hundredfold, which a sample of the table may not see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 3))
    nn.init.normal_(model[0].weight, std=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = Monitor(model, optimizer, every=every)
    for _ in range(40):
        with monitor.step() as step:
            x = torch.randint(37, (32,))
            loss = F.cross_entropy(model(x), x % 3)
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert model[0].weight[:37].norm() > 10 * 1e-3 * (37 * 16) ** 0.5
    assert "weights_changed_outside" not in [each.problem for each in monitor.findings]


def some_norms(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Norms, among them zeros, infinities and ones that are not known."""
    norms = np.exp(generator.normal(size=shape))
    for value, share in ((0.0, 0.1), (math.nan, 0.15), (math.inf, 0.03)):
        norms[generator.random(shape) < share] = value
    return norms


@pytest.mark.parametrize("seed", range(20))
def test_growth_is_that_of_each_parameter_from_step_to_step(seed: int) -> None:
    """Each parameter by itself, one step after the other."""
    generator = np.random.default_rng(seed)
    rows, columns = int(generator.integers(1, 30)), int(generator.integers(1, 9))
    weights, changes = (some_norms(generator, (rows, columns)) for _ in range(2))
    numbers = np.cumsum(generator.integers(1, 4, size=rows)).tolist()
    trace, names = RunTrace(rows), tuple(map(str, range(columns)))
    for row, number in enumerate(numbers):
        updates = np.stack([changes[row], weights[row]])
        trace.add(Step(number, parameters=names, updates=updates), [])
    found = growth_outside(trace)
    for column in range(columns):
        known: int | None = None  # the last step before that knew the weight
        for row in range(rows):
            start = numbers[0] if known is None else numbers[known]
            missed = sum(n not in numbers for n in range(start, numbers[row]))
            assert found.unwatched[row, column] == missed
            with np.errstate(all="ignore"):
                ratio = np.divide(*updates_at(changes, weights, known, column))
                now = np.divide(*updates_at(changes, weights, row, column))
                before = math.nan if known is None else weights[known, column]
                now_known = weights[row, column] > 0
                size = np.divide(weights[row, column] if now_known else math.nan, before)
                bound = np.fmax(ratio, now) if missed else ratio
                grown = size / (1 + bound) ** (missed + 1)
                shrunk = size / max(1 - bound, 0) ** (missed + 1)
            beyond = shrunk if shrunk < 1 / 1.02 else grown if grown > 1.02 else 1.0
            expected = (size, beyond, ratio)
            seen = (found.size[row, column], found.beyond[row, column], found.update[row, column])
            np.testing.assert_allclose(seen, expected, rtol=1e-12)
            known = row if now_known else known


def updates_at(
    changes: np.ndarray, weights: np.ndarray, row: int | None, column: int
) -> tuple[np.float64, np.float64]:
    """The norm of an update and of the weights before it; nan if they are not known."""
    if row is None or not weights[row, column] > 0:
        return np.float64(math.nan), np.float64(math.nan)
    return changes[row, column], weights[row, column]


def test_medians_of_rows_are_those_of_numpy() -> None:
    generator = np.random.default_rng(0)
    for columns in range(1, 9):
        values = some_norms(generator, (50, columns))
        values[0] = math.nan
        expected = [np.nanmedian(row) if (row == row).any() else math.nan for row in values]
        np.testing.assert_array_equal(row_medians(values), expected)
