"""Distances between the statistics of two training runs, as arrays of (step, series).

`histories` calls these functions on two `RunTable`s, and `step_noise` reads columns with them.
Distances of statistics are relative to the rms of the values, the unit in which noise is given too.
nan means that one side has no value there; infinity means that counts, such as the number of NaN,
differ. `histories` treats them differently, so no function here may turn one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchfmri._records import COUNTS, STORED, Floats


@dataclass(frozen=True, eq=False)
class RunTable:
    """The numbers of a run at chosen steps: of each series, (step, series, field)."""

    values: Floats
    updates: Floats
    loss: Floats


def statistics_gaps(a: Floats, b: Floats) -> Floats:
    """(step, series) how far two tables of statistics are apart, relative to the rms."""
    get = column_of
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = [np.abs(_spreads(a) - _spreads(b))]
        gaps += [np.abs(get(a, name) - get(b, name)) for name in ("mean", "min", "max")]
        found = np.fmax.reduce(gaps) / np.fmax(sizes_of(a), sizes_of(b))
        found = np.where(np.fmax.reduce(gaps) == 0, 0.0, found)
    counts = ("count", "nan", "pos_inf", "neg_inf")
    assert set(counts) <= COUNTS
    other = np.any([get(a, name) != get(b, name) for name in counts], 0)
    seen = [~np.isnan(get(table, "count")) for table in (a, b)]
    found = np.where(other & seen[0] & seen[1], math.inf, found)
    return np.where(seen[0] & seen[1], np.nan_to_num(found, nan=0.0, posinf=math.inf), math.nan)


def alone_in_one(a: Floats, b: Floats, kinds: Sequence[str]) -> NDArray[np.bool_]:
    """(step, series) whether one run lacks a series in a step where it has others of that kind.

    Such as the gradient of a parameter that was frozen, or the output of a layer that was left out.
    """
    seen: list[NDArray[np.bool_]] = [~np.isnan(column_of(table, "count")) for table in (a, b)]
    found: NDArray[np.bool_] = np.not_equal(seen[0], seen[1])
    for kind in set(kinds):
        own = [at for at, each in enumerate(kinds) if each == kind]
        watched = np.array([each[:, own].any(1) for each in seen]).all(0)
        found[:, own] &= watched.reshape(-1, 1)
    return found


def column_of(table: Floats, name: str) -> Floats:
    """(step, series) one statistic of a table."""
    column: Floats = table[..., STORED.index(name)]
    return column


def _spreads(table: Floats) -> Floats:
    """(step, series) the standard deviation of the finite values."""
    bad = sum(column_of(table, name) for name in ("nan", "pos_inf", "neg_inf"))
    found: Floats = np.sqrt(
        column_of(table, "squared_deviations") / (column_of(table, "count") - bad)
    )
    return found


def sizes_of(table: Floats) -> Floats:
    """(step, series) the rms of the finite values."""
    return np.hypot(_spreads(table), column_of(table, "mean"))


def number_gaps(a: Floats, b: Floats) -> Floats:
    """How far numbers are apart, relative to the larger; nan where one is missing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    gap = np.where(a == b, 0.0, gap)
    gap = np.where(np.isinf(a) ^ np.isinf(b), math.inf, gap)
    return np.where(np.isnan(a) | np.isnan(b), math.nan, gap)
