"""Draw the brain of a scan: layers down, tokens across, one colour for each value.

`_scan/pictures` and the room `_compare` fill in a `Brain` and call `draw_brain`. This file knows
arrays and labels, nothing of scans or models. Sizes and colours may change freely. A cell without a
value is hatched and must not look like a small value.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfmri._text import layer_label, shorten
from torchfmri.visualization._colour_scale import (
    ColourScale,
    pool_rows,
    scale_colours,
    scale_from,
    ticks_between,
)
from torchfmri.visualization._figure import GREY, draw_ring, escape, write_above, write_middle
from torchfmri.visualization._token_track import (
    TRACK_INCHES,
    TokenTrack,
    draw_boundaries,
    draw_strip,
    draw_surprisal,
    label_tokens,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABSENT, _HATCH = "#e4e4e4", "#bdbdbd"
_MARK = "#D55E00"
_SINGLE, _GAP = 0.17, 0.05
_SMALLEST_BAND, _LARGEST_BAND = 0.34, 1.5
_ROW = 0.042
_LEAST, _LARGEST_FACTOR = 1.7, 2.5
_THINNEST = 0.012
_LETTERS = 17.0
"""How many letters of a colour bar's label stand along an inch of it."""
_MANY_BANDS = 20
_MOST_ROWS = 900
_BETWEEN_LABELS = 0.105
_LONGEST_LABEL = 34
_WIDEST, _NARROWEST, _TOKEN = 11.0, 4.2, 0.105


class Band(NamedTuple):
    """A group of rows drawn without a gap: layers of one kind, the voxels of a layer, a block.

    Attributes:
        label: What they are.
        rows: Their places in the table of values.
        marks: (place among the rows, text) to write beside some of them.
    """

    label: str
    rows: Sequence[int]
    marks: Sequence[tuple[int, str]] = ()


class Brain(NamedTuple):
    """The picture of a scan, as arrays and labels.

    Attributes:
        bands: From top to bottom.
        values: (row, s)
        tokens: Along the x axis.
        metric: What the values are.
        normalise: "layer" or "global".
        title: Above it.
        subtitle: A second line in small letters.
        most_inches: How high the map may be.
        beside: Whether the subtitle stands beside the title.
        remark: What to say below the texts.
        mark: (row, s) of a value to draw a ring around; None for none.
        unit: Where the colours begin: values up to it are the darkest, and beyond it colours follow
            the logarithm. 0 for a scale that is made of the values.
    """

    bands: Sequence[Band]
    values: npt.NDArray[np.floating[Any]]
    tokens: TokenTrack
    metric: str
    normalise: str
    title: str
    subtitle: str = ""
    most_inches: float = 7.5
    beside: bool = False
    remark: str = ""
    mark: tuple[int, int] | None = None
    unit: float = 0.0

    @property
    def inches(self) -> tuple[float, float]:
        """The best width and height of the map itself."""
        wide = min(max(_TOKEN * len(self.tokens), _NARROWEST), _WIDEST)
        return wide, float(band_edges(self.bands, self.most_inches)[-1][1])

    @property
    def figure_inches(self) -> tuple[float, float]:
        """The best width and height of the figure: the map and the text around it."""
        wide, high = self.inches
        return wide + 2.9, high + 2.1


def band_edges(bands: Sequence[Band], most: float) -> list[tuple[float, float]]:
    """Return the top and bottom of each band in inches, scaled to end at `most` or before."""
    if not bands:
        return [(0.0, 0.5)]
    heights = np.array(
        [
            _SINGLE
            if len(band.rows) == 1
            else min(max(_ROW * len(band.rows), _SMALLEST_BAND), _LARGEST_BAND)
            for band in bands
        ]
    )
    single = np.array([len(band.rows) == 1 for band in bands])
    close = (single & np.append(single[1:], False)) | (len(bands) > _MANY_BANDS)
    gaps = np.where(close, _GAP / 3, _GAP)
    total = float((heights + gaps).sum())
    # Few rows are made higher, so that there is room for the colour bar and its label.
    factor = most / total if total > most else max(1.0, min(_LEAST / total, _LARGEST_FACTOR))
    gaps[gaps * factor < _THINNEST] = 0.0  # gaps this thin would be drawn unevenly
    ends = np.cumsum((heights + gaps) * factor)
    return [
        (float(end - (height + gap) * factor), float(end - gap * factor))
        for end, height, gap in zip(ends, heights, gaps, strict=True)
    ]


def draw_brain(ax: Axes, brain: Brain, *, text: bool = True, surprisal: bool = True) -> Axes:
    """Draw a brain; each band is an image of `ax`.

    Args:
        ax: Where to draw.
        brain: What to draw.
        text: Whether to write the tokens below.
        surprisal: Whether to draw the track of surprisal above.
    """
    if brain.unit:
        scale = scale_from(brain.unit, brain.values, brain.metric)
    else:
        scale = scale_colours(brain.values, brain.metric, brain.normalise)
    number = len(brain.tokens)
    edges = band_edges(brain.bands, brain.most_inches)
    images = [
        _draw_band(ax, scale, band, span, number)
        for band, span in zip(brain.bands, edges, strict=False)
        if number
    ]
    ax.set_xlim(-0.5, max(number, 1) - 0.5)
    ax.set_ylim(edges[-1][1], 0.0)
    ax.spines[:].set_visible(False)
    remark = _label_bands(ax, brain.bands, edges)
    ax.tick_params(axis="x", length=0, labelbottom=text)
    draw_boundaries(ax, brain.tokens)
    draw_strip(ax, brain.tokens)
    if text:
        label_tokens(ax, brain.tokens, brain.inches[0], [remark, brain.remark])
    if surprisal and number:
        draw_surprisal(ax, brain.tokens)
    _write_title(ax, brain, surprisal and number > 0)
    if brain.mark is not None:
        _draw_mark(ax, brain, edges)
    if images:
        _draw_bar(ax, images[0], scale, brain.inches[1])
    else:
        write_middle(ax, "no tokens")
    return ax


