"""Whether a backward pass gives the derivative of its forward pass, along random directions.

`layer_verdict` calls `judge`. For random numbers u and a random direction v, u·f is one number; one
backward pass gives its derivative along v, a few forward passes measure it. Sums are in float64,
and every run starts from the same random state (`seed_all`), or dropout alone would differ.
Gradients are collected by hooks on leaves and not by `.grad`: a reentrant checkpoint delivers them
in parts. How numbers are drawn may change freely, but must not depend on the user's generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchfmri._model import run_backward
from torchfmri._verify.comparison import WRONG, GradientComparison, Judgement, explain
from torchfmri._verify.directional import (
    PRECISIONS,
    Precision,
    Scales,
    directions_for,
    measure_slope,
    norm_of,
    seed_all,
    typical_size,
)
from torchfmri._verify.varied_call import VariedCall, VariedTensor

T = TypeVar("T")

_SAFETY = 5.0  # by how much a numerical derivative may be worse than its estimated error


class UndifferentiableError(Exception):
    """Raised if there is nothing to compare; the message says why."""


class BackwardError(Exception):
    """Raised if the module's backward pass raised; the cause is its exception."""


class Problem(Protocol):
    """A function of tensors that is differentiated in two ways."""

    values: list[Tensor]
    variables: list[VariedTensor]

    def run(self, values: Sequence[Tensor], use: Callable[[list[Tensor]], T]) -> T:
        """Return what `use` makes of the outputs at `values`."""


def judge(
    problem: Problem,
    values: Sequence[Tensor],
    variables: Sequence[VariedTensor],
    directions: int,
    precision: Precision,
) -> list[Judgement]:
    """Compare the two derivatives along random directions, for each of `variables`.

    If they differ in any of `directions`, as many again and one more are tried.

    For a random cotangent u and a random direction v, u·f is one number. One backward pass gives
    its derivative along v (for any number of variables at once), and a few forward passes measure
    it. The cost therefore does not depend on how many numbers a tensor has.

    Raises:
        UndifferentiableError: There is no output to differentiate.
        BackwardError: The backward pass raised.
    """
    generator = torch.Generator().manual_seed(7)
    judgements = [Judgement(variable) for variable in variables]
    point = Point(problem, values)
    doubtful = judgements
    for number in range(2 * directions + 1):
        if number == directions:  # look more closely if not all directions agree
            doubtful = [each for each in judgements if any(c.excess > 1 for c in each.comparisons)]
        if not doubtful:
            break
        cotangents = point.draw(generator)
        slopes = _differentiate(problem, values, cotangents)
        for judgement in doubtful:
            line = _Curve(point, cotangents, judgement.variable, generator)
            judgement.comparisons.append(_compare(line, slopes, precision))
    for judgement in judgements:
        if judgement.status == WRONG:
            judgement.reason = explain(judgement)
    return judgements


class Point:
    """The point at which a problem is judged.

    Raises:
        UndifferentiableError: There is no floating-point output, or it holds NaN.
    """

    def __init__(self, problem: Problem, values: Sequence[Tensor]) -> None:
        self.problem, self.values = problem, values
        self.sizes = [typical_size(value) for value in values]
        self._outputs = problem.run(values, lambda found: [each.detach() for each in found])
        if not any(output.numel() for output in self._outputs):
            raise UndifferentiableError("it returns no floating-point numbers")
        if any(bool(output.isnan().any()) for output in self._outputs):
            raise UndifferentiableError("its output has NaN")

    def draw(self, generator: torch.Generator) -> list[Tensor]:
        """Return a random number for each number of the outputs; 0 if those are infinite."""
        return [
            torch.randn(each.shape, generator=generator, dtype=torch.float64, device="cpu").to(each)
            * each.isfinite()
            for each in self._outputs
        ]


