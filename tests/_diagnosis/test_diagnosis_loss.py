"""How a loss is read: softmax axes, KL divergence, shifted targets, mixed samples, exact cases."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._checkup.loss_reading import what_targets_are
from torchfmri._checkup.loss_watch import LossWatch
from torchfmri._checkup.mixing import mixed_share
from torchfmri._checkup.operations import OperationWatch, head_activity
from torchfmri._checkup.softmaxes import class_axis, distribution_axes
from torchfmri._checkup.users_step import Split
from torchfmri._diagnosis.report import Notes


def watched(run: Callable[[], object], samples: int = 0) -> OperationWatch:
    """What is noted of some operations."""
    notes = Notes()
    watch = OperationWatch(lambda: "", 0, notes, samples)
    with watch:
        run()
    assert notes.all == ()
    return watch


# -- axes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "target", "axis"),
    [
        ((8, 4), torch.zeros(8, dtype=torch.long), 1),
        ((8, 4, 5, 6), torch.zeros(8, 5, 6, dtype=torch.long), 1),
        ((8, 5, 4), torch.zeros(8, 5, dtype=torch.long), 2),
        ((8, 5, 5), torch.zeros(8, 5, dtype=torch.long), None),  # either
        ((8, 4), torch.eye(4)[torch.arange(8) % 4], 1),
        ((8, 4), torch.randn(8, 4), None),  # no distribution
        ((8, 4), torch.randn(8), None),
    ],
)
def test_targets_tell_which_axis_is_that_of_the_classes(
    shape: tuple[int, ...], target: Tensor, axis: int | None
) -> None:
    assert class_axis(shape, target) == axis


def test_axes_of_distributions() -> None:
    values = torch.randn(3, 4, 5)
    for axis in range(3):
        assert distribution_axes(values.softmax(axis)) == [axis]
    assert distribution_axes(values) == []
    assert distribution_axes(torch.full((4, 4), 0.25)) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_distributions_that_were_rounded(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    sure = torch.tensor([[0.6, 0.4], [0.9, 0.1]], dtype=dtype)
    many = torch.randn(64, 1000, generator=draw).softmax(1).to(dtype)
    assert distribution_axes(sure) == [1]
    assert distribution_axes(many) == [1]
    assert distribution_axes((many.double() * 0.97).to(dtype)) == []


@pytest.mark.parametrize("last", [0, 1])
def test_every_part_of_a_loss_counts(last: int) -> None:
    # One target has two classes in each row, the other one: whichever is compared last.
    targets = [torch.ones(4, 2), torch.eye(2)[torch.tensor([0, 1, 0, 1])]]
    x = torch.randn(4, 2, requires_grad=True)

    def loss() -> Tensor:
        p = x.softmax(1)
        return F.mse_loss(p, targets[1 - last]) + F.mse_loss(p, targets[last])

    assert watched(loss).softmaxes.above_one == 1.0


@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_weights_must_sum_to_1_over_what_is_summed(axis: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    seen = watched(lambda: (q @ k.transpose(-1, -2)).softmax(axis) @ v)
    assert bool(seen.softmaxes.misplaced) is (axis != -1)


def test_keys_first_is_no_fault_and_its_mask_is_read_the_right_way() -> None:
    q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    later = torch.ones(8, 8, dtype=torch.bool).tril(-1)

    def run() -> None:
        scores = (k @ q.transpose(-1, -2)).masked_fill(later, -math.inf)
        scores.softmax(-2).transpose(-1, -2) @ v

    seen = watched(run)
    assert seen.softmaxes.misplaced == []
    assert [each.future for each in seen.heads] == [0.0]


def test_softmax_over_the_samples_needs_an_axis_that_is_surely_theirs() -> None:
    logits = torch.randn(6, 4, requires_grad=True)
    assert len(watched(lambda: logits.softmax(0), samples=6).softmaxes.misplaced) == 1
    assert watched(lambda: logits.softmax(1), samples=6).softmaxes.misplaced == []
    assert watched(lambda: logits.softmax(0), samples=0).softmaxes.misplaced == []
    square = torch.randn(6, 6, requires_grad=True)
    assert watched(lambda: square.softmax(0), samples=6).softmaxes.misplaced == []
    with torch.no_grad():  # as targets are made
        assert watched(lambda: logits.softmax(0), samples=6).softmaxes.misplaced == []


def test_open_future_is_counted() -> None:
    logits = torch.randn(2, 4, 8, 8)
    free = head_activity("a", 0, logits, logits.softmax(-1))
    above = torch.ones(8, 8, dtype=torch.bool).triu(1)
    masked = logits.masked_fill(above, -math.inf)
    causal = head_activity("a", 0, masked, masked.softmax(-1))
    assert free is not None
    assert causal is not None
    assert (free.future, causal.future) == (1.0, 0.0)
    wide = head_activity("a", 0, logits[..., :4, :], logits[..., :4, :].softmax(-1))
    assert wide is not None
    assert math.isnan(wide.future)


# -- KL divergence -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "misread"),
    [
        (lambda x: x.log_softmax(-1), None),
        (lambda x: x.softmax(-1), ("log-probabilities", "probabilities")),
        (lambda x: x, ("log-probabilities", "logits")),
    ],
)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergence_is_known_by_its_parts(
    given: Callable[[Tensor], Tensor],
    misread: tuple[str, str] | None,
    log_target: bool,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(8, 4, dtype=dtype, requires_grad=True)
    target = torch.randn(8, 4, dtype=dtype).softmax(-1)
    target = target.log() if log_target else target
    seen = watched(lambda: F.kl_div(given(x), target, reduction="sum", log_target=log_target))
    assert seen.loss.misread == misread


def test_divergence_from_what_is_no_distribution_is_not_judged() -> None:
    rates = torch.rand(1, 32, requires_grad=True)
    seen = watched(lambda: F.kl_div(rates.log(), torch.full((1, 32), 0.1), reduction="sum"))
    assert seen.loss.misread is None


# -- what a loss is multiplied by ----------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 1 / 32, 0.3])
def test_weight_of_a_mean_is_its_own_gradient(weight: float) -> None:
    x, y = torch.randn(32, 4, requires_grad=True), torch.randint(4, (32,))
    seen = watched(lambda: (weight * F.cross_entropy(x, y)).backward())
    ((found, samples),) = seen.loss.weights
    assert found == pytest.approx(weight)
    assert samples == 32
    total = watched(lambda: (weight * F.cross_entropy(x, y, reduction="sum")).backward())
    assert total.loss.weights == []


# -- targets -------------------------------------------------------------------------------------


def compared_with(target: Tensor, ids: Tensor) -> str:
    seen = LossWatch()
    seen.compared, seen.ignored = target.flatten(), -100
    return what_targets_are(seen, Split((ids,), {}, None))


def test_targets_are_the_inputs_or_what_comes_next() -> None:
    ids = torch.randint(2, 50, (4, 12))
    following = torch.cat([ids[:, 1:], torch.full((4, 1), -100)], 1)
    assert compared_with(ids, ids) == "inputs"
    assert compared_with(following, ids) == "next inputs"
    assert compared_with(ids[:, 1:], ids) == "next inputs"
    assert compared_with(torch.randint(2, 50, (4, 12)), ids) == ""
    assert compared_with(torch.full((4, 12), 7), torch.full((4, 12), 7)) == ""  # either
    hidden = ids.masked_fill(torch.arange(12) % 3 > 0, -100)
    assert compared_with(hidden, ids.masked_fill(hidden >= 0, 51)) == ""


# -- samples -------------------------------------------------------------------------------------


def last(batch_first: bool) -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 16, batch_first=batch_first), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]

    return Last()


def test_samples_that_influence_each_other() -> None:
    x = torch.randn(6, 10, 8)
    assert mixed_share(last(True), (x,), {}) == 0
    assert mixed_share(last(False), (x,), {}) > 0.01
    norm = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    assert mixed_share(norm, (x[:, 0],), {}) == 0  # in evaluation mode it leaves them alone
    assert norm.training
    assert norm[1].num_batches_tracked == 0


def test_an_output_that_differs_by_itself_is_not_judged() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls = nn.Linear(8, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x) + self.calls  # type: ignore[no-any-return]

    class Draws(Counts):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + torch.randn(len(x), 4)  # type: ignore[no-any-return]

    x = torch.randn(6, 8)
    assert math.isnan(mixed_share(Counts(), (x,), {}))
    assert mixed_share(Draws(), (x,), {}) == 0  # the same draws each time


def test_samples_that_cannot_be_told_apart_are_not_judged() -> None:
    x = torch.randn(6, 10, 8)
    fixed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False))
    assert math.isnan(mixed_share(fixed, (x[:, 0],), {}))
    assert math.isnan(mixed_share(nn.Linear(8, 4), (x,), {}))  # a sequence: which axis is time?
    assert math.isnan(mixed_share(nn.Linear(8, 4), (torch.ones(6, 8),), {}))  # all alike
    assert math.isnan(mixed_share(nn.Linear(6, 6), (torch.randn(6, 6),), {}))
