"""Layers as fused kernels are written: they use the memory of the gradient of their output again.

No version tells of it, as with a kernel of somebody's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FusedRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, small: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + small).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        x, weight, scale = ctx.saved_tensors
        of_weight = (g * x * scale).flatten(0, -2).sum(0)
        inner = g * weight
        of_x = scale * (inner - x * scale.square() * (inner * x).mean(-1, keepdim=True))
        g.data.copy_(of_x)
        return g, of_weight, None


class FusedSineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight).sin() + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        of_bias = g.flatten(0, -2).sum(0)
        inner = g * (x * weight).cos()
        of_weight = (inner * x).flatten(0, -2).sum(0)
        g.data.copy_(inner * weight)
        return g, of_weight, of_bias


class FusedRMSNorm(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, width))
        self.variance_epsilon, self.fused = 1e-6, fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return FusedRMSNormFunction.apply(x, self.weight, self.variance_epsilon)
        scale = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return x * scale * self.weight


class FusedSine(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, width))
        self.bias, self.fused = nn.Parameter(torch.zeros(width)), fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return FusedSineFunction.apply(x.flatten(0, 1), self.weight, self.bias).view(x.shape)
        return (x * self.weight).sin() + self.bias
