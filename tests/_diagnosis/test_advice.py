"""What findings say fits the model: no cure that it has, no part that it has not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Finding, Monitor, diagnose


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def batches(count: int = 25) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(32, 8, generator=generator) for _ in range(count)]
    return [(x, x[:, :1].clone()) for x in inputs]


def named(findings: Any, problem: str) -> Finding:
    every = [each for finding in findings for each in (finding, *finding.consequences)]
    (found,) = [each for each in every if each.problem == problem]
    return found


# -- clipping and scaling --------------------------------------------------------------------------


def clipping(scaler: torch.amp.GradScaler, unscale: bool) -> Callable[..., Tensor]:
    """A step that clips at 1, before or after the gradients are unscaled."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = 10 * nn.functional.mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_clipping_before_unscaling(unscale: bool, live: bool) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", 65536.0)
    step = clipping(scaler, unscale)
    if live:
        monitor = Monitor(model, optimizer, scaler=scaler)
        for batch in batches():
            with monitor.step() as told:
                told.loss(step(model, batch, optimizer))
        findings = monitor.findings
    else:
        findings = list(diagnose(model, batches(), None, optimizer, 25, step=step, show=False))
    if unscale:
        assert findings == []
        return
    assert [each.problem for each in findings] == ["clipped_before_unscaling"]
    assert "scaler.unscale_(optimizer)" in findings[0].advice
    assert "limit" not in findings[0].text + findings[0].advice


# -- depth -----------------------------------------------------------------------------------------


class PostNorm(nn.Module):
    """A block that normalises after the sum, with a branch that outweighs its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU()
        nn.init.normal_(self.down.bias, std=4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.act(self.up(x))))  # type: ignore[no-any-return]


def test_no_cure_that_the_model_has() -> None:
    model = nn.Sequential(nn.Linear(8, 16), *[PostNorm(16) for _ in range(12)], nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = diagnose(model, batches(), nn.MSELoss(), optimizer, 12, show=False)
    advice = named(found, "vanishing_gradients").advice
    assert "pre-norm" in advice
    for cure in ("GELU", "ReLU", "normalisation", "residual"):
        assert cure not in advice


def test_a_stack_of_sigmoids_is_told_all_it_lacks() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = diagnose(model, batches(), nn.MSELoss(), optimizer, 12, show=False)
    advice = named(found, "vanishing_gradients").advice
    for cure in ("ReLU", "normalisation", "residual"):
        assert cure in advice


class Block(nn.Module):
    def __init__(self, width: int, adds: bool) -> None:
        super().__init__()
        self.fc, self.adds = nn.Linear(width, width), adds
        nn.init.normal_(self.fc.weight, std=3 / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.fc(x.relu())
        return x + branch if self.adds else branch


@pytest.mark.parametrize("adds", [False, True])
def test_only_a_network_with_residuals_is_told_of_a_sum(adds: bool) -> None:
    body = [Block(16, adds) for _ in range(10)]
    model = nn.Sequential(nn.Linear(8, 16), *body, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    found = named(
        diagnose(model, batches(), nn.MSELoss(), optimizer, 12, show=False), "activation_growth"
    )
    assert ("in the sum" in found.text) is adds
    assert ("branch" in found.advice) is adds


# -- parameters that nothing uses ------------------------------------------------------------------


class Unused(nn.Module):
    """Has a parameter of its own, and one of an inner module, that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain()
        self.token = nn.Parameter(torch.zeros(1, 8))
        self.body.register_parameter("scale", nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_an_unused_parameter_is_called_that() -> None:
    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    (found,) = diagnose(model, batches(), nn.MSELoss(), optimizer, 12, show=False)
    assert found.problem == "unused_layer"
    assert "'token'" in found.text
    assert "'body.scale'" in found.text
    assert "forward does not use them" in found.text
    assert "returns" not in found.text
    assert found.evidence["parameters"] == 11
