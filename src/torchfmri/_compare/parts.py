"""Put together the calls of a model that reads a batch in several parts.

A model may be called with the next tokens (generation, with or without a cache) or with the next
rows. `find_parts` recognizes this from the shapes that layers returned, and `BatchParts.join` makes
one tensor of the parts, so that such a run can be compared with a single pass. Only `recording`
uses it. A guess that is wrong would compare tokens with other tokens: shapes that fit no pattern
exactly must give an empty `BatchParts`, and tensors that do not fit together None.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._compare.grid import PositionGrid
from torchfmri._records import Inspection, Record


class Part(NamedTuple):
    """What one call reads: `rows` rows of the batch from row `first` on, and so many tokens."""

    first: int
    rows: int
    length: int


@dataclass(frozen=True)
class BatchParts:
    """How the calls of a model make up one batch.

    Attributes:
        calls: What each call reads, in order; empty if every call reads the whole batch.
        grows: Whether every call reads all tokens so far, as in generation without a cache.
        length: How many tokens there are in the end; more than were given in generation.
    """

    calls: tuple[Part, ...] = ()
    grows: bool = False
    length: int = 0

    @property
    def by_rows(self) -> bool:
        """Whether calls read some rows of the batch only."""
        return len({call.first for call in self.calls}) > 1

    @property
    def steps(self) -> int:
        """How many calls read the same rows; 0 if some rows take more calls than others."""
        counts = set(collections.Counter(call.first for call in self.calls).values())
        return counts.pop() if len(counts) == 1 else 0

    def join(self, tensors: Sequence[Tensor], kept: Tensor | None) -> Tensor | None:
        """Put the tensors of all calls together as that of the batch; None if they do not fit.

        Args:
            tensors: One of each call.
            kept: (b, s) True where a position is a token; None for a batch without tokens.
        """
        if self.by_rows and len({(call.first, call.length) for call in self.calls}) == len(
            {call.first for call in self.calls}
        ):
            whole = self._stack(tensors)
            if whole is not None or kept is None:
                return whole
        return None if kept is None else self._fill(tensors, kept)

    def _stack(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Put rows below one another, also those of tensors without tokens."""
        found = []
        for call, tensor in zip(self.calls, tensors, strict=True):
            if not tensor.ndim or tensor.shape[1:] != tensors[0].shape[1:]:
                return None
            if len(tensor) == 1 < call.rows:  # one for all rows, such as rotations
                tensor = tensor.expand(call.rows, *tensor.shape[1:])
            if len(tensor) not in (call.rows, call.rows * call.length):
                return None
            found.append(tensor)
        return torch.cat(found)

    def _fill(self, tensors: Sequence[Tensor], kept: Tensor) -> Tensor | None:
        """Put tokens where they are in the batch; padding that no call reads is left at zero."""
        parts = [_aligned(tensor, call) for tensor, call in zip(tensors, self.calls, strict=True)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        if self.grows and not self.by_rows:
            return known[-1]
        # Attention weights grow along the keys, so that their parts do not fit together.
        if len({part.shape[2:] for part in known}) > 1:
            return None
        whole = known[0].new_zeros(*kept.shape, *known[0].shape[2:])
        for first, several in itertools.groupby(
            zip(self.calls, known, strict=True), key=lambda each: each[0].first
        ):
            pieces = [part for _, part in several]
            row = pieces[-1] if self.grows else torch.cat(pieces, 1)
            places = kept[first] if row.shape[1] < kept.shape[1] else slice(None)
            whole[first : first + len(row), places] = row
        return whole


def _aligned(tensor: Tensor, call: Part) -> Tensor | None:
    """Return a tensor as (rows, tokens, ...); None for one without a token axis."""
    if tensor.ndim == 2 and len(tensor) == call.rows * call.length:
        # A router returns (b * s, w), which a grid of one token takes for (b, w).
        tensor = tensor.view(call.rows, call.length, -1)
    grid = PositionGrid(
        kept=torch.ones(call.rows, call.length, dtype=torch.bool, device="cpu"),
        order=tuple(range(call.rows)),
    )
    return grid.aligned(tensor)


def find_parts(inspection: Inspection, grids: Sequence[PositionGrid], batch: int) -> BatchParts:
    """Return how the calls of a model make up its batch.

    Args:
        inspection: What was recorded.
        grids: Where the tokens are; empty for a batch without tokens.
        batch: How many rows the batch has.
    """
    count = _model_calls(inspection)
    for shapes in _call_shapes(inspection):
        if grids and all(len(shape) == 3 for shape in shapes):
            sizes = [(shape[0], shape[1]) for shape in shapes]
            found = _filled(sizes, grids) or _generated(sizes, grids[0])
            if found is not None and (not found.by_rows or len(shapes) == count):
                return found
        sizes_only = [shape[0] for shape in shapes if len(shape) > 1]
        if not grids and len(sizes_only) == count and sum(sizes_only) == batch:
            starts = itertools.accumulate(sizes_only, initial=0)
            return BatchParts(
                tuple(Part(at, n, 0) for at, n in zip(starts, sizes_only, strict=False))
            )
    return BatchParts()


def _model_calls(inspection: Inspection) -> int:
    """How often the outermost module that was called was called."""
    called = [record for record in inspection.values() if record.calls]
    if not called:
        return 0
    outermost = min(called, key=lambda each: len(each.layer.split(".")) if each.layer else 0)
    return len(outermost.calls)


def _call_shapes(inspection: Inspection) -> Iterator[list[tuple[int, ...]]]:
    """Yield the shape of what each call of a layer returns, for layers with several calls."""
    for record in inspection.values():
        shapes = _shapes(record)
        if len(shapes) > 1:
            yield shapes


def _shapes(record: Record) -> list[tuple[int, ...]]:
    values = [call.values("activations")[:1] for call in record.calls]
    found = [tuple(each[0].shape) for each in values if each and each[0] is not None]
    return found if len(found) == len(record.calls) else []


def _filled(sizes: Sequence[tuple[int, int]], grids: Sequence[PositionGrid]) -> BatchParts | None:
    """Return the parts if calls fill one batch, row after row; None if they do not."""
    for grid in grids:
        b, s = grid.kept.shape
        counts = grid.kept.sum(1).tolist()
        found, row, at = [], 0, 0
        for rows, length in sizes:
            if row + rows > b or at + length > s:
                break
            found.append(Part(row, rows, length))
            at += length
            if at == s or (rows == 1 and at == counts[row]):  # a row may be read without padding
                row, at = row + rows, 0
        if len(found) == len(sizes) and (row, at) == (b, 0):
            return BatchParts(tuple(found), length=s)
    return None


def _generated(sizes: Sequence[tuple[int, int]], grid: PositionGrid) -> BatchParts | None:
    """Return the parts of a model that generates: its tokens are more than it was given.

    A loop may generate for one row of the batch after another; all rows get equally many tokens.
    """
    b, s = grid.kept.shape
    counts = grid.kept.sum(1).tolist()
    grows = sizes[1][1] > sizes[0][1]  # without a cache every call reads all tokens again
    starts = [at for at, ((_, last), (_, length)) in enumerate(itertools.pairwise(sizes), 1)
              if (length <= last if grows else length > 1)]  # fmt: skip
    parts, added, row = [], set(), 0
    for first, end in itertools.pairwise([0, *starts, len(sizes)]):
        rows, lengths = sizes[first][0], [length for _, length in sizes[first:end]]
        rows = rows if starts else b
        if row + rows > b or lengths[0] not in {s, *counts[row : row + 1][: rows == 1]}:
            return None
        if not grows and set(lengths[1:]) != {1}:
            return None
        parts += [Part(row, rows, length) for length in lengths]
        added.add((lengths[-1] if grows else sum(lengths)) - lengths[0])
        row += rows
    if row != b or len(added) != 1:
        return None
    return BatchParts(tuple(parts), grows, s + added.pop())
