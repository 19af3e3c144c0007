"""Random directions, and numerical derivatives along them, each with an estimate of its error.

`judgement` calls `measure_slope`. A derivative is a central difference. Its error has two parts
that pull in opposite directions: truncation falls with the step, rounding grows as the step
shrinks. Neither is known beforehand, because a module may compute in float32 internally whatever
its inputs. Differences are therefore taken at several steps; the two parts balance where three
neighbouring steps agree best, and how well these agree is the error. The quick way out (two
evaluations that agree with the guess) is safe because they cannot agree by accident. Steps and
limits may be tuned with the tests of wrong and right functions.

A direction is as large as the tensor it changes, and 0 if that is infinite or huge, because masks
are filled with such numbers and a step there would mean nothing. `seed_all` must not call
`torch.manual_seed`, which queues a call for a CUDA that was never used.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


Curve = Callable[[float], float]

_STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
_LONGEST_IF_EXACT = 1e-3
_NOISY = 1e-11  # more than what rounding in float64 explains
_ROUNDINGS = 20  # how many rounding errors of full size a forward pass may add up to


class Precision(NamedTuple):
    """The rounding and the steps to expect of one dtype.

    Attributes:
        rounding: Relative rounding error of one operation.
        step: A step that is good for most functions.
        tolerance: The smallest relative deviation that counts.
    """

    rounding: float
    step: float
    tolerance: float


PRECISIONS = {
    torch.float64: Precision(2.2e-16, 1e-6, 1e-6),
    torch.float32: Precision(1.2e-7, 1e-2, 2e-3),
    torch.float16: Precision(9.8e-4, 1e-1, 5e-2),
    torch.bfloat16: Precision(7.8e-3, 1e-1, 2e-1),
}


class Scales(NamedTuple):
    """The typical sizes along one direction.

    Attributes:
        slope: The typical size of a derivative; deviations are relative to it.
        value: The typical size of the numbers that the curve is a sum of.
        rounding: The rounding error of these numbers.
    """

    slope: float
    value: float
    rounding: float


class Slope(NamedTuple):
    """A numerical derivative with its error.

    Attributes:
        value: The derivative.
        error: How wrong it may be.
        bend: The derivative to the right minus the derivative to the left; it shows a kink or a
            jump if it is not zero.
    """

    value: float
    error: float
    bend: float


def measure_slope(
    curve: Curve, at_zero: float, guess: float, scales: Scales, precision: Precision
) -> Slope:
    """Return the numerical derivative of `curve` at 0.

    Two evaluations are enough if the derivative equals `guess`: they cannot agree by accident.
    If not, several steps are tried, and the best one is used.

    Args:
        curve: The function; steps are relative to the size of what is varied.
        at_zero: The value of the curve at 0.
        guess: The expected derivative.
        scales: The typical sizes along the direction.
        precision: The precision of the dtype in use.
    """
    differences = _Differences(curve, at_zero, scales.rounding)
    known = scales.rounding / scales.value if scales.value else 0.0
    step = precision.step if known < _NOISY else _STEPS[_balanced(known)]
    quick = differences.at(step)
    size = max(scales.slope, abs(quick.value))
    near = abs(quick.value - guess) <= precision.tolerance * size + quick.error
    if near and quick.error <= 1e-2 * max(size, 1e-2 * scales.value):
        return quick
    noise = max(differences.noise(step) / scales.value if scales.value else 0.0, known)
    if noise > _NOISY:
        # Coarser arithmetic inside, or a kink: use the step that balances such a rounding error.
        balanced = differences.around(_balanced(noise))
        close = abs(balanced.value - guess) < 3 * balanced.error
        if close and balanced.error < 1e-3 * scales.slope:
            return balanced
    usable = [
        k for k in range(1, len(_STEPS) - 1) if noise > _NOISY or _STEPS[k - 1] <= _LONGEST_IF_EXACT
    ]
    found = [differences.around(k) for k in usable]
    best = min(found, key=lambda slope: slope.error if math.isfinite(slope.error) else math.inf)
    # Curvature falls with the step, rounding grows as it shrinks; what remains is a kink.
    return best._replace(bend=min(slope.bend for slope in found))


def _balanced(noise: float) -> int:
    """Return the step at which truncation is as large as this relative rounding error."""
    return min(range(1, len(_STEPS) - 1), key=lambda k: abs(_STEPS[k] - noise ** (1 / 3)))


class _Differences:
    """Central differences of a curve at chosen steps, each computed once."""

    def __init__(self, curve: Curve, at_zero: float, rounding: float) -> None:
        self._curve, self._at_zero = curve, at_zero
        self._rounding = _ROUNDINGS * rounding
        self._ends: dict[float, tuple[float, float]] = {}

    def at(self, step: float) -> Slope:
        """Return the difference at one step, with the rounding error alone."""
        low, high = self._both(step)
        bend = abs(high - 2 * self._at_zero + low) / step
        return Slope((high - low) / (2 * step), self._rounding / step, bend)

    def around(self, index: int) -> Slope:
        """Return the difference at one step, with its neighbours' disagreement as error."""
        slopes = [self.at(_STEPS[k]) for k in (index - 1, index, index + 1)]
        values = [slope.value for slope in slopes]
        spread = max(values) - min(values) if all(map(math.isfinite, values)) else math.inf
        return Slope(values[1], spread + slopes[1].error, slopes[1].bend)

    def noise(self, step: float) -> float:
        """Return an upper bound of the rounding error of one evaluation."""
        low, high = self._both(step)
        return abs(high - 2 * self._at_zero + low)

    def _both(self, step: float) -> tuple[float, float]:
        if step not in self._ends:
            self._ends[step] = (self._curve(-step), self._curve(step))
        return self._ends[step]
