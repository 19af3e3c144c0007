"""Draw lesions and patches: what each did to the metric, beside how active it was.

The results in `_lesion` fill in a `LesionPicture` or a `PatchPicture` and have it drawn. The
records hold arrays only, so this room does not know what a lesion is. Sizes and colours may change
freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._text import shorten
from torchfmri.visualization._colour_scale import ticks_between
from torchfmri.visualization._figure import GREY, draw_cells, draw_colour_bar, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL, _LEAST, _MOST = 0.2, 2.2, 9.0
_SINGLE = {"mlps": "MLP", "attentions": "attention", "blocks": "block", "places": "place"}


class LesionPicture(NamedTuple):
    """The picture of a lesion map; every array has one entry for each lesion.

    Attributes:
        kinds: "heads", "mlps", "attentions", "blocks", "voxels" or "places".
        blocks: The block of each; -1 for none.
        columns: The head or voxel of each.
        names: The names of the lesions.
        effect: The mean change of the metric.
        notable: Whether it differs from 0 over prompts, corrected for the number of lesions.
        activation: The root mean square of what was lesioned.
        label: What the effect is.
        title: Above all.
    """

    kinds: Sequence[str]
    blocks: NDArray[np.int64]
    columns: NDArray[np.int64]
    names: Sequence[str]
    effect: NDArray[np.float64]
    notable: NDArray[np.bool_]
    activation: NDArray[np.float64]
    label: str
    title: str

    @property
    def inches(self) -> tuple[float, float]:
        """How wide and high the figure is best."""
        rows, columns = (int(each.max()) + 1 for each in self.places)
        wide = min(max(_CELL * columns, _LEAST), _MOST)
        return 2 * wide + 3.0, min(max(_CELL * rows, _LEAST), _MOST) + 1.3

    @property
    def singles(self) -> list[str]:
        """The kinds of which a block has one."""
        return [kind for kind in _SINGLE if kind in self.kinds]

    @property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row of each lesion, its block (its own where places are named), and its column.

        Heads and voxels come first, then one column for each other kind.
        """
        wide = np.isin(self.kinds, ("heads", "voxels"))
        first = int(self.columns[wide].max(initial=-1)) + 1
        single = np.array(
            [0 if kind not in _SINGLE else self.singles.index(kind) for kind in self.kinds]
        )
        rows = np.arange(len(self.names)) if "places" in self.kinds else self.blocks
        return rows, np.where(wide, self.columns, first + single)

    def cells(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the values as (rows, columns); NaN where there is no lesion."""
        rows, columns = self.places
        table = np.full((int(rows.max()) + 1, int(columns.max()) + 1), np.nan)
        table[rows, columns] = values
        return table


def draw_lesions(figure: Figure, picture: LesionPicture) -> None:
    """Draw both maps side by side on one figure."""
    from matplotlib.colors import LogNorm, SymLogNorm

    left, right = figure.subplots(1, 2, sharey=True)
    effect, activation = picture.cells(picture.effect), picture.cells(picture.activation)
    limit = float(np.nanmax(np.abs(effect))) or 1.0
    # Linear up to a thirtieth of the largest: on a linear scale one MLP leaves every head white.
    signed = SymLogNorm(linthresh=limit / 30, vmin=-limit, vmax=limit)
    marks = [-limit, -limit / 5, -limit / 30, 0.0, limit / 30, limit / 5, limit]
    _draw(left, picture, effect, "what the lesion did", picture.label, signed, marks)
    rows, columns = picture.places
    for index in np.flatnonzero(picture.notable):
        left.plot(columns[index], rows[index], ".", color="black", ms=3)
    positive = activation[activation > 0]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (1.0, 1.0)
    high = max(high, low * 1.01)
    sizes, marks = LogNorm(low, high), list(ticks_between(low, high))
    _draw(right, picture, activation, "how active it was", "root mean square", sizes, marks)
    left.set_ylabel("block" if "places" not in picture.kinds else "")
    if bool(picture.notable.any()):
        text = "dots: different from 0 over prompts (p < 0.05, Bonferroni)"
        left.annotate(text, (0, -0.09), xycoords="axes fraction", fontsize=7, color=GREY, va="top")
    figure.suptitle(escape(picture.title), fontsize=9, x=0.01, ha="left", wrap=True)


def _draw(
    ax: Axes,
    picture: LesionPicture,
    table: NDArray[np.float64],
    title: str,
    label: str,
    norm: Any,
    marks: list[float],
) -> None:
    """Draw one map, with its colour bar marked at the given values."""
    image = draw_cells(ax, table, "RdBu_r" if norm.vmin < 0 else "viridis", norm=norm)
    ax.set_title(title, fontsize=9, loc="left")
    first = table.shape[1] - len(picture.singles)
    wide = "voxel" if "voxels" in picture.kinds else "head"
    step = max(1, first // 12)
    ticks = list(range(0, first, step)) + list(range(first, table.shape[1]))
    texts = [str(each) for each in range(0, first, step)] + [_SINGLE[k] for k in picture.singles]
    ax.set_xticks(ticks, texts, fontsize=7, rotation=90 if picture.singles else 0)
    if first:
        ax.set_xlabel(wide, fontsize=8)
    if "places" in picture.kinds:
        ax.set_yticks(range(len(picture.names)), list(map(escape, picture.names)), fontsize=6)
    ax.tick_params(labelsize=7)
    draw_colour_bar(ax, image, label, marks, pad=0.02, fraction=0.06)


class PatchPicture(NamedTuple):
    """The picture of patches.

    Attributes:
        names: The places, from top to bottom.
        labels: The tokens, from left to right.
        score: (places, tokens) 0 as corrupted, 1 as clean; nan where no path leads.
        metric: What the score is of.
        to: Where patches arrive; "" for everything after them.
    """

    names: Sequence[str]
    labels: Sequence[str]
    score: NDArray[np.float64]
    metric: str
    to: str = ""

    @property
    def inches(self) -> tuple[float, float]:
        """How wide and high the figure is best."""
        rows, columns = self.score.shape
        return min(max(0.28 * columns, 1.6), 10.0) + 2.0, min(max(0.18 * rows, 2.0), 9.0) + 1.6


def draw_patches(figure: Figure, picture: PatchPicture) -> None:
    """Draw the scores of patches as one image."""
    ax = figure.subplots()
    limit = max(1.0, float(np.nanmax(np.abs(picture.score))))
    image = draw_cells(ax, picture.score, "RdBu_r", vmin=-limit, vmax=limit)
    ax.set_facecolor("#b8b8b8")  # white is a score of 0
    step = -(-len(picture.names) // 45)
    shown = range(0, len(picture.names), step)
    ax.set_yticks(list(shown), [escape(picture.names[each]) for each in shown], fontsize=7)
    labels = list(map(escape, picture.labels))
    ax.set_xticks(range(len(labels)), labels, fontsize=7, rotation=90)
    title = "what a patch of clean values brings back"
    if picture.to:
        grey = "\n(grey: no path)" if np.isnan(picture.score).any() else ""
        title += f"\non the direct way to {escape(shorten(picture.to, 40))}{grey}"
    ax.set_title(title, fontsize=9, loc="left")
    draw_colour_bar(ax, image, f"{picture.metric}: 0 as corrupted, 1 as clean", pad=0.02)
