"""Where each sequence of a batch ends, noted while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Endings:
    """A stopping criterion that stops nothing by itself: it remembers what the others say.

    A row that has ended is filled up with padding, whose token may well be the ending token, so
    the place where it ended has to be noted when it happens.

    Args:
        start: The length of the prompt.
        ends: Tokens that end a sequence.
        criteria: The user's own criterion: ids and scores -> whether each row has ended.
    """

    def __init__(
        self, start: int, ends: frozenset[int], criteria: Callable[..., Any] | None = None
    ) -> None:
        self._start, self._ends, self._criteria = start, ends, criteria
        self._lengths: dict[int, int] = {}

    def __call__(self, ids: Tensor, scores: Any = None, **options: Any) -> Tensor:
        """Whether each row has ended by the user's criterion, (b,)."""
        said: Any = False if self._criteria is None else self._criteria(ids, scores, **options)
        over = torch.as_tensor(said, device=ids.device).expand(len(ids)).clone()
        if ids.shape[1] > self._start:
            last = ids[:, -1].tolist()
            for row, (token, done) in enumerate(zip(last, over.tolist(), strict=True)):
                if done or token in self._ends:
                    self._lengths.setdefault(row, ids.shape[1])
        return over

    def has_ended(self, row: int, position: int) -> bool:
        """Whether a row ended before this position."""
        return row in self._lengths and position >= self._lengths[row]

    def lengths(self, ids: Tensor) -> list[int]:
        """The length of each row of the finished ids."""
        return [self._lengths.get(row, ids.shape[1]) for row in range(len(ids))]

    def look_through(self, ids: Tensor) -> None:
        """Find the ends in finished ids, where nobody was told while they came."""
        for length in range(self._start + 1, ids.shape[1] + 1):
            self(ids[:, :length])
