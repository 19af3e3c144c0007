"""Bytes saved for backward against the storages that the autograd graph really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread")


def storages_in_graph(loss: Tensor, existing: list[Tensor]) -> int:
    """Bytes of the distinct storages that the nodes behind `loss` hold, found node by node."""
    known = {each.untyped_storage().data_ptr() for each in existing}
    found: dict[int, int] = {}
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                value = getattr(node, name)
                values = value if isinstance(value, (tuple, list)) else [value]
                for tensor in values:
                    if isinstance(tensor, Tensor) and not is_python_number(tensor):
                        storage = tensor.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
        waiting.extend(each for each, _ in node.next_functions)
    return sum(size for pointer, size in found.items() if pointer and pointer not in known)


def is_python_number(tensor: Tensor) -> bool:
    """The 8 bytes that hold the 0.5 of `x * 0.5`; torch shows them to no hook and no mode."""
    return tensor.ndim == 0 and tensor.dtype in (torch.float64, torch.int64)


def saved_for_real(model: nn.Module, data: Any) -> int:
    with torch.random.fork_rng(devices=[]):
        output = model(**data) if isinstance(data, dict) else model(data)
        output = output[0] if isinstance(output, tuple) else output
        loss = output.loss if hasattr(output, "loss") else output.sum()
        values = list(data.values()) if isinstance(data, dict) else [data]
        existing = [*model.parameters(), *model.buffers(), *values]
        return storages_in_graph(loss, [each for each in existing if isinstance(each, Tensor)])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu_(self.a(x))) * x.sigmoid()


class Slices(nn.Module):
    """Saves views of one storage three times."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k * v


MODELS = {
    "mlp": (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)), (5, 6)),
    "dropout": (nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (5, 6)),
    "conv": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        ),
        (2, 3, 9, 9),
    ),
    "residual": (Residual(), (5, 6)),
    "slices": (Slices(), (5, 6)),
    "lstm": (nn.LSTM(6, 4, 2), (5, 2, 6)),
    "gru": (nn.GRU(6, 4), (5, 2, 6)),
    "encoder": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (2, 5, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_distinct_storages_of_the_graph(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(*shape)
    cost = torchfmri.cost(model, x, loss=lambda output: first(output).sum(), rounds=0)
    assert cost.total.saved_bytes == saved_for_real(model, x) > 0
    assert cost.retained_bytes == cost.total.saved_bytes
    own = sum((each.own or each).saved_bytes for each in cost.values())
    assert own == cost.total.saved_bytes


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "bert", "qwen3-moe", "t5"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_equals_the_distinct_storages_of_transformers(name: str, attention: str) -> None:
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES

    architecture = ARCHITECTURES[name]
    model, batch = architecture.build(attention).eval(), architecture.batch()
    cost = torchfmri.cost(model, batch, rounds=0)
    assert cost.total.saved_bytes == saved_for_real(model, batch) > 0
    # Whatever else is alive between the passes would show here.
    assert cost.retained_bytes == cost.total.saved_bytes


def test_layers_get_what_they_save() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(-1))
    cost = torchfmri.cost(model, torch.randn(5, 6), loss="sum", rounds=0)
    assert cost["0"].saved_bytes == 0  # its input is the data, its weight a parameter
    assert cost["1"].saved_bytes == 4 * 5 * 8  # its output, which '2' saves too
    assert cost["2"].saved_bytes == 0
    assert cost["3"].saved_bytes == 4 * 5 * 2


def test_a_view_keeps_its_whole_storage() -> None:
    class Corner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2)[:1, :1] ** 2

    x = torch.randn(8, 8, requires_grad=True)
    assert torchfmri.cost(Corner(), x, loss="sum", rounds=0).total.saved_bytes == 4 * 64


def test_what_is_freed_before_the_end_does_not_count() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.exp().detach()  # its graph is gone at once
            return y.tanh()

    cost = torchfmri.cost(Aside(), torch.randn(5, 6), rounds=0)
    assert cost.total.saved_bytes == cost.retained_bytes == 4 * 5 * 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_saves_its_input_only(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.inner = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    x = torch.randn(5, 6)
    cost = torchfmri.cost(Checkpointed(), x, rounds=0)
    assert cost.total.saved_bytes == 4 * 5 * 6
    once = 2 * 5 * 6 * 64
    assert cost["inner.0"].forward_flops == once
    # Forward again, dL/d input and dL/d weight. Recomputing stops at the last saved tensor when
    # it is not reentrant, so the last layer does not run a third time.
    assert cost["inner.0"].backward_flops == 3 * once
    assert cost["inner.2"].backward_flops == (3 if reentrant else 2) * once


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["mlp", "conv", "encoder"])
def test_equals_what_cuda_has_allocated(name: str) -> None:
    wide = {
        "mlp": (nn.Sequential(*(nn.Linear(1024, 1024), nn.GELU()) * 3), (512, 1024)),
        "conv": (nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()), (8, 3, 64, 64)),
        "encoder": (nn.TransformerEncoderLayer(512, 8, batch_first=True), (4, 256, 512)),
    }
    model, shape = wide[name][0].cuda(), wide[name][1]
    x = torch.randn(*shape, device="cuda")
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(x).sum()
    real = torch.cuda.memory_allocated() - before
    del loss
    cost = torchfmri.cost(model, x, loss="sum", rounds=1)
    assert abs(cost.total.saved_bytes / real - 1) < 0.03
