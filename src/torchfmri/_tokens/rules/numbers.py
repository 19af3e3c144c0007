"""Numbers of tokens: tensors of integers that say for each entry to which token it belongs.

Axes along which nothing changes have stride 0, so that most of these tensors are small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NOBODY = -1  # a constant, or a value that all samples share
UNKNOWN = -2  # the result of an operation without a rule
SEVERAL = -3  # computed from several positions, none of which takes precedence

broadcast: Any = torch.broadcast_tensors  # without types in torch
unique: Any = torch.unique


def compact(numbers: Tensor) -> Tensor:
    """The numbers with one entry along each axis of stride 0."""
    strides = numbers.stride()
    if 0 not in strides:
        return numbers
    sizes = [
        size if stride else min(size, 1)
        for size, stride in zip(numbers.shape, strides, strict=True)
    ]
    return numbers.as_strided(sizes, strides)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same numbers."""
    return bool((compact(a) == compact(b)).all())


def is_constant_along(numbers: Tensor, axis: int) -> bool:
    """Whether the numbers do not change along an axis."""
    small = compact(numbers)
    return small.shape[axis] <= 1 or bool((small == small.narrow(axis, 0, 1)).all())


def agrees_along(numbers: Tensor, axis: int) -> bool:
    """Whether the numbers do not change along an axis, where constants have no say."""
    small = compact(numbers)
    if small.shape[axis] <= 1:
        return True
    highest = small.amax(axis, keepdim=True)
    return bool(((small == highest) | (small == NOBODY)).all())


def rows_of(numbers: Tensor) -> Tensor:
    """The token of the first entry of each row, (n,)."""
    return numbers.reshape(numbers.shape[0], -1)[:, 0] if numbers.ndim else numbers.reshape(1)


def constant(code: int, tensor: Tensor) -> Tensor:
    """One code for all entries of a tensor."""
    return torch.full((), code, dtype=torch.int64, device=tensor.device).expand(tensor.shape)
