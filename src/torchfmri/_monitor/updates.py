"""How far one optimizer step moves the weights, relative to their size.

A copy of all weights would double their memory, so a parameter with more than `UPDATE_SAMPLE`
values is represented by at most that many of them, evenly spaced: the ratio is then an estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._records import UPDATE_SAMPLE
from torchfmri._torch import differences, local_part, norms


class Moved(NamedTuple):
    """How far some parameters were moved, still on their device.

    Attributes:
        names: The parameters.
        norms: (2, parameter): the norm of the change, and of the weights before it.
    """

    names: list[str]
    norms: Tensor


class Updates:
    """Measures one step: create it before `optimizer.step()`, call `moved` after it.

    The weights before it are copied. Those after it are read where they are, at once.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._before = {name: _sample(each, copy=True) for name, each in self._parameters.items()}

    def moved(self) -> list[Moved]:
        """How far each parameter went, in one tensor per device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
        for name, before in self._before.items():
            groups[before.device, before.dtype].append(name)
        return [Moved(names, self._norms(names)) for names in groups.values()]

    def _norms(self, names: list[str]) -> Tensor:
        with torch.no_grad():
            before = [self._before[name] for name in names]
            after = [_sample(self._parameters[name], copy=False) for name in names]
            change = differences(after, before)
            return torch.stack([torch.stack(norms(change)), torch.stack(norms(before))])


def is_sampled(parameter: Tensor) -> bool:
    """Whether the ratio of this parameter is an estimate from a sample."""
    return local_part(parameter).numel() > UPDATE_SAMPLE


def _sample(parameter: Tensor, copy: bool) -> Tensor:
    """Evenly spaced values, in float32 or wider; of a small parameter all, in its own shape."""
    sample = local_part(parameter)
    if sample.numel() > UPDATE_SAMPLE:
        flat = sample.reshape(-1)
        sample = flat[:: -(-flat.numel() // UPDATE_SAMPLE)]
    if sample.is_complex():
        sample = torch.view_as_real(sample)
    wide = torch.float64 if sample.dtype == torch.float64 else torch.float32
    return sample.to(wide, copy=copy)
