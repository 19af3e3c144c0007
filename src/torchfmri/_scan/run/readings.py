"""What is read off the layers of a model: norms by voxel and token, statistics by layer.

On the CPU a tensor is reduced at once, while it is in the cache. On a CUDA device launches are the
cost, so references wait until there are many, and all are reduced by one launch; a tensor that
somebody wrote into in the meantime is not used. Nothing waits for the device before the end.

`LiveRecording` and the gradient passes hand outputs over. The work of a step may not grow with the
batch in Python: the statistics of all sequences are taken by one call.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._kernels import (
    Floats,
    Integers,
    VoxelSums,
    heaviest,
    merge_numbers,
    no_numbers,
    numbers_of_layers,
    reduce_voxels,
    voxels_reducible,
)
from torchfmri._scan.run.flat_layout import FlatLayout, layout_of, voxel_norms
from torchfmri._scan.run.measurements import norms_by_layer
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject

_WRITTEN = "somebody wrote into its output after the layer had returned it"

Kept = Callable[[int, int], Tensor]
"""The first of some positions and how many -> (b, n) which of them count for the statistics."""


class _Waiting(NamedTuple):
    layer: ScannedLayer
    source: Tensor  # whose version tells whether somebody wrote
    version: int
    rows: Tensor
    first: int


class Readings:
    """Norms of one quantity per voxel, (b, s, voxel), and statistics per layer.

    Args:
        subject: What is scanned.
        b: Batch rows.
        s: Positions.
        like: Where and in what dtype: float64 for a model in float64, else float32.
        kept: Which positions count for the statistics; None takes no statistics.
        missed: Told layer and reason where something could not be read.
    """

    def __init__(
        self,
        subject: ScanSubject,
        b: int,
        s: int,
        like: Tensor,
        *,
        kept: Kept | None,
        missed: Callable[[str, str], None],
    ) -> None:
        self._subject, self._missed = subject, missed
        self._kept = None if kept is None else lru_cache(maxsize=1)(kept)  # for many layers
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        count = len(subject.anatomy.layer)
        self._norms = torch.full((b, s, count), torch.nan, dtype=dtype, device=like.device)
        largest = max(each.size for each in subject.layers)
        self.waits = voxels_reducible(like, largest)
        self._waiting: list[_Waiting] = []
        self._bytes, self._most = 0, heaviest(like.device)
        self._sums = VoxelSums(b, count, like.device) if self.waits and kept is not None else None
        counts = kept is not None and not self.waits
        self._found = no_numbers(b, len(subject.layers)) if counts else None

    @property
    def norms(self) -> Tensor:
        """(b, s, voxel); nan where nothing was measured."""
        self.flush()
        return self._norms

    def grow(self, s: int) -> None:
        """Make room for `s` positions."""
        missing = s - self._norms.shape[1]
        self._norms = F.pad(self._norms, (0, 0, 0, missing), value=torch.nan)

    def by_layer(self) -> Tensor:
        """The norms over all units of each layer, (b, s, layer); nan where no voxel has one."""
        return norms_by_layer(self.norms, self._subject)

    def take(self, layer: ScannedLayer, source: Tensor, rows: Tensor, first: int = 0) -> None:
        """Take in (b, n, w) from position `first` on; another call of the layer is added.

        Args:
            layer: Whose they are.
            source: The tensor that the layer returned, of which `rows` may be a view.
            rows: Its values.
            first: A position.
        """
        rows = rows.detach() if rows.requires_grad else rows
        if rows.device != self._norms.device:
            rows = rows.to(self._norms.device)
        if not self.waits:
            self._put(layer, rows, first)
            return
        if layer.is_written or source.is_inference():  # whose version nobody counts
            with torch.inference_mode(False):
                source = rows = rows.clone()
        self._waiting.append(_Waiting(layer, source, source._version, rows, first))
        self._bytes += rows.nbytes
        if self._bytes > self._most or layer.calls > 1:
            self.flush()

    def take_flat(self, layout: FlatLayout, flat: Tensor, first: int, added: bool = False) -> None:
        """Take in (b, n, width) of many layers side by side, and read it now."""
        count = flat.shape[1]
        where = slice(first, first + count)
        kept = None if self._kept is None else self._kept(first, count)
        if self.waits:
            values = flat if flat.dtype in (torch.bfloat16, torch.float16) else flat.float()
            norms = self._norms[:, where]
            reduce_voxels(values, layout.table, norms, self._sums, kept, added=added)
            return
        self._norms[:, where, layout.columns] = layout.norms(flat)
        self._add_statistics([each.index for each in layout.layers], layout.edges, flat, kept)

    def take_together(self, outputs: list[tuple[ScannedLayer, Tensor | None]], first: int) -> None:
        """Take in (b, n, w) of many layers that are called once, and read them now."""
        if outputs:
            layout = layout_of(self._subject, [each for each, _ in outputs], self._norms.device)
            rows = {each.index: tensor for each, tensor in outputs if tensor is not None}
            flat = torch.cat([rows[each.index] for each in layout.layers], -1).detach()
            self.take_flat(layout, flat, first)

    def flush(self) -> None:
        """Reduce what waits."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        groups: dict[tuple[int, ...], list[_Waiting]] = defaultdict(list)
        for number, each in enumerate(waiting):
            if each.source._version != each.version:
                self._missed(each.layer.name, _WRITTEN)
                continue
            alone = number if each.layer.calls > 1 else -1  # a launch writes each place once
            groups[each.first, each.rows.shape[1], alone].append(each)
        for (first, *_), some in groups.items():
            layout = layout_of(self._subject, [each.layer for each in some], self._norms.device)
            rows = {each.layer.index: each.rows for each in some}
            flat = torch.cat([rows[each.index] for each in layout.layers], -1)
            self.take_flat(layout, flat, first, added=some[0].layer.calls > 1)

    def statistics(self) -> Floats | None:
        """(b, layer, STATISTICS); None where none were taken."""
        self.flush()
        if self._found is not None:
            count, mean, deviations, low, high, nan, positive, negative, zero, _ = np.moveaxis(
                self._found, -1, 0
            )
            infinite = positive + negative
            with np.errstate(divide="ignore", invalid="ignore"):
                std = np.sqrt(deviations / (count - nan - infinite))
            return np.stack([count, mean, std, low, high, nan, infinite, zero], -1)
        return None if self._sums is None else _statistics_of(self._sums, self._subject)

    def _put(self, layer: ScannedLayer, rows: Tensor, first: int) -> None:
        """Reduce the rows of one layer now."""
        count = rows.shape[1]
        found = voxel_norms(rows, layer.size)
        place = self._norms[:, first : first + count, layer.voxels]
        if layer.calls > 1:
            found = torch.where(place.isnan(), found, torch.hypot(place.nan_to_num(), found))
        place.copy_(found)
        if self._kept is not None:
            edges = np.array([0, rows.shape[-1]])
            self._add_statistics([layer.index], edges, rows, self._kept(first, count))

    def _add_statistics(
        self, layers: list[int], edges: Integers, values: Tensor, kept: Tensor | None
    ) -> None:
        """Add the values (b, n, units) of layers side by side to their statistics."""
        if self._found is None or kept is None:
            return
        found = numbers_of_layers(values, edges, kept)
        self._found[:, layers] = merge_numbers(self._found[:, layers], found)


def _statistics_of(sums: VoxelSums, subject: ScanSubject) -> Floats:
    """The statistics of layers from those of their voxels, (b, layer, STATISTICS)."""
    layers = torch.from_numpy(subject.anatomy.layer).long().to(sums.numbers.device)
    finite, mean, deviations, low, high, nan, infinite, zero = np.moveaxis(
        sums.by_group(layers, len(subject.layers)), -1, 0
    )
    some = finite > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        std = np.sqrt(deviations / finite)
    moments = [np.where(some, each, math.nan) for each in (mean, std, low, high)]
    return np.stack([finite + nan + infinite, *moments, nan, infinite, zero], -1)
