"""Note where each sequence of a batch ends while it is generated: `Endings`.

`Decoding` hands it to `generate` as the only stopping criterion, with the user's own criteria
inside; `live` and `batch_run` ask for the lengths. Answers of the user's criteria stay on the
device, since reading one would make every step wait for the GPU. Only the first end of a row
counts, since padding may be the ending token itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Endings:
    """A stopping criterion that stops nothing by itself: it remembers what the others say.

    A row that has ended is filled up with padding, whose token may well be the ending token, so
    only the first end counts. What was said stays on the device until somebody asks.

    Args:
        start: The length of the prompt.
        ends: Tokens that end a sequence.
        criteria: The user's own criterion: ids and scores -> whether each row has ended.
    """

    def __init__(
        self, start: int, ends: frozenset[int], criteria: Callable[..., Any] | None = None
    ) -> None:
        self._start, self._ends, self._criteria = start, ends, criteria
        self._said: dict[int, Tensor] = {}  # length -> what the user's criterion said then
        self._nobody = torch.zeros(0, dtype=torch.bool, device="cpu")

    def __call__(self, ids: Tensor, scores: Any = None, **options: Any) -> Tensor:
        """Whether each row has ended by the user's criterion, (b,)."""
        if self._criteria is None:
            if len(self._nobody) != len(ids) or self._nobody.device != ids.device:
                self._nobody = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
            return self._nobody
        said: Any = self._criteria(ids, scores, **options)
        over = torch.as_tensor(said, device=ids.device).expand(len(ids)).clone()
        if ids.shape[1] > self._start:
            self._said[ids.shape[1]] = over
        return over

    def running(self, ids: Tensor) -> Tensor:
        """Whether a row had not ended before each position of the ids, (b, s)."""
        over = torch.zeros_like(ids, dtype=torch.bool)
        if self._ends:
            ends = torch.tensor(sorted(self._ends), dtype=ids.dtype, device=ids.device)
            over[:, self._start :] = torch.isin(ids[:, self._start :], ends)
        said = {length: each for length, each in self._said.items() if length <= ids.shape[1]}
        if said:
            places = [length - 1 for length in said]
            over[:, places] |= torch.stack([each.bool() for each in said.values()], 1)
        before = over.cumsum(1) - over.long()
        return before == 0

    def lengths(self, ids: Tensor) -> list[int]:
        """The length of each row of the finished ids."""
        found: list[int] = self.running(ids).sum(1).tolist()
        return found

    def look_through(self, ids: Tensor) -> None:
        """Ask the user's criterion about finished ids, where nobody did while they came."""
        for length in range(self._start + 1, ids.shape[1] + 1) if self._criteria else ():
            self(ids[:, :length])
