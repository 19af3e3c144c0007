"""What comes out of a model: constants, sums of 1, scores, sizes; and who is named for what."""

import math
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import Blobs, mlp
from benchmarks._faults_output import (
    days_beside_features,
    faded_out,
    frozen_with_its_head,
    half_with_small_epsilon,
    several_labels_by_softmax,
)
from benchmarks._healthy_output import Equilibrium, few_patterns, margins_kept
from benchmarks.diagnosis import examine, make
from torchfmri import Finding, Monitor, diagnose
from torchfmri._checkup.layer_logs import normalises_one
from torchfmri._checkup.loss_reading import score_of
from torchfmri._diagnosis.structure import describe

BLOBS = Blobs()
CE = nn.CrossEntropyLoss()


class Functional(nn.Module):
    """Two hidden layers whose function is no layer."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        nn.init.constant_(self.second.bias, shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)))))  # type: ignore[no-any-return]


def test_a_function_is_named_by_what_feeds_it_and_not_by_its_reader() -> None:
    torch.manual_seed(0)
    model = Functional(-50.0)
    optimizer = torch.optim.Adam(model.parameters())
    found = diagnose(model, BLOBS.batches(), CE, optimizer, show=False)[0]
    assert (found.problem, found.layers) == ("dead_units", ("second",))
    assert "relu behind 'second'" in found.text
    assert "last" not in found.text


def test_a_function_of_a_sum_is_named_by_a_layer_of_the_sum() -> None:
    torch.manual_seed(0)
    model = Equilibrium()
    with torch.no_grad():
        model.again.weight.mul_(30)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    found = diagnose(model, BLOBS.batches(), CE, optimizer, show=False)[0]
    assert found.problem == "saturated_units"
    assert "out" not in found.layers
    assert "again" in found.layers or "enter" in found.layers


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make_case", [margins_kept, few_patterns])
def test_a_short_run_is_as_silent_as_a_long_one(make_case: Any) -> None:
    diagnosis = examine(make(make_case), 25)
    assert diagnosis.ok, str(diagnosis)


def test_days_are_told_by_the_layer_that_they_go_into() -> None:
    (found,) = examine(make(days_beside_features), 25)
    case = make(days_beside_features)
    x, day, _ = case.batches[0]
    given = torch.cat([day[:, None].float(), x], 1)
    assert found.evidence["input_rms"] == pytest.approx(float(given.square().mean().sqrt()))


def test_frozen_is_not_taken_for_a_cut() -> None:
    (found,) = examine(make(frozen_with_its_head), 25)
    assert "requires_grad" in found.text
    assert "detach" not in found.advice


def test_labels_that_are_on_together_get_a_sigmoid() -> None:
    (found,) = examine(make(several_labels_by_softmax), 25)
    assert found.evidence["outside_share"] == 1.0
    assert "sigmoid" in found.advice


# -- the optimizer -------------------------------------------------------------------------------


def watched(case: Any, steps: int = 24) -> list[Finding]:
    """What a Monitor says about a case."""
    monitor = Monitor(case.model, case.optimizer)
    for batch in islice(cycle(case.batches), steps):
        with monitor.step() as step:
            if case.step is not None:
                step.loss(case.step(case.model, batch, case.optimizer))
                continue
            case.optimizer.zero_grad()
            loss = case.loss(case.model(*batch[:-1]), batch[-1])
            step.loss(loss)
            loss.backward()
            case.optimizer.step()
    return monitor.findings


@pytest.mark.parametrize("live", [False, True])
def test_an_epsilon_that_is_0_is_the_only_thing_told(live: bool) -> None:
    case = make(half_with_small_epsilon)
    (found,) = watched(case) if live else examine(case, 25)
    assert found.problem == ("nonfinite_weights" if live else "nonfinite_update")
    assert "eps=1e-08, which is 0 in float16" in found.text
    assert "eps" in found.advice
    assert not any("nan %" in each.text for each in (found, *found.consequences))


@pytest.mark.parametrize(
    ("dtype", "eps", "lost"),
    [
        (torch.float32, 1e-8, ""),
        (torch.bfloat16, 1e-8, ""),
        (torch.float16, 1e-4, ""),
        (torch.float16, 1e-8, "eps=1e-08, which is 0 in float16"),
        (torch.float32, 0.0, "eps=0"),
    ],
)
def test_epsilon_in_the_numbers_of_the_weights(dtype: torch.dtype, eps: float, lost: str) -> None:
    model = nn.Linear(2, 2).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), eps=eps)
    assert describe(model, [optimizer]).groups[0]["eps_lost"] == lost


def test_a_rate_that_fades_is_told_once_while_training() -> None:
    assert [each.problem for each in watched(make(faded_out), 40)] == ["learning_rate_zero"]


def test_an_infinite_loss_with_finite_gradients_is_told_while_training() -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = Monitor(model, optimizer)
    for x, _ in BLOBS.batches(12):
        with monitor.step() as step:
            size = F.relu(model(x) - 100)  # 0 everywhere, and so is its gradient
            loss = model(x).square().mean() - size.sum().log()
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert math.isinf(monitor.history.loss[0])
    assert [each.problem for each in monitor.findings if each.severity == "alarm"] == [
        "nonfinite_loss"
    ]


# -- constants and scores ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "shape", "one"),
    [
        (nn.LayerNorm(1), (4, 1), True),
        (nn.LayerNorm(2), (4, 2), False),
        (nn.GroupNorm(8, 8), (4, 8), True),
        (nn.GroupNorm(8, 8), (4, 8, 3), False),
        (nn.GroupNorm(4, 8), (4, 8), False),
    ],
)
def test_a_norm_over_one_number_returns_a_constant(norm: nn.Module, shape: Any, one: bool) -> None:
    values = torch.randn(shape, dtype=torch.float64)
    assert normalises_one(norm, values) is one
    assert (float(norm.double()(values).detach().std()) < 1e-6) is one


def dice(p: Tensor, y: Tensor) -> Tensor:
    return 2 * (p * y).sum() / (p.sum() + y.sum())


def test_a_score_is_1_for_the_right_answer_and_an_error_is_0() -> None:
    y = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    out = torch.zeros(2, 3)
    assert score_of(dice, out, y, True) == pytest.approx((1.0, 0.0))
    assert score_of(lambda o, t: 1 - dice(o.sigmoid(), t), out, y, False) == pytest.approx((0, 1))
    right, wrong = score_of(nn.BCEWithLogitsLoss(), out, y, False) or (math.nan, math.nan)
    assert right < 1e-6
    assert wrong == pytest.approx(20.0)


def test_no_score_is_asked_of_other_targets() -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("asked")

    out = torch.zeros(2, 3)
    for target in (torch.rand(2, 3), torch.tensor([0, 1]), torch.ones(2, 3), None):
        assert score_of(never, out, target, True) is None
