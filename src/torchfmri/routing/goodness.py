"""Which units are good for which token: plain functions of a call's signals.

`Divergence` takes one of these as its `goodness`. Another Goodness is a few lines: take a
`Signals`, return (b, s, o), larger where a unit should be on. It is scaled by MAS before it is
compared, so its size does not matter, and it receives no gradient. The functions are public, and
results of earlier experiments rest on them: add one instead of changing one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from torchfmri.routing.scaling import TOKENS_AND_UNITS, UNITS, mas
from torchfmri.routing.signals import Signals

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
