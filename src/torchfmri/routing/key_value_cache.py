"""Keys and values of the tokens that were read before, by block."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """What attention needs of earlier tokens; each forward pass with it appends its own.

    Examples:
        >>> import torch
        >>> cache = KeyValueCache()
        >>> keys, values = cache.append(0, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        >>> cache.length
        3
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """How many tokens were read."""
        return next(iter(self._kept.values()))[0].shape[2] if self._kept else 0

    def append(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a block so far, (b, heads, s, head size), these included."""
        if block in self._kept:
            before = self._kept[block]
            keys, values = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        self._kept[block] = keys, values
        return keys, values
