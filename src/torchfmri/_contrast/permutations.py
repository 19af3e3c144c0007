"""Compute p by relabelling: what the same prompts show if their labels mean nothing.

`ContrastTrial` calls `permute`. Under the null hypothesis the labels of prompts are exchangeable,
whatever the distribution of the values, so the share of relabellings that reach what was seen is a
p-value. The largest statistic of each relabelling is the null distribution of the largest one of
all columns: what exceeds it holds for the whole family. The true labelling is always among the
relabellings, so that p is never 0. It must be computed exactly as the others are, or rounding would
decide whether it reaches itself. The order in which columns are worked on may change freely.
"""

from __future__ import annotations

from collections.abc import Callable
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
_NARROW = 1e-4
"""Where less than this share of the squares is within groups, they are computed from deviations."""
_AT_ONCE = 1 << 14


class Permuted(NamedTuple):
    """P-values by relabelling.

    Attributes:
        p: (v,) by each column's own distribution; nan where it was not tested.
        p_max: (v,) by that of the largest statistic of all columns.
        number: How many relabellings there are, the true one among them.
        exact: Whether these are all possible ones.
        least: The smallest p that they allow.
    """

    p: Doubles
    p_max: Doubles
    number: int
    exact: bool
    least: float


def permute(
    values: NDArray[np.floating],
    tested: NDArray[np.bool_],
    statistic: Statistic,
    *,
    relabellings: int,
    exact: bool,
    mirrored: bool,
    two_sided: bool,
) -> Permuted:
    """Compare what was seen with every relabelling; the first one is the true labelling.

    Args:
        values: (n, v).
        tested: (v,) which columns have a statistic; the others, and those that lack a value, are
            left out.
        statistic: Computes the statistic of some columns, for all relabellings.
        relabellings: How many there are.
        exact: Whether these are all possible ones.
        mirrored: Whether every relabelling has one beside it that only changes the sign.
        two_sided: Whether the size counts and not the sign.
    """
    number, seen = np.zeros(len(tested)), np.full(len(tested), np.nan)
    largest: Doubles | None = None
    complete = np.zeros(len(tested), bool)
    for part in blocks(values, relabellings):
        own = np.asarray(values[:, part], np.float64)
        complete[part] = np.isfinite(own).all(0) & tested[part]
        use = complete[part]
        if not use.any():
            continue
        found = statistic(own[:, use])
        found = np.abs(found) if two_sided else found
        known = np.nan_to_num(found, nan=-np.inf)  # no spread in a relabelling: nothing is seen
        places = np.arange(part.start, part.stop)[use]
        seen[places] = known[0]  # computed as all others are, so that it reaches itself
        number[places] = (known >= _slightly_below(known[0])).sum(0)
        top = known.max(1)
        largest = top if largest is None else np.maximum(largest, top)
    if largest is None:
        nothing = np.full(len(seen), np.nan)
        return Permuted(nothing, nothing, 0, exact, 1.0)
    order = np.sort(largest)
    above = len(order) - np.searchsorted(order, _slightly_below(seen), side="left")
    p, p_max = number / len(order), above / len(order)
    least = (2 if exact and mirrored and two_sided else 1) / len(order)
    return Permuted(
        np.where(complete, p, np.nan), np.where(complete, p_max, np.nan), len(order), exact, least
    )


def _slightly_below(target: Doubles) -> Doubles:
    return target - np.abs(target) * (1 - _TIE)


