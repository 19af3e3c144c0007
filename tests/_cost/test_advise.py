"""`torchfmri.advise`: what is tried is run, what it changes is told, and nothing is left behind."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_same_state, state_of
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, Option
from torchfmri._cost.advice import mark_front
from torchfmri._cost.techniques import find_blocks

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def build(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Block(16, dropout) for _ in range(4))
    return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1))


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


def advise(model: nn.Module, data: Any, loss: Any = squared, **options: Any) -> torchfmri.Advice:
    options = {"rounds": 1, "combine": 0, **options}
    return torchfmri.advise(model, data, loss, **options)


def test_checkpointing_saves_memory_and_changes_nothing() -> None:
    advice = advise(build(), torch.randn(256, 8))
    plain, every, half = (advice[n] for n in ("plain", "checkpoint", "half checkpoint"))
    assert every.peak_bytes < half.peak_bytes < plain.peak_bytes
    assert every.gradient_deviation == half.gradient_deviation == advice.noise == 0
    assert plain.peak_bytes == advice.options["plain"].peak_bytes > 0


def test_peak_of_the_plain_step_is_that_of_cost() -> None:
    """The step of the advice keeps its gradients in .grad, that of cost returns them."""
    model, x = build(), torch.randn(256, 8)
    cost = torchfmri.cost(model, x, squared, rounds=0)
    assert advise(model, x)["plain"].peak_bytes == pytest.approx(cost.peak_bytes, rel=0.02)


def test_deviations_are_honest() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    advice = advise(model, torch.randn(64, 8))
    assert 1e-4 < advice["bf16"].gradient_deviation < 0.1
    # The statistics of half a batch are others.
    assert advice["accumulate 2"].gradient_deviation > 1e-3
    without = advise(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), torch.randn(64, 8))
    assert without["accumulate 2"].gradient_deviation < 1e-5


@pytest.mark.parametrize("loss", [squared, lambda output: output.square().sum()])
def test_losses_that_are_means_and_sums_accumulate_alike(loss: Any) -> None:
    advice = advise(build(), torch.randn(64, 8), loss)
    assert advice["accumulate 4"].gradient_deviation < 1e-5
    assert advice["accumulate 4"].loss_deviation < 1e-5
    assert advice["accumulate 4"].peak_bytes < advice["plain"].peak_bytes


def test_randomness_of_the_model_is_told() -> None:
    random = advise(build(dropout=0.3), torch.randn(64, 8))
    assert random.randomness > 0.01
    assert random.noise == 0
    assert random["checkpoint"].gradient_deviation == 0
    assert any("the model is random" in note for note in random.notes)
    assert advise(build(), torch.randn(64, 8)).randomness == 0


def test_optimizer_state_is_part_of_the_peak_and_fused_is_tried() -> None:
    model, x = build(), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    squared(model(x)).backward()
    optimizer.step()
    states = list(optimizer.state.values())
    before = state_of(model, x, states)
    with_optimizer = advise(model, x, optimizer=optimizer)
    assert_same_state(before, state_of(model, x, states))
    parameters = sum(each.nbytes for each in model.parameters())
    more = with_optimizer["plain"].peak_bytes - advise(model, x)["plain"].peak_bytes
    assert more > 2 * parameters
    assert with_optimizer["fused"].gradient_deviation == 0
    made = advise(model, x, optimizer=torch.optim.AdamW)
    assert made["plain"].peak_bytes == with_optimizer["plain"].peak_bytes


def test_convolutions_are_tried_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    advice = advise(model, torch.randn(4, 3, 12, 12))
    assert advice["channels last"].gradient_deviation < 1e-4
    assert next(model.parameters()).is_contiguous()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_of_transformers_is_switched(attention: str) -> None:
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES, tokens

    architecture = ARCHITECTURES["qwen3"]
    model = architecture.build(attention, attention_dropout=0.0)
    ids = tokens(32)
    advice = advise(model, {"input_ids": ids, "labels": ids}, None)
    if attention == "sdpa":
        assert advice.obstacles["SDPA"] == "attention already runs as 'sdpa'"
    else:
        assert advice["SDPA"].peak_bytes < advice["plain"].peak_bytes
        assert 0 < advice["SDPA"].gradient_deviation < 1e-4
    assert advice["checkpoint"].gradient_deviation == 0
    assert model.config._attn_implementation == attention


def test_what_does_not_apply_says_why() -> None:
    advice = advise(nn.Linear(8, 1), torch.randn(3, 8))
    assert set(advice) == {"plain", "bf16"}
    assert "no repeated blocks" in advice.obstacles["checkpoint"]
    assert "no 2-d convolutions" in advice.obstacles["channels last"]
    assert "no optimizer was given" in advice.obstacles["fused"]
    assert "3 does not divide into 2" in advice.obstacles["accumulate 2"]
    assert "not a transformers model" in advice.obstacles["SDPA"]
    with pytest.raises(InspectionError, match="was not measured: no repeated blocks"):
        advice["checkpoint"]
    double = advise(nn.Linear(8, 1).double(), torch.randn(4, 8).double())
    assert "they are float64" in double.obstacles["bf16"]
    plain = advise(nn.Linear(8, 1), torch.randn(4, 8), optimizer=torch.optim.RMSprop)
    assert plain.obstacles["fused"] == "RMSprop has no fused version"


def test_what_could_not_run_says_why() -> None:
    target = torch.randn(8, 1)

    def loss(output: Tensor) -> Tensor:
        if len(output) != len(target):
            raise ZeroDivisionError("half a batch")
        return (output - target).square().mean()

    advice = advise(nn.Linear(4, 1), torch.randn(8, 4), loss)
    assert advice.failures["accumulate 2"].startswith("ZeroDivisionError")
    assert "accumulate 2 could not run" in advice.table()


def test_combinations_are_run_and_counted() -> None:
    advice = advise(build(), torch.randn(256, 8), combine=2)
    combined = [option for option in advice.options.values() if len(option.techniques) > 1]
    assert len(combined) == 2
    assert any("more combinations were not run" in note for note in advice.notes)
    for option in combined:
        assert option.name == " + ".join(option.techniques)
        assert not {"checkpoint", "half checkpoint"} <= set(option.techniques)


def test_front_respects_the_deviation_that_is_allowed() -> None:
    advice = advise(build(), torch.randn(256, 8), max_deviation=1e-5)
    assert advice.front
    assert all(option.gradient_deviation <= 1e-5 for option in advice.front)
    assert not advice["bf16"].on_front


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8))
def test_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    options = {
        str(i): Option(str(i), (), float(t), 0.0, m, 0.0, 0.0) for i, (t, m) in enumerate(points)
    }
    front = [option for option in mark_front(options, None).values() if option.on_front]
    assert front
    for option in options.values():
        # Everything is on the front or beaten by something on it.
        assert any(
            each.seconds <= option.seconds and each.peak_bytes <= option.peak_bytes
            for each in front
        )
    for one in front:
        for other in options.values():
            assert not (other.seconds < one.seconds and other.peak_bytes < one.peak_bytes)


def test_blocks_are_found_outermost() -> None:
    inner = lambda: nn.Sequential(Block(4), Block(4))  # noqa: E731
    assert list(find_blocks(nn.Sequential(inner(), inner()))) == ["0", "1"]
    assert list(find_blocks(nn.ModuleList([Block(4), nn.ReLU(), Block(4)]))) == ["0", "2"]
    assert not find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaves_no_trace(error: type[BaseException] | None) -> None:
    model, x = build(dropout=0.2), torch.randn(16, 8)
    squared(model(x)).backward()
    lines: list[str] = []

    def progress(text: str) -> None:
        lines.append(text)
        if error is not None and len(lines) == 3:
            raise error

    before = state_of(model, x)
    if error is None:
        advise(model, x, progress=progress)
        assert lines[0] == "plain"
    else:
        with pytest.raises(error):
            advise(model, x, progress=progress)
    assert_same_state(before, state_of(model, x))


@pytest.mark.parametrize(
    ("model", "data", "loss", "message"),
    [
        (nn.Linear(4, 1), torch.full((2, 4), math.nan), "sum", "The loss is nan"),
        (nn.ReLU(), torch.randn(2, 4), "sum", "No parameter gets a gradient"),
        (nn.Linear(4, 1).requires_grad_(False), torch.randn(2, 4), "sum", "No parameter gets"),
        (nn.Linear(4, 1), torch.randn(2, 4), lambda out: out.detach().sum(), "No parameter gets"),
        (nn.Linear(4, 1), torch.randn(0, 4), "sum", "The data is empty"),
        (nn.Linear(4, 1), [torch.randn(2, 4)], "sum", "data is a list"),
    ],
)
def test_bad_input_is_refused(model: nn.Module, data: Any, loss: Any, message: str) -> None:
    with pytest.raises(InspectionError, match=message):
        advise(model, data, loss)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 1)
    model.cache = model(torch.randn(2, 4))  # part of a graph: torch refuses to copy it
    with pytest.raises(InspectionError, match="cannot be copied"):
        advise(model, torch.randn(2, 4), "sum")


class Pair(nn.Module):
    """Two layers of 64 by 64 weights, in memory of their own or in the same memory."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        weight = self.first.weight.data
        self.last.weight.data = weight if shared else weight.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def test_weights_that_share_memory_are_counted_once() -> None:
    apart, shared = (advise(Pair(each), torch.randn(4, 64))["plain"] for each in (False, True))
    assert apart.peak_bytes - shared.peak_bytes == 64 * 64 * 4


