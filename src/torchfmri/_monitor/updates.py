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
from torchfmri._torch import differences, norms


class Moved(NamedTuple):
    """How far some parameters were moved, still on their device.

    Attributes:
        names: The parameters.
        norms: (2, parameter): the norm of the change, and of the weights before it.
    """

    names: list[str]
    norms: Tensor


class Updates:
    """Measures one step: create it before `optimizer.step()`, call `moved` after it."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._before = {name: _sample(each) for name, each in self._parameters.items()}

    def moved(self) -> list[Moved]:
        """How far each parameter went, in one tensor per device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
        for name, before in self._before.items():
            groups[before.device, before.dtype].append(name)
        return [Moved(names, self._norms(names)) for names in groups.values()]

    def _norms(self, names: list[str]) -> Tensor:
        with torch.no_grad():
            before = [self._before[name] for name in names]
            after = [_sample(self._parameters[name]) for name in names]
            change = differences(after, before)
            return torch.stack([torch.stack(norms(change)), torch.stack(norms(before))])


def is_sampled(parameter: Tensor) -> bool:
    """Whether the ratio of this parameter is an estimate from a sample."""
    return local_part(parameter).numel() > UPDATE_SAMPLE


def local_part(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter, which may be sharded."""
    detached = parameter.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local


def _sample(parameter: Tensor) -> Tensor:
    """A copy of evenly spaced values, in float32 or wider."""
    flat = local_part(parameter).reshape(-1)
    sample = flat[:: max(1, -(-flat.numel() // UPDATE_SAMPLE))]
    if sample.is_complex():
        sample = torch.view_as_real(sample)
    wide = torch.float64 if sample.dtype == torch.float64 else torch.float32
    return sample.to(wide, copy=True)