def varies_by_itself(problem: Problem) -> bool:
    """Return whether two runs on the same numbers and random state differ."""
    first, second = (
        problem.run(problem.values, lambda found: [each.detach().clone() for each in found])
        for _ in range(2)
    )
    if len(first) != len(second):
        return True
    return not all(map(_are_equal, first, second))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are the same but for rounding in float64."""
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    size = float(one[one.isfinite()].abs().amax()) if one.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=1e-9 * size, equal_nan=True)


def gradient_varies(problem: Problem, values: Sequence[Tensor]) -> bool:
    """Return whether two backward passes over the same numbers give different gradients."""
    generator = torch.Generator().manual_seed(11)
    cotangents = Point(problem, values).draw(generator)
    first, second = (_differentiate(problem, values, cotangents, seed).gradients for seed in (1, 2))
    return any(
        norm_of(first[place] - second[place]) > 1e-6 * norm_of(first[place])
        for place in first.keys() & second.keys()
    )


class _Slopes(NamedTuple):
    """u·f, the sizes of f and of its rounding, and the gradient of u·f by place, if it arrives."""

    value: float
    size: float
    rounding: float
    gradients: dict[int, Tensor]


class _Curve:
    """The curve u·f along one random direction of one variable."""

    def __init__(
        self,
        point: Point,
        cotangents: Sequence[Tensor],
        variable: VariedTensor,
        generator: torch.Generator,
    ) -> None:
        self.point, self.cotangents = point, cotangents
        self.places = variable.places
        self.sizes = [point.sizes[place] for place in self.places]
        values = [point.values[place] for place in self.places]
        self.directions = directions_for(values, self.sizes, generator)
        self._moved = list(map(torch.empty_like, values))  # the same memory for every step

    def __call__(self, step: float) -> float:
        moved = list(self.point.values)
        for place, direction, room in zip(self.places, self.directions, self._moved, strict=True):
            moved[place] = torch.add(moved[place], direction, alpha=step, out=room)
        return self.point.problem.run(
            moved, lambda found: float(weighted_sum(self.cotangents, found).detach())
        )


def _compare(line: _Curve, slopes: _Slopes, precision: Precision) -> GradientComparison:
    analytic = spread = 0.0
    for place, size, direction in zip(line.places, line.sizes, line.directions, strict=True):
        gradient = slopes.gradients.get(place)
        if gradient is not None:
            analytic += _inner_product(gradient, direction)
            spread = math.hypot(spread, norm_of(gradient) * size)
    scale = spread if math.isfinite(spread) else 0.0
    rounding = max(slopes.rounding, precision.rounding * slopes.size)
    scales = Scales(scale, slopes.size, rounding)
    slope = measure_slope(line, slopes.value, analytic, scales, precision)
    scale = max(scale, abs(slope.value))
    allowed = precision.tolerance * scale + _SAFETY * slope.error
    return GradientComparison(analytic, slope, scale, allowed, slopes.size)


def _inner_product(one: Tensor, other: Tensor) -> float:
    if one.dtype != torch.float64:
        one, other = one.double(), other.double()
    return float(torch.dot(one.reshape(-1), other.reshape(-1)))


def _differentiate(
    problem: Problem, values: Sequence[Tensor], cotangents: Sequence[Tensor], seed: int = 0
) -> _Slopes:
    leaves = [value.detach().requires_grad_() for value in values]
    arrived: dict[int, Tensor] = {}

    def keep(place: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        before = arrived.get(place)  # a reentrant checkpoint delivers it in parts
        arrived[place] = dense if before is None else before + dense

    for place, leaf in enumerate(leaves):
        leaf.register_hook(partial(keep, place))  # type: ignore[no-untyped-call]

    def use(outputs: list[Tensor]) -> tuple[float, float, float]:
        total = weighted_sum(cotangents, outputs)
        sizes = [_finite_norm(each) for each in outputs]
        rounding = math.hypot(
            # A loss is often computed in float32, whatever comes in.
            *(
                PRECISIONS[each.dtype].rounding * size if each.dtype in PRECISIONS else 0.0
                for each, size in zip(outputs, sizes, strict=True)
            )
        )
        if total.requires_grad:
            arrived.clear()  # left there by a first derivative
            seed_all(seed)
            try:
                run_backward(total, leaves)
            except Exception as error:
                raise BackwardError from error
        return float(total.detach()), math.hypot(*sizes), rounding

    return _Slopes(*problem.run(leaves, use), arrived)


def _finite_norm(tensor: Tensor) -> float:
    norm = norm_of(tensor)
    return norm if math.isfinite(norm) else norm_of(tensor[tensor.isfinite()])


def weighted_sum(cotangents: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """Return u·f, in float64."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for u, output in zip(cotangents, outputs, strict=True):
        part = (u.double() * output.double()).sum()
        if not bool(part.isfinite()):  # 0 times infinity: where u is 0, the output does not count
            part = (u.double() * output.double().masked_fill(u == 0, 0.0)).sum()
        total = total + part.to(total.device)
    return total


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
