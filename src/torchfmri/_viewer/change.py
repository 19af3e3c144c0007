"""Find how much the first metric of two boards differs, and say it in a sentence.

`DiffBoard` shows the sentence above the map and opens at the largest change. Only layers that both
have are compared, and of their columns those before the first that is not the same in both. If even
the first is not the same, all columns are compared by position, and the sentence says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torchfmri._text import plural

_ROUNDING = 1e-5
"""A relative difference of a layer's values that the order of a sum in float32 can make."""
NAMES = {"token": "texts", "step": "step numbers"}
"""What the columns of two boards are compared by."""


@dataclass(frozen=True)
class BoardChange:
    """How much a metric differs in the layers that two boards share.

    Attributes:
        count: How many layers differ by more than rounding.
        rounded: How many differ by rounding alone.
        largest: The largest difference by rounding alone, as a share of the layer's values.
        most: The place of the layer that changes most; None if none does.
        column: Where it changes most.
        share: By how much, as a share of its values before; 0 if these are all zero.
    """

    count: int
    rounded: int
    largest: float
    most: int | None = None
    column: int = 0
    share: float = 0.0


def find_change(
    first: NDArray[np.floating], second: NDArray[np.floating], missing: NDArray[np.bool_] | None
) -> BoardChange | None:
    """Return how two tables (column, layer) differ; None if they have no value in common.

    Args:
        first: The values before.
        second: The values after.
        missing: What was not measured in one of them; other values that are not finite in one of
            them alone are a difference.
    """
    rounding = max(_ROUNDING, *(2 * _precision(each.dtype) for each in (first, second)))
    first, second = first.astype(np.float64), second.astype(np.float64)
    known = np.isfinite(first) & np.isfinite(second)
    broken = np.isfinite(first) != np.isfinite(second)
    if missing is not None:
        broken &= ~missing
    if not known.any() and not broken.any():
        return None
    with np.errstate(invalid="ignore"):
        delta = np.where(known, np.abs(second - first), 0.0)
    before = np.sqrt((np.where(known, first, 0.0) ** 2).sum(0))
    sizes = np.sqrt((delta**2).sum(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.nan_to_num(sizes / before, nan=0.0, posinf=0.0)
    differs = (sizes > rounding * before) | broken.any(0)
    rounded = (sizes > 0) & ~differs
    found = BoardChange(
        count=int(differs.sum()),
        rounded=int(rounded.sum()),
        largest=float(shares[rounded].max(initial=0.0)),
    )
    if not found.count:
        return found
    ranked = np.where(broken.any(0), np.inf, np.where(differs, shares, -1.0))
    row = int(ranked.argmax() if (ranked > 0).any() else sizes.argmax())
    places = broken[:, row] if broken[:, row].any() else delta[:, row]
    return replace(found, most=row, column=int(places.argmax()), share=float(shares[row]))


def change_sentence(
    change: BoardChange,
    metric: str,
    layers: list[str],
    *,
    axis: str,
    same: int,
    lengths: tuple[int, int],
) -> str:
    """Return a sentence: over which columns, in how many layers a metric differs, and where most.

    Args:
        change: What was found.
        metric: Its name.
        layers: The layers that were compared.
        axis: What a column is.
        same: How many columns there are before the first that is not the same in both.
        lengths: How many columns each of the two has.
    """
    both, names = min(lengths), NAMES.get(axis, f"{axis}s")
    where = ""
    if both and not same:
        where = f" (by position: the {names} differ from {axis} 0 on)"
    elif same < both:
        where = f" (up to {axis} {same - 1}, as long as the {names} are the same)"
    elif lengths[0] != lengths[1]:
        where = f" (over the {plural(both, axis)} that both have)"
    many = plural(len(layers), "layer")
    differs, same_is = ("differ", "are") if metric.endswith("s") else ("differs", "is")
    if change.most is not None:
        name = layers[change.most]
        most = f"layer {name}" if name.isdigit() else name  # as those of nn.Sequential are called
        said = f"{metric} {differs} in {change.count} of {many}, most in {most}"
        said += f", by {100 * change.share:.2g} %" if change.share else ""
        if change.rounded:
            said += f"; {change.rounded} more differ by rounding alone"
    elif change.rounded:
        said = f"{metric} {same_is} the same in {many} up to rounding"
        said += f" (at most {100 * change.largest:.2g} % apart)"
    elif where:
        said = f"{metric} {same_is} the same in {many}"
    else:
        said = f"No difference: {metric} {same_is} the same in {many}"
    return f"{said[:1].upper()}{said[1:]}{where}."


def _precision(dtype: np.dtype[np.floating]) -> float:
    """Return the relative distance of neighbouring numbers of a stored dtype."""
    return float(np.spacing(np.ones((), dtype)))