def _draw_band(
    ax: Axes, scale: ColourScale, band: Band, span: tuple[float, float], number: int
) -> Any:
    import matplotlib as mpl
    from matplotlib.patches import Rectangle

    rows = pool_rows(scale.shown[list(band.rows)], _MOST_ROWS)
    if np.isnan(rows).any():
        look: dict[str, Any] = {"facecolor": _ABSENT, "edgecolor": _HATCH, "hatch": "//////"}
        height = span[1] - span[0]
        ax.add_patch(Rectangle((-0.5, span[0]), number, height, linewidth=0, zorder=0, **look))
    colours = mpl.colormaps[scale.map].with_extremes(bad=(0, 0, 0, 0))
    return ax.imshow(
        np.ma.masked_invalid(rows),
        extent=(-0.5, number - 0.5, span[1], span[0]),
        norm=scale.norm(),
        cmap=colours,
        aspect="auto",
        # Neighbours must not be mixed where every cell can be seen.
        interpolation="nearest" if len(rows) < 120 and number < 400 else "auto",
    )


def _draw_mark(ax: Axes, brain: Brain, edges: Sequence[tuple[float, float]]) -> None:
    """Draw a ring around one value that is visible on dark and on bright colours."""
    assert brain.mark is not None
    row, column = brain.mark
    for band, (top, end) in zip(brain.bands, edges, strict=False):
        if row in band.rows:
            at = top + (list(band.rows).index(row) + 0.5) * (end - top) / len(band.rows)
            for colour, width in (("white", 3.6), (_MARK, 1.8)):
                look = {"markersize": 13, "markeredgewidth": width, "zorder": 5, "clip_on": False}
                draw_ring(ax, column, at, colour, **look)


def _label_bands(ax: Axes, bands: Sequence[Band], edges: Sequence[tuple[float, float]]) -> str:
    """Write names of bands and marks beside the map; return a remark if some had no room."""
    places: list[float] = []
    texts: list[str] = []
    named = 0
    last = last_name = -1.0
    for band, (top, end) in zip(bands, edges, strict=False):
        label = escape(shorten(layer_label(band.label), _LONGEST_LABEL))
        middle = (top + end) / 2
        if len(band.rows) == 1 or not band.marks:
            if middle - max(last, last_name) >= _BETWEEN_LABELS:
                places.append(middle)
                texts.append(label)
                last = last_name = middle
                named += 1
            continue
        if middle - last_name >= _BETWEEN_LABELS:
            onto: Any = ("axes fraction", "data")
            look: dict[str, Any] = {"ha": "right", "va": "center", "fontweight": "bold"}
            look |= {"textcoords": "offset points", "annotation_clip": False, "fontsize": 7.5}
            ax.annotate(label, (0, middle), (-20, 0), xycoords=onto, **look)
            last_name = middle
            named += 1
        row = (end - top) / len(band.rows)
        for place, text in band.marks:
            at = top + (place + 0.5) * row
            if at - last >= _BETWEEN_LABELS * 0.8:
                places.append(at)
                texts.append(escape(text))
                last = at
    ax.set_yticks(places, texts, fontsize=7)
    ax.tick_params(axis="y", length=2, pad=2)
    left = len(bands) - named
    return f"no room for {left} of {len(bands)} names" if left else ""


def _write_title(ax: Axes, brain: Brain, above_track: bool) -> None:
    points = 72 * (TRACK_INCHES + 0.06) + 14 if above_track else 6
    if brain.subtitle and brain.beside:
        ax.set_title(escape(brain.subtitle), fontsize=8, loc="right", pad=points, color=GREY)
    elif brain.subtitle:
        write_above(ax, brain.subtitle, points, fontsize=8, color=GREY, va="bottom")
        points += 12 * (1 + brain.subtitle.count("\n"))
    title = ax.set_title(escape(brain.title), fontsize=11, loc="left", pad=points)
    title.set_fontweight("bold")


def _draw_bar(ax: Axes, image: Any, scale: ColourScale, inches: float) -> None:
    """Draw the colour bar: what colours mean, their range, and whether values go beyond."""
    ticks = ticks_between(scale.low, scale.high) if scale.logarithmic else None
    room: dict[str, Any] = {
        "pad": 0.012,
        "fraction": 0.04,
        "shrink": 0.92,
        "aspect": max(12.0, 9 * inches),
    }
    ends: dict[str, Any] = {"extend": scale.beyond, "extendfrac": 0.12 / max(inches, 1.0)}
    bar = ax.figure.colorbar(image, ax=ax, ticks=ticks, **room, **ends)
    if ticks is not None:
        bar.ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        bar.ax.set_yticks([], minor=True)
    along = max(16, int(_LETTERS * inches))
    lines = [part for line in scale.label.splitlines() for part in wrap(line, along)]
    bar.set_label(escape("\n".join(lines)), fontsize=7.5)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    if np.isnan(scale.shown).any():
        look: dict[str, Any] = {"transform": bar.ax.transAxes, "va": "top", "color": GREY}
        bar.ax.text(0, -0.2 / max(inches, 1.0), "hatched:\nno value", fontsize=6.5, **look)
