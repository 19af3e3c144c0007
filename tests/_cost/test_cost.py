"""`torchfmri.cost`: what it returns, what it leaves behind, and what it says to bad input."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from oracles import assert_same_state, state_of
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, LayerNotFoundError
from torchfmri._cost.layer_cost import ADDABLE

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = [name for name in ADDABLE if "seconds" not in name]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 2))


def test_own_values_add_up_and_containers_hold_what_is_inside() -> None:
    cost = torchfmri.cost(build(), torch.randn(5, 4), loss="sum", rounds=2)
    own = {name: each.own or each for name, each in cost.items()}
    for name in ADDABLE:
        assert sum(getattr(each, name) for each in own.values()) == pytest.approx(
            getattr(cost.total, name)
        )
        inside = [getattr(own[layer], name) for layer in own if layer.split(".")[0] == "1"]
        assert getattr(cost["1"], name) == pytest.approx(sum(inside))
        assert getattr(cost[""], name) + getattr(own["(loss)"], name) == pytest.approx(
            getattr(cost.total, name)
        )
    assert cost["1"].calls == 1
    assert cost["1"].kind == "Block"


def test_bytes_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))
    cost = torchfmri.cost(model, torch.randn(5, 4), loss="sum", rounds=0)
    assert [cost[name].parameter_bytes for name in "012"] == [4 * 30, 0, 4 * 12]
    assert [cost[name].gradient_bytes for name in "012"] == [4 * 30, 0, 4 * 12]
    assert [cost[name].activation_bytes for name in "012"] == [4 * 30, 4 * 30, 4 * 10]
    assert cost[""].own is not None
    assert cost[""].own.activation_bytes == 0  # it returns what '2' returned
    assert cost.data_bytes == 4 * 20
    assert cost.total.gradient_bytes == cost.total.parameter_bytes == 4 * 42


def test_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    cost = torchfmri.cost(model, torch.tensor([[1, 2, 3]]), loss="sum", rounds=0)
    assert cost["0"].parameter_bytes == 4 * 28
    assert cost["2"].parameter_bytes == 0  # counted where it is held first
    assert cost["1"].gradient_bytes == 0
    assert cost["1"].backward_flops == 2 * 3 * 4 * 4  # dL/d input only
    assert cost.total.gradient_bytes == 4 * 28


def test_a_module_with_two_names_is_counted_once_and_said_so() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    cost = torchfmri.cost(model, torch.randn(3, 4), loss="sum", rounds=0)
    assert cost["0"].calls == 2
    assert cost["0"].forward_flops == cost.total.forward_flops == 2 * 2 * 3 * 16
    assert cost["2"].flops == 0
    assert any("2 is the same module as 0" in note for note in cost.notes)


def test_what_else_stays_alive_is_said() -> None:
    class Hoarder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.kept = y.detach() * 3
            return y.tanh()

    cost = torchfmri.cost(Hoarder(), torch.randn(3, 4), loss="sum", rounds=0)
    assert cost.retained_bytes - cost.total.saved_bytes == 4 * 12
    assert any("48 B more than what is saved" in note for note in cost.notes)


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("sizes", [None, {"batch": (3, 5)}])
def test_leaves_no_trace(rounds: int, sizes: Any) -> None:
    model, x = build(), torch.randn(5, 4)
    model(x).sum().backward()
    model.eval()
    model[1].train()
    before = state_of(model, x)
    torchfmri.cost(model, x, loss="sum", rounds=rounds, sizes=sizes)
    assert_same_state(before, state_of(model, x))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("run", [1, 2, 3])
def test_leaves_no_trace_when_it_is_stopped(
    error: type[BaseException], when: str, run: int
) -> None:
    model, x = build(), torch.randn(5, 4)
    model(x).sum().backward()
    runs = [0]

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            runs[0] += 1
            if when == "forward" and runs[0] == run:
                raise error("stop")
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if runs[0] == run:
                raise error("stop")
            return gradient

    class Stopping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor) -> Tensor:
            return Stop.apply(self.inner(x))

    stopping = Stopping()
    before = state_of(stopping, x)
    with pytest.raises(error, match="stop"):
        torchfmri.cost(stopping, x, loss="sum", rounds=2)
    assert_same_state(before, state_of(stopping, x))


def test_gradients_of_the_plain_run_are_those_of_the_counted_one() -> None:
    """Counting changes nothing that is computed: hooks see the same gradients."""
    model, x = build().eval(), torch.randn(5, 4)
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(x).sum().backward()
    torchfmri.cost(model, x, loss="sum", rounds=1)
    handle.remove()
    assert len(seen) > 3
    assert all(torch.equal(each, seen[0]) for each in seen)


# -- input ---------------------------------------------------------------------------------------


def test_data_as_keywords_and_tuples_and_a_target() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.linear(a + b)

    a, target = torch.randn(3, 4), torch.randn(3, 2)
    one = torchfmri.cost(Two(), (a, a), nn.MSELoss(), target=target, rounds=0)
    two = torchfmri.cost(Two(), {"a": a, "b": a}, nn.MSELoss(), target=target, rounds=0)
    assert one.total.flops == two.total.flops > 0
    assert one["(loss)"].saved_bytes > 0


def notes_of(model: nn.Module, data: Any, **options: Any) -> str:
    cost = torchfmri.cost(model, data, rounds=0, **options)
    assert cost.total.backward_flops == cost.total.gradient_bytes == 0
    return "\n".join(cost.notes)


class Argmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


def test_no_backward_where_there_is_none_and_it_says_why() -> None:
    x = torch.randn(5, 4)
    assert "not floating point: forward pass only" in notes_of(Argmax(), x)
    assert "the model has no parameters" in notes_of(nn.ReLU(), x)
    assert "all parameters are frozen" in notes_of(nn.Linear(4, 3).requires_grad_(False), x)
    detached = notes_of(nn.Linear(4, 3), x, loss=lambda output: output.detach().sum())
    assert "does not depend on the parameters" in detached
    with torch.no_grad():
        assert "grad mode is off" in notes_of(nn.Linear(4, 3), x)


def test_a_loss_that_is_nan_is_said() -> None:
    cost = torchfmri.cost(nn.Linear(4, 3), torch.full((5, 4), math.nan), loss="sum", rounds=0)
    assert "the loss is nan" in cost.notes
    assert cost.total.forward_flops == 2 * 5 * 12


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (torch.randn(0, 4), {}, r"The data is empty \(shape \(0, 4\)\)"),
        ([torch.randn(5, 4)], {}, "data is a list of 1"),
        (torch.randn(5, 4), {"rounds": -1}, "rounds=-1"),
        (torch.randn(5, 4), {"loss": "mean"}, "loss='mean'"),
        (torch.randn(5, 4), {"loss": lambda output: output}, "must be one number"),
        (torch.randn(5, 4), {"target": torch.randn(5)}, "without a loss"),
        (lambda: None, {}, "data is a function"),
    ],
)
def test_bad_input_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 3)
    before = state_of(model)
    with pytest.raises(InspectionError, match=message):
        torchfmri.cost(model, data, **options)
    assert_same_state(before, state_of(model))


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    with pytest.raises(InspectionError, match="TORCHFMRI=off"):
        torchfmri.cost(nn.Linear(4, 3), torch.randn(5, 4))


def test_a_class_is_no_model() -> None:
    with pytest.raises(InspectionError, match="give a model"):
        torchfmri.cost(nn.Linear, torch.randn(5, 4))  # type: ignore[arg-type]


# -- looking -------------------------------------------------------------------------------------


def test_result_reads_as_table_page_and_json() -> None:
    cost = torchfmri.cost(build(), torch.randn(5, 4), loss="sum", rounds=1)
    table = cost.table(width=200)
    assert repr(cost) == cost.table()
    lines = table.splitlines()
    assert lines[0].startswith("cost of Sequential on cpu: peak")
    assert [line.split()[0] for line in lines if line.startswith(("1.up", "total"))] == [
        *("1.up", "total")
    ]
    assert "1.up" in cost._repr_html_()
    assert "<script" not in cost._repr_html_()
    data = json.loads(json.dumps(cost.to_dict()))
    assert data["total"]["forward_flops"] == cost.total.forward_flops
    assert data["layers"]["1"]["own"]["forward_flops"] == 0
    assert cost.table(inside=True) != cost.table()
    assert "*.up (2)" in cost.table(fold=True, width=200)


def test_folding_keeps_the_sums() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    cost = torchfmri.cost(model, torch.randn(2, 3), loss="sum", rounds=0)
    lines = cost.table(width=150).splitlines()
    folded, total = (
        next(line.split() for line in lines if line.startswith(start))
        for start in ("* (50)", "total")
    )
    assert folded[3:6] == total[2:5]  # FLOPs forward, and backward with its unit


def test_names_of_layers_are_escaped() -> None:
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(3, 2))
    html = torchfmri.cost(model, torch.randn(2, 3), loss="sum", rounds=0)._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;" in html


def test_an_unknown_layer_names_the_nearest() -> None:
    cost = torchfmri.cost(build(), torch.randn(5, 4), loss="sum", rounds=0)
    with pytest.raises(LayerNotFoundError, match=r"Nearest: '1\.up'"):
        cost["1.upp"]
    assert "1.upp" not in cost
    assert cost.get("1.upp") is None
    assert len(cost) == len(list(cost)) == 14
