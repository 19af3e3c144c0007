"""The two functions of the meta stream: MAS, and the divergence of what it scales.

The layer itself, the Goodness functions and `Divergence` use them. `mas` and `jensen_shannon` are
public. All of them return 0 and never NaN where everything is 0, which happens for tokens that
reach no unit; hence the divisions by at least the smallest positive number. How they are computed
may change freely.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = (-1,)
"""Scale along units: each token by itself."""
TOKENS_AND_UNITS = (-3, -2, -1)
"""Scale over all tokens and units of a call (b, s, o) together."""


def mas(x: Tensor, over: tuple[int, ...] = UNITS) -> Tensor:
    """Return ReLU(x / max|x|): non-negative, at most 1, and 0 where everything is 0.

    Args:
        x: (b, s, o), or anything else with units last.
        over: The axes over which the maximum is taken, `UNITS` by default.
    """
    largest = x.abs().amax(over, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.relu(x) / largest


def shares(x: Tensor, over: tuple[int, ...] = UNITS) -> Tensor:
    """Return MAS(x) divided by its sum, which adds up to 1; 0 if everything is 0 or negative.

    The maximum cancels against the sum and is not computed.
    """
    positive = torch.relu(x)
    return positive / positive.sum(over, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def jensen_shannon(p: Tensor, q: Tensor, over: tuple[int, ...] = UNITS) -> Tensor:
    """Return the Jensen-Shannon divergence of two distributions, in nats (0 to log 2).

    The gradient goes to p; q is what p is compared with.

    Args:
        p: Non-negative, adding up to 1 over the axes `over`.
        q: The distribution to compare with, of the same shape.
        over: The axes of one distribution.
    """
    tiny = torch.finfo(p.dtype).tiny
    with torch.no_grad():
        middle = ((p + q) / 2).clamp_min_(tiny).log_()
        slope = p.clamp_min(tiny).log_().sub_(middle)
        rest = q.clamp_min(tiny).log_().sub_(middle).mul_(q).sum(over)
    # With m = (p + q) / 2, the derivative by p of the whole is log(p / m) / 2: the other terms
    # cancel. So p log(p / m) with the logarithm held constant has the right value and gradient.
    return ((p * slope).sum(over) + rest) / 2
