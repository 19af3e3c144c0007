"""Findings of a Monitor: cuts, cleared gradients, decay, groups, undone updates; and silence."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import Blobs, mlp
from benchmarks._healthy import gradient_penalty
from benchmarks._healthy_setup import every_fourth_step, layer_wise_decay, slow_body_fast_head
from torchfmri import Finding, Monitor

BLOBS = Blobs()
Step = Callable[[nn.Module, Any, Any], Tensor]


def train(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def findings(
    model: nn.Module, optimizer: Any, batches: Any, step: Step, attached: bool, steps: int = 24
) -> list[Finding]:
    """What a Monitor says about a loop, attached or around each step."""
    monitor = Monitor(model, optimizer)
    if attached:
        with monitor:
            for batch in islice(cycle(batches), steps):
                monitor.loss(step(model, batch, optimizer))
    else:
        for batch in islice(cycle(batches), steps):
            with monitor.step() as watched:
                watched.loss(step(model, batch, optimizer))
    return monitor.findings


@pytest.fixture(params=[True, False], ids=["attached", "step"])
def attached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Encoder(nn.Module):
    """An encoder and a head, with or without a cut between them."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.encoder, self.head, self.cut = mlp(16, 32, 32), nn.Linear(32, 4), cut

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.cut != "no_grad"):
            h = torch.relu(self.encoder(x))
        return self.head(h.detach() if self.cut == "detach" else h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", ["detach", "no_grad"])
def test_cut(cut: str, attached: bool) -> None:
    model = Encoder(cut)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    (found,) = findings(model, optimizer, BLOBS.batches(), train, attached)
    assert found.problem == "graph_cut"
    assert found.layers == ("encoder.0", "encoder.2")


def test_no_cut_where_the_encoder_is_left_out_on_purpose(attached: bool) -> None:
    model = Encoder("no_grad")
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)
    assert findings(model, optimizer, BLOBS.batches(), train, attached) == []
    model = Encoder("")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    assert findings(model, optimizer, BLOBS.batches(), train, attached) == []


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


def cleared(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss


def cleared_to_zero(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return loss


def early(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.step()
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [cleared, cleared_to_zero, early])
def test_gradients_that_the_optimizer_never_finds(step: Step, attached: bool) -> None:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    batches = [(torch.randn(8, 6, 8), torch.randint(4, (8,))) for _ in range(24)]
    (found,) = findings(model, optimizer, batches, step, attached)
    assert found.problem == "cleared_gradients"
    assert findings(model, optimizer, batches, train, attached) == []


def test_decay(attached: bool) -> None:
    model = mlp(16, 64, 4)
    strong = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=10.0)
    found = findings(model, strong, BLOBS.batches(), train, attached)
    assert [each.problem for each in found] == ["weight_decay_too_strong"]
    model = mlp(16, 64, 4)
    usual = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    assert findings(model, usual, BLOBS.batches(), train, attached) == []


@pytest.mark.parametrize(
    ("rate", "problem"), [(1.0, "learning_rate_too_high"), (1e-10, "learning_rate_too_low")]
)
def test_one_group(rate: float, problem: str, attached: bool) -> None:
    model = mlp(16, 64, 64, 4)
    groups = [
        {"params": model[4].parameters(), "lr": rate},
        {"params": model[:4].parameters(), "lr": 1e-3},
    ]
    (found,) = findings(model, torch.optim.Adam(groups), BLOBS.batches(), train, attached)
    assert (found.problem, found.layers) == (problem, ("4",))


def test_updates_that_are_undone(attached: bool) -> None:
    model = mlp(16, 64, 4)
    kept = {name: each.clone() for name, each in model.state_dict().items()}

    def step(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        model.load_state_dict(kept)
        return train(model, batch, optimizer)

    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    (found,) = findings(model, optimizer, BLOBS.batches(), step, attached)
    assert (found.problem, found.step) == ("updates_undone", 0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("make", [every_fourth_step, slow_body_fast_head, layer_wise_decay])
def test_silence(make: Any, attached: bool) -> None:
    torch.manual_seed(0)
    case = make()
    step = case.step or (lambda model, batch, optimizer: plain(case.loss, model, batch, optimizer))
    assert findings(case.model, case.optimizer, case.batches, step, attached, 30) == []


def plain(loss: Any, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    value: Tensor = loss(model(batch[0]), batch[1])
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value


def test_a_graph_that_is_run_through_twice_is_not_taken_for_clipping() -> None:
    torch.manual_seed(0)
    case = gradient_penalty()
    assert case.step is not None
    assert findings(case.model, case.optimizer, case.batches, case.step, False, 100) == []


@pytest.mark.parametrize(
    ("lr", "dtype", "problem"),
    [
        (0.0, torch.float32, "learning_rate_zero"),
        (1e-6, torch.bfloat16, "updates_lost"),
        (1e-2, torch.float32, None),
    ],
)
def test_weights_that_never_move(
    lr: float, dtype: torch.dtype, problem: str | None, attached: bool
) -> None:
    model = mlp(16, 32, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = [(x.to(dtype), y) for x, y in BLOBS.batches(8)]
    found = findings(model, optimizer, data, train, attached)
    assert [each.problem for each in found] == ([problem] if problem else [])
    if found:
        assert "No weight has changed in" in found[0].text


def test_an_optimizer_that_has_converged_is_not_told_of_its_learning_rate() -> None:
    model = mlp(16, 32, 4)
    options = {"max_iter": 4, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, **options)  # type: ignore[arg-type]

    def step(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)  # type: ignore[no-any-return]

    before = model[0].weight.detach().clone()
    found = findings(model, optimizer, [BLOBS.batches(1)[0]], step, False, steps=48)
    assert not torch.equal(model[0].weight, before)
    assert found == []
