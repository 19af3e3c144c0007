"""Count the bytes that a forward pass keeps for its backward pass, by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from torchfmri._capture import FORWARD, Position
from torchfmri._cost.live_memory import Storages


class SavedBytes:
    """The storages that autograd saves in its `with` block, each for the first who saved it.

    If a view is saved, its whole storage counts, because all of it stays alive. Storages that
    existed before (parameters, buffers, data) cost nothing to keep and do not count. Storages that
    are freed before the forward pass ends do not count either.

    Args:
        position: Says which layer is running.
        existing: Tensors that existed before.
    """

    def __init__(self, position: Position, existing: Iterable[Tensor]) -> None:
        self._position = position
        self._storages = Storages(existing)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def by_layer(self) -> Counter[str]:
        """Return the bytes now saved by each layer: ask when the forward pass is over."""
        result: Counter[str] = Counter()
        for layer, size in self._storages.sizes():
            result[layer] += size
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._position.phase == FORWARD:
            self._storages.add(tensor, self._position.layer)
        # Keeping the output itself would keep its own node alive for ever.
        return tensor.detach()

    @staticmethod
    def _unpack(tensor: Tensor) -> Tensor:
        return tensor
