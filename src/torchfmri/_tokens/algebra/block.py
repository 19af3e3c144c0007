"""The gradients of one parameter for a block of tokens, each over all positions.

The gradient of one token's own loss reaches a weight through every position that the token could
see, so it is a sum over rows (positions) and not of rank one:

    G_t = sum over r of  g[t, r] (x) x[r]

Every token of the batch shares the x. What is asked for is computed from the two factors, without
G; where no such factors exist, G itself is given. Letters: t token, r row, n and m entries along
the two axes of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfmri._tokens.algebra.factors import Index
from torchfmri._tokens.algebra.sketch import Sketch

_SMALL = 8  # tokens that are not worth taking apart


@dataclass(frozen=True, slots=True)
class SharedFactors:
    """What one use of a matrix adds to the gradient of each token.

    Attributes:
        varying: The factor that each token has of its own, (t, r, n).
        shared: The factor that they share: (r, m), or the row numbers of an embedding, (r,).
        axis: On which axis of the parameter the varying factor lies, 0 or 1.
    """

    varying: Tensor
    shared: Tensor | Index
    axis: int

    def trimmed(self, tokens: slice) -> SharedFactors:
        """Some tokens, and of the rows only those that matter to at least one of them.

        Rows of other samples, of later positions and of padding are zero and need no arithmetic.
        """
        varying = self.varying[tokens]
        used = (varying != 0).any(-1).any(0).nonzero().flatten()
        rows: slice | Tensor = used
        if len(used) and int(used[-1] - used[0]) == len(used) - 1:  # a slice copies nothing
            rows = slice(int(used[0]), int(used[-1]) + 1)
        return SharedFactors(varying[:, rows], self._shared_at(rows), self.axis)

    def kept(self) -> SharedFactors:
        """The same with memory of its own, so that the rest of the chunk can go."""
        return SharedFactors(self.varying.clone(), self.shared, self.axis)

    def _shared_at(self, rows: slice | Tensor) -> Tensor | Index:
        if isinstance(self.shared, Index):
            return Index(self.shared.at[rows], self.shared.size)
        return self.shared[rows]


@dataclass(frozen=True, slots=True)
class TermBlock:
    """The gradients of one parameter for some tokens.

    Attributes:
        shape: That of the parameter.
        uses: Its uses, as factors; empty where `whole` is given.
        whole: The gradients themselves, (t, entries).
    """

    shape: tuple[int, ...]
    uses: Sequence[SharedFactors] = ()
    whole: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return len(self.uses[0].varying if self.whole is None else self.whole)

    @property
    def bytes(self) -> int:
        """What it keeps in memory; the shared factors belong to the model's pass."""
        if self.whole is not None:
            return self.whole.numel() * self.whole.element_size()
        return sum(each.varying.numel() * each.varying.element_size() for each in self.uses)

    def runs(self) -> list[slice]:
        """Neighbouring tokens that depend on much the same rows, to be reduced together.

        Tokens of different samples have no row in common: together they would cost the square.
        """
        if self.whole is not None:
            return [slice(0, self.tokens)]
        used = (self.uses[0].varying != 0).any(-1)
        return _runs(used.cpu(), 0, len(used))

    def trimmed(self, tokens: slice) -> TermBlock:
        """Some of its tokens."""
        if self.whole is not None:
            return TermBlock(self.shape, (), self.whole[tokens])
        return TermBlock(self.shape, [each.trimmed(tokens) for each in self.uses])

    def kept(self) -> TermBlock:
        """The same with memory of its own."""
        if self.whole is not None:
            return TermBlock(self.shape, (), self.whole.clone())
        return TermBlock(self.shape, [each.kept() for each in self.uses])

    def precise(self) -> TermBlock:
        """The same in float32 where it came in 16 bits."""
        if self.whole is not None:
            return TermBlock(self.shape, (), _precise(self.whole))
        uses = [
            SharedFactors(
                _precise(each.varying),
                each.shared if isinstance(each.shared, Index) else _precise(each.shared),
                each.axis,
            )
            for each in self.uses
        ]
        return TermBlock(self.shape, uses)

    # -- what is asked for; on blocks that are precise ---------------------------------------

    def squares(self) -> Tensor:
        """|G_t|^2, (t,)."""
        if self.whole is not None:
            return self.whole.square().sum(1)
        total = self.uses[0].varying.new_zeros(len(self.uses[0].varying))
        for number, one in enumerate(self.uses):
            total += _inner(one, one)
            for other in self.uses[number + 1 :]:
                total += 2 * _inner(one, other)
        return total.clamp_min_(0)

    def gram(self, other: TermBlock) -> Tensor:
        """<G_t, G'_t'> with every token of another block of the same parameter, (t, t')."""
        if self.whole is not None:
            assert other.whole is not None
            return self.whole @ other.whole.mT
        parts = [_gram(one, another) for one in self.uses for another in other.uses]
        return torch.stack(parts).sum(0)

    def dots(self, direction: Tensor) -> Tensor:
        """<G_t, V> for one V of the parameter's shape, (t,)."""
        if self.whole is not None:
            return self.whole @ direction.to(self.whole).flatten()
        parts = [_dots(each, direction.to(each.varying)) for each in self.uses]
        return torch.stack(parts).sum(0)

    def sketches(self, sketch: Sketch) -> Tensor:
        """G_t under a random linear map, (t, k)."""
        if self.whole is not None:
            return sketch.dense(self.whole)
        return torch.stack([_sketches(each, sketch) for each in self.uses]).sum(0)

    def dense(self) -> Tensor:
        """G_t in full, (t, *shape)."""
        if self.whole is not None:
            return self.whole.view(len(self.whole), *self.shape)
        parts = torch.stack([_dense(each) for each in self.uses])
        return parts.sum(0).reshape(-1, *self.shape)

    def total(self, weights: Tensor) -> Tensor:
        """The sum over the tokens, each with a weight, of the parameter's shape."""
        if self.whole is not None:
            return (weights.to(self.whole) @ self.whole).view(self.shape)
        summed = [
            SharedFactors(
                torch.tensordot(weights.to(each.varying), each.varying, 1)[None],
                each.shared,
                each.axis,
            )
            for each in self.uses
        ]
        return TermBlock(self.shape, summed).dense()[0]


