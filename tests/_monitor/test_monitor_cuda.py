"""The Monitor on a CUDA device: exact, by reference, and never waiting inside a step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fused_layers import FusedRMSNorm
from torch import Tensor, nn

from torchfmri import Monitor

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Tokens(nn.Module):
    """Embeds, mixes and returns a loss, as a language model does."""

    def __init__(self, width: int = 64, in_place: bool = False) -> None:
        super().__init__()
        self.embed, self.fc, self.head = (
            nn.Embedding(50, width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, 50),
        )
        self.in_place = in_place

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.fc(self.embed(input_ids))
        logits = self.head(hidden.mul_(0.5) if self.in_place else hidden * 0.5)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), input_ids.flatten())
        return {"loss": loss, "logits": logits}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(model: nn.Module, monitor: Monitor, mask: Tensor | None = None, steps: int = 4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = [torch.randint(0, 50, (4, 32), device="cuda") for _ in range(steps)]
    for each in ids:
        # The first step compiles kernels and fills caches.
        with no_waiting() if monitor.history else nothing(), monitor.step():
            model(each, attention_mask=mask)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("histogram", [False, True])
def test_a_step_waits_for_nothing_and_is_exact(dtype: torch.dtype, histogram: bool) -> None:
    torch.manual_seed(0)
    model = Tokens().to("cuda", dtype)
    kept: dict[str, list[Tensor]] = {"activations": [], "gradients": []}

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        kept["activations"].append(output.detach().clone())
        output.register_hook(lambda gradient: kept["gradients"].append(gradient.clone()))

    model.fc.register_forward_hook(keep)
    monitor = Monitor(model, histogram=histogram)
    train(model, monitor)
    for what, tensors in kept.items():
        for position, tensor in enumerate(tensors):
            values = tensor.double()
            found = monitor.history.statistics("fc", what, position)
            assert found.count == values.numel()
            assert (found.min, found.max) == (float(values.min()), float(values.max()))
            assert math.isclose(found.std, float(values.std(unbiased=False)), rel_tol=1e-5)
    assert not monitor.history.missing
    assert (monitor.history.loss > 0).all()


@pytest.mark.parametrize("full", [False, True])
def test_padding(full: bool) -> None:
    torch.manual_seed(0)
    model = Tokens().cuda()
    mask = torch.ones(4, 32, dtype=torch.long, device="cuda")
    if not full:
        mask[0, 10:] = 0
    monitor = Monitor(model, what=("activations", "gradients"))
    train(model, monitor, mask)
    assert set(monitor.history.values("fc", field="count")) == {float(mask.sum()) * 128}
    assert set(monitor.history.values("fc", field="nan")) == {0.0}


def test_a_layer_written_in_place_is_reduced_at_once_from_the_second_step_on() -> None:
    torch.manual_seed(0)
    model = Tokens(in_place=True).cuda()
    monitor = Monitor(model, what="activations")
    train(model, monitor)
    found = monitor.history.values("fc", field="rms")
    assert math.isnan(found[0])
    assert (found[1:] > 0).all()
    assert "written in place" in monitor.history.missing["fc"]


def test_memory_stays_within_the_budget() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    monitor = Monitor(model, what=("activations", "gradients"), max_bytes=32 << 20)

    def peak(watch: bool) -> int:
        torch.cuda.reset_peak_memory_stats()
        with monitor.step() if watch else nothing():
            model(x).sum().backward()
        model.zero_grad()
        return torch.cuda.max_memory_allocated()

    peak(True), peak(False)
    assert peak(True) - peak(False) < 64 << 20


def test_a_fused_layer_writes_into_the_gradient_that_was_seen() -> None:
    """Gradients are read after the step, long after the layer has used their memory again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), FusedRMSNorm(64, True), nn.Linear(64, 8)).cuda()
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: kept.append(gradient.clone()))

    model[1].register_forward_hook(keep)
    monitor = Monitor(model, what="gradients")
    with monitor.step():
        model(torch.randn(16, 20, 32, device="cuda")).square().sum().backward()
    found = monitor.history.statistics("1", "gradients", 0)
    values = kept[0].double()
    assert (found.min, found.max) == (float(values.min()), float(values.max()))
    assert math.isclose(found.std, float(values.std(unbiased=False)), rel_tol=1e-5)
