"""`VectorJacobian`: the gradients of some tokens' losses at chosen places of the graph.

`loss_pass` uses it, once for the weighted sum of all losses and then for chunks of tokens. A chunk
goes through the graph at once with `is_grads_batched`; where an operation cannot do that, tokens go
one by one and `reason` keeps the error. Running out of memory is no such reason and passes through,
so that it is not tried again more slowly. The graph is always retained. `loss_pass` asks
`largest_gradient` how much memory one token needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchfmri._torch import gradient_bytes
from torchfmri.exceptions import InspectionError

Place: TypeAlias = "Tensor | GradientEdge"


class VectorJacobian:
    """Products of the losses' Jacobian with chosen vectors; the graph stays usable.

    All tokens of a chunk go through the graph at once (`is_grads_batched`). Where an operation
    cannot do that, they go one by one, and `reason` says why.

    Args:
        losses: One loss per token, with its graph.
        places: Where gradients are wanted: parameters, or places in the graph.
    """

    def __init__(self, losses: Tensor, places: Sequence[Place]) -> None:
        self._losses = losses
        self._places = list(places)
        self.reason: str | None = None

    def weighted(self, weights: Tensor) -> list[Tensor | None]:
        """The gradients of the weighted sum of all losses; None where nothing arrives."""
        return self._product(weights, batched=False)

    def tokens(self, first: int, last: int) -> list[Tensor | None]:
        """The gradients of losses `first` to `last`, exclusive, each by itself, (t, *shape)."""
        count = last - first
        vectors = self._losses.new_zeros(count, self._losses.numel())
        vectors[torch.arange(count, device="cpu"), torch.arange(first, last, device="cpu")] = 1
        vectors = vectors.view(count, *self._losses.shape)
        if self.reason is None:
            try:
                return self._product(vectors, batched=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.reason = str(error).strip().splitlines()[0]
        # If the error was not about batching, it comes again here and passes through.
        single = [self._product(vector, batched=False) for vector in vectors]
        return [_stacked(each) for each in zip(*single, strict=True)]

    def _product(self, vectors: Tensor, *, batched: bool) -> list[Tensor | None]:
        if not self._places:
            return []
        try:
            found = torch.autograd.grad(
                self._losses,
                self._places,  # type: ignore[arg-type]  # both kinds at once are accepted
                vectors,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
        except RuntimeError as error:
            if "use_reentrant=True" in str(error):
                raise InspectionError(
                    "Reentrant checkpointing hides the graph from everything but backward(). "
                    'For per="token_loss" switch to use_reentrant=False (Transformers: '
                    'gradient_checkpointing_enable({"use_reentrant": False})).'
                ) from error
            if "backward through the graph a second time" in str(error):
                raise InspectionError(
                    "The graph of the losses is gone: loss.backward() has freed it. Write "
                    "tokens.backward(losses) before losses.sum().backward()."
                ) from error
            raise
        return [each.to_dense() if each is not None and each.is_sparse else each for each in found]


def largest_gradient(losses: Tensor) -> int:
    """Bytes of the largest gradient between the losses and the leaves, one token's at a time."""
    largest = losses.numel() * losses.element_size()
    waiting, seen = [losses.grad_fn], {losses.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        largest = max(largest, gradient_bytes(node))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return largest


def _stacked(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of all tokens' gradients; None where none of them has any."""
    known = next((each for each in gradients if each is not None), None)
    if known is None:
        return None
    return torch.stack([torch.zeros_like(known) if each is None else each for each in gradients])
