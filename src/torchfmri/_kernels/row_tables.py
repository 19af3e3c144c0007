"""Tables of numbers per row, made ahead: what the lanes of `rows` write and `_tokens` reads.

How many lines a table has may change freely. The order of its memory may not: kernels are told the
address of a line, and `queue_works` reads a table as they write it. Who keeps what alive is said in
`rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_AHEAD = 512
"""Lines of a table at most."""
_BYTES = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Bytes of the first table: larger ones mean fewer read operations, but new memory costs time."""


class Table:
    """Lines of results, made ahead.

    Attributes:
        squares: (lines, t), or with groups (lines, t, groups).
        products: (lines, t).
        lines: How many: what `_BYTES` hold, at least twice the table before, 1 to `_AHEAD`.
        address: Of the first line; the next is `step` bytes further, and in each the products are
            `behind` bytes behind the squares.
    """

    __slots__ = ("address", "behind", "lines", "products", "squares", "step")

    def __init__(self, tokens: int, groups: int, device: torch.device, before: int = 0) -> None:
        entries = tokens * max(1, groups)
        self.behind, self.step = 4 * entries, 4 * (entries + tokens)
        first = _BYTES.get(device.type, _BYTES["cpu"]) // self.step
        self.lines = min(_AHEAD, max(1, first, 2 * before))
        whole = torch.empty(self.lines, entries + tokens, device=device)
        squares = whole[:, :entries]
        self.squares = squares.view(self.lines, tokens, groups) if groups else squares
        self.products = whole[:, entries:]
        self.address = whole.data_ptr()


class Numbers(NamedTuple):
    """Sums of squares and inner products of some rows: one line of two tables."""

    all_squares: Tensor
    all_products: Tensor
    line: int

    @staticmethod
    def of(squares: Tensor, products: Tensor) -> Numbers:
        """Numbers that somebody else has computed."""
        return Numbers(squares[None], products[None], 0)

    @property
    def squares(self) -> Tensor:
        """The sums of squares: (t,), or with groups (t, groups)."""
        return self.all_squares[self.line]

    @property
    def products(self) -> Tensor:
        """The inner products with the vector, (t,)."""
        return self.all_products[self.line]