def relabel(
    groups: NDArray[np.int64], number: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], bool]:
    """Return (m, n) labels, the true ones first, and whether these are all possible ones.

    Two groups with few prompts are enumerated; else labels are drawn.
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
    """Return (m, n) signs of n differences, all + first, and whether these are all possible."""
    if n < 63 and 2**n <= number:
        return np.array(list(product((1.0, -1.0), repeat=n))), True
    drawn = random.choice([1.0, -1.0], size=(number, n))
    return np.concatenate([np.ones((1, n)), drawn]), False


def welch_statistic(labels: NDArray[np.int64], weights: Doubles) -> Statistic:
    """Return a function that computes Welch's t of weighted groups, for labels (m, n)."""

    def statistic(values: NDArray[np.floating]) -> Doubles:
        effect = squared = np.zeros(values.shape[1])
        for weight, group in zip(weights, _by_group(values, labels, len(weights)), strict=True):
            effect = effect + weight * group.mean
            squared = squared + weight**2 * group.variance / group.size
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Doubles = effect / np.sqrt(squared)
        return found

    return statistic


def f_statistic(labels: NDArray[np.int64], contrasts: Doubles) -> Statistic:
    """Return a function: what contrasts (q, k) explain over the rest, which orders as F does."""

    def statistic(values: NDArray[np.floating]) -> Doubles:
        groups = _by_group(values, labels, contrasts.shape[1])
        counts = np.array([group.size for group in groups])
        means = np.stack([group.mean for group in groups])  # (k, m, v)
        gaps = np.einsum("qk,kmv->qmv", contrasts, means)
        inverse = np.linalg.pinv((contrasts / counts) @ contrasts.T)
        left = sum(group.squares for group in groups)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Doubles = np.einsum("qmv,qr,rmv->mv", gaps, inverse, gaps) / left
        return found

    return statistic


class _Group(NamedTuple):
    """One group under every relabelling.

    Attributes:
        mean: (m, v) less the mean of all prompts.
        squares: (m, v) the sum of squared deviations.
        size: How many prompts it has.
    """

    mean: Doubles
    squares: Doubles
    size: int

    @property
    def variance(self) -> Doubles:
        """(m, v) of its prompts."""
        return self.squares / max(self.size - 1, 1)


def _by_group(values: NDArray[np.floating], labels: NDArray[np.int64], number: int) -> list[_Group]:
    """Return the groups of values (n, v) under labels (m, n).

    Sums of squares by products of matrices are fast, but they lose their digits where groups are
    far apart and narrow. Those few are computed again from deviations.
    """
    centred = values - values.mean(0)  # squares of values far from 0 would lose the variance
    squares, total = centred * centred, centred.sum(0)
    total_squares = squares.sum(0)
    sums, sum_squares = np.zeros_like(total), np.zeros_like(total)
    groups, left = [], np.zeros_like(total)
    for k in range(number):
        last = k == number - 1
        mine = (labels == k).astype(np.float64)
        own = total - sums if last else mine @ centred
        own_squares = total_squares - sum_squares if last else mine @ squares
        sums, sum_squares = sums + own, sum_squares + own_squares
        count = int(mine[0].sum())
        inside = np.maximum(own_squares - own * own / count, 0.0)
        left = left + inside
        groups.append(_Group(mean=own / count, squares=inside, size=count))
    rows, columns = np.nonzero(left < _NARROW * total_squares)
    for at in range(0, len(rows), _AT_ONCE):
        some = rows[at : at + _AT_ONCE], columns[at : at + _AT_ONCE]
        own_values = centred[:, some[1]].T
        for k, group in enumerate(groups):
            mine = labels[some[0]] == k
            mean = np.where(mine, own_values, 0.0).sum(1) / group.size
            gap = np.where(mine, own_values - mean[:, None], 0.0)
            group.mean[some] = mean
            group.squares[some] = (gap * gap).sum(1) - gap.sum(1) ** 2 / group.size
    return groups


def paired_statistic(signs: Doubles) -> Statistic:
    """Return a function for differences (n, v): their mean with signs (m, n) over their rms.

    It orders as t does, also among columns, and no digits are lost if all differences are alike.
    """

    def statistic(values: NDArray[np.floating]) -> Doubles:
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Doubles = signs @ (values / np.sqrt((values * values).sum(0)))
        return found

    return statistic
