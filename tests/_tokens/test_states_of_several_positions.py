"""Recurrences whose states have several positions, or no data: refused, and not misplaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchfmri


class _Walk(nn.Module):
    """Both directions in one state, two frames at once, or a weight that changes by step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Parameter(torch.tensor([0.5, 0.7, 0.9]))

    def forward(self, x: Tensor) -> Tensor:
        h, weight = torch.zeros(2, 2, 3), torch.ones(3)
        if self.kind == "weight":
            h = torch.zeros(2, 3)
            for t in range(4):
                weight = weight * self.a
                h = h + weight * x[:, t]
            return h
        both = torch.stack([x, x.flip(1)], 1) if self.kind == "both" else x.view(2, 2, 2, 3)
        for t in range(both.shape[2]):
            h = (self.a * h + both[:, :, t]).tanh()
        return h


@pytest.mark.parametrize("kind", ["both", "frames", "weight"])
def test_it_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    model = _Walk(kind)
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(2, 4, 3)).square().sum().backward()
    assert [row.name for row in tokens.coverage().missing] == ["a"]
    with pytest.raises(torchfmri.UnsupportedLayerError, match=r"positions|recurrence"):
        tokens["a"]
