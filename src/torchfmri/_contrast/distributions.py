"""Tails of Student's t and of F, in float64, from the incomplete beta function.

Written out here because the package needs torch and numpy only, and neither has them. SciPy is the
oracle in the tests: both agree to 1e-10 relative, down to probabilities of 1e-200. That is why x
and 1 - x are passed separately: tails that small are lost when one is computed from the other. The
method may change freely as long as the tests with SciPy pass.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]
_STEPS = 10_000
_TINY = 1e-300
_CLOSE = 1e-16


def t_tail(t: ArrayLike, dof: ArrayLike, *, two_sided: bool = True) -> Doubles:
    """Return P(|T| >= |t|), or P(T >= t) if one-sided; nan where t or dof is.

    Examples:
        >>> t_tail(2.0, 10.0).round(6).item()
        0.073388
    """
    values, freedom = np.broadcast_arrays(np.asarray(t, float), np.asarray(dof, float))
    square = values * values
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = freedom / (freedom + square), 1.0 / (1.0 + freedom / square.clip(min=_TINY))
    x = np.where(np.isinf(square), 0.0, x)
    y = np.where(square == 0, 0.0, y)
    both = incomplete_beta(freedom / 2, np.full_like(freedom, 0.5), x, y)
    if two_sided:
        return both
    return np.where(values >= 0, both / 2, 1 - both / 2)


def t_power(
    shift: float, dof: float, alpha: float, *, two_sided: bool = True, points: int = 20_001
) -> float:
    """Return how often a t-test at `alpha` finds something if t is noncentral, shifted by `shift`.

    Given the estimated spread u the statistic is normal, so it is integrated over the distribution
    of u, that of chi over the root of its degrees of freedom.

    Examples:
        >>> round(t_power(2.0, 10.0, 0.05), 6)
        0.439627
    """
    limit = t_quantile(1 - alpha / (2 if two_sided else 1), dof)
    u = np.linspace(0.0, 1 + 12 / math.sqrt(2 * dof), points)[1:]
    density = np.exp((dof - 1) * np.log(u) - dof * (u * u - 1) / 2)
    density /= density.sum()
    found = _normal_below(shift - limit * u)
    if two_sided:
        found = found + _normal_below(-shift - limit * u)
    return float(density @ found)


def _normal_below(z: Doubles) -> Doubles:
    found: Doubles = torch.special.ndtr(torch.from_numpy(z)).numpy()
    return found


def f_tail(f: ArrayLike, above: ArrayLike, below: ArrayLike) -> Doubles:
    """Return P(F >= f) with `above` and `below` degrees of freedom.

    Examples:
        >>> f_tail(4.0, 2.0, 20.0).round(6).item()
        0.034572
    """
    values, first, second = np.broadcast_arrays(
        np.asarray(f, float), np.asarray(above, float), np.asarray(below, float)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        total = second + first * values
        x, y = second / total, first * values / total
    y = np.where(np.isinf(values), 1.0, y)
    return incomplete_beta(second / 2, first / 2, x, y)


def t_quantile(share: float, dof: float) -> float:
    """Return the t below which this share of the distribution lies, by Newton's method.

    Examples:
        >>> round(t_quantile(0.975, 10.0), 6)
        2.228139
    """
    if dof == 1:
        return math.tan(math.pi * (share - 0.5))
    z = normal_quantile(share)
    t = z + (z**3 + z) / (4 * dof)  # the first terms of an expansion around the normal
    log_scale = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    for _ in range(100):
        density = math.exp(log_scale - (dof + 1) / 2 * math.log1p(t * t / dof))
        gap = float(t_tail(t, dof, two_sided=False)) - (1 - share)
        step = gap / density
        t += max(min(step, 1 + abs(t)), -1 - abs(t))
        if abs(step) <= 1e-14 * (1 + abs(t)):
            break
    return t


def normal_quantile(share: float) -> float:
    """Return the z below which this share of the normal distribution lies."""
    return NormalDist().inv_cdf(share)


def incomplete_beta(a: Doubles, b: Doubles, x: Doubles, y: Doubles) -> Doubles:
    """Return the regularised incomplete beta function I_x(a, b); nan where something is nan.

    Args:
        a: Above zero.
        b: Above zero.
        x: From 0 to 1.
        y: 1 - x, given apart because it may be too small to be computed from x.
    """
    shape = np.shape(x)
    a, b, x, y = (np.atleast_1d(np.asarray(each, float)).ravel() for each in (a, b, x, y))
    known = ~(np.isnan(a) | np.isnan(b) | np.isnan(x) | np.isnan(y)) & (a > 0) & (b > 0)
    result = np.full(x.shape, np.nan)
    result[known & (x <= 0)] = 0.0
    result[known & (y <= 0)] = 1.0
    inside = np.flatnonzero(known & (x > 0) & (y > 0))
    swap = x[inside] > (a[inside] + 1) / (a[inside] + b[inside] + 2)
    first, second = np.where(swap, b[inside], a[inside]), np.where(swap, a[inside], b[inside])
    here, there = np.where(swap, y[inside], x[inside]), np.where(swap, x[inside], y[inside])
    logs = first * np.log(here) + second * np.log(there) - _log_beta(first, second)
    part = np.exp(logs) * _fraction(first, second, here) / first
    result[inside] = np.where(swap, 1 - part, part)
    return result.reshape(shape)


def _log_beta(a: Doubles, b: Doubles) -> Doubles:
    total, first, second = (torch.lgamma(torch.from_numpy(each)).numpy() for each in (a + b, a, b))
    found: Doubles = first + second - total
    return found


def _fraction(a: Doubles, b: Doubles, x: Doubles) -> Doubles:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""

    def kept(values: Doubles) -> Doubles:
        return np.where(np.abs(values) < _TINY, _TINY, values)

    c = np.ones_like(x)
    d = 1 / kept(1 - (a + b) * x / (a + 1))
    result = d.copy()
    for step in range(1, _STEPS):
        even, odd = a + 2 * step, a + 2 * step - 1
        for numerator in (
            step * (b - step) * x / (odd * even),
            -(a + step) * (a + b + step) * x / (even * (even + 1)),
        ):
            d = 1 / kept(1 + numerator * d)
            c = kept(1 + numerator / c)
            change = c * d
            result = result * change
        if np.abs(change - 1).max(initial=0.0) < 4 * _CLOSE + math.ulp(1.0):
            break
    return result
