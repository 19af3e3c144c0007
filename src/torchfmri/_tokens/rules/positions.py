"""The generic exact way: one backward pass through a layer per token position.

It is exact where the layer works position by position, that is, where what position t returns
depends on what position t was given and on nothing else. That is checked for every position.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchfmri._tokens.algebra.factors import Term
from torchfmri._tokens.rules.sources import TokenSource
from torchfmri._tokens.rules.uses import NotUnderstoodError

_MOST = 4096


def position_terms(
    owner: Any, pairs: list[tuple[Tensor, Tensor]], leaves: list[Tensor]
) -> tuple[TokenSource, list[Term]]:
    """The tokens, and one term per leaf.

    Args:
        owner: The call that is run again.
        pairs: Its outputs and their gradients.
        leaves: The parameters in the graph of the outputs.

    Raises:
        NotUnderstoodError: The layer mixes positions, or has too many of them.
    """
    if len(pairs) != 1:
        raise NotUnderstoodError("the layer has several outputs")
    output, gradient = pairs[0]
    source, numbers = owner.tokens_of(output)
    count = math.prod(source.grid)
    if count > _MOST:
        raise NotUnderstoodError(f"one pass for each of {count} positions would take too long")
    if not owner.works_by_position(output, numbers, source):
        raise NotUnderstoodError("the layer mixes positions")
    found: list[list[Tensor]] = [[] for _ in leaves]
    for token in range(count):
        only = torch.where(numbers == token, gradient, 0.0)
        brought = torch.autograd.grad(output, leaves, only, retain_graph=True, allow_unused=True)
        for number, (each, leaf) in enumerate(zip(brought, leaves, strict=True)):
            found[number].append((torch.zeros_like(leaf) if each is None else each).flatten())
    return source, [Term((torch.stack(each)[:, None],)) for each in found]
