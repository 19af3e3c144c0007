"""Which axes of a layer's output are tokens, found from passes of two lengths: `resolve`.

`probe` calls it with the shapes it saw; `subject`, `row_order` and `live` then turn outputs into
(b, s, w) with the `Resolved` axis. The first arrangement in `AXES` that fits all passes with the
same sizes inside a token is taken, so a new one goes behind those that are likelier. Outputs of
another shape than expected must give None, not a guess. `first_tensor` says which tensor of a
layer's output is scanned; live hooks and passes must agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchfmri._torch import flatten

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TokenAxis:
    """How the output of a layer becomes (b, s, w).

    Attributes:
        name: The arrangement, such as "(b, s, ...)".
        expected: (b, s) and the sizes inside a token -> the shape of the output.
        rows: The output, b and s -> (b, s, w).
        inside: An output's shape, b and s -> the sizes inside a token; None where it does not fit.
        shared: Whether all batch elements share one row, so that its gradient is theirs together.
    """

    name: str
    expected: Callable[[int, int, Shape], Shape]
    rows: Callable[[Tensor, int, int], Tensor]
    inside: Callable[[Shape, int, int], Shape | None]
    shared: bool = False


def _fits(where: tuple[int, ...], *wanted: str) -> Callable[[Shape, int, int], Shape | None]:
    """Return a test: do these axes have the sizes b, s or 1? It gives the sizes of the others."""

    def inside(shape: Shape, b: int, s: int) -> Shape | None:
        sizes = {"b": b, "s": s, "bs": b * s, "1": 1}
        if len(shape) <= max(where):
            return None
        if any(shape[axis] != sizes[each] for axis, each in zip(where, wanted, strict=True)):
            return None
        return tuple(size for axis, size in enumerate(shape) if axis not in where)

    return inside


def _at_least_one(
    inside: Callable[[Shape, int, int], Shape | None], count: int
) -> Callable[..., Shape | None]:
    """Return `inside` for outputs with exactly `count` sizes inside a token, None for others."""

    def checked(shape: Shape, b: int, s: int) -> Shape | None:
        found = inside(shape, b, s)
        return found if found is not None and len(found) == count else None

    return checked


AXES = (
    TokenAxis(
        "(b, s, ...)",
        lambda b, s, inside: (b, s, *inside),
        lambda y, b, s: y.flatten(2) if y.ndim > 2 else y[..., None],
        _fits((0, 1), "b", "s"),
    ),
    TokenAxis(
        "(b * s, w)",
        lambda b, s, inside: (b * s, *inside),
        lambda y, b, s: y.reshape(b, s, -1),
        _fits((0,), "bs"),
    ),
    TokenAxis(
        "(b, heads, s, d)",
        lambda b, s, inside: (b, inside[0], s, inside[1]),
        lambda y, b, s: y.transpose(1, 2).flatten(2),
        _at_least_one(_fits((0, 2), "b", "s"), 2),
    ),
    TokenAxis(
        "(b, w, s)",
        lambda b, s, inside: (b, inside[0], s),
        lambda y, b, s: y.mT,
        _at_least_one(_fits((0, 2), "b", "s"), 1),
    ),
    TokenAxis(
        "(1, s, ...)",
        lambda b, s, inside: (1, s, *inside),
        lambda y, b, s: y.flatten(2).expand(b, -1, -1),
        _at_least_one(_fits((0, 1), "1", "s"), 1),
        shared=True,
    ),
    TokenAxis(
        "(s, w)",
        lambda b, s, inside: (s, *inside),
        lambda y, b, s: y.expand(b, -1, -1),
        _at_least_one(_fits((0,), "s"), 1),
        shared=True,
    ),
)
"""The arrangements that are known, the likeliest first."""


@dataclass(frozen=True)
class Resolved:
    """The token axis of one layer.

    Attributes:
        axis: The arrangement.
        inside: The sizes inside a token; their product is the number of units.
    """

    axis: TokenAxis
    inside: Shape

    @cached_property
    def width(self) -> int:
        """How many units the layer has."""
        return math.prod(self.inside)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether outputs are (b, s, w) as they come, as most are: nothing is computed then."""
        return self.axis is AXES[0] and len(self.inside) == 1

    def expected(self, b: int, s: int) -> Shape:
        """The shape of the output for b sequences of s tokens."""
        return self.axis.expected(b, s, self.inside)

    def rows(self, output: Tensor, b: int, s: int) -> Tensor | None:
        """(b, s, w), or None where the output has another shape than expected."""
        shape = output.shape
        if self._is_plain and shape == (b, s, self.width):
            return output
        if shape == self.expected(b, s):
            return self.axis.rows(output, b, s)
        if self.axis.shared and shape == (b, s, *self.inside):  # positions given for each of them
            return output.flatten(2)
        return None

    def is_shared(self, output: Tensor, b: int) -> bool:
        """Whether several batch elements share this output, and with it its gradient."""
        return self.axis.shared and b > 1 and output.shape[0] != b


def resolve(shapes: Sequence[tuple[Shape, int, int]]) -> Resolved | str:
    """The one arrangement that fits outputs of several lengths, or why there is none.

    Args:
        shapes: Output shape, b and s of each pass.
    """
    for axis in AXES:
        found = [axis.inside(*each) for each in shapes]
        first = found[0]
        if first is not None and all(each == first for each in found) and 0 not in first:
            return Resolved(axis, first)
    texts = ", ".join(f"{shape} for {b} x {s} tokens" for shape, b, s in shapes)
    return f"its output has no token axis: {texts}"


def first_tensor(output: object) -> Tensor | None:
    """The output itself, or element 0 of a tuple or of a mapping; None for others."""
    if type(output) is tuple and output and type(output[0]) is Tensor:
        output = output[0]
    elif not isinstance(output, Tensor):
        elements = flatten(output)
        if not elements:
            return None
        output = elements[0].tensor
    return output if output.is_floating_point() and not output.is_nested else None
