"""A compiled model stays compiled while it is watched; the eager Monitor is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of
from torch import Tensor, nn
from versions import needs

from torchfmri import History, Monitor
from torchfmri._kernels import summaries
from torchfmri.statistics import calculate_statistics

pytestmark = pytest.mark.usefixtures("one_thread")
FIELDS = ("count", "mean", "std", "min", "max", "nan", "zero")
COMPILED = "watched steps ran compiled, with the statistics inside the graph"


class Compiler:
    """A backend that counts what it compiles and how often that runs."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


class Masked(nn.Module):
    """Takes tokens and an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.embedding(input_ids)))


class Twice(nn.Module):
    """Calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)]
    return nn.Sequential(*first, nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def compiled(model: nn.Module, backend: Any, how: str) -> nn.Module:
    if how == "wrapped":
        found: nn.Module = torch.compile(model, backend=backend)
        return found
    if how == "in place":
        model.compile(backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    return model


def train(
    model: nn.Module, every: int = 1, micro: int = 1, monitor: bool = True
) -> tuple[History, list[float]]:
    """Four steps on the same data, evaluated in between; the history and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Monitor(model, optimizer, every=every)
    generator, losses = torch.Generator().manual_seed(1), []
    if monitor:
        watch.attach()
    for _ in range(4):
        for _ in range(micro):
            x = torch.randn(32, 8, generator=generator)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    watch.detach()
    return watch.history, losses


def assert_same(one: History, other: History, rtol: float = 0.0) -> None:
    assert set(one.series) == set(other.series)
    assert list(one.steps) == list(other.steps)
    for series in one.series:
        for position in range(len(one)):
            a, b = (each.statistics(*series, position) for each in (one, other))
            assert [a[name] for name in FIELDS] == pytest.approx(
                [b[name] for name in FIELDS], rel=rtol, abs=rtol, nan_ok=True
            ), series
            assert (a.dtype, a.shape, a.positions) == (b.dtype, b.shape, b.positions)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place", "forward"])
@pytest.mark.parametrize(("every", "micro"), [(2, 1), (1, 3)])
def test_it_is_the_eager_monitor_and_changes_nothing(how: str, every: int, micro: int) -> None:
    expected, _ = train(build(), every, micro)
    plain = compiled(build(), "aot_eager", how)
    _, losses = train(plain, monitor=False, micro=micro)
    model = compiled(build(), "aot_eager", how)
    attributes = dict(vars(model))
    found, watched = train(model, every, micro)
    assert dict(vars(model)) == attributes
    assert list(found.notes) == [COMPILED]
    assert not found.missing
    assert_same(found, expected)
    assert watched == losses, "bit for bit the run without a Monitor"


@needs("torch", "2.13", "it compiles once more")
def test_the_users_own_graph_is_his_own() -> None:
    backend = Compiler()
    model = compiled(build(), backend, "wrapped")
    x = torch.randn(4, 8)
    model(x)
    own, before, forward = backend.graphs, state_of(model), vars(model)["forward"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = Monitor(model, optimizer, what="activations", every=2)
    calls = []
    for _ in range(4):
        with monitor.step():
            counted = backend.calls
            model(x).sum().backward()
            optimizer.zero_grad()
            calls.append(backend.calls - counted)
    assert calls == [1, 1, 1, 1], "watched and unwatched steps run compiled"
    assert backend.graphs == own + 1, "compiled once more, for all watched steps"
    assert vars(model)["forward"] is forward
    assert_same_state(before, state_of(model))
    model(x)
    assert backend.graphs == own + 1


def watch_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Callable[[], Tensor]]
) -> History:
    monitor = Monitor(model, optimizer, what=("activations", "gradients"))
    for loss in losses:
        with monitor.step():
            loss().backward()
            optimizer.zero_grad()
    return monitor.history


def test_two_calls_in_one_backward_pass_both_count() -> None:
    """A loss that compares two outputs of the model."""
    a, b = torch.randn(2, 4, 8)
    histories = []
    for backend in (None, "aot_eager"):
        model = build() if backend is None else compiled(build(), backend, "wrapped")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses = [lambda each=model: (each(a) - 2 * each(b)).square().mean()] * 2
        histories.append(watch_steps(model, optimizer, losses))
    eager, found = histories
    assert list(found.notes) == [COMPILED]
    assert_same(found, eager, rtol=1e-6)
    assert found.statistics("0", "gradients", 0)["count"] == 2 * 4 * 16


class Depth(Twice):
    """Calls its layer as often as it is told."""

    times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


def test_a_layer_that_a_later_step_calls_again_is_missing_there_and_not_wrong() -> None:
    model = compiled(Depth(), "aot_eager", "in place")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(times: int) -> Tensor:
        model.times = times  # type: ignore[assignment]
        found: Tensor = model(torch.ones(4, 8)).sum()
        return found

    history = watch_steps(model, optimizer, [partial(loss, times) for times in (1, 2, 2)])
    for what in ("activations", "gradients"):
        counts = history.values("layer", what, "count")
        assert np.isnan(counts[1]), "of two calls it would be the last alone"
        assert [counts[0], counts[2]] == [32, 64]
    assert "called several times" in history.missing["layer"]
    (note,) = history.notes
    assert "layer is called several times in a pass" in note


def test_a_call_that_failed_leaves_nothing_for_the_next() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(4, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.head(self.embedding(x)) + self.embedding(ids)

    model = compiled(Lookup(), "aot_eager", "in place")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    monitor = Monitor(model, optimizer, what=("activations", "gradients"), watch="head")
    with pytest.raises(IndexError), monitor.step():
        model(good, bad).sum().backward()
    for _ in range(2):
        with monitor.step():
            model(good, good).sum().backward()
    assert list(monitor.history.notes) == [COMPILED]
    assert monitor.history.values("head", "gradients", "count").tolist() == [16, 16]


@pytest.mark.slow
def test_padding_does_not_count() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    ids = torch.arange(8).reshape(2, 4)
    histories = []
    for wrap in (lambda each: each, lambda each: torch.compile(each, backend="aot_eager")):
        torch.manual_seed(0)
        model = wrap(Masked())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, optimizer, what=("activations", "gradients"))
        with monitor.step():
            model(ids, attention_mask=mask).square().mean().backward()
            optimizer.step()
        histories.append(monitor.history)
    eager, found = histories
    assert list(found.notes) == [COMPILED]
    assert_same(found, eager, rtol=1e-6)
    assert found.statistics("head", "activations", 0).positions == (5, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (Twice(), {}, "layer is called several times in a pass"),
        (nn.Sequential(nn.Linear(8, 8)), {"histogram": True}, "histograms"),
    ],
)
def test_what_cannot_be_watched_inside_runs_eagerly_and_says_so(
    model: nn.Module, options: dict[str, Any], reason: str
) -> None:
    watched = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(watched, optimizer, **options)
    for _ in range(3):
        with monitor.step():
            watched(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (note,) = monitor.history.notes
    assert note.startswith("watched steps ran eagerly: ")
    assert reason in note
    calls = 2 if isinstance(model, Twice) else 1
    layer = "layer" if calls == 2 else "0"
    assert monitor.history.values(layer, "gradients", "count")[-1] == calls * 32


def test_parts_that_are_compiled_run_eagerly_and_a_note_says_so() -> None:
    expected, losses = train(build())
    model, backend = build(), Compiler()
    model[2] = torch.compile(model[2], backend=backend)
    found, watched = train(model)
    assert watched == losses
    assert_same(found, expected)
    (note,) = found.notes
    assert note == ("watched steps ran eagerly: only parts of the model are compiled, such as 2")
    assert backend.graphs == 0
    model(torch.randn(32, 8))
    assert backend.graphs == 1  # and are compiled without a Monitor


@pytest.mark.slow
def test_a_compiler_that_fails_does_not_stop_training() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        if any("summarise" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no compiler here")
        return graph.forward

    expected, losses = train(build())
    found, watched = train(compiled(build(), broken, "wrapped"))
    assert watched == losses
    assert_same(found, expected)
    (note,) = found.notes
    assert "no compiler here" in note or "BackendCompilerFailed" in note


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_summary_is_what_is_calculated_at_once(dtype: torch.dtype) -> None:
    values = torch.randn(5, 7, 11).to(dtype)
    values[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]).to(dtype)
    (slot,) = slots = summaries.make_slots(1, values.device)
    summaries.summarise(values, None, slot.values, slot.number)
    (label,) = summaries.take_labels(slots)
    (row,) = summaries.table_of(summaries.combine(slots).numpy())
    expected = calculate_statistics(values)
    assert label == summaries.Label(expected.dtype, (5, 7, 11), 0, 1)
    names = ("count", "mean", "squared_deviations", "min", "max", "nan", "pos_inf", "neg_inf")
    for number, name in zip(row.tolist(), (*names, "zero", "subnormal"), strict=True):
        assert number == pytest.approx(getattr(expected, name), rel=1e-12), name
    assert not slot.values.any(), "the slot is empty afterwards"
