"""Whether what a model says about one sample depends on the others.

`Checkup` calls `mixed_share` once, after the run, on the copy. It exchanges one sample and compares
the outputs of the others, in evaluation mode. It returns nan wherever the comparison would mean
nothing (sequences, graphs, random outputs): a false alarm here would accuse a right model. Add a
reason to return nan freely; remove one only with a healthy model that shows it is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import evaluating, random_state
from torchfmri._torch import flatten, map_tensors

LEAST_SAMPLES = 4


def mixed_share(model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> float:
    """Return how much outputs move when another sample is exchanged, relative to how they differ.

    Three forward passes in evaluation mode, where batch norms and dropout leave samples alone. nan
    if that cannot be told: outputs that are not one row per sample or differ by themselves from
    pass to pass, sequences (whose first axis may be time), or norms that always take the batch's
    own statistics.
    """
    first = next((each.tensor for each in flatten((arguments, dict(keywords)))), None)
    if first is None or first.ndim < 2 or _takes_batch_statistics(model):
        return math.nan
    if _reads_one_sequence(model, first):
        return math.nan
    count = first.shape[0]
    place = _other_row(first)
    if count < LEAST_SAMPLES or place is None or _is_square(model, count):
        return math.nan
    if any(
        not each.tensor.ndim or each.tensor.shape[0] != count or count in each.tensor.shape[1:]
        for each in flatten((arguments, dict(keywords)))
    ):
        return math.nan

    with evaluating(model), torch.no_grad():
        state = random_state()
        before = _rows(model(*arguments, **keywords), count)
        state.restore()
        again = _rows(model(*arguments, **keywords), count)
        if before is None or again is None or not torch.equal(before, again):
            return math.nan
        state.restore()
        exchange = partial(_exchanged, place)
        others = map_tensors(tuple(arguments), exchange)
        after = _rows(model(*others, **map_tensors(dict(keywords), exchange)), count)
    if after is None or before.shape != after.shape:
        return math.nan
    apart = float(before.std(0).max())
    moved = float((after - before)[1:].abs().max())
    return moved / apart if math.isfinite(moved) and apart > 0 else math.nan


def _exchanged(place: int, tensor: Tensor) -> Tensor:
    """Return a tensor with another of its rows in place of the first."""
    rows = tensor.detach().clone()
    rows[0] = rows[place]
    return rows


def _rows(output: Any, count: int) -> Tensor | None:
    """Return an output with one row of numbers per sample; None for any other."""
    found = [each.tensor for each in flatten(output) if each.tensor.is_floating_point()]
    if not found or found[0].ndim > 2 or tuple(found[0].shape).count(count) != 1:
        return None
    rows = found[0].detach().float()
    return rows if rows.shape[0] == count else None


def _other_row(values: Tensor) -> int | None:
    """Return the place of a sample that is not like the first."""
    differs = (values != values[:1]).flatten(1).any(1).nonzero()
    return int(differs[0]) if len(differs) else None


def _reads_one_sequence(model: nn.Module, first: Tensor) -> bool:
    """Whether rows may be the steps of one sequence, which a recurrent layer also takes."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return recurrent and first.ndim == 2 and first.is_floating_point()


def _takes_batch_statistics(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
        for module in model.modules()
    )


def _is_square(model: nn.Module, count: int) -> bool:
    """Whether the model holds a matrix of all samples by all samples, such as a graph's edges."""
    return any(tuple(each.shape).count(count) > 1 for each in model.buffers())
