"""Draw lenses and attributions: what each layer would say, and what made a logit.

The methods of the results of `_lens` call these functions with plain arrays; nothing is computed
here. Colours and sizes may change freely. In `plot_lens` the words of a cell are about the token
after it, or about the token below it in masked models (`ahead=False`): the axis says which, and
must.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from torchfmri._arguments import require
from torchfmri.visualization._figure import (
    BLUE,
    GREY,
    ORANGE,
    axes_or_new,
    draw_cells,
    draw_colour_bar,
    escape,
)
from torchfmri.visualization._fonts import fonts_for
from torchfmri.visualization._token_track import token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = {
    "top_probability": "probability of the token written in the cell",
    "probability": "probability of the token that came next",
    "rank": "rank of the token that came next",
    "entropy": "entropy of the distribution in nats",
}
_CELL = (0.72, 0.24)
_WIDEST, _TALLEST = 24.0, 14.0  # inches
_LETTERS_PER_INCH = 12  # of a title


def plot_lens(
    values: Any,
    words: Sequence[Sequence[str]],
    layers: Sequence[str],
    tokens: Sequence[str],
    *,
    metric: str = "top_probability",
    ahead: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draw layers up and tokens across, with the likeliest next token in each cell.

    Args:
        values: (layer, s) what colours the cells.
        words: (layer, s) what is written in them.
        layers: The rows, the first at the bottom.
        tokens: The text that was read.
        metric: What the values are.
        ahead: False where cells are about the token below them and not about the one after it.
        ax: Where to draw.
    """
    from matplotlib.colors import LogNorm, Normalize

    shown = np.asarray(values, float)
    meaning = f"shape {shown.shape} is not ({len(layers)} layers, {len(tokens)} tokens)"
    require(shown.shape == (len(layers), len(tokens)), "values", "an array", meaning)
    rows, columns = shown.shape
    width, height = min(_CELL[0] * columns, _WIDEST), min(_CELL[1] * rows, _TALLEST)
    ax = axes_or_new(ax, width + 2.6, height + 1.0)
    top = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    norm = LogNorm(1, max(top, 10)) if metric == "rank" else Normalize(0, max(top, 1e-9))
    colours = "viridis_r" if metric == "rank" else "viridis"
    image = draw_cells(ax, shown, colours, norm=norm, origin="lower")
    room = width * 72 / columns
    size = float(np.clip(min(room / 6.0, height * 72 / rows / 1.6), 3.5, 7.5))
    longest = max(3, int(room / (0.62 * size)))
    fonts = fonts_for([*tokens, *(word for row in words for word in row)])
    for row in range(rows):
        for column in range(columns):
            value = shown[row, column]
            dark = np.isfinite(value) and _is_dark(image, value)
            text = escape(fonts.writable(token_label(words[row][column], longest)))
            look: dict[str, Any] = {
                "color": "white" if dark else "black",
                "fontfamily": fonts.families,
            }
            ax.text(column, row, text, ha="center", va="center", fontsize=size, **look)
    ax.set_yticks(range(rows), [escape(_short(each)) for each in layers], fontsize=7)
    _write_tokens(ax, tokens)
    about = "come next" if ahead else "stand there"
    ax.set_xlabel(f"what was read; the cells say what would {about}", fontsize=8, color=GREY)
    draw_colour_bar(ax, image, shrink=0.7, pad=0.015)
    label = _LABELS.get(metric, metric)
    label = label if ahead else label.replace("that came next", "that stands there")
    ax.set_title(f"colour: {label}", fontsize=8, loc="left", color=GREY)
    return ax


def _is_dark(image: Any, value: float) -> bool:
    red, green, blue, _ = image.cmap(image.norm(value))
    return bool(0.3 * red + 0.59 * green + 0.11 * blue < 0.5)


def _short(layer: str) -> str:
    """Return the number of a block, for the axis; other names as they are."""
    above, _, last = layer.rpartition(".")
    return f"after {above.rpartition('.')[2]} {last}" if last.isdigit() else layer


def plot_logit_attribution(
    heads: Any, mlps: Any, *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw what heads and MLPs add to a logit: blocks down, heads across, MLPs last.

    Args:
        heads: (block, head); nan where heads could not be told apart.
        mlps: (block,).
        title: Above it.
        ax: Where to draw.
    """
    matrix, last = np.asarray(heads, float), np.asarray(mlps, float)
    rows, columns = matrix.shape
    gap = np.full((rows, 1), np.nan)
    shown = np.concatenate([matrix, gap, last[:, None]], 1)
    ax = axes_or_new(ax, min(0.42 * (columns + 2), 14) + 2.0, min(0.24 * rows, 12) + 1.2)
    limit = float(np.nanmax(np.abs(shown))) if np.isfinite(shown).any() else 1.0
    image = draw_cells(ax, shown, "RdBu_r", vmin=-limit, vmax=limit)
    ax.set_yticks(range(rows), [f"L{row}" for row in range(rows)], fontsize=7)
    labels = [*(f"H{head}" for head in range(columns)), "", "MLP"]
    ax.set_xticks(range(columns + 2), labels, fontsize=7)
    _write_title(ax, title)
    draw_colour_bar(ax, image, "adds to the logit", shrink=0.7, pad=0.02)
    return ax


def plot_token_bars(
    values: Any, tokens: Sequence[str], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw a bar per token, orange if it adds and blue if it takes away.

    Args:
        values: (s,).
        tokens: Their text.
        title: Above it.
        ax: Where to draw.
    """
    heights = np.asarray(values, float)
    ax = axes_or_new(ax, min(0.34 * len(heights) + 1.2, 20), 2.8)
    ax.bar(range(len(heights)), heights, color=[ORANGE if v >= 0 else BLUE for v in heights])
    ax.axhline(0, color=GREY, linewidth=0.6)
    _write_tokens(ax, tokens)
    ax.tick_params(axis="y", labelsize=7)
    ax.set_ylabel("adds to the logit", fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    _write_title(ax, title)
    return ax


def _write_tokens(ax: Axes, tokens: Sequence[str]) -> None:
    labels = [token_label(each) for each in tokens]
    fonts = fonts_for(labels)
    texts = [escape(fonts.writable(each)) for each in labels]
    look: dict[str, Any] = {"fontsize": 7.5, "fontfamily": fonts.families, "rotation": 50}
    ax.set_xticks(range(len(texts)), texts, ha="right", rotation_mode="anchor", **look)


def _write_title(ax: Axes, title: str) -> None:
    """Write the title above a plot, in as many lines as its width asks for."""
    inches = ax.get_window_extent().width / ax.figure.dpi
    lines = wrap(title, max(20, int(inches * _LETTERS_PER_INCH)))
    ax.set_title(escape("\n".join(lines)), fontsize=9, loc="left")
