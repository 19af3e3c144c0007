"""Draw attention: the patterns of heads (`plot_attention`), and one number per head (`plot_heads`).

Both are public and take plain arrays, so that they serve scans, inspections and users alike. All
panels of one figure share one colour scale, because heads are compared with each other; colours
and sizes may change freely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchfmri._arguments import require
from torchfmri.exceptions import InspectionError
from torchfmri.visualization._figure import (
    axes_or_new,
    draw_cells,
    draw_colour_bar,
    escape,
    ink,
    panels,
)
from torchfmri.visualization._fonts import fonts_for
from torchfmri.visualization._token_track import token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LABELS = 40
_MOST_COLUMNS = 4


def plot_attention(
    pattern: Any,
    tokens: Sequence[str] | None = None,
    *,
    heads: Sequence[int] | None = None,
    title: str = "",
) -> Figure:
    """Draw attention patterns, one panel per head: queries down, keys across.

    All panels share one scale, from 0 to the largest weight; it is not linear (square root), so
    that weights of a few per cent can be seen.

    Args:
        pattern: (heads, q, k) or (q, k); a batch of one is taken as its only pattern.
        tokens: The text of the tokens; the last q are the queries.
        heads: Which heads; all of them by default.
        title: Above them all.

    Raises:
        InspectionError: It has another shape, or no such head.

    Examples:
        >>> import numpy as np
        >>> figure = plot_attention(np.tril(np.ones((2, 3, 3))), ["a", "b", "c"])
        >>> len(figure.axes)
        3
    """
    from matplotlib.colors import PowerNorm

    weights = _as_heads(pattern)
    count, queries, keys = weights.shape
    chosen = list(range(count)) if heads is None else list(heads)
    for head in chosen:
        if not 0 <= head < count:
            raise InspectionError(f"There is no head {head!r}: the pattern has 0 to {count - 1}.")
    if tokens is not None and len(tokens) != keys:
        raise InspectionError(
            f"{len(tokens)} tokens for a pattern over {keys} keys. Give one text per key."
        )
    side_by_side = math.isqrt(len(chosen) - 1) + 1 if len(chosen) > 4 else len(chosen)
    columns = min(_MOST_COLUMNS, side_by_side)
    side = 3.4 if len(chosen) == 1 else 2.3
    figure, grid = panels(len(chosen), columns, (side, side * min(1.0, queries / keys + 0.15)))
    norm = PowerNorm(0.5, vmin=0.0, vmax=float(np.nanmax(weights[chosen])) or 1.0)
    for index, (ax, head) in enumerate(zip(grid, chosen, strict=True)):
        image = draw_cells(ax, weights[head], norm=norm)
        ax.set_title(f"head {head}", fontsize=8, loc="left", color=ink(ax))
        below, left = index >= len(chosen) - columns, index % columns == 0
        _label(ax, tokens, queries, keys, below=below, left=left)
    draw_colour_bar(figure.axes, image, "attention", shrink=0.6, pad=0.02)
    if title:
        figure.suptitle(escape(title), fontsize=10, x=0.01, ha="left")
    return figure


def _as_heads(pattern: Any) -> Any:
    """Return a pattern as (heads, q, k)."""
    weights = np.asarray(pattern, float)
    weights = weights[0] if weights.ndim == 4 and len(weights) == 1 else weights
    weights = weights[None] if weights.ndim == 2 else weights
    meaning = f"shape {np.shape(pattern)} is none of (heads, q, k) and (q, k)"
    require(weights.ndim == 3 and weights.size > 0, "pattern", "an array", meaning)
    return weights


def _label(
    ax: Axes, tokens: Sequence[str] | None, queries: int, keys: int, *, below: bool, left: bool
) -> None:
    """Write the tokens, or what the axes are, at the panels on the outside."""
    if tokens is None or keys > _MOST_LABELS:
        ax.tick_params(labelbottom=below, labelleft=left and queries > 1, labelsize=7)
        ax.set_xlabel("key" if below else "", fontsize=8)
        ax.set_ylabel("query" if left else "", fontsize=8)
        return
    labels = [token_label(each, 10) for each in tokens]
    fonts = fonts_for(labels)
    texts = [escape(fonts.writable(each)) for each in labels]
    size = float(np.clip(130 / keys, 4.5, 7.5))
    look: dict[str, Any] = {"fontsize": size, "fontfamily": fonts.families}
    ax.set_xticks(range(keys) if below else [], texts if below else [], rotation=90, **look)
    ax.set_yticks(range(queries) if left else [], texts[-queries:] if left else [], **look)


def plot_heads(
    scores: Any, layers: Sequence[str], *, title: str = "", label: str = "", ax: Axes | None = None
) -> Axes:
    """Draw one number per head: blocks down, heads across, the number in each cell.

    Args:
        scores: (layer, head); nan is left grey.
        layers: The name of each row.
        title: Above it.
        label: What the numbers are.
        ax: Where to draw.
    """
    values = np.asarray(scores, float)
    meaning = f"shape {values.shape} is not (layer, head) for {len(layers)} layers"
    require(values.ndim == 2 and len(values) == len(layers), "scores", "an array", meaning)
    rows, columns = values.shape
    ax = axes_or_new(ax, min(0.48 * columns, 14) + 2.2, min(0.26 * rows, 12) + 1.1)
    image = draw_cells(ax, values)
    middle = (np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0.0
    if values.size <= 400:
        for row, column in np.argwhere(np.isfinite(values)):
            value = values[row, column]
            colour = "black" if value > middle else "white"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    ax.set_yticks(range(rows), [escape(each) for each in layers], fontsize=7)
    ax.set_xticks(range(columns), [str(each) for each in range(columns)], fontsize=7)
    ax.set_xlabel("head", fontsize=8)
    if title:
        ax.set_title(escape(title), fontsize=9, loc="left")
    draw_colour_bar(ax, image, label, shrink=0.7, pad=0.02)
    return ax
