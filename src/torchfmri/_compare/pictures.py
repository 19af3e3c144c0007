"""The pictures of a `Comparison`: layers by tokens, and the difference along the depth.

`Comparison.plot`, `plot_depth` and `draw` call these functions, and document their arguments. The
picture of layers by tokens is a `Brain` of `visualization`, filled in by `_brain`. Colours, sizes
and titles may change. A value of 1 is what noise allows on both sides, and matplotlib is imported
only inside `visualization`, so that comparing does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from torchfmri._compare.difference import BRIGHTEST, Pair, beyond_text, drawable, unit_text
from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.recording import BACKWARD, FORWARD, PARAMETERS
from torchfmri._scan import layer_bands, outline_of
from torchfmri._text import layer_label, listed, shorten
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import (
    Brain,
    TokenTrack,
    axes_or_new,
    draw_brain,
    escape,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchfmri._compare.comparison import Comparison

_DIRECTIONS = {FORWARD: "forward pass", BACKWARD: "backward pass (dL/d output)"}
_DEPTHS = {**_DIRECTIONS, PARAMETERS: "gradients of parameters"}
_MOST_NAMES = 40
_DOTS_PER_INCH = 110


def plot_difference(
    comparison: Comparison, direction: str, row: int | None, ax: Axes | None
) -> Axes:
    """The layers of one direction down, the tokens of one row across; see `Comparison.plot`."""
    brain = _brain(comparison, direction, row)
    return draw_brain(axes_or_new(ax, *brain.figure_inches), brain, surprisal=False)


def plot_depth(pairs: Sequence[Pair], direction: str, ax: Axes | None) -> Axes:
    """Difference and own spreads along one direction; see `Comparison.plot_depth`."""
    _check_direction(direction, _DEPTHS)
    shown = [pair for pair in pairs if pair.direction == direction]
    if not shown:
        what = "activations" if direction == FORWARD else "gradients"
        raise InspectionError(f"No {what} were compared: there is no depth to draw.")
    ax = axes_or_new(ax, 9.0, 3.6)
    at = np.arange(len(shown))
    lines = (
        ("allowed", [pair.threshold for pair in shown], "#7f7f7f", "--", ""),
        ("a differs from itself", [pair.spread_a for pair in shown], "#0072B2", "-", ""),
        ("b differs from itself", [pair.spread_b for pair in shown], "#009E73", "-.", ""),
        ("a differs from b", [pair.worst for pair in shown], "#D55E00", "-", "o"),
    )
    for label, values, colour, dashes, marker in lines:
        heights = np.array(values, float)
        drawn = np.where(np.isfinite(heights) & (heights > 0), heights, np.nan)
        if np.isfinite(drawn).any():
            style: Any = {"linestyle": dashes, "marker": marker, "markersize": 3}
            ax.plot(at, drawn, color=colour, linewidth=1.4, label=label, **style)
    infinite = [index for index, pair in enumerate(shown) if pair.worst == np.inf]
    if infinite:  # above all others, whatever the scale
        label, top = "on one side only, NaN or infinite", ax.get_xaxis_transform()
        ax.plot(infinite, [0.97] * len(infinite), "^", color="#D55E00", transform=top, label=label)
    scaled = any(0 < each < np.inf for pair in shown for each in (pair.worst, pair.threshold))
    if scaled:
        ax.set_yscale("log")
    if scaled or infinite:
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        ax.text(0.5, 0.5, "equal to the last bit", ha="center", va="center", transform=ax.transAxes)
    first = next((index for index, pair in enumerate(shown) if pair.differs), None)
    if first is not None:
        ax.axvline(first, color="#D55E00", linewidth=0.8, linestyle=":")
    every = max(1, -(-len(shown) // _MOST_NAMES))
    names = [escape(shorten(_depth_name(pair), 30)) for pair in shown[::every]]
    ax.set_xticks(at[::every], names, rotation=90, fontsize=6.5)
    row = "of a token" if any(pair.grid is not None for pair in shown) else "of a sample"
    of = "" if direction == PARAMETERS else row
    ax.set_ylabel(f"largest relative difference\n{of}", fontsize=8)
    title = _depth_title(direction, None if first is None else shown[first])
    ax.set_title(title, fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.01)
    return ax


def draw_comparison(comparison: Comparison, path: str | PathLike[str] | None) -> Figure:
    """The picture of tokens above that of the depth; see `Comparison.draw`."""
    first = comparison.first
    direction = FORWARD if first is None else first.direction
    try:
        brain = _brain(comparison, direction, None)
    except InspectionError:  # no tokens, as gradients of parameters have none: the depth alone
        figure = new_figure(10.0, 5.0)
        plot_depth(comparison.pairs, direction, figure.add_subplot())
    else:
        wide, high = brain.figure_inches
        figure = new_figure(max(wide, 10.0), high + 4.2)
        above, below = figure.subplots(2, 1, height_ratios=[high, 4.2])
        draw_brain(above, brain, surprisal=False)
        plot_depth(comparison.pairs, direction, below)
    if path is not None:
        save_figure(figure, path, dpi=_DOTS_PER_INCH)
    return figure


def _brain(comparison: Comparison, direction: str, row: int | None) -> Brain:
    _check_direction(direction)
    first, tokens = comparison.differences.get(direction), comparison._tokens
    shown = [
        pair for pair in comparison.pairs if pair.direction == direction and pair.grid is not None
    ]
    if not shown:
        raise InspectionError(
            f"No layer of the {_DIRECTIONS[direction]} has tokens to draw. See comparison.text()."
        )
    grid = _usual_grid(shown)
    seen = first.seen_at if first is not None else None
    shown = [pair for pair in shown if pair.grid is not None and pair.grid.places == grid.places]
    count, shown = len(shown), _outline(shown, seen)
    if row is None:
        row = first.row if first is not None and first.row is not None else 0
    columns = [index for index, (each, _) in enumerate(grid.places) if each == row]
    if not columns:
        raise InspectionError(f"row={row!r}: the batch has {grid.places[-1][0] + 1} rows, from 0.")
    values = np.stack([pair.beyond[columns] for pair in shown])
    mark = None
    if first is not None and first.token is not None and first.row == row:
        at = [
            i
            for i, pair in enumerate(shown)
            if pair.place.layer == seen
            and pair.place.call == first.call
            and pair.place.element == first.element
        ]
        mark = (at[0], first.token) if at and first.token < len(columns) else None
    texts = [
        tokens[index] if index < len(tokens) else str(grid.places[index][1]) for index in columns
    ]
    said = f"first: {shorten(str(first.place()), 150)}" if first is not None else ""
    which = [f"(row {row} of the batch)"] if grid.places[-1][0] and " of row " not in said else []
    limit, unit = beyond_text(comparison._tolerance), unit_text(comparison._tolerance)
    more = unit.removeprefix("difference in units of ")
    remarks = [f"brighter than the darkest: more than {more}; ring: the first difference"]
    remarks = (remarks if mark else []) + ([BRIGHTEST] if np.isposinf(values).any() else [])
    if len(shown) < count:
        remarks.append(f"{len(shown)} of {count} tensors are drawn")
    subject = "Where two runs part" if first is not None else f"No difference{limit}"
    return Brain(
        bands=layer_bands([_label(pair) for pair in shown], "kind"),
        values=drawable(values),
        tokens=_track(texts),
        metric=unit,
        normalise="global",
        title=f"{subject}: {_DIRECTIONS[direction]}",
        subtitle=" ".join([*filter(None, [said]), *which]),
        mark=mark,
        unit=1.0,
        remark="; ".join(remarks),
    )


def _check_direction(direction: str, known: Mapping[str, str] = _DIRECTIONS) -> None:
    if direction not in known:
        raise InspectionError(f"direction={direction!r}: there are {listed(list(known))}.")


def _depth_name(pair: Pair) -> str:
    if pair.direction != PARAMETERS:
        is_loss = (pair.place.layer, pair.place.element) == ("", "loss")
        return "(the loss)" if is_loss else layer_label(pair.place.layer)
    return ".".join(filter(None, (pair.place.layer, pair.place.element)))


def _depth_title(direction: str, first: Pair | None) -> str:
    if first is None or (direction != PARAMETERS and first.grid is not None):
        return f"How rounding grows along the {_DEPTHS[direction]}"
    # No picture of tokens above it says which one it is.
    of = "dL/d " if direction == PARAMETERS else ""
    said = escape(shorten(f"{of}{_depth_name(first)}", 110))
    return f"Where two runs part: {_DEPTHS[direction]}\nfirst (dotted line): {said}"


def _usual_grid(pairs: Sequence[Pair]) -> PositionGrid:
    counts: dict[int, int] = {}
    grids = [pair.grid for pair in pairs if pair.grid is not None]
    for grid in grids:
        counts[len(grid)] = counts.get(len(grid), 0) + 1
    most = max(counts, key=lambda length: counts[length])
    return next(grid for grid in grids if len(grid) == most)


def _outline(pairs: list[Pair], seen: str | None) -> list[Pair]:
    """The layers that give an overview, and the one where the difference is first seen."""
    names = [pair.place.layer for pair in pairs]
    unique = list(dict.fromkeys(names))
    chosen = {unique[column] for column in outline_of(unique)} | {seen}
    return [pair for pair in pairs if pair.place.layer in chosen]


def _label(pair: Pair) -> str:
    place = pair.place
    name = place.layer + (f" [{place.element}]" if place.element not in ("", "0") else "")
    return f"{name} call {place.call}" if place.call else name


def _track(texts: Sequence[str]) -> TokenTrack:
    count = len(texts)
    no = np.zeros(count, bool)
    return TokenTrack(list(texts), np.full(count, np.nan), no, no)
