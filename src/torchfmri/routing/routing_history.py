"""Keep how routing develops as series of a `History`, so that whatever shows one shows routing.

`LearningDynamics` and `TrainingRun` append to it. Each series holds statistics over the units of a
layer. In "activation_rate" the mean is the share of units that are on, and the zeros are the units
that no token reached; in "selectivity" it is how much a unit's rate differs between tasks. The
names of the series, and the keys of `history_to_data`, stand in result files. Further series may be
added freely.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfmri._capture import CallKey
from torchfmri._records import STORED, History, HistoryRows, Series, Step
from torchfmri.routing.signals import Signals
from torchfmri.statistics import Statistics, calculate_statistics

ACTIVATION_RATE, SELECTIVITY = "activation_rate", "selectivity"


def measure_routing(
    history: History, step: int, loss: float, signals: Mapping[CallKey, Signals]
) -> None:
    """Add a step: the activation rate of every unit over the tokens of one pass."""
    rates: dict[str, list[Tensor]] = defaultdict(list)
    for call, each in signals.items():
        active = each.contribution > 0
        chosen = active.flatten(0, -2) if each.mask is None else active[each.mask]
        rates[call.layer].append(chosen.float().mean(0))
    found = {
        Series(layer, ACTIVATION_RATE): calculate_statistics(torch.stack(parts).mean(0))
        for layer, parts in rates.items()
    }
    history.append(Step(step, loss=loss), found)


def append_rates(history: History, step: int, loss: float, rates: Mapping[str, Tensor]) -> None:
    """Add a step from the rates of every unit in every task, layer -> (task, o)."""
    found: dict[Series, Statistics] = {}
    for layer, each in rates.items():
        found[Series(layer, ACTIVATION_RATE)] = calculate_statistics(each.mean(0))
        found[Series(layer, SELECTIVITY)] = calculate_statistics(selectivity(each))
    history.append(Step(step, loss=loss), found)


def selectivity(rates: Tensor) -> Tensor:
    """Return the standard deviation over tasks of each unit's rate, (task, o) -> (o,)."""
    return rates.std(0, correction=0)


def history_to_data(history: History) -> dict[str, Any]:
    """Return a history of routing as plain data; `history_from_data` makes it one again."""
    return {
        "series": [list(series) for series in history.series],
        "steps": [step.number for step in history],
        "loss": [step.loss for step in history],
        "tables": [step.table.tolist() for step in history],
    }


def history_from_data(data: Mapping[str, Any], length: int = 1000) -> History:
    """Return the history that `history_to_data` wrote, without histograms."""
    history = History(length)
    series = [Series(*each) for each in data["series"]]
    for number, loss, table in zip(data["steps"], data["loss"], data["tables"], strict=True):
        labels: list[tuple[str, tuple[int, ...]]] = [("float32", ())] * len(table)
        rows = np.array(table, np.float64).reshape(len(table), len(STORED))
        history.append(Step(number, loss=loss), HistoryRows(series[: len(table)], rows, labels))
    return history
