"""Tokens x voxels while they are being filled: norms per voxel, by batch row and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._scan.run.subject import ScannedLayer, Subject


def voxel_norms(rows: Tensor, size: int) -> Tensor:
    """The norm of each group of `size` neighbouring units, (..., w) -> (..., ceil(w / size)).

    In float32 at least; the last group may have fewer units.
    """
    if missing := -rows.shape[-1] % size:
        rows = F.pad(rows, (0, missing))
    dtype = None if rows.dtype in (torch.float32, torch.float64) else torch.float32
    groups = rows.reshape(*rows.shape[:-1], -1, size)
    found: Tensor = torch.linalg.vector_norm(groups, 2, -1, dtype=dtype)
    return found


class Measurements:
    """Norms of one quantity per voxel, (b, s, voxel); nan where nothing was measured.

    Args:
        subject: What is scanned.
        b: Batch rows.
        s: Positions.
        like: Where and in what dtype: float64 for a model in float64, else float32.
    """

    def __init__(self, subject: Subject, b: int, s: int, like: Tensor) -> None:
        self._subject = subject
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        count = len(subject.anatomy.layer)
        self.norms = torch.full((b, s, count), torch.nan, dtype=dtype, device=like.device)

    def grow(self, s: int) -> None:
        """Make room for `s` positions."""
        missing = s - self.norms.shape[1]
        self.norms = F.pad(self.norms, (0, 0, 0, missing), value=torch.nan)

    def put(self, layer: ScannedLayer, rows: Tensor, first: int = 0) -> None:
        """Take in (b, n, w) from position `first` on; another call of the layer is added."""
        found = voxel_norms(rows.detach(), layer.size)
        place = self.norms[:, first : first + rows.shape[1], layer.voxels]
        if layer.calls > 1:
            found = torch.where(place.isnan(), found, torch.hypot(place.nan_to_num(), found))
        place.copy_(found)

    def by_layer(self) -> Tensor:
        """The norms over all units of each layer, (b, s, layer); nan where no voxel has one."""
        return norms_by_layer(self.norms, self._subject)


def norms_by_layer(norms: Tensor, subject: Subject, experts: bool = False) -> Tensor:
    """Norms by voxel -> norms by layer, (..., layer); nan where a layer has none.

    Args:
        norms: (..., voxel).
        subject: What is scanned.
        experts: Add up the voxels that are experts, instead of those that are units.
    """
    anatomy = subject.anatomy
    wanted = torch.from_numpy((anatomy.kind == 2) == experts).to(norms.device)
    places = torch.from_numpy(anatomy.layer).long().to(norms.device)[wanted]
    squares = norms[..., wanted].square()
    found = squares.new_zeros(*norms.shape[:-1], len(subject.layers)).index_add_(
        -1, places, squares
    )
    empty = torch.ones(len(subject.layers), dtype=torch.bool, device=norms.device)
    empty[places] = False
    return found.sqrt_().masked_fill_(empty, torch.nan)


def rms_by_layer(norms: Tensor, subject: Subject) -> Tensor:
    """Norms by voxel -> rms by layer, (..., layer)."""
    widths = [1 if each.axis is None else each.axis.width * each.calls for each in subject.layers]
    return norms_by_layer(norms, subject) / _roots(widths, norms)


def rms_by_voxel(norms: Tensor, subject: Subject) -> Tensor:
    """Norms by voxel -> rms by voxel."""
    anatomy = subject.anatomy
    calls = [max(each.calls, 1) for each in subject.layers]
    counts = [
        count * calls[layer]
        for count, layer in zip(anatomy.count.tolist(), anatomy.layer.tolist(), strict=True)
    ]
    return norms / _roots(counts, norms)


def _roots(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=like.dtype, device=like.device).sqrt()
