"""Differences that repeat: rounding errors are drawn anew, and a mistake is not.

A mistake that is no larger than the noise still shows if both sides round anew: the difference
before and the difference after point the same way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchfmri._compare.difference import Floats
from torchfmri._compare.recording import Axes
from torchfmri._compare.side import Partners

_SIZE, _SIZE_ELSEWHERE = 1.0, 4.0
"""How many times the typical spread a difference that repeats may be: if both sides compute in one
precision, and if they do not. Between two precisions the rounding of the weights repeats too."""
_ALIKE, _ALIKE_ROWS, _ALIKE_ROW = 0.9, 0.7, 0.95
"""The cosine between a difference and the one that comes back: over all rows, in the median row,
and in a row that is named. Mistakes reach 0.98; with 0.7 for all rows, 4 of 18 pairs that differ by
rounding were alarms (`python -m benchmarks compare --unseen`)."""
_LEAST_ROWS, _LEAST_REPEATED = 4, 32
"""Fewer rows or values may point the same way by chance."""
LEAST_VALUES = 64
"""The spread of fewer values over a few draws says little."""
LEAST_UNITS = 4.0
"""How many units in the last place are allowed at least."""
_MOST_NOISE = 0.5
"""A tensor whose noise is larger than this share of it is nothing but rounding, such as the
gradient of the bias of keys."""


class Repetition(NamedTuple):
    """How a difference comes back if both sides round anew.

    Attributes:
        threshold: What a difference that repeats may be; infinite if it does not repeat.
        rows: (row,) True where the difference is beyond typical noise and repeats.
        alike: The cosine between the two differences; nan if they are within typical noise.
    """

    threshold: float = math.inf
    rows: NDArray[np.bool_] | None = None
    alike: float = math.nan


class _RedrawnDifference:
    """The difference of two tables, and their difference under new rounding.

    Args:
        tables: Both sides, then both with new rounding, (row, unit) each.
        few: How many rows are enough.
    """

    def __init__(self, tables: list[Tensor], few: int) -> None:
        one, two, one_again, two_again = tables
        self._before, after = two - one, two_again - one_again
        self._few = few
        self._products = (self._before * after).sum(1)
        self._sizes = self._before.norm(dim=1), after.norm(dim=1)
        self.cosines = self._products / (self._sizes[0] * self._sizes[1]).clamp_min(1e-300)
        self.values, self.units = self._before.numel(), self._before.shape[1]

    def alike(self, rows: Tensor) -> float:
        """Return the cosine over some rows together; nan for too few."""
        if int(rows.sum()) < self._few or self._before[rows].numel() < _LEAST_REPEATED:
            return math.nan
        whole = self._sizes[0][rows].norm() * self._sizes[1][rows].norm()
        return float(self._products[rows].sum() / whole.clamp_min(1e-300))

    def come_back(self, rows: Tensor) -> bool:
        """Whether they point the same way, over these rows together and in most of them."""
        return self.alike(rows) > _ALIKE and float(self.cosines[rows].median()) > _ALIKE_ROWS


def repetition_of(both: Partners, gaps: Floats, axes: Axes = ()) -> Repetition:
    """Return whether a difference repeats under new rounding.

    Args:
        both: The two tensors.
        gaps: (row,) the relative difference.
        axes: In which order to take the axes of b.
    """
    spreads = [each for each in both.spreads if each is not None]
    tables = _tables(both, axes)
    typical = max((each.typical for each in spreads), default=math.inf)
    if tables is None or not gaps.size or typical > _MOST_NOISE:
        return Repetition()
    dtypes = both.dtypes
    same = both.a.coarsest == both.b.coarsest and dtypes[0] == dtypes[1]
    unit = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
    differences = _RedrawnDifference(tables, 1 if "parameter" in both.place.what else _LEAST_ROWS)
    # A constant such as 1 / tokens is rounded once in each dtype, and its error always repeats.
    allowed = max(_SIZE * typical, unit)
    if not same:
        allowed = max(_SIZE_ELSEWHERE * typical, LEAST_UNITS * unit)
    least = max(typical, 2 * LEAST_UNITS * unit)
    if differences.values < LEAST_VALUES:
        allowed = max(allowed, least)
    large = torch.from_numpy(gaps > least)
    rows = None
    if differences.units > 1:
        rows = (large & (differences.cosines > _ALIKE_ROW)).numpy()
    everywhere, size = torch.ones_like(large), math.sqrt(float(np.square(gaps).mean()))
    told = differences.alike(everywhere) if size > max(typical, unit) else math.nan
    if size > allowed and differences.come_back(everywhere):
        return Repetition(allowed, rows, told)
    # A mistake in one row of the batch, or in one expert, is lost among all tokens.
    few = same and differences.come_back(large)
    return Repetition(least if few else math.inf, rows, told)


def _tables(both: Partners, axes: Axes) -> list[Tensor] | None:
    """Return both sides, and both with new rounding, as rows; None if that cannot be had."""
    again = both.a.rounded, both.b.rounded
    if again[0] is None or again[1] is None:
        return None
    if again[0].value(both.place) is None or again[1].value(both.partner) is None:
        return None
    rows = (*both.rows(axes), *both.rows(axes, rounded=True))
    found = [each.values for each in rows if each is not None]
    return found if len(found) == 4 and len({each.shape for each in found}) == 1 else None
