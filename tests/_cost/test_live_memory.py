"""The peak of live bytes against the memory events of torch's profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torchfmri
from torchfmri._cost.live_memory import LiveMemory

pytestmark = pytest.mark.usefixtures("one_thread")


def profiled_peak(run: Callable[[], object]) -> int:
    """The most bytes that the CPU allocator had given out at once during a run."""
    run()
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("name", ["mlp", "encoder", "gru", "qwen3", "bert"])
@pytest.mark.one_in(2)
def test_peak_equals_the_allocators(name: str) -> None:
    model, data = build(name)
    parameters = list(model.parameters())

    def run() -> None:
        output = model(**data) if isinstance(data, dict) else model(data)
        loss = output.loss if hasattr(output, "loss") else squared(output)
        del output
        torch.autograd.grad(loss, parameters)

    own = None if isinstance(data, dict) else squared
    cost = torchfmri.cost(model, data, own, rounds=0)
    existing = cost.total.parameter_bytes + cost.buffer_bytes + cost.data_bytes
    # A kernel may take a few bytes for itself inside one operation.
    assert cost.peak_bytes - existing == pytest.approx(profiled_peak(run), rel=2e-3)


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(256, 32)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return layer, torch.randn(4, 16, 32)
    if name == "gru":
        return nn.GRU(16, 32), torch.randn(8, 4, 16)
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES

    architecture = ARCHITECTURES[name]
    return architecture.build().eval(), architecture.batch()


def squared(output: Any) -> Tensor:
    # Not the sum: its gradient has stride 0, and matrix products copy that inside.
    return (output[0] if isinstance(output, tuple) else output).square().sum()


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    x = torch.ones(100)
    with LiveMemory(None, [x]) as memory:
        a = x + 1
        b = a.view(10, 10)[2:]
        assert memory.live == 400
        x.add_(1)
        x[:50].mul_(2)
        assert memory.live == 400
        del a
        assert memory.live == 400  # b looks into it
        del b
        assert memory.live == 0
        c = x.double()
        assert (memory.live, memory.peak) == (800, 800)
        d = torch.empty(0)
        del c, d
    assert memory.existing_bytes == 400
    assert memory.steps == [400, 800]


def test_more_memory_is_noticed() -> None:
    class Wasteful(nn.Module):
        def __init__(self, waste: int) -> None:
            super().__init__()
            self.linear, self.waste = nn.Linear(8, 8), waste

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.zeros(self.waste) if self.waste else None
            y = self.linear(x)
            del kept
            return y.exp()

    x = torch.randn(4, 8)
    plain = torchfmri.cost(Wasteful(0), x, rounds=0)
    wasteful = torchfmri.cost(Wasteful(10_000), x, rounds=0)
    assert wasteful.peak_bytes > 40_000 > plain.peak_bytes
    assert wasteful.total.saved_bytes == plain.total.saved_bytes
    assert wasteful.peak_place == ("forward", "linear")


def test_counts_are_the_same_each_time() -> None:
    model, x = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1), torch.randn(5, 2, 16)
    one, two = (torchfmri.cost(model, x, rounds=0) for _ in range(2))
    assert one.to_dict()["layers"].keys() == two.to_dict()["layers"].keys()
    for name in one:
        assert one[name].saved_bytes == two[name].saved_bytes
        assert one[name].flops == two[name].flops
    assert one.peak_bytes == two.peak_bytes


class Allocator:
    """Stands for that of a CUDA device: blocks are larger than asked for, kernels take more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.most = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: torch.device) -> None:
        self.most = self.allocated


def test_on_cuda_a_workspace_counts_and_slack_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    mebibyte = 1 << 20

    @torch.library.custom_op("torchfmri_test::kernel", mutates_args=())
    def kernel(size: int, workspace: int, slack: int) -> Tensor:
        allocator.allocated += size + slack
        allocator.most = max(allocator.most, allocator.allocated + workspace)
        return torch.zeros(size, dtype=torch.uint8)

    with LiveMemory(None, [], torch.device("cuda")) as memory:
        one = kernel(10 * mebibyte, 0, mebibyte)
        assert (memory.live, memory.peak) == (10 * mebibyte, 10 * mebibyte)
        two = kernel(5 * mebibyte, 40 * mebibyte, 0)
        assert (memory.live, memory.peak) == (15 * mebibyte, 55 * mebibyte)
        del one, two
    assert memory.live == 0


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_peak_on_cuda_is_that_of_the_allocator_and_is_predicted() -> None:
    model = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, batch_first=True).cuda()
    parameters = list(model.parameters())

    def allocated(batch: int, length: int) -> int:
        x = torch.randn(batch, length, 256, device="cuda")
        torch.autograd.grad(squared(model(x)), parameters)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(squared(model(x)), parameters)
        peak = torch.cuda.max_memory_allocated() - before
        return peak + x.nbytes + sum(each.nbytes for each in parameters)

    sizes = {"batch": (4, 8), "length": (128, 256, 512)}
    x = torch.randn(8, 512, 256, device="cuda")
    cost = torchfmri.cost(model, x, squared, sizes=sizes, rounds=2)
    assert cost.growth is not None
    # Blocks of the allocator are up to 1 MiB larger than what was asked for.
    assert cost.peak_bytes == pytest.approx(allocated(8, 512), rel=0.03)
    assert cost.total.seconds > 0
    for size in ((16, 512), (8, 1024)):
        predicted = cost.growth.predict(batch=size[0], length=size[1]).peak_bytes
        assert predicted == pytest.approx(allocated(*size), rel=0.05)
