"""Make new token numbers for values computed from several old ones, and compare grids of tokens.

`trace` makes one `Grids` for each pass that it follows; `joins`, `sums`, `layouts`, `steps` and
operations ask it what a sum over tokens, a strided convolution or an upsampling is at. Two rows are
the same new token only if they come from the same old ones. Wherever that cannot be told, return a
code (`UNKNOWN`, `SEVERAL`): a parameter used there is then refused, while a wrong token would go
unnoticed. Work on `compact` numbers, without axes of stride 0, or following a pass becomes slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import (
    NOBODY,
    SEVERAL,
    UNKNOWN,
    broadcast,
    compact,
    is_constant_along,
    unique,
)
from torchfmri._tokens.rules.sources import MadeOf, Sources, TokenSource

_MOST_PIECES = 8  # of features of different grids, side by side


class Grids:
    """Makes and compares grids of tokens.

    Args:
        sources: The tokens of the pass.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def merged(
        self, numbers: Tensor, along: Sequence[int], entries: Tensor | None = None
    ) -> Tensor:
        """New tokens for values that are summed over several old ones.

        Args:
            numbers: The old ones.
            along: The axes.
            entries: Finer numbers than those of tokens, where a row is known by these.
        """
        shape, axes = list(numbers.shape), [each % numbers.ndim for each in along]
        for axis in axes:
            shape[axis] = 1
        small = compact(numbers)
        if bool((small < NOBODY).any()):
            lost = small.amin(axes, keepdim=True)
            return lost.expand(shape)
        known, far = small != NOBODY, int(small.max()) + 1  # constants have no say
        samples = self.sources.sample_of(small)
        lowest = torch.where(known, small, far).amin(axes, keepdim=True)
        if bool(((small == lowest) | ~known).all()):
            return torch.where(lowest == far, NOBODY, lowest).expand(shape)
        least = torch.where(known, samples, far).amin(axes, keepdim=True)
        most = torch.where(known, samples, NOBODY).amax(axes, keepdim=True)
        nobody = most == NOBODY
        if bool(((least != most) & ~nobody).any()):  # of several samples
            return torch.full_like(lowest, NOBODY).expand(shape)
        finer = self._finest(small, axes)
        if finer is not None:
            return finer.expand(shape)
        rows = _rows_along(small if entries is None else compact(entries), axes)
        keys = _sets(rows)
        if keys is None:
            return torch.full_like(lowest, SEVERAL).expand(shape)
        keys = keys.view(lowest.shape)
        if bool(nobody.any()):  # rows of padding alone
            found = torch.full_like(lowest, NOBODY)
            found[~nobody] = self.fresh(keys[~nobody], most[~nobody], small)
            return found.expand(shape)
        found = self.fresh(keys, most, small)
        source = self.sources.all[-1]
        is_new = bool((found >= source.start).all()) and source.name != "samples"
        old = small[known]
        if is_new and entries is None and _sets_are_apart(old, keys.expand(small.shape)[known]):
            source.members = torch.full((source.start,), -1, device=found.device)
            source.members[old] = found.expand(small.shape)[known]
        return found.expand(shape)

    def _finest(self, small: Tensor, axes: Sequence[int]) -> Tensor | None:
        """The tokens of rows whose features come from grids of which one is finer than the others.

        A U-Net puts the features of an upsampled grid beside those of the finer one.
        """
        rows = small.movedim(tuple(axes), tuple(range(len(axes)))).flatten(0, len(axes) - 1)
        changes = (rows[1:] != rows[:-1]).flatten(1).any(1).nonzero()[:, 0] + 1
        if len(changes) > _MOST_PIECES:
            return None
        result = rows[0]
        for each in rows[changes]:
            found = self.finer(result, each)
            if found is None:
                return None
            result = found
        for axis in sorted(axes):
            result = result.unsqueeze(axis)
        return result

    def finer(self, a: Tensor, b: Tensor) -> Tensor | None:
        """Return, place by place, the finer of two grids of tokens of the same samples.

        Every token of it meets one of the other, which has fewer or meets several.
        """
        a, b = broadcast(compact(a), compact(b))
        ours, theirs = self.sources.present(a), self.sources.present(b)
        is_told = bool((a >= 0).all()) and bool((b >= 0).all()) and a.numel() > 0
        if not is_told or len(ours) != 1 or len(theirs) != 1 or ours[0].true is theirs[0].true:
            return None
        if not bool((self.sources.sample_of(a) == self.sources.sample_of(b)).all()):
            return None
        pairs = len(unique(a * (int(b.max()) + 1) + b))
        counts = len(unique(a)), len(unique(b))
        whole = [n == math.prod(e[0].grid) for n, e in zip(counts, (ours, theirs), strict=True)]
        if whole[0] and pairs == counts[0] and (counts[1] < pairs or not whole[1]):
            return a
        if whole[1] and pairs == counts[1] and (counts[0] < pairs or not whole[0]):
            return b
        return None

    def fresh(self, keys: Tensor, samples: Tensor, old: Tensor | None = None) -> Tensor:
        """Numbers of new tokens: one for each key, in the order of keys within each sample.

        Args:
            keys: Of all entries.
            samples: Theirs.
            old: The tokens of which the new ones are made, if any.
        """
        found, inverse = unique(keys, return_inverse=True)
        owner = found.new_zeros(len(found)).index_put_((inverse.flatten(),), samples.flatten())
        b = int(owner.max()) + 1 if len(owner) else 1
        counts = torch.bincount(owner.clamp(0), minlength=b)
        if bool((owner < 0).any()) or int(counts.min()) != int(counts.max()):
            return torch.full_like(keys, UNKNOWN)
        s = int(counts[0])
        source = self._made((b, s), old)
        order = torch.argsort(owner, stable=True)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order), device=order.device)
        return ranks[inverse] + source.start

    def _made(self, grid: tuple[int, int], old: Tensor | None) -> TokenSource:
        """A new source, made of some tokens; one position for each sample is the sample."""
        if grid[1] == 1:
            return self.sources.whole_samples(grid[0])
        source = self.sources.add(grid)
        if old is not None:
            source.made_of = self._made_of(old)
        return source

    def _made_of(self, old: Tensor) -> MadeOf:
        """The arguments that tokens come from, and a key, the same for the same of their tokens."""
        small = compact(old)
        found = unique(small[small >= 0])
        parents = self.sources.present(found)
        roots = [each.made_of or MadeOf(frozenset({each.start}), 0) for each in parents]
        if len(roots) == 1 and roots[0].key and len(found) == math.prod(parents[0].grid):
            return roots[0]
        given = frozenset().union(*(each.given for each in roots))
        return MadeOf(given, int(_scrambled(found).sum()))

    def by_place(self, old: Tensor, shape: Sequence[int]) -> Tensor:
        """Numbers of new tokens at every place of (n, 1, *positions).

        Args:
            old: The tokens of what is at (n, ...).
            shape: (n, 1, *positions); n is the batch, or has several rows of each sample in turn.
        """
        samples = self.sources.sample_of(old)
        n, count = shape[0], math.prod(shape[2:])
        lost = torch.full((n, 1, *shape[2:]), UNKNOWN, device=samples.device)
        rows = compact(samples).reshape(compact(samples).shape[0], -1)
        first = rows.amax(1, keepdim=True) if rows.numel() else rows  # constants have no say
        if not rows.numel() or bool(((rows != first) & (rows != NOBODY) | (first < 0)).any()):
            return lost
        order = first[:, 0].expand(n) if len(rows) == 1 else first[:, 0]
        found, counts = unique(order, return_counts=True)
        b, each = len(found), int(counts[0])
        if len(order) != n or bool((counts != each).any()) or int(found[-1]) != b - 1:
            return lost
        source = self._made((b, each * count), old)
        turn = torch.empty_like(order)
        turn[torch.argsort(order, stable=True)] = torch.arange(n, device=order.device) % each
        place = torch.arange(count, device=samples.device)
        numbers = source.start + (order * each + turn)[:, None] * count + place
        return numbers.view(n, 1, *shape[2:])

    def longer(self, numbers: Tensor, grown: Tensor) -> Tensor:
        """The tokens of the rows of a convolution that makes a sequence longer, (b, i, s).

        For the layer, what is computed beyond the sequence belongs to its last token until it is
        cut. For whatever reads the rows before that, they are a grid of their own.

        Args:
            numbers: The tokens before, (b, 1, s).
            grown: The grid of their own.
        """
        before, sources = numbers[:, 0], self.sources.present(grown)
        if len(sources) == 1 and sources[0].grid == (len(before), grown.shape[-1]):
            sources[0].before = before
        at = torch.arange(grown.shape[-1], device=numbers.device).clamp(max=before.shape[1] - 1)
        return numbers[:, :, at].expand(grown.shape)

    def cut(self, numbers: Tensor) -> Tensor:
        """The tokens of rows of a longer sequence, if as many are left as there were before."""
        small = compact(numbers)
        sources = self.sources.present(small)
        before = sources[0].before if len(sources) == 1 else None
        if before is None or not small.numel() or bool((small < 0).any()):
            return numbers
        local = small - sources[0].start
        sample, place = local // sources[0].grid[1], local % sources[0].grid[1]
        place = place - place.min()
        if int(place.max()) + 1 != before.shape[1] or len(unique(place)) != before.shape[1]:
            return numbers
        return before[sample, place].expand(numbers.shape)

    def filled(self, numbers: Tensor) -> Tensor | None:
        """Rows that are back at their places, and the tokens of places that were left out.

        None where the rows are in another order.
        """
        sources = self.sources.present(numbers)
        if numbers.ndim < 2 or len(sources) != 1 or not is_constant_along(numbers, -1):
            return None
        rows, (source,) = numbers[..., 0], sources
        if rows.numel() != source.stop - source.start:
            return None
        places = torch.arange(source.start, source.stop, device=rows.device).view(rows.shape)
        if not bool(((rows == places) | (rows == NOBODY)).all()):
            return None
        return places[..., None].expand(numbers.shape)

    def is_single(self, numbers: Tensor) -> bool:
        """Whether each sample has one position in a tensor."""
        small = compact(numbers)
        if self._are_two(small.flatten()[:2].tolist()):  # most tensors have all positions
            return False
        small = small[small >= 0]
        if not small.numel():
            return False
        found = unique(small)
        return len(unique(self.sources.sample_of(found))) == len(found)

    def _are_two(self, some: Sequence[int]) -> bool:
        """Whether two numbers are two positions of one sample."""
        samples = {
            (number - each.start) // each.grid[1]
            for number in some
            for each in self.sources.all
            if each.start <= number < each.stop
        }
        return len({*some}) == 2 and min(some) >= 0 and len(samples) == 1

    def is_whole(self, numbers: Tensor) -> bool:
        """Whether a tensor has all tokens of a source, each at one place."""
        small = compact(numbers)
        sources = self.sources.present(small)
        if len(sources) != 1 or small.numel() % math.prod(sources[0].grid):
            return False
        return self.has_all(small) and bool((small >= 0).all())

    def has_all(self, numbers: Tensor) -> bool:
        """Whether a tensor has all tokens of a source, beside constants maybe."""
        small = compact(numbers)
        sources = self.sources.present(small)
        found = unique(small[small >= 0])
        return len(sources) == 1 and len(found) == math.prod(sources[0].grid)


