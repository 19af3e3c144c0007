"""Non-finite steps on a CUDA device: no waiting, and the same origins as on the CPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Monitor, NonFiniteError, NonFiniteWarning
from torchfmri._incidents.origin import find_origin

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ((x * 0) ** 2).sqrt()


def test_origin_in_the_backward_pass() -> None:
    """It runs in a thread of its own there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Root()).cuda()
    x = torch.randn(6, 4, device="cuda")
    finding = find_origin(lambda: model(x).sum(), model, x)
    assert finding is not None
    assert (finding.problem, finding.layers) == ("nonfinite_backward", ("1",))
    assert finding.evidence["operation"] == "sqrt"
    assert finding.evidence["code"] == "return ((x * 0) ** 2).sqrt()"


def train(action: str, bad: int | None, fused: bool = True, steps: int = 6) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    monitor = Monitor(model, optimizer, on_nonfinite=action, every=100)
    data = [torch.randn(8, 16, device="cuda") for _ in range(steps)]
    if bad is not None:
        data[bad][3, 1] = math.nan
    with monitor:
        for number, x in enumerate(data):
            if number == 2:  # the first steps set things up
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if action == "continue" else "default")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
    return model, monitor


def test_continue_never_waits() -> None:
    try:
        _, monitor = train("continue", None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert monitor.incidents == []


def test_continue_is_told_later() -> None:
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="continue", every=100)

    def run() -> list[Any]:
        for number in range(4):
            x = torch.ones(2, 4, device="cuda") * (math.nan if number == 1 else 1)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return monitor.incidents

    with monitor, pytest.warns(NonFiniteWarning, match="after the update"):
        (incident,) = run()
    assert incident.step == 1


def test_raise_names_the_sample() -> None:
    with pytest.raises(NonFiniteError, match="sample 3"):
        train("raise", bad=3)


@pytest.mark.parametrize("fused", [False, True])
def test_skip(fused: bool) -> None:
    with pytest.warns(NonFiniteWarning, match="Step 3 is left out"):
        model, _ = train("skip", bad=3, fused=fused)
    assert all(bool(each.isfinite().all()) for each in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_ordinary_skips_of_a_scaler(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    monitor = Monitor(model, optimizer, on_nonfinite="raise", scaler=scaler)
    with monitor:
        for _ in range(20):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.ones(8, 16, device="cuda")).square().mean()
            monitor.loss(loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**30  # it did skip
    assert monitor.incidents == []
