"""What one call of a SparseProtoLinear says about every token and unit, after a backward pass.

`LearningDynamics` makes a `Signals` from what `capture` kept and hands it to the Goodness
functions. Nothing of size (b, s, o, i) is formed: the gradient of token t in unit o is g_to x_t, so
norms and dot products have closed forms. `test_routing_signals.py` compares them with the formed
tensors in float64. `Signals` is public.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from torchfmri._capture import CallKey
from torchfmri.exceptions import InspectionError

TOKEN, AGGREGATE = "token", "aggregate"
SIGNALS = (TOKEN, AGGREGATE)
"""Whose learning cost: each token's own, or one of the whole batch for all of them."""


@dataclass(frozen=True)
class Factors:
    """The tensors captured of one call; the gradient of token t in unit o is g_to x_t.

    Attributes:
        x: The input of the computation, (b, s, i).
        g: dL/d computation output, (b, s, o).
        y: The masked output, (b, s, o).
        length: |x_t|, (b, s, 1); layers that read one tensor share it.
        total: The gradient that the whole pass brought to the weight, (o, i); None unless asked
            for.
    """

    x: Tensor
    g: Tensor
    y: Tensor
    length: Tensor
    total: Tensor | None = None


@dataclass(frozen=True)
class Signals:
    """Three numbers per token and unit of one call, (b, s, o) each, and how to get more.

    A Goodness is a function of this record. Nothing of size (b, s, o, i) is formed for any of it.

    Attributes:
        call: The layer, and which call of it.
        contribution: |masked output|.
        relevance: |dL/d computation output|.
        cost: The learning cost: the norm of the gradient of this unit's weights, of this token
            alone (`token`) or of the whole batch (`aggregate`, the same for every token).
        mask: (b, s), False where a position is padding; None if all count.

    Examples:
        >>> def cheap(signals):
        ...     return signals.contribution / (signals.cost + 1e-6)
    """

    call: CallKey
    contribution: Tensor
    relevance: Tensor
    cost: Tensor
    mask: Tensor | None
    factors: Factors = field(repr=False)
    route: Callable[[], Tensor] = field(repr=False)

    @cached_property
    def weights(self) -> Tensor:
        """The routing weights, (b, s, o), computed from x when they are asked for."""
        return self.route()

    @property
    def effect(self) -> Tensor:
        """By how much the loss is smaller with the unit on than off, to first order, (b, s, o).

        -(dL/d weight) weight = -(dL/d masked output) (masked output): positive where a unit helps.
        """
        tiny = torch.finfo(self.weights.dtype).tiny
        # g carries one factor of the weight already, the masked output another.
        return (
            -self.factors.g.to(self.weights)
            * self.factors.y.to(self.weights)
            / (self.weights.clamp_min(tiny))
        )

    @property
    def agreement(self) -> Tensor:
        """The cosine of each token's gradient in a unit with that of all other tokens, (b, s, o).

        Positive where the rest of the batch would move the unit's weights the same way, negative
        where this token is in conflict with them. Exact: with T_o the sum over tokens,
        <g x, T - g x> and |T - g x| have closed forms in g, |x_t|, x_t . T_o and |T_o|. Where no
        other token moves the unit, or what they want cannot be told from rounding, it is 0.
        """
        x, g = self.factors.x.to(self.relevance), self.factors.g.to(self.relevance)
        if self.mask is not None:
            g = g * self.mask[..., None]
        tiny = torch.finfo(g.dtype).tiny
        # A cosine does not depend on sizes, and squares of small gradients would underflow.
        g = g / g.abs().amax(tuple(range(g.ndim - 1)), keepdim=True).clamp_min(tiny)
        total = g.flatten(0, -2).mT @ x.flatten(0, -2)
        along = g * (x @ total.mT)
        size = (g * self.factors.length).abs()
        own, whole = size.square(), total.square().sum(-1)
        rest = whole - 2 * along + own
        rounding = 64 * torch.finfo(own.dtype).eps * (whole + own)
        cosine = (along - own) / (size * rest.clamp_min(0).sqrt()).clamp_min(tiny)
        return torch.where(rest > rounding, cosine, 0.0).clamp(-1, 1)


def read_signals(
    call: CallKey,
    factors: Factors,
    mask: Tensor | None,
    signal: str,
    route: Callable[[], Tensor],
) -> Signals:
    """Return the signals of one call.

    Args:
        call: Which.
        factors: What was captured of it.
        mask: Which positions count.
        signal: `token` or `aggregate`.
        route: Computes its routing weights, detached.
    """
    dtype = factors.length.dtype
    relevance = factors.g.abs().to(dtype)
    if signal == TOKEN:
        cost = relevance * factors.length
    else:
        if factors.total is None:
            raise InspectionError(
                f"The weight of layer {call.layer!r} received no gradient, and signal='aggregate' "
                "needs one; is it frozen?"
            )
        rows = torch.linalg.vector_norm(factors.total.to(dtype), dim=-1)
        cost = rows.expand_as(relevance)
    contribution = factors.y.abs().to(dtype)
    return Signals(
        call=call,
        contribution=contribution,
        relevance=relevance,
        cost=cost,
        mask=mask,
        factors=factors,
        route=route,
    )


def require_signal(signal: str) -> str:
    """Return `signal`, or raise if there is no such signal."""
    if signal not in SIGNALS:
        raise InspectionError(f"signal={signal!r}: choose one of {', '.join(map(repr, SIGNALS))}.")
    return signal
