"""A router whose choice cannot be read is told with the reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri._lens.experts import ExpertRouting, RouterReader

LOGITS, IDS, WEIGHTS = torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)


class Router(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def read(output: Any) -> tuple[list[ExpertRouting], dict[str, str]]:
    found: list[ExpertRouting] = []
    missed: dict[str, str] = {}
    model = nn.ModuleDict({"router": Router(output)})
    with RouterReader(model, found.append, missed.__setitem__):
        model["router"](torch.ones(1))
    assert not model["router"]._forward_hooks
    return found, missed


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (LOGITS, "returns no ids of experts"),
        ((LOGITS, IDS, IDS), "returns no ids of experts"),
        ((LOGITS, IDS), "without weights or without logits"),
        ((WEIGHTS, IDS), "without weights or without logits"),
    ],
)
def test_the_reason(output: Any, reason: str) -> None:
    found, missed = read(output)
    assert not found
    assert reason in missed["router"]


def test_a_router_that_returns_all_is_read() -> None:
    (routing,), missed = read((LOGITS, WEIGHTS, IDS))
    assert not missed
    logs = LOGITS.double().log_softmax(-1)
    expected = -(logs.exp() * logs).sum(-1)
    torch.testing.assert_close(routing.entropy.double(), expected, rtol=1e-6, atol=1e-6)
