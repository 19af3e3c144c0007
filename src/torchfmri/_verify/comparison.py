"""Two derivatives compared: whether they agree, and how they differ if not.

`judgement` makes the comparisons, `layer_verdict` reads the verdicts. The majority of directions
decides, so that one unlucky direction does not; every number that a median is taken of is therefore
free of NaN, which would make the median depend on the order. A difference counts only beyond
`allowed`, which grows with the error of the numerical derivative: never call a gradient wrong that
the measurement cannot tell from right. WRONG is decided first: a difference beyond `allowed` is
proof, however inexact the numerical derivative is. `doubt` only tells RIGHT from UNDECIDED. The
words of `explain` may be changed freely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from torchfmri._verify.directional import Slope
from torchfmri._verify.varied_call import VariedTensor

RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"
# An agreement proves nothing if the numerical error is more than 5 % of the derivative's size.
_UNDECIDED_BEYOND = 0.05


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """The derivative from the backward pass beside the numerical one, along one direction.

    Attributes:
        analytic: The derivative from the backward pass.
        slope: The numerical derivative.
        scale: The typical size of a derivative here.
        allowed: The largest difference that counts as equal.
        size: The size of the outputs.
    """

    analytic: float
    slope: Slope
    scale: float
    allowed: float
    size: float

    @property
    def excess(self) -> float:
        """The difference as a multiple of what is allowed; 0 if it could not be measured."""
        return self._difference_over(self.allowed)

    @property
    def deviation(self) -> float:
        """The difference relative to the size of the derivative; 0 if it could not be measured."""
        return self._difference_over(self.scale)

    def _difference_over(self, size: float) -> float:
        if not math.isfinite(self.analytic):
            return math.inf
        return abs(self.analytic - self.slope.value) / size if self.is_measured and size else 0.0

    @property
    def doubt(self) -> float:
        """Relative error of the numerical derivative.

        It is relative to the size of the outputs if the derivative is almost zero, and infinite if
        the derivative could not be measured.
        """
        if not self.is_measured:
            return math.inf
        size = max(self.scale, 1e-2 * self.size)
        return self.slope.error / size if size else 0.0

    @property
    def is_measured(self) -> bool:
        """Whether the numerical derivative is a number with a finite error."""
        return math.isfinite(self.slope.value) and math.isfinite(self.slope.error)

    @property
    def is_bent(self) -> bool:
        """Whether a kink or a jump right here may explain the difference."""
        return self.slope.bend > 0.1 * abs(self.analytic - self.slope.value)


@dataclass(slots=True)
class Judgement:
    """The comparisons of one variable, and the verdict they give together."""

    variable: VariedTensor
    comparisons: list[GradientComparison] = field(default_factory=list)
    reason: str = ""

    @property
    def status(self) -> str:
        """The verdict of the majority: one unlucky direction does not decide."""
        if median(each.excess for each in self.comparisons) > 1:
            return WRONG
        doubtful = median(each.doubt for each in self.comparisons) > _UNDECIDED_BEYOND
        return UNDECIDED if doubtful else RIGHT

    @property
    def deviation(self) -> float:
        """The relative deviation, as the median over directions."""
        return median(each.deviation for each in self.comparisons)

    @property
    def allowed(self) -> float:
        """The largest relative deviation that would still count as right."""
        return median(each.allowed / each.scale if each.scale else 0.0 for each in self.comparisons)

    @property
    def is_bent(self) -> bool:
        """Whether kinks may explain what differs."""
        return any(each.is_bent for each in self.comparisons if each.excess > 1)


def explain(judgement: Judgement) -> str:
    """Describe in words how a wrong derivative differs."""
    pairs = [(each.analytic, each.slope.value) for each in judgement.comparisons]
    scale = max(each.scale for each in judgement.comparisons)
    if not all(math.isfinite(analytic) for analytic, _ in pairs):
        return "the gradient is NaN or Inf where the output is smooth"
    if all(abs(analytic) < 1e-12 * scale for analytic, _ in pairs):
        return "no gradient arrives: a path is detached (detach, no_grad, .data) or forgotten"
    if all(abs(numerical) < 1e-9 * scale for _, numerical in pairs):
        return (
            "the output is piecewise constant, yet there is a gradient: a straight-through "
            "estimator, if that is meant"
        )
    ratios = [analytic / numerical if numerical else math.inf for analytic, numerical in pairs]
    middle = median(ratios)
    if max(ratios) - min(ratios) < min(1e-3 * abs(middle), 1e-2 * abs(middle - 1)):
        factor = _factor(middle)
        if middle < 0:
            return f"{factor} times the derivative: gradient reversal, if that is meant"
        return f"{factor} times the derivative: a wrong factor"
    off = judgement.deviation
    return f"off by {f'{off:.0%}' if off >= 0.1 else f'{100 * off:.2g} %'} of its size"


def _factor(value: float) -> str:
    """Write a factor with enough digits to show two digits of its difference from 1."""
    digits = max(4, 2 - math.floor(math.log10(abs(value - 1))))
    return f"{value:.{digits}g}"
