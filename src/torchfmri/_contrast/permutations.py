"""What the same prompts would show if their labels meant nothing: shuffled labels, flipped signs.

Under the null hypothesis the labels of prompts are exchangeable, whatever the distribution of the
values, so the share of relabellings that reach what was seen is a p-value. The largest statistic of
each relabelling is the null distribution of the largest one of all columns: what exceeds it holds
for the whole family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast.distributions import Doubles
from torchfmri._contrast.prompt_table import blocks

Statistic = Callable[[NDArray[np.floating]], Doubles]
"""(n, v) -> (m, v), the statistic of each column under each relabelling."""
_TIE = 1 - 1e-9
"""Sums in another order differ in their last digits: equal statistics count as reached."""


class Permuted(NamedTuple):
    """P-values by relabelling.

    Attributes:
        p: (v,) by each column's own distribution; nan where it was not tested.
        p_max: (v,) by that of the largest statistic of all columns.
        number: How many relabellings there are, the true one among them.
        exact: Whether these are all that there are.
    """

    p: Doubles
    p_max: Doubles
    number: int
    exact: bool


def permute(
    values: NDArray[np.floating],
    seen: Doubles,
    statistic: Statistic,
    *,
    relabellings: int,
    exact: bool,
    two_sided: bool,
) -> Permuted:
    """Compare what was seen with every relabelling; the first one is the true labelling.

    Args:
        values: (n, v).
        seen: (v,) the true statistic; a column of which it is nan, or that lacks a value, is left
            out.
        statistic: Of some columns, for all relabellings.
        relabellings: How many there are.
        exact: Whether these are all that there are.
        two_sided: Whether the size counts and not the sign.
    """
    number = np.zeros(len(seen))
    largest: Doubles | None = None
    complete = np.zeros(len(seen), bool)
    for part in blocks(values, relabellings):
        own = np.asarray(values[:, part], np.float64)
        complete[part] = np.isfinite(own).all(0) & ~np.isnan(seen[part])
        use = complete[part]
        if not use.any():
            continue
        found = statistic(own[:, use])
        found = np.abs(found) if two_sided else found
        known = np.nan_to_num(found, nan=-np.inf)  # no spread in a relabelling: nothing is seen
        target = np.abs(seen[part][use]) if two_sided else seen[part][use]
        places = np.arange(part.start, part.stop)[use]
        number[places] = (known >= _slightly_below(target)).sum(0)
        top = known.max(1)
        largest = top if largest is None else np.maximum(largest, top)
    if largest is None:
        nothing = np.full(len(seen), np.nan)
        return Permuted(nothing, nothing, 0, exact)
    target = np.abs(seen) if two_sided else seen
    order = np.sort(largest)
    above = len(order) - np.searchsorted(order, _slightly_below(target), side="left")
    p, p_max = number / len(order), above / len(order)
    return Permuted(
        np.where(complete, p, np.nan), np.where(complete, p_max, np.nan), len(order), exact
    )


def _slightly_below(target: Doubles) -> Doubles:
    return target - np.abs(target) * (1 - _TIE)


def relabel(
    groups: NDArray[np.int64], number: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], bool]:
    """(m, n) labels, the true ones first, and whether they are all that there are.

    Two groups with few prompts are enumerated; otherwise labels are drawn.
    """
    n, first = len(groups), int((groups == 0).sum())
    if groups.max(initial=0) == 1 and comb(n, first) <= number:
        rows = [groups]
        for chosen in combinations(range(n), first):
            row = np.ones(n, np.int64)
            row[list(chosen)] = 0
            if not np.array_equal(row, groups):
                rows.append(row)
        return np.stack(rows), True
    drawn = random.permuted(np.broadcast_to(groups, (number, n)).copy(), axis=1)
    return np.concatenate([groups[None], drawn]), False


def flip(n: int, number: int, random: np.random.Generator) -> tuple[Doubles, bool]:
    """(m, n) signs of n differences, all + first, and whether they are all that there are."""
    if n < 63 and 2**n <= number:
        return np.array(list(product((1.0, -1.0), repeat=n))), True
    drawn = random.choice([1.0, -1.0], size=(number, n))
    return np.concatenate([np.ones((1, n)), drawn]), False


def welch_statistic(labels: NDArray[np.int64], weights: Doubles) -> Statistic:
    """Welch's t of weighted groups, for labels (m, n)."""

    def statistic(values: NDArray[np.floating]) -> Doubles:
        effect = squared = np.zeros(values.shape[1])
        for mean, variance, count, weight in _by_group(values, labels, weights):
            effect = effect + weight * mean
            squared = squared + weight**2 * variance / count
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Doubles = effect / np.sqrt(squared)
        return found

    return statistic


def f_statistic(labels: NDArray[np.int64], contrasts: Doubles) -> Statistic:
    """The squares that contrasts (q, k) explain over those left, which orders as F does."""

    def statistic(values: NDArray[np.floating]) -> Doubles:
        groups = list(_by_group(values, labels, np.ones(contrasts.shape[1])))
        counts = np.array([count for _, _, count, _ in groups])
        means = np.stack([mean for mean, _, _, _ in groups])  # (k, m, v)
        gaps = np.einsum("qk,kmv->qmv", contrasts, means)
        inverse = np.linalg.pinv((contrasts / counts) @ contrasts.T)
        left = sum((count - 1) * variance for _, variance, count, _ in groups)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Doubles = np.einsum("qmv,qr,rmv->mv", gaps, inverse, gaps) / left
        return found

    return statistic


def _by_group(
    values: NDArray[np.floating], labels: NDArray[np.int64], weights: Doubles
) -> Iterator[tuple[Doubles, Doubles, int, float]]:
    """(mean, variance, count, weight) of each group: (m, v), (m, v), a number, a number."""
    centred = values - values.mean(0)  # squares of values far from 0 would lose the variance
    squares, total = centred * centred, centred.sum(0)
    total_squares = squares.sum(0)
    sums, sum_squares = np.zeros_like(total), np.zeros_like(total)
    for k, weight in enumerate(weights):
        last = k == len(weights) - 1
        mine = (labels == k).astype(np.float64)
        own = total - sums if last else mine @ centred
        own_squares = total_squares - sum_squares if last else mine @ squares
        sums, sum_squares = sums + own, sum_squares + own_squares
        count = int(mine[0].sum())
        variance = (own_squares - own * own / count) / max(count - 1, 1)
        yield own / count, np.maximum(variance, 0.0), count, float(weight)


def paired_statistic(signs: Doubles) -> Statistic:
    """The t of differences (n, v) with these signs (m, n)."""

    def statistic(values: NDArray[np.floating]) -> Doubles:
        n = len(values)
        mean = signs @ values / n
        variance = ((values * values).sum(0) - n * mean * mean) / max(n - 1, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Doubles = mean / np.sqrt(np.maximum(variance, 0.0) / n)
        return found

    return statistic
