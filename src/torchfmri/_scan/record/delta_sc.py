"""Compute delta_sc = z(activation) - z(gradient norm): is a layer loud, or needed?

`Reading.table` calls this whenever delta_sc is read; it is never stored, so that a better
definition also holds for old scans. z is a value minus the mean, divided by the standard deviation
of the population. Values that are not finite are left out of both. Where the deviation is 0 there
is no z, and the result is nan and not 0: equal values do not say that nothing differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def standardised(values: NDArray[np.floating], axis: int = -1) -> Doubles:
    """Return the z of values along an axis; nan for what is not finite, or if all are equal.

    Examples:
        >>> standardised(np.array([1.0, 2.0, 3.0])).round(3).tolist()
        [-1.225, 0.0, 1.225]
        >>> standardised(np.array([2.0, 2.0])).tolist()
        [nan, nan]
    """
    kept = np.isfinite(values)
    number = np.maximum(kept.sum(axis, keepdims=True), 1)
    found = np.where(kept, values, 0.0).astype(np.float64)
    gaps = np.where(kept, found - found.sum(axis, keepdims=True) / number, 0.0)
    deviation = np.sqrt((gaps * gaps).sum(axis, keepdims=True) / number)
    low = np.where(kept, values, np.inf).min(axis, keepdims=True, initial=np.inf)
    high = np.where(kept, values, -np.inf).max(axis, keepdims=True, initial=-np.inf)
    # Equal values whose mean is rounded have a deviation of 1e-17: that is no contrast either.
    usable = (high > low) & (deviation > 0)
    result: Doubles = np.where(kept & usable, gaps / np.where(usable, deviation, 1.0), np.nan)
    return result


def log10(values: NDArray[np.floating]) -> Doubles:
    """Return the logarithm; nan for what is not above zero."""
    positive = values > 0
    numbers = np.where(positive, values, 1.0).astype(np.float64)
    result: Doubles = np.where(positive, np.log10(numbers), np.nan)
    return result


def delta_within_layers(
    activation: NDArray[np.floating], gradient: NDArray[np.floating], layer: NDArray[np.integer]
) -> Doubles:
    """Return the contrast of voxels within their layer, token by token.

    Args:
        activation: (s, voxel)
        gradient: (s, voxel)
        layer: (voxel,) the layer that each belongs to, never falling.
    """
    starts = [*np.flatnonzero(np.diff(layer, prepend=-1)).tolist(), len(layer)]
    groups = [np.arange(*span) for span in pairwise(starts)]
    return _contrast(activation, gradient, groups)


def delta_between_layers(
    activation: NDArray[np.floating],
    gradient: NDArray[np.floating],
    kinds: Iterable[list[int]],
) -> Doubles:
    """Return the contrast of layers of one kind, token by token, of log10 values.

    Args:
        activation: (s, layer)
        gradient: (s, layer)
        kinds: The columns of the layers of each kind. Those of different kinds are never compared.
    """
    groups = [np.array(columns, dtype=np.intp) for columns in kinds]
    return _contrast(log10(activation), log10(gradient), groups)


def _contrast(
    activation: NDArray[np.floating],
    gradient: NDArray[np.floating],
    groups: Iterable[NDArray[np.intp]],
) -> Doubles:
    result = np.full(activation.shape, np.nan)
    for columns in groups:
        first, second = standardised(activation[:, columns]), standardised(gradient[:, columns])
        result[:, columns] = first - second
    return result
