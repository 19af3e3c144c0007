"""Random directions as large as the tensors they change, and a fixed random state.

`judgement` and `varied_call` use them. A direction is 0 if a tensor is infinite or huge, because
masks are filled with such numbers and a step there would mean nothing. `seed_all` must not call
`torch.manual_seed`, which queues a call for a CUDA that was never used.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

SEED = 20_231
_NUDGE = 1e-3  # of a tensor's size: beside a kink, and still the same function
_HUGE = 1e30  # masks are often filled with the smallest finite number


def directions_for(
    values: Sequence[Tensor], sizes: Sequence[float], generator: torch.Generator
) -> list[Tensor]:
    """Return a random direction for each tensor, as large as the tensor."""
    drawn = []
    for value, size in zip(values, sizes, strict=True):
        # Uniform and in float32, because that is quick; the variance is what matters: size².
        bound = math.sqrt(3) * size
        z = torch.empty(value.shape, dtype=torch.float32, device="cpu")
        direction = z.uniform_(-bound, bound, generator=generator).to(value)
        drawn.append(direction if _is_ordinary(value) else direction * _usable(value))
    return drawn


def nudged(values: Sequence[Tensor]) -> list[Tensor]:
    """Return values moved a little, off the kinks that they may lie on."""
    generator = torch.Generator().manual_seed(SEED)
    directions = directions_for(values, [typical_size(value) for value in values], generator)
    return [
        torch.add(value, direction, alpha=_NUDGE)
        for value, direction in zip(values, directions, strict=True)
    ]


def typical_size(value: Tensor) -> float:
    """Return the root mean square of the ordinary numbers in a tensor; 1 if all are zero."""
    ordinary = value.detach() if _is_ordinary(value) else value.detach()[_usable(value)].double()
    size = norm_of(ordinary) / math.sqrt(max(ordinary.numel(), 1))
    return size if size > 0 and math.isfinite(size) else 1.0


def norm_of(tensor: Tensor) -> float:
    """Return the Euclidean norm, in float64."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def seed_all(seed: int) -> None:
    """Fix the random numbers that are drawn from here on."""
    # Not torch.manual_seed: before CUDA is used, that queues a call to be made when it is.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed)


def _is_ordinary(value: Tensor) -> bool:
    """Whether all numbers are finite and none is huge, in one pass over them."""
    return norm_of(value) < _HUGE  # NaN is not


def _usable(value: Tensor) -> Tensor:
    return value.isfinite() & (value.abs() < _HUGE)
