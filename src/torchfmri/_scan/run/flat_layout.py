"""Join the outputs of many layers to one tensor, so that few operations reduce them all.

`live`, `live_hooks`, `readings` and `compiled_step` use a `FlatLayout`: with hundreds of layers and
one token per step, the number of operations is the cost. `layout_of` makes each layout once per
subject and device. Layers are sorted so that voxels of one size stand together, so `columns` must
be used to put norms back to the voxels of the anatomy. `voxel_norms` computes in float32 at least:
squares overflow in float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from torchfmri._kernels import VoxelTable
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject


class FlatLayout:
    """Where the units of some layers stand when their outputs are joined to (b, n, width).

    Layers of whole voxels of one size stand together, so that all their norms are had by one
    reduction.

    Args:
        layers: Layers with tokens.
        device: Where the outputs are.

    Attributes:
        layers: In the order in which they stand.
        width: Units of all of them.
        edges: (layer + 1,) where each begins, and the last one ends.
    """

    def __init__(self, layers: Sequence[ScannedLayer], device: torch.device) -> None:
        self._device = device
        self.layers = sorted(layers, key=lambda each: (_width(each) % each.size > 0, each.size))
        self.edges = np.cumsum([0, *map(_width, self.layers)])
        self._places = [slice(*pair) for pair in pairwise(self.edges.tolist())]
        self.width = int(self.edges[-1])
        self._groups: list[tuple[slice, int]] = []  # columns, and units of a voxel
        placed = zip(self.layers, self._places, strict=True)
        whole = [pair for pair in placed if not _width(pair[0]) % pair[0].size]
        for size, some in groupby(whole, key=lambda pair: pair[0].size):
            columns = [place for _, place in some]
            self._groups.append((slice(columns[0].start, columns[-1].stop), size))
        self._groups += [
            (place, layer.size)
            for layer, place in zip(self.layers, self._places, strict=True)
            if _width(layer) % layer.size
        ]

    @cached_property
    def columns(self) -> Tensor:
        """The voxels of all layers, in the order in which they stand."""
        found = [np.arange(each.voxels.start, each.voxels.stop) for each in self.layers]
        return torch.from_numpy(np.concatenate(found)).to(self._device)

    @cached_property
    def table(self) -> VoxelTable:
        """The voxels for the kernel."""
        starts = [
            np.arange(place.start, place.stop, layer.size)
            for layer, place in zip(self.layers, self._places, strict=True)
        ]
        counts = [
            np.minimum(layer.size, place.stop - each)
            for layer, place, each in zip(self.layers, self._places, starts, strict=True)
        ]
        columns = self.columns.cpu().numpy()
        return VoxelTable.of(np.concatenate(starts), np.concatenate(counts), columns, self._device)

    def units(self, flat: Tensor) -> list[Tensor]:
        """What each layer has in (..., width), in the order of `layers`."""
        return [flat[..., place] for place in self._places]

    def norms(self, flat: Tensor) -> Tensor:
        """(..., width) -> the norms of all voxels, in the order of `columns`."""
        found = [voxel_norms(flat[..., place], size) for place, size in self._groups]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


def layout_of(
    subject: ScanSubject, layers: Sequence[ScannedLayer], device: torch.device
) -> FlatLayout:
    """The layout of some layers of a subject, made once."""
    key = (device, *(each.index for each in layers))
    if key not in subject.layouts:
        subject.layouts[key] = FlatLayout(layers, device)
    found: FlatLayout = subject.layouts[key]
    return found


def _width(layer: ScannedLayer) -> int:
    assert layer.axis is not None
    return layer.axis.width


def voxel_norms(rows: Tensor, size: int) -> Tensor:
    """The norm of each group of `size` neighbouring units, (..., w) -> (..., ceil(w / size)).

    In float32 at least; the last group may have fewer units.
    """
    if missing := -rows.shape[-1] % size:
        rows = torch.nn.functional.pad(rows, (0, missing))
    dtype = None if rows.dtype in (torch.float32, torch.float64) else torch.float32
    groups = rows.reshape(*rows.shape[:-1], -1, size)
    found: Tensor = torch.linalg.vector_norm(groups, 2, -1, dtype=dtype)
    return found