class Listed(torch.optim.SGD):
    """An optimizer that lists its parameters in an attribute of its own, as LBFGS does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.listed = [each for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for each in self.listed:
                each -= 0.1 * each.grad


def test_an_optimizer_keeps_its_own_attributes_on_the_copy() -> None:
    model, x = nn.Linear(4, 1), torch.randn(4, 4)
    before = model.weight.detach().clone()
    advice = advise(model, x, optimizer=Listed(model.parameters()))
    assert set(advice.failures) <= {"fused"}  # whose settings this class does not take
    assert torch.equal(model.weight, before)


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor) -> Tensor:
        return (self.weight * output).square().mean()


def test_gradients_of_a_loss_module_and_of_the_model_are_left_alone() -> None:
    model, x, loss = nn.Linear(4, 1), torch.randn(4, 4), Scaled()
    both = [*model.parameters(), *loss.parameters()]
    advise(model, x, loss, optimizer=torch.optim.SGD(both, lr=0.1))
    advise(model, x, lambda output: squared(output) + model.weight.square().sum())
    assert [each.grad for each in both] == [None, None, None]
    assert loss.weight.item() == 1


def test_several_optimizers_are_refused() -> None:
    model = nn.Linear(4, 1)
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    with pytest.raises(InspectionError, match=r"2 optimizers were given.*Give one of them"):
        advise(model, torch.randn(4, 4), optimizer=each)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(InspectionError, match="LBFGS asks for a closure"):
        advise(nn.Linear(4, 1), torch.randn(4, 4), "sum", optimizer=torch.optim.LBFGS)


def test_no_loss_is_said() -> None:
    assert (
        "no loss was given: the sum of the first output was differentiated"
        in advise(nn.Linear(4, 3), torch.randn(4, 4), None).notes
    )


def test_result_reads_as_table_page_and_json() -> None:
    advice = advise(build(), torch.randn(64, 8))
    assert repr(advice) == advice.table()
    assert "checkpoint" in advice._repr_html_()
    loaded = json.loads(json.dumps(advice.to_dict()))
    assert [option["name"] for option in loaded["options"]] == list(advice)
    assert loaded["obstacles"] == advice.obstacles
    assert len(advice) == len(loaded["options"])
    assert "plain" in advice
