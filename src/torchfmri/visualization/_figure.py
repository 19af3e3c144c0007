"""What all figures share: axes to draw on, colours, words, scales, and how a figure is saved.

Every file of this room imports from here. matplotlib is imported inside functions only, because it
is an extra and slow to import. A figure is not registered with pyplot, except in a notebook, so
that plotting in a loop does not fill memory. All text goes through `escape`: "$" in a layer's name
would start a formula. Colours may change, but must stay apart for all common kinds of colour
vision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from torchfmri._arguments import require
from torchfmri._files import new_file
from torchfmri._text import in_notebook, layer_label, number_text, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by all common kinds of colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7f7f7f"
# The palette of lines: without the yellow, which is too pale for a line.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":")
MOST_LINES = len(LINE_COLOURS) * len(DASHES)
WIDE = 30
"""Values get a logarithmic scale if the largest is more than this many times the smallest."""
MEANING = {
    "activations": "value of the output",
    "inputs": "value of the input",
    "gradients": "dL/d output",
    "input_gradients": "dL/d input, through the layer's own call",
    "parameters": "value of the parameters",
    "parameter_gradients": "dL/d parameter",
    "activation_rate": "share of tokens that reach a unit",
    "selectivity": "spread over tasks of a unit's activation rate",
}
_LINEAR_UP_TO = 30.0
_DECADES_SHOWN = 6


def save_figure(drawn: Figure | Axes, path: str | PathLike[str], **options: Any) -> None:
    """Write a figure, or that of some axes, into a file: whole or not at all.

    A path without an ending gets that of matplotlib's own format.

    Raises:
        InspectionError: As `check_picture` does.
    """
    target, figure = Path(path), cast("Figure", drawn.figure)
    check_picture("path", target)
    if not target.suffix:
        target = target.with_name(f"{target.name}.{figure.canvas.get_default_filetype()}")
    with new_file(target) as new:
        figure.savefig(new, **options)


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of that size in inches, unknown to pyplot except in a notebook.

    There it is one of pyplot's, because only those are shown; the notebook closes it itself.

    Raises:
        ImportError: matplotlib is not installed; the message says how to.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure

    if in_notebook():
        from matplotlib import pyplot

        return pyplot.figure(figsize=(width, height), layout="constrained")
    return Figure(figsize=(width, height), layout="constrained")


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib, which is not installed: pip install 'torchfmri[plots]'"
        ) from error


def check_picture(name: str, path: Path) -> None:
    """Raise if a path cannot become a picture: a folder, or an ending of no known format.

    Raises:
        InspectionError: Naming the ending, and those that there are.
        ImportError: matplotlib is not installed.
    """
    _require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    require(not path.is_dir(), name, str(path), "that is a folder; name a file in it")
    known = FigureCanvasBase.get_supported_filetypes()
    endings = ", ".join(sorted(known))
    meaning = f"{path.suffix!r} is not a format of pictures; the ending is one of {endings}"
    require(not path.suffix or path.suffix[1:].lower() in known, name, str(path), meaning)


def axes_or_new(ax: Axes | None, width: float, height: float) -> Axes:
    """Return `ax`, or the axes of a new figure of that size in inches."""
    if ax is None:
        return new_figure(width, height).add_subplot()
    require(hasattr(ax, "get_figure"), "ax", ax, "give matplotlib Axes, or None for a new figure")
    return ax


def split_off(ax: Axes, share: float, side: Literal["right", "below"]) -> Axes:
    """Return new axes for a share of the space of `ax`; the axis between the two is shared."""
    figure, spec, box = ax.figure, ax.get_subplotspec(), ax.get_position()
    right, ratios = side == "right", (1 - share, share)
    shared: dict[str, Any] = {"sharey" if right else "sharex": ax}
    if spec is not None:
        across: dict[str, Any] = {"width_ratios": ratios, "wspace": 0.06}
        down: dict[str, Any] = {"height_ratios": ratios, "hspace": 0.02}
        parts = spec.subgridspec(1, 2, **across) if right else spec.subgridspec(2, 1, **down)
        ax.set_subplotspec(parts[0])
        part: Axes = figure.add_subplot(parts[1], **shared)
        return part
    width, height = box.width * share, box.height * share
    if right:
        ax.set_position((box.x0, box.y0, box.width * 0.95 - width, box.height))
        return figure.add_axes((box.x1 - width, box.y0, width, box.height), **shared)
    gap = 0.04 * box.height
    ax.set_position((box.x0, box.y0 + height + gap, box.width, box.height - height - gap))
    return figure.add_axes((box.x0, box.y0, box.width, height), **shared)


def line_look(index: int, name: str) -> dict[str, Any]:
    """Return colour, dashes and label of one of up to `MOST_LINES` lines of layers."""
    return {
        "color": LINE_COLOURS[index % len(LINE_COLOURS)],
        "linestyle": DASHES[index // len(LINE_COLOURS) % len(DASHES)],
        "label": escape(shorten(layer_label(name), 36)),
    }


def panels(
    count: int, most: int, inches: tuple[float, float], **options: Any
) -> tuple[Figure, list[Any]]:
    """Return a new figure and `count` axes on it, at most `most` of them side by side.

    Args:
        count: How many.
        most: How many side by side at most.
        inches: The width and height of each.
        **options: Options of `Figure.subplots`.
    """
    columns = min(most, count)
    rows = -(-count // columns)
    figure = new_figure(inches[0] * columns + 0.6, inches[1] * rows + 0.6)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


def draw_grid(ax: Axes, axis: Literal["x", "y", "both"] = "y") -> None:
    """Draw faint lines behind the data, and take away the frame above and at the right."""
    ax.grid(axis=axis, color="#e8e8e8", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def write_middle(ax: Axes, words: str, **look: Any) -> None:
    """Write in the middle of axes why they show no data."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", **look)