def _runs(used: Tensor, first: int, last: int) -> list[slice]:
    """Halved until the rows of all tokens (t, r) are not many more than those of one."""
    rows = used[first:last]
    if last - first <= _SMALL or int(rows.any(0).sum()) <= 2 * int(rows.sum(1).max()):
        return [slice(first, last)]
    middle = (first + last) // 2
    return [*_runs(used, first, middle), *_runs(used, middle, last)]


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _inner(one: SharedFactors, other: SharedFactors) -> Tensor:
    """<G_t, G'_t> of two uses, (t,)."""
    if one.axis == other.axis:
        mixed = _pairs(one.shared, other.shared, one.varying) @ other.varying
        return (one.varying * mixed).sum((1, 2))
    return (_across(one.varying, other.shared) * _across(other.varying, one.shared).mT).sum((1, 2))


def _gram(one: SharedFactors, other: SharedFactors) -> Tensor:
    """<G_t, G'_t'> of two uses for every pair of tokens, (t, t')."""
    if one.axis == other.axis:
        mixed = _pairs(one.shared, other.shared, one.varying) @ other.varying
        return one.varying.flatten(1) @ mixed.flatten(1).mT
    theirs = _across(other.varying, one.shared).mT
    return _across(one.varying, other.shared).flatten(1) @ theirs.flatten(1).mT


def _pairs(one: Tensor | Index, other: Tensor | Index, like: Tensor) -> Tensor:
    """The inner product of every row with every other row, (r, r')."""
    if isinstance(one, Index) and isinstance(other, Index):
        return (one.at[:, None] == other.at).to(like.dtype)
    if isinstance(one, Index):
        assert isinstance(other, Tensor)
        return other[:, one.at].mT
    return _across(one, other)


def _across(varying: Tensor, shared: Tensor | Index) -> Tensor:
    """The inner product of every row with every row of a shared factor, (..., r, r')."""
    return varying[..., shared.at] if isinstance(shared, Index) else varying @ shared.mT


def _dots(use: SharedFactors, direction: Tensor) -> Tensor:
    if use.axis == 0:
        direction = direction.mT  # now (shared, varying)
    shared = use.shared
    weights = direction[shared.at] if isinstance(shared, Index) else shared @ direction
    return use.varying.flatten(1) @ weights.flatten()


def _sketches(use: SharedFactors, sketch: Sketch) -> Tensor:
    if isinstance(use.shared, Index):
        assert use.axis == 1
        return sketch.rows(use.shared.at[None], use.varying)
    if use.axis == 0:
        return sketch.outer(use.varying, use.shared[None])
    return sketch.outer(use.shared[None], use.varying)


def _dense(use: SharedFactors) -> Tensor:
    if isinstance(use.shared, Index):
        assert use.axis == 1
        count, _, width = use.varying.shape
        whole = use.varying.new_zeros(count, use.shared.size, width)
        return whole.index_add_(1, use.shared.at, use.varying)
    if use.axis == 0:
        return use.varying.mT @ use.shared
    return use.shared.mT @ use.varying
