"""`TokenRecord`: one call of a layer with a rule, from what it read to its parameters' terms.

`capture` makes a record at each call, `arrivals` brings the gradient, `norms` may reduce both to
numbers, and `parts` makes `UsePart`s that `runs` joins. `Watched` describes the module, `Axis`
names the tokens. A model has hundreds of records per step: they use slots, keep tensors without
their graph, and hold the module weakly, since plans outlive blocks. The input is checked for writes
in place before it is used (`check_input`), because its values would be other ones by then.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._capture import TokenMask
from torchfmri._tokens.algebra.factors import Term, grouped
from torchfmri._tokens.algebra.reduced import Reduced
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.axes import TokenGrid, features_last, features_second
from torchfmri._tokens.rules.layer_rules import Rule
from torchfmri._torch import NO_BACKWARD, may_autocast
from torchfmri.exceptions import InspectionError


@dataclass(slots=True)
class Watched:
    """A module whose calls are captured.

    Attributes:
        layer: Its name.
        reference: To the module, weakly: plans outlive blocks, and must not keep models alive.
        rule: What its parameters' terms are; None for an owner, which is run again.
        parameters: Its own parameters that are watched: name in the module -> full name.
        below: Modules below whose weights it may use without calling them, by layer.
        reads_weights: Its code reads weights of modules below it, called or not.
        only_calls: It has no parameters of its own, and uses those below by calling their modules.
        is_shared: One of its parameters belongs to another module as well.
        stack: "encoder" or "decoder" where the model has both.
        is_plain: A call of it is described by what it read: there is no stack, and no state.
    """

    layer: str
    reference: weakref.ref[nn.Module]
    rule: Rule | None
    parameters: dict[str, str]
    below: dict[str, Watched] = field(default_factory=dict)
    is_shared: bool = False
    stack: str = ""
    reads_weights: bool = False
    only_calls: bool = False
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_plain = not self.stack and self.rule not in rules.STATEFUL

    @property
    def module(self) -> nn.Module:
        """The module, which whoever reads this keeps alive."""
        module = self.reference()
        assert module is not None
        return module


class TokenPass:
    """One pass of the model.

    Attributes:
        number: From 1; 0 before the first one.
        calls: How often each layer was called, as far as they were counted.
    """

    __slots__ = ("calls", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: dict[str, int] = defaultdict(int)


class Axis(NamedTuple):
    """Which tokens: the pass of the model, encoder or decoder, how many, and whose they are.

    `of` tells grids of the same size apart: the layer or argument that the tokens come from, "" for
    what the model was handed first.
    """

    run: int
    stack: str
    grid: tuple[int, int]
    of: str = ""

    def __str__(self) -> str:
        text = f"{self.grid[0]} x {self.grid[1]}"
        return f"{self.stack} {text}" if self.stack else text


class UsePart(NamedTuple):
    """What one call, or one re-run, adds to the token gradients of one parameter.

    Attributes:
        axis: Which tokens.
        rule: How it was found.
        mask: Which positions are padding.
        terms: The factors; None where numbers alone were kept.
        reduced: Those numbers; None where the factors were kept.
    """

    axis: Axis
    rule: str
    mask: TokenMask | None
    terms: list[Term] | None
    reduced: Reduced | None = None


class TokenRecord:
    """One call of a layer with a rule.

    Attributes:
        watched: The layer.
        within: The pass; `model` is what the model, or this stack of it, was handed, (b, s).
        mask: Which positions are padding.
        stack: Whose tokens they are, the encoder's or the decoder's.
        x: What the call read, at this `version` (None: it cannot change) and with these `strides`
            (where they matter).
        is_replayed: A checkpoint computes the call again, and brings x then.
        settings: What the rule asks the module for.
        spread_gradient: That of the addition which spread the output over the batch, whose rows
            have the tokens `spread_rows`.
        g: The gradient of the output, of this `shape`, from this `backward` pass.
        reduced: Numbers instead of both, by the parameter's name in the module.
        of: What the tokens belong to; see `Axis`.
        rows: The tokens of the rows, for each source of tokens, where they are not in the order
            that the shape suggests.
        is_second: The features are the second axis, though the layer has no say in that (PReLU).
    """

    __slots__ = (
        "__weakref__", "backward", "g", "is_replayed", "is_second", "mask", "model", "of",
        "reduced", "rows", "settings", "shape", "spread_gradient", "spread_rows", "stack",
        "strides", "version", "watched", "within", "x",
    )  # fmt: skip

    def __init__(self, watched: Watched, within: TokenPass, model: tuple[int, int] | None) -> None:
        self.watched, self.within, self.model = watched, within, model
        self.mask: TokenMask | None = None
        self.stack = ""
        self.x: Any = None
        self.version: int | None = None
        self.strides: tuple[int, ...] = ()
        self.is_replayed = False
        self.settings: Any = None
        self.spread_gradient: Tensor | None = None
        self.g: Tensor | None = None
        self.shape: tuple[int, ...] | None = None  # None: no gradient has come
        self.backward = NO_BACKWARD
        self.reduced: dict[str, Reduced] | None = None
        self.of = ""
        self.rows: tuple[Any, ...] = ()
        self.spread_rows: tuple[Any, ...] = ()
        self.is_second = False

    @property
    def is_alone(self) -> bool:
        """Whether no other call of the pass read the same parameters."""
        watched = self.watched
        return not watched.is_shared and self.within.calls.get(watched.layer, 0) <= 1

    def let_go_of_graph(self) -> None:
        """Keep what the call read without what it was computed from."""
        x = self.x
        if type(x) is tuple:
            self.x = tuple(each.detach() for each in x)
        elif x is not None and x.requires_grad:
            self.x = x.detach()

    def spread(self, gradient: Tensor) -> None:
        """Take the gradient of the addition that spread this output over the batch."""
        self.spread_gradient = gradient.detach()

    def before_broadcast(self, gradient: Tensor) -> Tensor:
        """The gradient of the output for each batch element, where that was seen."""
        spread, self.spread_gradient = self.spread_gradient, None
        if spread is None or spread.shape == gradient.shape or not sums_to(spread, gradient):
            return gradient  # nothing was spread: a batch of one, or an axis of one before it
        if self.x is not None:
            self.x = self._spread_input(spread)
        self.of, self.rows = "", self.spread_rows  # the tokens that it was added to
        return spread

    def _spread_input(self, spread: Tensor) -> Tensor:
        """The input repeated for every batch element."""
        x: Tensor = self.x
        features = 1 if x.is_floating_point() else 0
        x = x[None] if x.ndim - features < spread.ndim - 1 else x
        return x.expand(spread.shape[0], *x.shape[1:])

    def without_tail(self, gradient: Tensor) -> Tensor:
        """The gradient of a causal convolution without what it computed beyond the sequence."""
        model = self.model
        if model is None or gradient.ndim != 3:
            return gradient
        b, _, length = gradient.shape
        if b != model[0] or length <= model[1] or bool(gradient[..., model[1] :].any()):
            return gradient
        self.rows = tuple(
            each._replace(numbers=each.numbers.view(b, length)[:, : model[1]].reshape(-1))
            for each in self.rows
        )
        return gradient[..., : model[1]]

    # -- tokens ------------------------------------------------------------------------------

    @property
    def features(self) -> int:
        """How many of the last axes are features."""
        rule = self.watched.rule
        if rule is rules.layer_norm or rule is rules.rms_norm:
            return len(self.watched.module.normalized_shape)  # type: ignore[arg-type]
        return 1

    def grid(self) -> TokenGrid:
        """The tokens of this call."""
        assert self.shape is not None
        return self.grid_of(self.shape)

    def grid_of(self, shape: tuple[int, ...]) -> TokenGrid:
        """The tokens of a call with an output of this shape, in the order that it suggests."""
        watched = self.watched
        rule = watched.rule
        if rule in rules.CHANNELS_SECOND or self.is_second:
            return features_second(shape, rules.spatial_axes(watched.module))
        if rule is rules.embedding and "relative" in watched.layer:
            return TokenGrid(1, shape[0], (0, 1))  # (query, key, heads): the query's position
        lead = tuple(shape[: len(shape) - self.features])
        if self.rows:  # each row by itself
            count = math.prod(lead)
            return TokenGrid(count, 1, tuple(range(len(lead))))
        return features_last(lead, self.model, self.strides)

    # -- factors -----------------------------------------------------------------------------

    def terms(self) -> dict[str, Term]:
        """The factors of its parameters, by their names in the module."""
        rule = rules.prelu_at_positions if self.is_second else self.watched.rule
        assert rule is not None
        assert self.g is not None
        self.check_input()
        settings = self.watched.module if self.settings is None else self.settings
        kind = self.g.device.type
        plain = torch.autocast(kind, enabled=False) if may_autocast() else nullcontext()
        with torch.no_grad(), plain:
            found = rule(settings, self.x, self.g, self.grid())
        return {key: found[key] for key in self.watched.parameters if key in found}

    def check_input(self) -> None:
        """Refuse an input that is not there, or that somebody has written into since."""
        layer = self.watched.layer
        if self.x is None:
            raise InspectionError(
                f"The input of {layer!r} was not kept: it ran inside a checkpoint whose second "
                "pass did not bring it back. Write token_gradients(..., keep='factors')."
            )
        first = self.x[0] if type(self.x) is tuple else self.x
        if self.version is not None and first._version != self.version:
            raise InspectionError(
                f"The input of {layer!r} was written in place after the call, so its values are "
                "gone. Let the model write into a copy."
            )

    # -- parts -------------------------------------------------------------------------------

    def parts(self, keys: Iterable[str]) -> list[tuple[str, UsePart]]:
        """What the call adds to parameters of its module, with their names there."""
        assert self.watched.rule is not None
        name = self.watched.rule.__name__
        grid = self.grid()
        found: list[tuple[str, UsePart]] = []
        if self.reduced is not None:
            for key in keys:
                if key in self.reduced:
                    each = self.reduced[key]
                    axis = self.axis(each.tokens, grid)
                    found.append((key, UsePart(axis, name, self.mask, None, each)))
            return found
        terms = self.terms()
        for key in keys:
            if key in terms:
                term = terms[key]
                if self.rows:
                    found += [(key, part) for part in self._parts_by_row(term, name)]
                    continue
                axis = self.axis(term.tokens, grid)
                found.append((key, UsePart(axis, name, self.mask, [term])))
        return found

    def _parts_by_row(self, term: Term, name: str) -> Iterator[UsePart]:
        """A term that has one row after the other, put under the tokens of its rows."""
        for numbers, grid, stack, of in self.rows:
            if term.tokens != len(numbers):
                raise InspectionError(
                    f"{self.watched.layer!r} has {term.tokens} rows, and {len(numbers)} were "
                    "followed. Does a forward hook of yours return a part of the output?"
                )
            kept = (numbers >= 0).nonzero()[:, 0]
            token, some = numbers[kept], term.at(kept)
            axis = Axis(self.within.number, stack, grid, of)
            yield UsePart(axis, name, self.mask, [grouped(token, math.prod(grid), some)])

    def axis(self, tokens: int, grid: TokenGrid) -> Axis:
        """The tokens of a parameter: those of the call, or as many as it has of its own."""
        b, s = grid.b, grid.s
        run = self.within.number
        whole = (b, s) if tokens == b * s else (b, tokens // max(1, b))
        return Axis(run, self.stack, whole, self.of)


def sums_to(spread: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is the sum of another one over the batch: nobody else read the output."""
    total = spread.sum(0) if gradient.ndim == spread.ndim - 1 else spread.sum(0, keepdim=True)
    if total.shape != gradient.shape:
        return False
    if not bool(gradient.isfinite().all()):  # nothing can be compared, and nothing is told apart
        return True
    precision = 1e-9 if gradient.dtype == torch.float64 else 1e-3 if gradient.itemsize > 2 else 0.05
    scale = float(spread.abs().amax()) * len(spread) if spread.numel() else 1.0
    return torch.allclose(total, gradient, rtol=precision, atol=precision * scale)