def write_above(ax: Axes, words: str, points: float, **look: Any) -> None:
    """Write words above the upper left corner of the axes, at a distance in points."""
    look = {"textcoords": "offset points", "annotation_clip": False, **look}
    ax.annotate(escape(words), (0, 1), (0, points), xycoords="axes fraction", **look)


def write_beside(ax: Axes, words: str, x: float, y: float, **look: Any) -> None:
    """Write words at a height of the data, and at a share of the width of the axes."""
    look = {"va": "center", "fontsize": 8, **look}
    ax.annotate(escape(words), (x, y), xycoords=("axes fraction", "data"), **look)


def draw_cells(ax: Axes, values: Any, colours: str = "viridis", **options: Any) -> Any:
    """Draw a table as an image without a frame, grey where a value is not finite; return it.

    Args:
        ax: Where to draw.
        values: (row, column).
        colours: The name of matplotlib's colour map.
        **options: Options of `Axes.imshow`.
    """
    ax.set_facecolor("#e4e4e4")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    options = {"aspect": "auto", "interpolation": "nearest", **options}
    return ax.imshow(np.ma.masked_invalid(values), cmap=colours, **options)


def draw_ring(ax: Axes, x: float, y: float, colour: str, **look: Any) -> None:
    """Draw a hollow mark around a place, so that what is there stays visible.

    Args:
        ax: Where to draw.
        x: The place, on the x axis.
        y: The place, on the y axis.
        colour: Of the ring.
        **look: Options of `Axes.plot`.
    """
    look = {"marker": "o", "markeredgewidth": 1.8, "linestyle": "", **look}
    ax.plot([x], [y], markerfacecolor="none", markeredgecolor=colour, **look)


def draw_triangles(ax: Axes, places: Any, height: float, colour: str) -> None:
    """Draw a triangle at each place on the x axis, at a share of the height of the axes."""
    heights, onto = [height] * len(places), ax.get_xaxis_transform()
    look: dict[str, Any] = {"markeredgecolor": "white", "clip_on": False, "transform": onto}
    ax.plot(places, heights, "v", color=colour, markersize=5, **look)


def draw_legend(ax: Axes, size: float = 8, **options: Any) -> None:
    """Draw the legend at the right of the axes, or with another `loc` at their upper right end."""
    look = {"loc": "upper left", "frameon": False, "fontsize": size, **options}
    ax.legend(bbox_to_anchor=(1.0, 1.0), **look)


def draw_colour_bar(
    ax: Axes | Sequence[Axes],
    image: Any,
    label: str = "",
    marks: Sequence[float] | None = None,
    **options: Any,
) -> Any:
    """Draw the colour bar of an image in small letters, and return it.

    Args:
        ax: The axes that it stands beside; one or several.
        image: What it explains.
        label: What the colours mean.
        marks: The values that are written beside it; by default matplotlib chooses them.
        **options: Options of `Figure.colorbar`.
    """
    figure = (ax[0] if isinstance(ax, Sequence) else ax).figure
    bar = figure.colorbar(image, ax=ax, **options)
    bar.set_label(escape(label), fontsize=8)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    if marks is not None:
        bar.ax.set_yticks(marks, [number_text(each) for each in marks])
        bar.ax.set_yticks([], minor=True)
    return bar


def scale_values(ax: Axes, ends: Iterable[tuple[float, float]]) -> None:
    """Make the x axis linear only around zero if the sizes of layers differ widely.

    Args:
        ax: The axes to scale.
        ends: The lowest and the highest value to show of every layer.
    """
    known = [(low, high) for low, high in ends if math.isfinite(low) and math.isfinite(high)]
    sizes = [size for low, high in known if (size := max(abs(low), abs(high))) > 0]
    if not sizes or max(sizes) / min(sizes) < _LINEAR_UP_TO:
        return
    low_end, high_end = min(low for low, _ in known), max(high for _, high in known)
    power = math.floor(math.log10(max(min(sizes) / 2, max(sizes) * 10.0**-_DECADES_SHOWN)))
    ax.set_xscale("symlog", linthresh=10.0**power)
    ticks = [0.0]
    for sign, end in ((-1.0, -low_end), (1.0, high_end)):
        powers = range(power, math.floor(math.log10(end)) + 1) if end >= 10.0**power else range(0)
        step = -(-len(powers) // 3) if powers else 1
        ticks += [sign * 10.0**each for each in reversed(powers[::-1][::step])]
    ax.set_xticks(sorted(ticks))
    ax.set_xticks([], minor=True)


def ink(ax: Axes) -> Any:
    """Return the colour of the text, which fits the user's own style, dark ones too."""
    return ax.xaxis.label.get_color()


def behind_text(ax: Axes) -> dict[str, Any]:
    """Return a box that lets a text be read on top of data."""
    return {"facecolor": ax.get_facecolor(), "edgecolor": "none", "alpha": 0.8, "pad": 1.0}


def escape(text: str) -> str:
    """Return the text with nothing in it that matplotlib would read as mathematics."""
    return text.replace("$", r"\$")
