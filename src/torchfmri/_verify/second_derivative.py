"""Treat the first derivative of a call as a function to differentiate again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchfmri._verify.judgement import BackwardError, Point, weighted_sum
from torchfmri._verify.varied_call import VariedCall, VariedTensor

T = TypeVar("T")


class SecondDerivative:
    """The first derivative of a call as a function of the same values, and of the cotangents.

    A second backward pass differentiates this function.
    """

    def __init__(self, call: VariedCall) -> None:
        self._call = call
        generator = torch.Generator().manual_seed(13)
        cotangents = Point(call, call.values).draw(generator)
        self._count = len(call.values)
        self.values = [*call.values, *cotangents]
        places = tuple(range(self._count, len(self.values)))
        self.variables = [*call.variables, VariedTensor("gradient that arrives", places)]

    def run(self, values: Sequence[Tensor], use: Callable[[list[Tensor]], T]) -> T:
        """Return what `use` makes of the gradients at `values`."""
        twice = any(value.requires_grad for value in values)
        leaves = [value if twice else value.detach().requires_grad_() for value in values]
        own, cotangents = leaves[: self._count], leaves[self._count :]

        def differentiate(outputs: list[Tensor]) -> T:
            total = weighted_sum(cotangents, outputs)
            found: Sequence[Tensor | None] = [None] * len(own)
            if total.requires_grad and own:
                try:
                    found = torch.autograd.grad(total, own, create_graph=twice, allow_unused=True)
                except Exception as error:
                    raise BackwardError from error
            return use(
                [
                    torch.zeros_like(value) if gradient is None else gradient
                    for value, gradient in zip(own, found, strict=True)
                ]
            )

        return self._call.run(leaves, differentiate)