def _rows_along(small: Tensor, axes: Sequence[int]) -> Tensor:
    """The numbers as (rows, k): what is summed over comes last."""
    last = tuple(range(-len(axes), 0))
    rows = small.movedim(tuple(axes), last).flatten(-len(axes))
    return rows.reshape(-1, rows.shape[-1])


def _sets(rows: Tensor) -> Tensor | None:
    """A number for each row (n, k), the same for rows of the same tokens, in order of appearance.

    None where this does not tell rows apart: the same tokens in another order are another row, as
    in x + x.flip(1), and so are two rows among others that they overlap with, unless all rows come
    equally often (windows of every feature).
    """
    columns = torch.arange(rows.shape[1], device=rows.device)
    unordered = torch.where(rows < 0, 0, _scrambled(rows)).sum(1)
    ordered = torch.where(rows < 0, 0, _scrambled(rows * len(columns) + columns)).sum(1)
    sets, inverse, counts = unique(unordered, return_inverse=True, return_counts=True)
    if len(sets) != len(unique(ordered)):
        return None
    first = torch.full((len(sets),), len(rows), device=rows.device)
    places = torch.arange(len(rows), device=rows.device)
    first = first.scatter_reduce(0, inverse, places, "amin")
    keys = first[inverse]
    known = rows >= 0
    apart = _sets_are_apart(rows[known], keys[:, None].expand(rows.shape)[known])
    return keys if apart or bool((counts == counts[0]).all()) else None


def _sets_are_apart(numbers: Tensor, keys: Tensor) -> bool:
    """Whether no number is in two sets, which are known by their keys."""
    pairs = unique(numbers * (int(keys.max()) + 1) + keys)
    return len(pairs) == len(unique(numbers))


def _scrambled(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits whose sums tell sets apart."""
    mixed = (numbers + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32)
