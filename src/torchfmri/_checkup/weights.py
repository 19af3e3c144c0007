"""Sizes of weights, outputs and gradients: functions of tensors without side effects.

The files of this room use them. Complex numbers count as pairs of real ones. `noise_scale` is the
unbiased estimate of McCandlish et al. 2018, with the steps of a run in place of examples. They must
stay without side effects, because hooks call them in the middle of the user's pass. How they are
computed may change freely.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import named_layers


def relative_size(output: Tensor, target: Any) -> float:
    """Return rms of the output / rms of the targets; nan if the targets are not such numbers."""
    if not isinstance(target, Tensor) or not target.is_floating_point() or not target.numel():
        return math.nan
    size = rms(target)
    return rms(output) / size if size > 0 else math.nan


def copied_tables(model: nn.Module) -> list[tuple[str, str]]:
    """Return embeddings and output layers that are two parameters with equal random values."""
    layers = named_layers(model)
    tables = [(name, each) for name, each in layers.items() if isinstance(each, nn.Embedding)]
    heads = [(name, each) for name, each in layers.items() if isinstance(each, nn.Linear)]
    return [
        (name, other)
        for name, table in tables
        for other, head in heads
        if head.weight is not table.weight
        and head.weight.data_ptr() != table.weight.data_ptr()  # else tied by their memory
        and head.weight.shape == table.weight.shape
        and head.weight.requires_grad
        and float(table.weight.detach().float().std()) > 0
        and torch.equal(head.weight, table.weight)
    ]


def rms(parameter: Tensor) -> float:
    """Return the root mean square of a tensor; 0 if it is empty."""
    values = real(parameter.detach()).float()
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def spread(values: Tensor) -> float:
    """Return the rms of the rows (samples) around their mean; nan for fewer than four."""
    rows = values.detach().float()
    if rows.shape[0] < 4:
        return math.nan
    return math.sqrt(float((rows - rows.mean(0)).square().mean()))


def relative_spread(values: Tensor) -> float:
    """Return how much rows (samples) differ from each other, relative to their size."""
    apart, size = spread(values), rms(values)
    return apart if math.isnan(apart) else apart / size if size > 0 else 0.0


def growth_in_time(output: Tensor, batch_first: bool) -> float:
    """Return rms of a recurrent layer's last output / rms of its first."""
    steps = output.detach() if not batch_first else output.detach().transpose(0, 1)
    first, last = rms(steps[0]), rms(steps[-1])
    return last / first if first > 0 else math.nan


def has_equal_rows(parameter: Tensor) -> bool:
    """Whether all units have the same weights."""
    if parameter.ndim < 2 or parameter.shape[0] < 2 or parameter.numel() == parameter.shape[0]:
        return False
    rows = real(parameter.detach()).flatten(1).float()
    largest = float(rows.abs().max())
    return float((rows - rows[0]).abs().max()) <= 1e-6 * largest


def noise_scale(samples: list[Tensor], batch: float) -> float:
    """Return the batch size at which noise and mean of the gradient are equally large.

    McCandlish et al. 2018, with steps for examples: n gradients of one batch size, unbiased.
    """
    used = [each for each in samples if each.shape == samples[0].shape]
    if len(used) < 4:
        return math.nan
    stacked = torch.stack(used)
    count = len(used)
    mean = float(stacked.mean(0).square().sum())
    each = float(stacked.square().sum(1).mean())
    signal = (count * mean - each) / (count - 1)
    noise = each - signal
    return batch * noise / signal if signal > 0 else math.inf


def real(values: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(values) if values.is_complex() else values


def dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, which an embedding may have made sparse, without graph."""
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
