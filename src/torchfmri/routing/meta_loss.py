"""What the routing parameters learn from: Goodness functions, and meta losses that use them.

A Goodness says which units are good for which token. Another one is a few lines: take a `Signals`,
return (b, s, o), larger where a unit should be on. It is scaled by MAS before it is compared, so
its size does not matter, and it receives no gradient.

A meta loss is a number per call, of its routing and its signals; `LearningDynamics` adds them up.
Any function (routing, signals) -> scalar will do. Gradients must flow into `routing` alone: signals
are what it is compared with. Padding never counts. All of these are public, and results of earlier
experiments rest on them: add one instead of changing one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from torchfmri._arguments import check_real, require
from torchfmri.exceptions import InspectionError
from torchfmri.routing.scaling import TOKENS_AND_UNITS, UNITS, jensen_shannon, mas, shares
from torchfmri.routing.signals import Signals
from torchfmri.routing.sparse_proto_linear import Routing

Goodness: TypeAlias = Callable[[Signals], Tensor]
EPSILON = 1e-6


def worth(signals: Signals) -> Tensor:
    """Return MAS(MAS(contribution) * MAS(relevance)) / (MAS(cost) + eps): the default."""
    return _worth(signals, UNITS)


def worth_over_tokens(signals: Signals) -> Tensor:
    """Return `worth` with each maximum taken over tokens and units together, which keeps |x_t|."""
    return _worth(signals, TOKENS_AND_UNITS)


def _worth(signals: Signals, over: tuple[int, ...]) -> Tensor:
    gain = mas(mas(signals.contribution, over) * mas(signals.relevance, over), over)
    return gain / (mas(signals.cost, over) + EPSILON)


def helpfulness(signals: Signals) -> Tensor:
    """Return how much a unit lowers the loss of this token, to first order; 0 if it raises it."""
    return signals.effect.relu()


def agreement(signals: Signals) -> Tensor:
    """Return the contribution, if the other tokens would move the unit the same way as this one.

    A unit is to keep the tokens that teach it one thing, and to let go of those that pull it
    elsewhere. This needs the gradient of every token by itself.
    """
    return mas(signals.contribution) * signals.agreement.relu()


def harmony(signals: Signals) -> Tensor:
    """Return contribution times (1 + agreement) / 2: only conflict takes away from it."""
    return signals.contribution * (1 + signals.agreement)


MetaLoss: TypeAlias = Callable[[Routing, Signals], Tensor]
_AXES = {"units": UNITS, "tokens_and_units": TOKENS_AND_UNITS}


@dataclass(frozen=True)
class Divergence:
    """The Jensen-Shannon divergence between routing and Goodness, as a mean over tokens.

    Both are scaled by MAS and divided by their sum. Padding does not count; tokens that nothing
    but rounding came back to, such as the query of the first position, add nothing.

    Attributes:
        goodness: A function of the signals.
        over: "units": one distribution per token. "tokens_and_units": one of all tokens together,
            so that it matters which tokens a unit is good for.
        weight: Factor in front of it.

    Examples:
        >>> meta_loss = Divergence(lambda signals: signals.contribution, weight=0.5)
    """

    goodness: Goodness = worth
    over: str = "units"
    weight: float = 1.0

    def __post_init__(self) -> None:
        meaning = "give a function of the signals, such as torchfmri.routing.worth"
        require(callable(self.goodness), "goodness", self.goodness, meaning)
        check_real("weight", self.weight, "give a number, such as 1.0")
        if self.over not in _AXES:
            known = ", ".join(map(repr, _AXES))
            raise InspectionError(f"over={self.over!r}: choose one of {known}.")

    def __call__(self, routing: Routing, signals: Signals) -> Tensor:
        """Return the divergence, with a gradient to the routing alone."""
        with torch.no_grad():
            good = self.goodness(signals)
            if good.shape != routing.logits.shape:
                raise InspectionError(
                    f"The Goodness of layer {signals.call.layer!r} has the shape "
                    f"{tuple(good.shape)}; give {tuple(routing.logits.shape)}, one number per "
                    "token and unit."
                )
            kept = signals.mask
            if kept is not None:
                good = good * kept[..., None]
        axes = _AXES[self.over]
        logits = routing.logits
        if axes == TOKENS_AND_UNITS:
            if kept is not None:
                logits = logits * kept[..., None]
            return self.weight * jensen_shannon(shares(logits, axes), shares(good, axes), axes)
        each = jensen_shannon(shares(logits), shares(good)) * _felt(signals, good)
        count = each.numel() if kept is None else kept.sum().clamp_min(1)
        return self.weight * each.sum() / count


def _felt(signals: Signals, good: Tensor) -> Tensor:
    """Return (b, s) whether a token's gradient is more than rounding and a unit is good for it."""
    largest = signals.relevance.amax(-1)
    rounding = 16 * torch.finfo(largest.dtype).eps * largest.amax()
    return (largest > rounding) & (good > 0).any(-1)


@dataclass(frozen=True)
class Price:
    """A plain L1 penalty: the mean of the routing weights, times a weight.

    Attributes:
        weight: Factor in front of it.

    Examples:
        >>> meta_loss = Price(0.1)
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_real("weight", self.weight, "give a number, such as 1.0")

    def __call__(self, routing: Routing, signals: Signals) -> Tensor:
        """Return the price of all routes of this call."""
        if signals.mask is None:
            return self.weight * routing.weights.mean()
        kept = signals.mask[..., None]
        count = kept.sum().clamp_min(1) * routing.weights.shape[-1]
        return self.weight * (routing.weights * kept).sum() / count
