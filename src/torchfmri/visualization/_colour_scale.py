"""Decide how the values of a picture become colours, and what its colour bar says.

`_brain` calls `scale_colours`. The viewer's page follows the same rule, and `test_acceptance.py`
compares the two: change both or neither. A scale is one for values divided by the top of their row,
or one for all rows; values beyond its ends are shown by the arrows of the colour bar, never
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfmri.exceptions import InspectionError

Floats = npt.NDArray[np.float64]

NORMALISE = ("layer", "global")
QUANTILE = 0.995
FEW = 4
"""Rows with fewer values are scaled by their largest one, or two would always share a colour."""
DECADES_IN_ROW, DECADES = 2, 4
_WIDE = 30
_MEANING = {
    "activation": "root mean square of the output",
    "gradient": "norm of dL/d output",
    "learning_cost": "norm of dL/d parameters",
    "delta_sc": "z(activation) − z(gradient)",
}


class ColourScale(NamedTuple):
    """Values made ready for drawing.

    Attributes:
        shown: What is drawn, (row, s): beyond the scale at its end; nan for what is not finite.
        low: The value of the darkest colour.
        high: The value of the brightest colour.
        logarithmic: Whether colours follow the logarithm.
        map: The name of matplotlib's colour map.
        label: What the colour bar says.
        beyond: Which ends have values beyond them: "neither", "min", "max" or "both".
    """

    shown: Floats
    low: float
    high: float
    logarithmic: bool
    map: str
    label: str
    beyond: str

    def norm(self) -> Any:
        """Return the scale as matplotlib takes it."""
        from matplotlib.colors import LogNorm, Normalize

        return (LogNorm if self.logarithmic else Normalize)(self.low, self.high)


def meaning(metric: str) -> str:
    """Return what a metric is, in words."""
    return _MEANING.get(metric, metric.replace("_", " "))


def tops(values: npt.NDArray[np.floating[Any]]) -> Floats:
    """Return the 99.5th percentile of each row's finite values, 0 where there is none.

    It is one of the values (the next lower one), so that the largest value of a short text does not
    count: its first token is often a hundred times as loud as any other. Among two or three values
    the largest does count, because nothing else would tell them apart.
    """
    found = np.zeros(len(values))
    for index, row in enumerate(values):
        finite = row[np.isfinite(row)]
        if len(finite):
            share = QUANTILE if len(finite) >= FEW else 1.0
            found[index] = np.quantile(finite, share, method="lower")
    return found


def scale_colours(
    values: npt.NDArray[np.floating[Any]], metric: str, normalise: str = "layer"
) -> ColourScale:
    """Return how values (row, s) become colours.

    Args:
        values: Rows are layers or voxels.
        metric: What they are; those of delta_sc may be negative and are drawn around zero.
        normalise: "layer" for each row divided by its own 99.5th percentile, "global" for one
            scale for all. delta_sc compares already, so that it has one scale in any case.

    Raises:
        InspectionError: `normalise` is neither.
    """
    if normalise not in NORMALISE:
        raise InspectionError(
            f"normalise={normalise!r} is neither 'layer' nor 'global'. Choose one."
        )
    numbers = np.asarray(values, dtype=np.float64)
    numbers = np.where(np.isfinite(numbers), numbers, np.nan)
    if metric == "delta_sc":
        return _around_zero(numbers, metric)
    if normalise == "layer":
        top = tops(numbers)[:, None]
        ratio = np.where(top > 0, numbers / np.where(top > 0, top, 1.0), numbers)
        logarithmic = metric != "activation"
        low = 10.0**-DECADES_IN_ROW if logarithmic else 0.0
        return _clipped(ratio, low, 1.0, logarithmic, _label(metric, of_row=True))
    finite = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not len(finite):
        return _clipped(numbers, 0.0, 1.0, False, _label(metric))
    high = float(np.quantile(finite, QUANTILE, method="lower"))
    low = max(float(np.quantile(finite, 1 - QUANTILE)), high * 10.0**-DECADES)
    if high < _WIDE * low:
        return _clipped(numbers, 0.0, high, False, _label(metric))
    return _clipped(numbers, low, high, True, _label(metric))


def scale_from(unit: float, values: npt.NDArray[np.floating[Any]], metric: str) -> ColourScale:
    """Return colours that follow the logarithm from `unit` to the largest value.

    Values up to `unit` are all the darkest. If none is larger, the scale is linear from 0 to it.

    Args:
        unit: The largest value that does not count.
        values: (row, s)
        metric: What they are.
    """
    numbers = np.where(np.isfinite(values), values, np.nan)
    high = float(np.nanmax(numbers, initial=0.0))
    if high <= unit:
        return _clipped(numbers, 0.0, unit, False, f"{meaning(metric)}\n(linear scale)")
    said = f"{meaning(metric)}\n(log scale; darkest: {unit:g} or less)"
    return _clipped(numbers, unit, max(high, 10 * unit), True, said)


def _label(metric: str, of_row: bool = False) -> str:
    return meaning(metric) + ("\n/ 99.5th percentile of its row" if of_row else "")


def _around_zero(numbers: Floats, metric: str) -> ColourScale:
    finite = np.abs(numbers[np.isfinite(numbers)])
    high = float(np.quantile(finite, QUANTILE, method="lower")) if len(finite) else 1.0
    return _clipped(numbers, -(high or 1.0), high or 1.0, False, meaning(metric), "PuOr_r")


def _clipped(
    numbers: Floats, low: float, high: float, logarithmic: bool, label: str, name: str = "viridis"
) -> ColourScale:
    # nan compares false with everything, and so is at neither end.
    below, above = bool((numbers < low).any()), bool((numbers > high).any())
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    beyond = ends.get((below, above), "neither")
    return ColourScale(
        shown=np.clip(numbers, low, high),
        low=low,
        high=high,
        logarithmic=logarithmic,
        map=name,
        label=label,
        beyond=beyond,
    )


def pool_rows(shown: Floats, most: int) -> Floats:
    """Return at most `most` rows: each is the largest of some neighbours in size; nan wins.

    Examples:
        >>> pool_rows(np.array([[1.0], [-3.0], [2.0]]), 2).tolist()
        [[-3.0], [2.0]]
    """
    every = -(-len(shown) // most)
    if every <= 1:
        return shown
    return np.stack([_largest(shown[at : at + every]) for at in range(0, len(shown), every)])


def _largest(rows: Floats) -> Floats:
    sizes = np.where(np.isnan(rows), np.inf, np.abs(rows))
    chosen: Floats = rows[sizes.argmax(0), np.arange(rows.shape[1])]
    return chosen


def ticks_between(low: float, high: float) -> Sequence[float]:
    """Return powers of ten for a logarithmic colour bar, with 2 and 5 if there are few."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    digits = (1, 2, 5) if len(powers) <= 3 else (1,)
    found = [digit * 10.0**power for power in powers for digit in digits]
    return [each for each in found if low * 0.999 <= each <= high * 1.001]
