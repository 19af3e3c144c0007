"""The part of a tensor that an edit is about: read as a copy, written into a copy.

`bound` works out an `EditPart` for each call, and is the only file that uses this one. The trap:
numbered rows and numbered units in one index are paired by PyTorch, not crossed, so they are
written in two steps. Neighbouring numbers become a slice, which is faster; that may be changed
freely. The order of a selection must be kept, because a donor's values are given in that order.
`tokens`, `positions` and `sources` are parallel lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfmri._edit.edit import Numbers
from torchfmri._model import Ranges
from torchfmri.exceptions import InspectionError

Index = slice | Tensor
"""A run of neighbours, or any numbers as a tensor."""


@dataclass(frozen=True, eq=False)
class EditPart:
    """Rows, tokens and units of one value (b, s, ..., w).

    Attributes:
        rows: None for all.
        tokens: Their places in this pass; None for all.
        positions: Their positions in the whole sequence, (t,); None if there are no tokens.
        sources: Their positions in the donor, (t,); None if they are the same.
        mask: (b, s), instead of rows and tokens.
        units: Along the last axis; None for all.
    """

    rows: Index | None = None
    tokens: Index | None = None
    positions: Tensor | None = None
    sources: Tensor | None = None
    mask: Tensor | None = None
    units: Index | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.rows is self.tokens is self.mask is self.units is None

    def read(self, value: Tensor) -> Tensor:
        """Return the part, (rows, tokens, ..., units); of a mask (n, ..., units)."""
        part = value[self._key(value.device)]
        return part if self.units is None else part[..., self.units]

    def write(self, new: Tensor, value: Tensor, into: Tensor) -> None:
        """Put a new part into a copy of the value."""
        key = self._key(value.device)
        if self.units is None:
            into[key] = new
        elif isinstance(self.units, slice) and not any(isinstance(each, Tensor) for each in key):
            into[(*key, ..., self.units)] = new
        else:
            # Numbered rows and numbered units in one index would be paired, not crossed.
            both = into[key].clone()
            both[..., self.units] = new
            into[key] = both

    def _key(self, device: torch.device) -> tuple[Any, ...]:
        if self.mask is not None:
            return (self.mask.to(device),)
        rows = slice(None) if self.rows is None else self.rows
        if self.tokens is None:
            return (rows,)
        if isinstance(rows, Tensor) and isinstance(self.tokens, Tensor):
            return (rows[:, None], self.tokens)
        return (rows, self.tokens)


def numbers_of(numbers: Numbers, count: int, what: str) -> list[int]:
    """Return the numbers below `count` that a selection means, in its order.

    Raises:
        InspectionError: A number is outside 0 to `count` - 1.
    """
    if numbers is None:
        return list(range(count))
    if isinstance(numbers, slice):
        return list(range(*numbers.indices(count)))
    several: Sequence[int] = [numbers] if isinstance(numbers, int) else list(numbers)
    for each in several:
        if not -count <= each < count:
            raise InspectionError(
                f"There is no {what} {each} among {count}; they are 0 to {count - 1}."
            )
    return [each % count for each in several]


def index_of(numbers: Sequence[int], count: int, device: torch.device) -> Index | None:
    """Return numbers as an index: None for all of them, a slice for neighbours."""
    if not numbers:
        return slice(0, 0)
    first, last = numbers[0], numbers[-1]
    if list(numbers) == list(range(first, last + 1)):
        return None if (first, last) == (0, count - 1) else slice(first, last + 1)
    return torch.tensor(numbers, device=device)


def units_in(ranges: Ranges) -> list[int]:
    """Return the units of several runs, in order."""
    return [unit for first, end in ranges for unit in range(first, end)]


def tokens_in(tokens: Any, before: int, s: int) -> list[int]:
    """Return the absolute positions of one pass that a selection means.

    Positions of other passes are left out: they may be in the cache, or come later.
    """
    total = before + s
    if isinstance(tokens, slice):
        chosen: Sequence[int] = range(*tokens.indices(total))
    else:
        several = [tokens] if isinstance(tokens, int) else list(tokens)
        chosen = [each + total if each < 0 else each for each in several]
    return [each for each in chosen if before <= each < total]
