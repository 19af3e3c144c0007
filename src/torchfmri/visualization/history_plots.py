"""Draw a `History`: a statistic over the steps of training, with the loss beneath.

`Monitor.plot`, the writers for dashboards and users call `plot_history`, which is public. A step
with NaN or Inf carries a triangle, and a layer that was not seen is hatched: neither may vanish in
the colours. Values over a wide range get a logarithmic scale. Sizes, colours and limits of scales
may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchfmri._model import match_all
from torchfmri._records import COUNTS, NO_STEPS, UPDATES, Floats, History
from torchfmri._text import layer_label, plural, shorten
from torchfmri.exceptions import InspectionError
from torchfmri.visualization._figure import (
    GREY,
    MEANING,
    MOST_LINES,
    WIDE,
    axes_or_new,
    draw_colour_bar,
    draw_grid,
    draw_legend,
    draw_triangles,
    escape,
    line_look,
    split_off,
    write_middle,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALARM, _ABSENT = "#D55E00", "#e4e4e4"
_SIGNED = frozenset({"mean", "min", "max"})
_MOST_NAMES = 56


def plot_history(
    history: History,
    field: str = "rms",
    what: str = "activations",
    *,
    layers: str | Sequence[str] | None = None,
    loss: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draw a statistic over the steps: all layers as a heat map, or chosen ones as lines.

    Steps in which a layer had NaN or Inf carry a triangle; those in which it was not seen are
    grey and hatched. Values over a wide range are on a logarithmic scale (signed ones: linear
    near zero).

    Args:
        history: What to show.
        field: Which statistic: rms, std, mean, abs_max, nan, ... With what="updates" it is always
            update / weight.
        what: activations, gradients, parameters, parameter_gradients or updates.
        layers: A pattern, or several, for the layers to draw as lines.
        loss: Whether to draw the loss beneath.
        ax: Where to draw.

    Raises:
        LayerNotFoundError: No layer in the history matches.
        InspectionError: There is nothing to draw, or no such statistic.
    """
    if not len(history):
        return _draw_nothing(ax)
    names, values = history.matrix(what, field)
    bad = _non_finite(history, what, values)
    if layers is not None:
        chosen = np.isin(names, list(match_all(layers, names)))
        names, values, bad = np.array(names)[chosen].tolist(), values[chosen], bad[chosen]
    shown = "update / weight" if what == UPDATES else field
    if layers is None:
        ax = axes_or_new(ax, 9.0, min(max(0.22 * len(names) + 2.6, 4.4), 14.0))
        _draw_map(ax, history.steps, names, values, bad, shown)
    else:
        ax = axes_or_new(ax, 9.0, 5.0)
        _draw_lines(ax, history.steps, names, values, bad, shown)
    meaning = "what the optimizer changed" if what == UPDATES else MEANING[what]
    title = f"{shown} ({meaning})" if what == UPDATES else f"{shown} of {what} ({meaning})"
    ax.set_title(escape(title), fontsize=11, loc="left")
    if loss:
        _draw_loss(ax, history)
    else:
        ax.set_xlabel("step")
    return ax


def _draw_nothing(ax: Axes | None) -> Axes:
    ax = axes_or_new(ax, 9.0, 3.0)
    write_middle(ax, NO_STEPS)
    ax.set_axis_off()
    return ax


def _non_finite(history: History, what: str, values: Floats) -> Any:
    """Return True where a series had NaN or Inf, (layer, step)."""
    if what == UPDATES:
        return np.isinf(values)
    found: Floats = history.matrix(what, "nan")[1] + history.matrix(what, "inf")[1]
    return found > 0


# -- heat map ------------------------------------------------------------------------------------


def _draw_map(ax: Axes, steps: Any, names: list[str], values: Floats, bad: Any, field: str) -> None:
    """Draw layers down and steps across."""
    import matplotlib as mpl

    norm, cmap = _norm(values, field)
    colours = mpl.colormaps[cmap].with_extremes(bad=(0, 0, 0, 0))
    ax.set_facecolor(_ABSENT)
    ax.patch.set_hatch("////")
    ax.patch.set_edgecolor("#bdbdbd")
    edges = _edges(steps)
    shown = np.ma.masked_invalid(values)
    mesh = ax.pcolormesh(
        edges, np.arange(len(names) + 1) - 0.5, shown, norm=norm, cmap=colours, rasterized=True
    )
    if np.ma.is_masked(shown) and not shown.mask.all():
        ax.plot([], [], "s", color=_ABSENT, markeredgecolor="#9a9a9a", label="not seen")
    rows, columns = np.nonzero(bad)
    if len(rows):
        marks = _thin(rows, columns, bad.shape)
        look: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.6, "label": "NaN or Inf"}
        look |= {"marker": "v", "s": 22, "color": _ALARM, "zorder": 3, "clip_on": False}
        ax.scatter(np.asarray(steps)[marks[1]], marks[0], **look)
    _label_layers(ax, names)
    ax.set_xlim(edges[0], edges[-1])
    beside: dict[str, Any] = {"pad": 0.015, "fraction": 0.05, "aspect": 30}
    draw_colour_bar(ax, mesh, field + _scale_name(norm), **beside)
    if ax.get_legend_handles_labels()[0]:
        spaces = {"borderaxespad": 0.2, "handletextpad": 0.3}
        draw_legend(ax, loc="lower right", ncols=2, **spaces)


