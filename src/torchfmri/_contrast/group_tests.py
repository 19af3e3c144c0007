"""Tests over prompts: Welch's t of weighted groups, the paired t, and F for several contrasts.

`ContrastTrial` calls them for a block of columns; they return a `Tested`, whose fields are those of
a `Contrast`. A prompt counts once, whatever its length: tokens of one prompt are not independent.
Results equal those of scipy and statsmodels to 1e-10, which `test_contrast.py` checks. Differences
as small as the rounding of float32 do not count as variance: without this rule constant columns
would be "significant". How sums are formed may change freely as long as these comparisons pass.
Index letters: n prompts, v columns, k groups, q contrasts, m relabellings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchfmri._contrast.distributions import Doubles, f_tail, normal_quantile, t_tail

_SAME = 4 * float(np.finfo(np.float32).eps)
"""Values were float32: what varies less than this, relatively, is one value with rounding."""


@dataclass(eq=False)
class Tested:
    """The outcome of a test, (v,) each.

    Attributes:
        n_a: Prompts with a value, of positive weight.
        n_b: Prompts with a value, of negative weight.
        effect: The weighted sum of the groups' means; of F, the largest distance of two means.
        g: Hedges g.
        ci_low: Where its interval begins.
        ci_high: Where it ends.
        statistic: t, or F.
        dof: Its degrees of freedom; of F, those of the denominator.
        p: Its p-value; nan where nothing was tested.
    """

    n_a: NDArray[np.int64]
    n_b: NDArray[np.int64]
    effect: Doubles
    g: Doubles
    ci_low: Doubles
    ci_high: Doubles
    statistic: Doubles
    dof: Doubles
    p: Doubles


def rounding_of(size: Doubles) -> Doubles:
    """Return what values of this size may differ by through rounding alone."""
    return _SAME * size


class Moments:
    """Counts, means and variances of the groups, by column; only finite values count.

    Args:
        values: (n, v).
        members: (k, n) which prompts each group has.
        rounding: (v,) what the values may differ by without being different; None takes it from
            the size of the groups' means.
    """

    def __init__(
        self,
        values: NDArray[np.floating],
        members: NDArray[np.bool_],
        rounding: Doubles | None = None,
    ) -> None:
        finite = np.isfinite(values)
        known = np.where(finite, values, 0.0).astype(np.float64)
        weight = members.astype(np.float64)
        self.count: Doubles = weight @ finite
        with np.errstate(divide="ignore", invalid="ignore"):
            self.mean: Doubles = (weight @ known) / self.count
            self.square = np.empty_like(self.mean)  # the sum of squared deviations
            for k, own in enumerate(members):
                gap = np.where(finite[own], known[own] - self.mean[k], 0.0)
                self.square[k] = (gap * gap).sum(0)
            self.variance: Doubles = self.square / (self.count - 1)
        least = _SAME * np.abs(self.mean)
        least = least if rounding is None else np.fmax(least, rounding)
        same = np.sqrt(self.square / np.maximum(self.count, 1)) <= least
        self.variance = np.where((self.count > 1) & same, 0.0, self.variance)


def hedges(
    effect: Doubles, deviation: Doubles, dof: Doubles, spread: Doubles, alpha: float, less: float
) -> tuple[Doubles, Doubles, Doubles]:
    """Return Hedges g with the ends of its interval.

    g = J effect / deviation with J = 1 - 3 / (4 dof - 1); its variance is spread + g^2 / (2 (dof -
    less)), and the interval is that of a normal distribution. For two groups this is what
    statsmodels.stats.meta_analysis.effectsize_smd gives (Hedges and Olkin, 1985).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        g = (1 - 3 / (4 * dof - 1)) * effect / np.where(deviation > 0, deviation, np.nan)
        g = np.where(dof >= 2, g, np.nan)
        below = np.where(dof - less > 0, dof - less, np.nan)
        half = normal_quantile(1 - alpha / 2) * np.sqrt(spread + g * g / (2 * below))
    return g, g - half, g + half


