"""Which layer is running, and what is handed on when none is."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfmri._capture import RunningLayers


class Checkpointed(nn.Module):
    """A part that runs again in the backward pass."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self._is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.part, x, use_reentrant=self._is_reentrant)
        return found * 2


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_part_that_runs_again_returns_nothing_of_the_model(is_reentrant: bool) -> None:
    model, found = Checkpointed(is_reentrant), []
    with RunningLayers(model, found.append) as running:
        output = model(torch.randn(2, 4, requires_grad=True))
        output.sum().backward()
    assert len(found) == 1
    assert found[0] is output
    assert running.calls["part"] == 1


def test_a_layer_that_raises_returns_nothing() -> None:
    model, found = nn.Linear(4, 2), []
    with RunningLayers(model, found.append) as running:
        output = model(torch.zeros(1, 4))
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(1, 5))
        assert running.stack == []
    assert len(found) == 1
    assert found[0] is output
