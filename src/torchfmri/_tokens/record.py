"""One call of a layer that has a rule: what it read, what came back, or numbers made of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._padding import TokenMask
from torchfmri._tokens import rules
from torchfmri._tokens.axes import Grid, features_last, features_second
from torchfmri._tokens.factors import Term
from torchfmri._tokens.rules import Rule
from torchfmri._torch_private import NO_BACKWARD, current_backward
from torchfmri.exceptions import InspectionError


@dataclass(slots=True)
class Watched:
    """A module whose calls are captured.

    Attributes:
        layer: Its name.
        module: The module.
        rule: What its parameters' terms are; None for an owner, which is run again.
        parameters: Its own parameters that are watched: name in the module -> full name.
        below: Modules below whose weights it may use without calling them, by layer.
        reads_weights: Its code reads weights of modules below it, called or not.
        is_shared: One of its parameters belongs to another module as well.
        stack: "encoder" or "decoder" where the model has both.
    """

    layer: str
    module: nn.Module
    rule: Rule | None
    parameters: dict[str, str]
    below: dict[str, Watched] = field(default_factory=dict)
    is_shared: bool = False
    stack: str = ""
    reads_weights: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Which tokens: the pass of the model, encoder or decoder, and how many there are."""

    run: int
    stack: str
    grid: tuple[int, int]

    def __str__(self) -> str:
        text = f"{self.grid[0]} x {self.grid[1]}"
        return f"{self.stack} {text}" if self.stack else text


@dataclass(slots=True)
class Part:
    """What one call, or one re-run, adds to the token gradients of one parameter.

    Attributes:
        axis: Which tokens.
        rule: How it was found.
        mask: Which positions are padding.
        terms: The factors; None where norms alone were kept.
        squares: (t,), the squared norms; None until asked for.
        probes: Computes the gradients between the check's random vectors, (t,); likewise.
    """

    axis: Axis
    rule: str
    mask: TokenMask | None
    terms: list[Term] | None
    squares: Tensor | None = None
    probes: Callable[[], Tensor] | None = None


# Squared norms, (t,), and what computes the probes, by the parameter's name.
Numbers: TypeAlias = Callable[[], dict[str, tuple[Tensor, Callable[[], Tensor]]]]


