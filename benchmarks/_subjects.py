"""Models for `torchfmri cost` and `torchfmri advise`: functions that return (model, data, loss).

torchfmri cost benchmarks._subjects:qwen3
torchfmri advise benchmarks._subjects:conv_net --optimizer AdamW
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._qwen3 import SMALL, build_qwen3

Subject = tuple[nn.Module, Any, Callable[..., Tensor] | str | None]


def qwen3(batch: int = 4, length: int = 128, attention: str = "eager") -> Subject:
    """A small Qwen3 (4 layers, 256 wide) in training mode, its attention written out."""
    model = build_qwen3(SMALL, attention=attention).train()
    return model, tokens(batch, length), None


def qwen3_sdpa(batch: int = 4, length: int = 128) -> Subject:
    """The same with torch's fused attention."""
    return qwen3(batch, length, "sdpa")


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Token numbers, and the same as labels."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(1000, (batch, length), generator=generator)
    return {"input_ids": numbers, "labels": numbers}


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


def conv_net(batch: int = 16) -> Subject:
    """A small residual network on 32 x 32 images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *(Block(32) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, images(batch), squared


def images(batch: int) -> Tensor:
    """Random images (batch, 3, 32, 32)."""
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def squared(output: Tensor) -> Tensor:
    """A loss that needs no target."""
    return output.square().mean()
