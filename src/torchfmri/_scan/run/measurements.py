"""Norms by voxel as norms and rms by layer and voxel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfmri._scan.run.subject import ScanSubject


def norms_by_layer(norms: Tensor, subject: ScanSubject, experts: bool = False) -> Tensor:
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


def rms_by_layer(norms: Tensor, subject: ScanSubject) -> Tensor:
    """Norms by voxel -> rms by layer, (..., layer)."""
    widths = [1 if each.axis is None else each.axis.width * each.calls for each in subject.layers]
    return norms_by_layer(norms, subject) / _roots(widths, norms)


def rms_by_voxel(norms: Tensor, subject: ScanSubject) -> Tensor:
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
