"""Draw lines over the depth of a model: how large a metric is, and what one token did.

`_scan/pictures/figures` fills in the `Line`s and calls `draw_lines`. Colours and dashes repeat
after `MOST_LINES`, which callers must not exceed. Layers outside the blocks stand before and after
the numbered ones, under their names. Widths and marks may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfmri._text import layer_label, shorten
from torchfmri.visualization._figure import (
    GREY,
    WIDE,
    draw_grid,
    draw_legend,
    escape,
    line_look,
    write_middle,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

_MOST_NUMBERS = 16


class Line(NamedTuple):
    """The layers of one kind over depth.

    Attributes:
        label: The kind.
        depths: Where each layer stands on the x axis.
        middle: (layer,)
        low: The lower edge of the band around it, (layer,); None without one.
        high: The upper edge.
        is_outside: Whether it is a layer outside the blocks.
    """

    label: str
    depths: Sequence[float]
    middle: Floats
    low: Floats | None = None
    high: Floats | None = None
    is_outside: bool = False


def draw_lines(ax: Axes, lines: Sequence[Line], *, value: str) -> Axes:
    """Draw lines over depth, a single layer as a mark; logarithmic over a wide range.

    Args:
        ax: Where to draw.
        lines: What to draw.
        value: What the y axis is.
    """
    for index, line in enumerate(lines):
        look = line_look(index, line.label)
        single = len(line.depths) == 1
        marker = "D" if single else "o" if len(line.depths) <= 40 else ""
        size = 5 if single else 2.5
        # Those below are wider: gradients of a block and of its parts are often the same.
        width = 1.4 if single else max(1.4, 3.4 - index)
        ax.plot(line.depths, line.middle, marker=marker, markersize=size, linewidth=width, **look)
        if line.low is not None and line.high is not None:
            colour = look["color"]
            if single:
                ax.vlines(line.depths, line.low, line.high, color=colour, linewidth=1.4)
            else:
                ax.fill_between(
                    line.depths, line.low, line.high, color=colour, alpha=0.16, linewidth=0
                )
    ax.set_xlabel("depth (number of the block)")
    ax.set_ylabel(escape(value))
    draw_grid(ax)
    _write_depths(ax, lines)
    draw_legend(ax)
    if not any(np.isfinite(line.middle).any() for line in lines):
        write_middle(ax, "no values", color=GREY)
    return ax


def _write_depths(ax: Axes, lines: Sequence[Line]) -> None:
    """Write the numbers of the blocks, and the names of layers before and after them."""
    alone = {
        line.depths[0]: layer_label(line.label).rpartition(".")[2]
        for line in lines
        if line.is_outside
    }
    inside = [each for line in lines if not line.is_outside for each in line.depths]
    if not inside:
        ax.locator_params(axis="x", integer=True)
        return
    step = max(1, -(-int(max(inside) - min(inside) + 1) // _MOST_NUMBERS))
    numbers = range(int(min(inside)), int(max(inside)) + 1, step)
    marks = {**{float(each): str(each) for each in numbers}, **alone}
    ax.set_xticks(list(marks), [escape(shorten(each, 16)) for each in marks.values()])
    for mark, tick in zip(marks, ax.get_xticklabels(), strict=True):
        if mark in alone:
            tick.set(rotation=45, ha="right", rotation_mode="anchor", fontsize=7)


def scale_wide(ax: Axes, lines: Sequence[Line]) -> None:
    """Make the y axis logarithmic if all values are positive over a wide range."""
    parts = [each for line in lines for each in (line.middle, line.low, line.high)]
    found = [part[np.isfinite(part)] for part in parts if part is not None]
    numbers = np.concatenate(found) if found else np.array([])
    positive = numbers[numbers > 0]
    if len(positive) and positive.max() > WIDE * positive.min():
        ax.set_yscale("log")
        if positive.min() < positive.max() * 1e-8:
            ax.set_ylim(bottom=float(positive.max()) * 1e-8)
