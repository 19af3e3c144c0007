"""By-reference collection, with the launches replaced by a stand-in: a real one needs a GPU."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchfmri import Monitor
from torchfmri._capture.padding import TokenMask
from torchfmri._kernels import reduce_values
from torchfmri._monitor import collector as collector_module
from torchfmri._monitor.collector import Collector
from torchfmri._records.history import History, HistoryRows, Series, Step
from torchfmri.statistics import calculate_statistics

A, B = Series("a", "activations"), Series("b", "activations")


class Reductions:
    """Work that is done when it is asked for, like that of a device."""

    def __init__(self, tensors: Sequence[Tensor], histogram: bool) -> None:
        self.copies = [tensor.detach().clone() for tensor in tensors]
        self.histogram = histogram
        self.is_ready = False
        self.started = False

    def start_copy(self) -> None:
        self.started = True

    def ready(self) -> bool:
        return self.is_ready

    def read_table(self) -> np.ndarray[Any, Any] | None:
        if self.histogram:
            return None
        return np.array(
            [
                [r.count]
                + ([r.mean, r.squared_deviations, r.low, r.high] if r.finite else [math.nan] * 4)
                + [r.nan, r.pos_inf, r.neg_inf, r.zero, r.subnormal]
                for r in self.read()
            ]
        )

    def read(self) -> list[Any]:
        assert self.started
        return [
            reduce_values(each.contiguous().reshape(-1), histogram=self.histogram)
            for each in self.copies
        ]


class Kernels:
    """Stands in for `torchfmri._kernels.cuda`."""

    def __init__(self) -> None:
        self.launches: list[Reductions] = []

    def available(self) -> bool:
        return True

    def reduce_many(self, tensors: Sequence[Tensor], *, histogram: bool = False) -> Reductions:
        self.launches.append(Reductions(tensors, histogram))
        return self.launches[-1]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(collector_module, "cuda", kernels)
    monkeypatch.setattr(
        collector_module, "is_launchable", lambda tensor: tensor.is_floating_point()
    )
    return kernels


class Missed(list[tuple[str, str, str]]):
    def __call__(self, *what: str) -> None:
        self.append(what)  # type: ignore[arg-type]


def collector(max_bytes: int = 1 << 20, histogram: bool = False) -> tuple[Collector, Missed, set]:  # type: ignore[type-arg]
    missed, immediate = Missed(), set()  # type: ignore[var-annotated]
    return Collector(histogram, max_bytes, immediate, missed), missed, immediate


def test_many_tensors_are_one_launch(kernels: Kernels) -> None:
    collected, missed, _ = collector(histogram=True)
    parts = [torch.randn(5, 7) for _ in range(6)]
    for part in parts:
        collected.add(A, part)
    assert not kernels.launches
    assert not collected.ready()
    collected.flush()
    assert len(kernels.launches) == 1
    assert not collected.ready()
    kernels.launches[0].is_ready = True
    assert collected.ready()
    found = collected.read()[A]
    expected = calculate_statistics(torch.stack(parts))
    assert (found.count, found.min, found.max) == (210, expected.min, expected.max)
    assert math.isclose(found.std, expected.std, rel_tol=1e-6)
    assert found.histogram.total == 210  # type: ignore[union-attr]
    assert not missed


def test_byte_budget(kernels: Kernels) -> None:
    collected, _, _ = collector(max_bytes=1000)
    for _ in range(10):
        collected.add(A, torch.ones(100))  # 400 bytes
    assert len(kernels.launches) == 3
    assert all(len(each.copies) == 3 for each in kernels.launches)
    assert collected.read()[A].count == 1000


def test_a_written_tensor_is_not_used_and_reduced_at_once_from_then_on(kernels: Kernels) -> None:
    collected, missed, immediate = collector()
    written, kept = torch.ones(4), torch.ones(4)
    collected.add(A, written.detach())
    collected.add(B, kept.detach())
    written.mul_(3)
    found = collected.read()
    assert A not in found
    assert found[B].count == 4
    assert missed == [("a", "activations", collector_module._WRITTEN)]
    assert immediate == {A}
    again = Collector(False, 1 << 20, immediate, missed)
    tensor = torch.ones(4)
    again.add(A, tensor.detach())
    tensor.mul_(3)
    assert again.read()[A].max == 1.0
    assert len(missed) == 1


def test_a_write_through_a_view_is_noticed(kernels: Kernels) -> None:
    collected, missed, _ = collector()
    base = torch.ones(4, 4)
    collected.add(A, base[1:].detach())
    base[2].zero_()
    assert not collected.read()
    assert missed


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 3), (8, 3), (2, 5, 4, 3)])
def test_padding_is_left_out_of_launches(
    kernels: Kernels, full: bool, shape: tuple[int, ...]
) -> None:
    kept = torch.ones(2, 4, dtype=torch.bool)
    if not full:
        kept[0, 2:] = False
    tensor = torch.randn(shape)
    tensor.view(-1)[0] = math.nan
    mask = TokenMask(kept)
    collected, _, _ = collector(histogram=True)
    collected.add(A, tensor, mask)
    found = collected.read()[A]
    values, over = mask.align(tensor)  # type: ignore[misc]
    expected = calculate_statistics(values, mask=over)
    for name in ("count", "nan", "zero", "min", "max"):
        assert getattr(found, name) == getattr(expected, name), name
    assert math.isclose(found.mean, expected.mean, rel_tol=1e-6)
    assert found.positions == (None if full else expected.positions)
    assert found.shape == shape


def test_what_a_launch_cannot_take_is_reduced_at_once(kernels: Kernels) -> None:
    collected, missed, _ = collector()
    collected.add(A, torch.arange(4))
    collected.add(B, torch.ones(3, device="meta").long())
    assert collected.read()[A].max == 3
    assert "meta device" in missed[0][2]
    assert not kernels.launches


@pytest.mark.parametrize("every", [1, 2])
def test_a_monitor_with_launches_sees_what_one_without_sees(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    class Late(Kernels):
        """Its results are there three steps later."""

        def reduce_many(self, tensors: Sequence[Tensor], *, histogram: bool = False) -> Reductions:
            found = super().reduce_many(tensors, histogram=histogram)
            for earlier in self.launches[:-6]:
                earlier.is_ready = True
            return found

    def run() -> Monitor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, every=every) as monitor:
            for _ in range(8):
                loss = model(torch.randn(6, 4)).square().mean()
                monitor.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            waiting.append(len(monitor._unread))
        return monitor

    waiting: list[int] = []
    monkeypatch.setattr(collector_module, "cuda", Late())
    late = run()
    assert waiting[0] > 0  # nothing was waited for,
    assert not late._unread  # until it was detached
    monkeypatch.setattr(collector_module, "is_launchable", lambda tensor: False)
    now = run()
    assert not now._unread
    assert list(late.history.steps) == list(now.history.steps) == list(range(0, 8, every))
    assert late.history.series == now.history.series
    for series in now.history.series:
        for field in ("count", "rms", "min", "max"):
            one, two = (each.history.values(*series, field) for each in (late, now))
            assert one.tolist() == pytest.approx(two.tolist(), rel=1e-6)


def test_a_layer_that_is_written_in_place(kernels: Kernels) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc(x).mul_(2))

    model = Net()
    seen = []
    model.fc.register_forward_hook(lambda *args: seen.append(float(args[2].detach().max())))
    monitor = Monitor(model, what="activations")
    for _ in range(3):
        with monitor.step():
            model(torch.randn(5, 4)).sum().backward()
    values = monitor.history.values("fc", field="max")
    assert math.isnan(values[0])  # found out here
    assert values[1:].tolist() == seen[1:]
    assert "written in place" in monitor.history.missing["fc"]


@pytest.mark.parametrize("values", [[1.0, -2.0, 0.0], [math.nan, math.inf, -math.inf], []])
def test_one_table_says_the_same_as_single_statistics(
    kernels: Kernels, values: list[float]
) -> None:
    tensors = {A: torch.tensor(values), B: torch.randn(3, 5)}
    collection, _, _ = collector()
    for series, tensor in tensors.items():
        collection.add(series, tensor)
    found = collection.read()
    assert isinstance(found, HistoryRows)
    table, single = History(), History()
    table.append(Step(0), found)
    single.append(Step(0), {each: calculate_statistics(t) for each, t in tensors.items()})
    for series in tensors:
        one, other = table.statistics(*series), single.statistics(*series)
        for key in ("count", "mean", "std", "min", "max", "nan", "pos_inf", "neg_inf", "zero"):
            assert one[key] == pytest.approx(other[key], nan_ok=True), (series, key)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert dict(found)[series].count == other.count
    assert np.array_equal(table[0].table, single[0].table, equal_nan=True)
    with pytest.raises(KeyError):
        found[Series("c", "activations")]


def test_what_has_to_be_merged_is_not_taken_from_a_table(kernels: Kernels) -> None:
    collection, _, _ = collector()
    collection.add(A, torch.ones(2))
    collection.add(A, torch.zeros(2))
    found = collection.read()
    assert not isinstance(found, HistoryRows)
    assert found[A].count == 4