def _label_layers(ax: Axes, names: list[str]) -> None:
    """Write names down the y axis, the input on top; of many only every n-th."""
    every = -(-len(names) // _MOST_NAMES)
    places = range(0, len(names), every)
    labels = [escape(shorten(layer_label(names[place]), 36)) for place in places]
    ax.set_yticks(list(places), labels, fontsize=8)
    ax.set_ylim(len(names) - 0.5, -0.5)
    if every > 1:
        ax.set_ylabel(f"one in {every} layers is named", fontsize=8)


def _thin(rows: Any, columns: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the marks without those that would touch: the first of a run, then one in so many."""
    gap = max(1, shape[1] // 60)
    kept_rows, kept_columns = [], []
    last: dict[int, int] = {}
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if row not in last or column - last[row] >= gap:
            last[row] = column
            kept_rows.append(row)
            kept_columns.append(column)
    return np.array(kept_rows), np.array(kept_columns)


def _edges(steps: Any) -> Floats:
    """Return the borders of the columns; watched steps may lie apart."""
    middles = np.asarray(steps, float)
    if len(middles) == 1:
        return np.array([middles[0] - 0.5, middles[0] + 0.5])
    inner = (middles[1:] + middles[:-1]) / 2
    return np.array([2 * middles[0] - inner[0], *inner, 2 * middles[-1] - inner[-1]])


def _norm(values: Floats, field: str) -> tuple[Any, str]:
    """Return how values become colours: colour-blind safe, logarithmic over a wide range."""
    from matplotlib.colors import LogNorm, Normalize, SymLogNorm

    finite = values[np.isfinite(values)]
    if not len(finite):
        return Normalize(0, 1), "viridis"
    if field in _SIGNED and finite.min() < 0:
        top = float(np.abs(finite).max()) or 1.0
        sizes = np.abs(finite[finite != 0])
        near = float(np.quantile(sizes, 0.1)) if len(sizes) else top
        if top / near < WIDE:
            return Normalize(-top, top), "PuOr_r"
        return SymLogNorm(max(near, top * 1e-6), vmin=-top, vmax=top), "PuOr_r"
    low, high = float(finite.min()), float(finite.max())
    positive = finite[finite > 0]
    if field not in COUNTS and len(positive) and high / float(positive.min()) > WIDE:
        return LogNorm(max(float(positive.min()), high * 1e-12), high, clip=True), "viridis"
    if field in COUNTS:
        low = 0.0
    return Normalize(low, high if high > low else low + 1), "viridis"


def _scale_name(norm: Any) -> str:
    kind = type(norm).__name__
    return {"LogNorm": " (log scale)", "SymLogNorm": " (log scale, linear near 0)"}.get(kind, "")


# -- lines ---------------------------------------------------------------------------------------


def _draw_lines(
    ax: Axes, steps: Any, names: list[str], values: Floats, bad: Any, field: str
) -> None:
    """Draw one line per layer, in its own colour and dashes; NaN and Inf as triangles."""
    if len(names) > MOST_LINES:
        raise InspectionError(
            f"{len(names)} lines cannot be told apart: choose at most {MOST_LINES} layers, or "
            "leave out layers= for a heat map."
        )
    marker = "o" if len(steps) <= 30 else ""
    finite = np.where(np.isfinite(values), values, np.nan)
    for index, name in enumerate(names):
        look = line_look(index, name)
        ax.plot(steps, finite[index], linewidth=1.4, marker=marker, markersize=3, **look)
        hit = np.flatnonzero(bad[index])
        if len(hit):
            draw_triangles(ax, np.asarray(steps)[hit], 0.985 - 0.03 * index, look["color"])
    if bad.any():
        ax.plot([], [], "v", color=GREY, label="NaN or Inf")
    _scale_lines(ax, finite)
    ax.set_ylabel(field)
    draw_grid(ax)
    ax.margins(x=0.01)
    draw_legend(ax)


def _scale_lines(ax: Axes, values: Floats) -> None:
    finite = values[np.isfinite(values)]
    sizes = np.abs(finite[finite != 0])
    if not len(sizes) or sizes.max() / sizes.min() <= WIDE:
        return
    if (finite > 0).all():
        ax.set_yscale("log")
    else:
        near = max(float(np.quantile(sizes, 0.05)), float(sizes.max()) * 1e-6)
        ax.set_yscale("symlog", linthresh=near)


# -- the loss ------------------------------------------------------------------------------------


def _draw_loss(ax: Axes, history: History) -> None:
    """Draw the loss beneath, over the same steps."""
    inches = max(ax.get_position().height * ax.figure.bbox.height / ax.figure.dpi, 0.1)
    below = split_off(ax, min(max(1.0 / inches, 0.1), 0.3), "below")
    ax.tick_params(axis="x", labelbottom=False)
    below.set_xlabel("step")
    below.spines[["top", "right"]].set_visible(False)
    below.set_ylabel("loss", fontsize=9, labelpad=2)
    below.tick_params(labelsize=8)
    loss = history.loss
    if np.isnan(loss).all():
        write_middle(below, "loss not seen", color=GREY, fontsize=9)
        below.set_yticks([])
        return
    finite = np.isfinite(loss)
    steps = history.steps
    marker = "o" if len(steps) <= 30 else ""
    look: dict[str, Any] = {"color": "#333333", "linewidth": 1.2, "markersize": 2.5}
    below.plot(steps, np.where(finite, loss, np.nan), marker=marker, **look)
    lost = np.isinf(loss) | (np.isnan(loss) & finite.any())
    if lost.any():
        draw_triangles(below, steps[lost], 0.92, _ALARM)
        said = f"NaN, Inf or not seen at {plural(int(lost.sum()), 'step')}"
        corner: dict[str, Any] = {"transform": below.transAxes, "ha": "right", "va": "top"}
        below.text(0.995, 0.97, said, color=_ALARM, fontsize=8, **corner)
    positive = loss[finite & (loss > 0)]
    if len(positive) == int(finite.sum()) and positive.max() / positive.min() > WIDE:
        below.set_yscale("log")
