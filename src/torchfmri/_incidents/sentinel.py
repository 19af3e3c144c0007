"""Whether the loss and the gradients of a step are finite, without waiting for the device.

The norm of a gradient is NaN or infinite if any of its values is, and reading each gradient once
is the cheapest exact test there is. A norm can also overflow by itself, so an alarm is checked
value by value before anything is done about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfmri._incidents.content import readable
from torchfmri._torch import norms


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that an optimizer is about to apply, as this process holds them."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                values = readable(parameter.grad)
                if values is not None:
                    found.append(values)
    return found


def total_size(losses: Iterable[Tensor], gradients: Sequence[Tensor]) -> Tensor | None:
    """Return a number, not yet read, that is finite only if all of these are; or None.

    It may be infinite though all are finite, where a norm overflows.
    """
    parts: dict[torch.device, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for loss in losses:
            parts[loss.device].append(loss.detach().float().abs().reshape(()))
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            kinds[gradient.device, gradient.dtype].append(gradient)
        for (device, _), some in kinds.items():
            found = torch.stack(norms(some))
            parts[device].append((found.abs() if found.is_complex() else found).float().sum())
        totals = [torch.stack(some).sum() for some in parts.values()]
        if not totals:
            return None
        device = totals[0].device
        return torch.stack([total.to(device, non_blocking=True) for total in totals]).sum()


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every value of these is finite, exactly; waits for the device."""
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)
