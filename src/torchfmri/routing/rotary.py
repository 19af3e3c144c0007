"""Rotary positions: queries and keys turned by an angle that grows with their position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """The cosines and sines of the angles, (b, 1, s, head size)."""

    cosine: Tensor
    sine: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """(b, heads, s, head size), turned in the dtype it has."""
        first, second = x.chunk(2, -1)
        turned = x * self.cosine + torch.cat((-second, first), -1) * self.sine
        return turned.to(x.dtype)


def rotary(positions: Tensor, head_size: int, base: float = 10_000.0) -> Rotary:
    """The angles of these positions, (b, s), for heads of an even size."""
    steps = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None] * base ** (-steps / head_size)
    angles = torch.cat((angles, angles), -1)
    return Rotary(angles.cos(), angles.sin())
