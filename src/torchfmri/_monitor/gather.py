"""Histories of several processes as one: what a single process would have seen.

With data parallelism each process sees its part of the batch. Activations of all parts together
are those of the whole batch. The loss that training follows is the mean of the processes' losses,
so a gradient with respect to an output is that of the process divided by the number of processes
that have the layer. With a pipeline each process has layers of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from torchfmri._records import History, Series, Step
from torchfmri.statistics import Statistics, merge_statistics

WHOLE, SHARD = "whole", "shard"


def share_of(parameter: Tensor) -> str:
    """Whether this process holds a parameter whole, or a shard of it (FSDP, tensor parallel)."""
    placements: Any = getattr(parameter, "placements", None)
    if placements is None:
        return WHOLE
    return SHARD if any(each.is_shard() for each in placements) else WHOLE


def gather(history: History, layers: Collection[str], shares: Mapping[str, str]) -> History:
    """The merged history of all processes; all of them must call this.

    Args:
        history: That of this process.
        layers: The layers that this process watches.
        shares: Parameter name -> WHOLE or SHARD, of those that this process has.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return history
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (history, list(layers), dict(shares)))
    copies = Counter(layer for _, own, _ in everyone for layer in own)
    known = {name: share for *_, own in reversed(everyone) for name, share in own.items()}
    return merge([each for each, *_ in everyone], known, copies)


def merge(
    histories: list[History], shares: Mapping[str, str], copies: Mapping[str, int]
) -> History:
    """The history that one process with the whole batch would have kept.

    Args:
        histories: One of each process.
        shares: Parameter name -> WHOLE or SHARD.
        copies: Layer -> how many processes have it.
    """
    merged = History(max(len(each) for each in histories) or 1)
    for history in histories:
        for layer, reason in history.missing.items():
            merged.missing.setdefault(layer, reason)
        for text, layers in history.notes.items():
            known = merged.notes.setdefault(text, [])
            known.extend(layer for layer in layers if layer not in known)
    by_number = [{step.number: index for index, step in enumerate(each)} for each in histories]
    for number in sorted(set(by_number[0]).intersection(*by_number)):
        positions = [each[number] for each in by_number]
        merged.append(*_merge_step(histories, positions, shares, copies))
    return merged


def _merge_step(
    histories: list[History],
    positions: list[int],
    shares: Mapping[str, str],
    copies: Mapping[str, int],
) -> tuple[Step, dict[Series, Statistics]]:
    steps = [each[position] for each, position in zip(histories, positions, strict=True)]
    losses = [step.loss for step in steps if step.has_loss]
    step = Step(
        steps[0].number,
        sum(losses) / len(losses) if losses else math.nan,
        max(each.seconds for each in steps),
        dict(steps[0].scalars),
        **_merge_updates(steps, shares),
        has_loss=bool(losses),
    )
    found = {}
    for series in dict.fromkeys(series for each in histories for series in each.series):
        parts = [
            history.statistics(*series, position)
            for history, position in zip(histories, positions, strict=True)
            if series in history.series
        ]
        if shares.get(series.layer) == WHOLE:
            parts = parts[:1]
        if series.what == "gradients":
            parts = [part.scaled(1 / max(1, copies[series.layer])) for part in parts]
        statistics = merge_statistics(parts)
        if statistics.count:
            found[series] = statistics
    return step, found


def _merge_updates(steps: list[Step], shares: Mapping[str, str]) -> dict[str, Any]:
    """Norms of shards add up in the square; those of whole parameters are all the same."""
    names = tuple(dict.fromkeys(name for step in steps for name in step.parameters))
    columns = []
    for name in names:
        parts = [
            step.updates[:, step.parameters.index(name)]
            for step in steps
            if name in step.parameters
        ]
        columns.append(np.linalg.norm(parts, axis=0) if shares.get(name) == SHARD else parts[0])
    updates = np.stack(columns, axis=1) if columns else np.empty((2, 0))
    return {"parameters": names, "updates": updates}