def welch(
    values: NDArray[np.floating],
    members: NDArray[np.bool_],
    weights: Doubles,
    *,
    alpha: float,
    two_sided: bool,
    rounding: Doubles | None = None,
) -> Tested:
    """Test a weighted sum of the groups' means by Welch's t, with Satterthwaite's dof.

    g is that of the weights divided by the sum of the positive ones, so that it is a distance in
    standard deviations however the weights are scaled.

    Args:
        values: (n, v).
        members: (k, n).
        weights: (k,), which add up to 0.
        alpha: One minus the level of the interval.
        two_sided: Whether the other direction counts.
        rounding: (v,) what varies less than this does not vary.
    """
    found = Moments(values, members, rounding)
    share = weights[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        effect = (share * found.mean).sum(0)
        parts = share**2 * found.variance / found.count
        squared = parts.sum(0)
        dof = squared**2 / (parts**2 / (found.count - 1)).sum(0)
        t = np.where(squared > 0, effect / np.sqrt(squared), np.nan)
        inside = found.count - 1
        pooled = (inside * found.variance).sum(0) / inside.sum(0)
        scale = weights[weights > 0].sum()
        spread = ((share / scale) ** 2 / found.count).sum(0)
        sizes = hedges(effect / scale, np.sqrt(pooled), inside.sum(0), spread, alpha, 1.94)
    n_a, n_b = (found.count[side].sum(0).astype(np.int64) for side in (weights > 0, weights < 0))
    return outcome(n_a, n_b, effect, sizes, t, dof, partial(t_tail, two_sided=two_sided))


def paired(
    differences: NDArray[np.floating],
    *,
    alpha: float,
    two_sided: bool,
    rounding: Doubles | None = None,
) -> Tested:
    """Test differences within pairs, (n, v), against 0 by t; g is that of the differences.

    Args:
        differences: (n, v).
        alpha: One minus the level of the interval.
        two_sided: Whether the other direction counts.
        rounding: (v,) differences that vary less than this are rounding. It follows from the size
            of the values, which the differences do not show.
    """
    found = Moments(differences, np.ones((1, len(differences)), bool), rounding)
    count, mean, variance = found.count[0], found.mean[0], found.variance[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(variance > 0, mean / np.sqrt(variance / count), np.nan)
        # The variance of g over n pairs is 1/n + g^2 / 2n: dof - (-1) is n.
        sizes = hedges(mean, np.sqrt(variance), count - 1, 1 / count, alpha, -1.0)
    number = count.astype(np.int64)
    tail = partial(t_tail, two_sided=two_sided)
    return outcome(number, number, mean, sizes, t, count - 1, tail)


def outcome(
    n_a: NDArray[np.int64],
    n_b: NDArray[np.int64],
    effect: Doubles,
    sizes: Sequence[Doubles],
    statistic: Doubles,
    dof: ArrayLike,
    tail: Callable[[Doubles, Doubles], Doubles],
) -> Tested:
    """Return the outcome of a test; where there is no statistic, there are no dof and no p.

    Args:
        n_a: As in `Tested`.
        n_b: As in `Tested`.
        effect: As in `Tested`.
        sizes: g, and the ends of its interval.
        statistic: As in `Tested`.
        dof: Its degrees of freedom.
        tail: Returns p for a statistic and its degrees of freedom.
    """
    freedom = np.where(np.isnan(statistic), np.nan, dof)
    rest = dict(zip(("g", "ci_low", "ci_high"), sizes, strict=True))
    rest |= {"effect": effect, "statistic": statistic, "dof": freedom}
    return Tested(n_a=n_a, n_b=n_b, p=tail(statistic, freedom), **rest)


def f_test(
    values: NDArray[np.floating],
    members: NDArray[np.bool_],
    contrasts: Doubles,
    rounding: Doubles | None = None,
) -> tuple[Tested, int]:
    """Test several contrasts at once by F, with one variance for all groups.

    Args:
        values: (n, v).
        members: (k, n).
        contrasts: (q, k).
        rounding: (v,) what varies less than this does not vary.

    Returns:
        What it found, and the degrees of freedom of the numerator.
    """
    found = Moments(values, members, rounding)
    dof_num = int(np.linalg.matrix_rank(contrasts))
    with np.errstate(divide="ignore", invalid="ignore"):
        below = (found.count - 1).sum(0)
        error = found.square.sum(0) / below
        error = np.where((found.variance <= 0).all(0), np.nan, error)
        f = _explained(contrasts, found) / dof_num / error
    number = found.count.sum(0).astype(np.int64)
    furthest = found.mean.max(0) - found.mean.min(0)
    return tested_by_f(number, furthest, f, dof_num, below), dof_num


def tested_by_f(
    number: NDArray[np.int64], effect: Doubles, f: Doubles, dof_num: int, dof: ArrayLike
) -> Tested:
    """Return the outcome of an F-test, which has no second side and no g; p follows from f."""
    nothing = np.full(len(f), np.nan)

    def tail(values: Doubles, below: Doubles) -> Doubles:
        return f_tail(values, float(dof_num), below)

    return outcome(number, np.zeros_like(number), effect, [nothing] * 3, f, dof, tail)


def _explained(contrasts: Doubles, found: Moments) -> Doubles:
    """Return (v,) the squares that the contrasts explain: (C m)' (C diag(1/n) C')^-1 (C m)."""
    gaps = contrasts @ found.mean
    result = np.full(gaps.shape[1], np.nan)
    counts, which = np.unique(found.count, axis=1, return_inverse=True)
    for number, count in enumerate(counts.T):
        if (count > 0).all():  # columns with as many prompts share the inverse
            own = which.reshape(-1) == number
            inverse = np.linalg.pinv((contrasts / count) @ contrasts.T)
            result[own] = np.einsum("qv,qr,rv->v", gaps[:, own], inverse, gaps[:, own])
    return result
