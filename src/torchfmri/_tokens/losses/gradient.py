"""`TokenLossGradient`: the gradient of each token's own loss for one parameter.

`loss_pass` makes it from `Computed`, and users get it by `tokens[name]`. Norms are always there.
The rest is either what was asked for in `backward(...)` or computed from kept factors; a method
that finds neither must name the argument to give, because the gradients are gone by then. Blocks
are the tokens of one chunk, in order. `project` uses the same map as per="position", so that both
kinds can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfmri._arguments import check_tensor
from torchfmri._tokens.algebra.block import TermBlock
from torchfmri._tokens.algebra.precision import in_full
from torchfmri._tokens.algebra.sketch import Sketch
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True, slots=True)
class Computed:
    """What was computed for one parameter while its gradients passed by, tokens flattened.

    Attributes:
        squares: Squared norms, (t,).
        blocks: The factors, where they were kept.
        sketches: (k, seed) -> (t, k).
        dots: With the direction that was given, (t,).
    """

    squares: Tensor
    blocks: Sequence[TermBlock] | None = None
    sketches: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    dots: Tensor | None = None


class TokenLossGradient:
    """The gradient of each token's own loss with respect to one parameter.

    Unlike the gradient through a position it reaches the parameter through every position that
    the token could see. Its shape is (b, s, *parameter.shape), and nothing of that size is formed.

    Attributes:
        name: Of the parameter.
        rule: How its gradients were found; `coverage()` lists it for all of them.
        residual: How far the tokens' gradients are from adding up to that of the whole loss,
            relative; checked under a random map, once plainly and once with a weight per token.
        note: A reservation, or "".

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 5)
        >>> with torchfmri.token_gradients(model, per="token_loss") as tokens:
        ...     tokens.backward(model(torch.randn(1, 4, 3)).square().sum(-1))
        >>> tokens["weight"].norm().shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        grid: tuple[int, ...],
        computed: Computed,
        *,
        rule: str = "",
        residual: float = 0.0,
        note: str = "",
    ) -> None:
        self.name, self.rule, self.residual, self.note = name, rule, residual, note
        self._shape, self._grid, self._computed = shape, grid, computed

    @property
    def shape(self) -> torch.Size:
        """(b, s, *parameter.shape)."""
        return torch.Size((*self._grid, *self._shape))

    def __repr__(self) -> str:
        kept = "norms" if self._computed.blocks is None else "factors"
        return (
            f"TokenLossGradient({self.name!r}, shape={tuple(self.shape)}, rule={self.rule!r}, "
            f"keep={kept!r})"
        )

    @property
    def has_dots(self) -> bool:
        """Whether a direction was given for it."""
        return self._computed.dots is not None

    def squares(self) -> Tensor:
        """The squared norms, (b, s)."""
        return self._computed.squares.view(self._grid)

    def norm(self) -> Tensor:
        """The Euclidean norm of each token's gradient, (b, s)."""
        return self.squares().sqrt()

    @in_full
    def project(self, k: int, seed: int = 0) -> Tensor:
        """Each token's gradient under a random linear map to k numbers, (b, s, k).

        The map is that of `per="position"`: it depends on the parameter's name and the seed.
        """
        found = self._computed.sketches.get((k, seed))
        if found is None:
            write = f"project={k}" if seed == 0 else f"project={k}, seed={seed}"
            sketch = Sketch(self.name, self._shape, k, seed)
            blocks = self._blocks(f"project({k}, seed={seed})", write)
            found = torch.cat([each.precise().sketches(sketch) for each in blocks])
        return found.view(*self._grid, k)

    @in_full
    def dot(self, direction: Tensor | None = None) -> Tensor:
        """The inner product of each token's gradient with one direction, (b, s).

        Args:
            direction: Of the parameter's shape; without it the one given to `backward(dot=...)`.
        """
        if direction is None:
            if self._computed.dots is None:
                raise InspectionError(
                    f"No direction was given for {self.name!r}. Write tokens.backward(losses, "
                    f"dot={{{self.name!r}: direction}})."
                )
            return self._computed.dots.view(self._grid)
        check_direction(self.name, direction, self._shape)
        blocks = self._blocks("dot(direction)", f"dot={{{self.name!r}: direction}}")
        found = torch.cat([each.precise().dots(direction) for each in blocks])
        return found.view(self._grid)

    @in_full
    def gram(self) -> Tensor:
        """The inner product of every two tokens' gradients, (b * s, b * s), from kept factors."""
        blocks = self._blocks("gram()")
        count = self._computed.squares.numel()
        result = self._computed.squares.new_zeros(count, count)
        first = 0
        for number, one in enumerate(blocks):
            precise, second = one.precise(), first
            rows = slice(first, first + one.tokens)
            for other in blocks[number:]:
                columns = slice(second, second + other.tokens)
                found = precise.gram(other.precise())
                result[rows, columns], result[columns, rows] = found, found.mT
                second += other.tokens
            first += one.tokens
        return result

    @in_full
    def sum(self, mask: Tensor | None = None) -> Tensor:
        """The gradients of some tokens added up, of the parameter's shape.

        Args:
            mask: (b, s), booleans or weights; without it all tokens.
        """
        if mask is not None:
            check_tensor("mask", mask, f"booleans or weights {self._grid}, or None")
        weights = self._computed.squares.new_ones(self._grid) if mask is None else mask
        if tuple(weights.shape) != self._grid:
            raise InspectionError(
                f"sum(mask): the mask is {tuple(weights.shape)}, the losses are {self._grid}."
            )
        blocks = self._blocks("sum()")
        parts = torch.split(weights.flatten(), [each.tokens for each in blocks])
        totals = [each.precise().total(part) for each, part in zip(blocks, parts, strict=True)]
        return torch.stack(totals).sum(0)

    @in_full
    def __getitem__(self, where: int | tuple[int, ...]) -> Tensor:
        """The whole gradient of one token: `gradient[b, s]`, of the parameter's shape."""
        places = torch.arange(self._computed.squares.numel(), device="cpu").view(self._grid)[where]
        if places.ndim:
            raise InspectionError(
                f"Give one number for each axis of the losses {self._grid}, not {where!r}."
            )
        token = int(places)
        for block in self._blocks("[b, s]"):
            if token < block.tokens:
                return block.trimmed(slice(token, token + 1)).precise().dense()[0]
            token -= block.tokens
        raise IndexError(where)

    def _blocks(self, wanted: str, instead: str = "") -> Sequence[TermBlock]:
        if self._computed.blocks is None:
            other = f"tokens.backward(losses, {instead}), or " if instead else ""
            raise InspectionError(
                f"{wanted} of {self.name!r} was not computed, and the gradients are gone. Write "
                f"{other}tokens.backward(losses, keep='factors') to ask for it afterwards."
            )
        return self._computed.blocks


def check_direction(name: str, direction: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a direction has the shape of its parameter."""
    check_tensor("direction", direction, f"of the shape of {name!r}, {shape}")
    if tuple(direction.shape) != shape:
        raise InspectionError(
            f"The direction for {name!r} has the shape {tuple(direction.shape)}, the parameter "
            f"has {shape}."
        )