class Record:
    """One call of a layer with a rule; a hook on the call's output."""

    __slots__ = (
        "_arrived", "_spread", "backward", "g", "is_replayed", "mask", "model", "numbers", "run",
        "settings", "shape", "stack", "strides", "version", "watched", "x",
    )  # fmt: skip

    def __init__(
        self,
        watched: Watched,
        run: int,
        model: tuple[int, int] | None,
        mask: TokenMask | None,
        arrived: Callable[[Record, Tensor, int], None],
    ) -> None:
        self.watched, self.run, self.model, self.mask = watched, run, model, mask
        self.stack, self._arrived = watched.stack, arrived
        self.x: Any = None
        self.version, self.is_replayed = 0, False
        self.g: Tensor | None = None
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()
        self.backward = NO_BACKWARD
        self.numbers: Numbers | None = None
        self.settings: Any = watched.module
        self._spread: Tensor | None = None

    def __call__(self, gradient: Tensor) -> None:
        self._arrived(self, gradient, current_backward())

    def spread(self, gradient: Tensor) -> None:
        """Take the gradient of the addition that spread this output over the batch."""
        self._spread = gradient.detach()

    @property
    def is_spread(self) -> bool:
        """Whether the gradient of such an addition has come."""
        return self._spread is not None

    def before_broadcast(self, gradient: Tensor) -> Tensor:
        """The gradient of the output for each batch element, where that was seen."""
        spread, self._spread = self._spread, None
        if spread is None or not sums_to(spread, gradient):
            return gradient
        if self.x is not None:
            self.x = self._spread_input(spread)
        return spread

    def _spread_input(self, spread: Tensor) -> Tensor:
        """The input repeated for every batch element."""
        x: Tensor = self.x
        whole = x.ndim == spread.ndim - 1 or x.is_floating_point()
        x = x if whole else x[None]
        return x.expand(spread.shape[0], *x.shape[1:])

    def without_tail(self, gradient: Tensor) -> Tensor:
        """The gradient of a causal convolution without what it computed beyond the sequence."""
        model = self.model
        if self.watched.rule is not rules.convolution or model is None or gradient.ndim != 3:
            return gradient
        b, _, length = gradient.shape
        if b != model[0] or length <= model[1] or bool(gradient[..., model[1] :].any()):
            return gradient
        return gradient[..., : model[1]]

    # -- tokens ------------------------------------------------------------------------------

    def grid(self) -> Grid:
        """The tokens of this call."""
        module = self.watched.module
        if self.watched.rule in rules.CHANNELS_SECOND:
            return features_second(self.shape, rules.spatial_axes(module))
        if self.watched.rule is rules.embedding and "relative" in self.watched.layer:
            return Grid(1, self.shape[0], (0, 1))  # (query, key, heads): the query's position
        normalised = getattr(module, "normalized_shape", (0,))
        features = len(normalised) if isinstance(normalised, tuple) else 1
        return features_last(self.shape[: len(self.shape) - features], self.model, self.strides)

    # -- factors -----------------------------------------------------------------------------

    def parts(self) -> dict[str, Part]:
        """What the call adds to its parameters, by their names in the module."""
        rule = self.watched.rule
        assert rule is not None
        assert self.g is not None
        self.check_input()
        grid = self.grid()
        with torch.no_grad(), torch.autocast(self.g.device.type, enabled=False):
            terms = rule(self.settings, self.x, self.g, grid)
        return {
            key: Part(self._axis(terms[key].tokens, grid), rule.__name__, self.mask, [terms[key]])
            for key in self.watched.parameters
            if key in terms
        }

    def check_input(self) -> None:
        """Refuse an input that is not there, or that somebody has written into since."""
        layer = self.watched.layer
        if self.x is None:
            raise InspectionError(
                f"The input of {layer!r} was not kept: it ran inside a checkpoint whose second "
                "pass did not bring it back. Write token_gradients(..., keep='factors')."
            )
        first = self.x[0] if isinstance(self.x, tuple) else self.x
        if not first.is_inference() and first._version != self.version:
            raise InspectionError(
                f"The input of {layer!r} was written in place after the call, so its values are "
                "gone. Let the model write into a copy."
            )

    # -- norms alone -------------------------------------------------------------------------

    def reduced_parts(self) -> dict[str, Part] | None:
        """The parts, if the call was reduced to numbers."""
        if self.numbers is None:
            return None
        assert self.watched.rule is not None
        grid, rule = self.grid(), self.watched.rule.__name__
        return {
            key: Part(self._axis(len(found[0]), grid), rule, self.mask, None, *found)
            for key, found in self.numbers().items()
            if key in self.watched.parameters
        }

    def _axis(self, tokens: int, grid: Grid) -> Axis:
        """The tokens of a parameter: those of the call, or as many as it has of its own."""
        own = (grid.b, tokens // max(1, grid.b))
        return Axis(self.run, self.stack, grid.shape if tokens == grid.b * grid.s else own)


def sums_to(spread: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is the sum of another one over the batch: nobody else read the output."""
    total = spread.sum(0) if gradient.ndim == spread.ndim - 1 else spread.sum(0, keepdim=True)
    if total.shape != gradient.shape:
        return False
    precision = 1e-9 if gradient.dtype == torch.float64 else 1e-3 if gradient.itemsize > 2 else 0.05
    scale = float(spread.abs().amax()) * len(spread) if spread.numel() else 1.0
    return torch.allclose(total, gradient, rtol=precision, atol=precision * scale)
