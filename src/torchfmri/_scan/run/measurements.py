"""Convert norms by voxel into norms by layer, and into rms by layer or voxel.

`readings`, `batch_rows` and `live_token` use it, so that live tokens and finished scans show equal
numbers. Voxels that are experts are not added to those that are units, or values would count twice.
A layer that is called several times per token has as many times the units in its rms. A layer
without such voxels has nan, not 0.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
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
    widths = [
        1 if each.axis is None else each.axis.width * max(each.calls, 1) for each in subject.layers
    ]
    return norms_by_layer(norms, subject) / _roots(np.array(widths), norms)


def rms_by_voxel(norms: Tensor, subject: ScanSubject) -> Tensor:
    """Norms by voxel -> rms by voxel."""
    anatomy = subject.anatomy
    calls = np.array([max(each.calls, 1) for each in subject.layers])
    return norms / _roots(anatomy.count * calls[anatomy.layer], norms)


def _roots(counts: NDArray[np.integer], like: Tensor) -> Tensor:
    return torch.from_numpy(counts).to(like).sqrt()
