"""Draw the map of a contrast: kinds of layers down, blocks across, what survives outlined.

`Contrast.plot_contrast` calls `plot_map`; `ContrastBoard` shows the same layout in the viewer.
Colours, sizes and texts may change freely. A cell that stands for several voxels is outlined if any
of them survives, and the title says how many it stands for: a picture must not hide a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._text import layer_label, shorten, star
from torchfmri.visualization import axes_or_new, draw_colour_bar, escape, write_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

    from torchfmri._contrast.record import Contrast

_MOST_ROWS = 64
"""Voxels or units of a layer that are drawn above each other; of more, the strongest of some."""
_MOST_ACROSS, _FEWEST_ACROSS = 96, 24
"""Voxels on a line of a layer outside the blocks; a few do not fill it, many take several."""
_ROW, _THINNEST, _THICKEST, _GAP, _AXIS = 0.044, 0.2, 1.1, 0.08, 0.62
"""Inches: of a row, a band, the gap between bands, and the axis below the blocks."""
_FAINTEST = 0.12
_LEGEND = "outlined: survives; faint: small statistic; hatched: not tested"
_MAP, _UNSIGNED_MAP = "PuOr_r", "Oranges"
_GREY = "#6f6f6f"


class _Band(NamedTuple):
    """Layers that are drawn as one image: (row, x) places in the contrast's arrays, -1 for none."""

    label: str
    places: NDArray[np.int64]

    @property
    def inches(self) -> float:
        return min(max(_ROW * len(self.places), _THINNEST), _THICKEST)


class _Shades(NamedTuple):
    """The colour, opacity and outline of every column, (v,) each, and the scale of the colours."""

    values: NDArray[np.float64]
    sizes: NDArray[np.float64]
    survives: NDArray[np.bool_]
    scale: ScalarMappable


class _Cells(NamedTuple):
    """The cells of a band, (row, x): whether there is one, and what it shows."""

    there: NDArray[np.bool_]
    values: NDArray[np.float64]
    sizes: NDArray[np.float64]
    survives: NDArray[np.bool_]

    def rows(self, which: slice) -> _Cells:
        there, values, sizes, survives = self
        return _Cells(there[which], values[which], sizes[which], survives[which])


def plot_map(contrast: Contrast, ax: Axes | None) -> Axes:
    """Draw a contrast; see `Contrast.plot_contrast`."""
    inside, outside, depth = _bands(contrast)
    wide = min(max(5.5, 0.22 * depth), 8.0)
    high = sum(band.inches + _GAP for band in (*inside, *outside))
    ax = axes_or_new(ax, wide + 3.2, high + _AXIS * bool(outside) + 1.9)
    values, label, scale = _colours(contrast)
    shades = _Shades(values, opacities(contrast), contrast.survives, scale)
    middles, at = _draw_bands(ax, inside, shades, depth, 0.0)
    ax.spines["bottom"].set_position(("data", at))  # the numbers stand right below the blocks
    if outside:
        at += _AXIS if inside else 0.2
        parts = f"the {contrast.level}s of a layer side by side" * (contrast.level != "layer")
        said = ": ".join(each for each in ("outside the blocks" * bool(inside), parts) if each)
        ax.text(-0.5, at - 0.5 * _GAP, said, fontsize=7.5, color=_GREY, va="bottom")
        more, at = _draw_bands(ax, outside, shades, depth, at)
        middles += more
    names = [shorten(layer_label(band.label), 34) for band in (*inside, *outside)]
    ax.set_xlim(-0.5, depth - 0.5)
    ax.set_ylim(at, -_GAP)
    ax.set_yticks(middles, [escape(name) for name in names], fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=7.5, bottom=bool(inside), labelbottom=bool(inside))
    ax.set_xlabel("block" if inside else "", fontsize=8)
    ax.spines[:].set_visible(False)
    ends = "max" if contrast.is_f else "both"
    draw_colour_bar(ax, scale, label, pad=0.015, fraction=0.035, aspect=30, extend=ends)
    most = max((_pooled(band.places) for band in (*inside, *outside)), default=1)
    pooled = f"; a cell shows the strongest of up to {most} {contrast.level}s" * (most > 1)
    _write(ax, contrast, wide, pooled)
    return ax


# -- where everything stands ---------------------------------------------------------------------


def _bands(contrast: Contrast) -> tuple[list[_Band], list[_Band], int]:
    """Return the kinds of layers in numbered blocks, other layers, and the number of blocks."""
    own: dict[str, list[int]] = {}
    for place, name in enumerate(contrast.columns.layer.tolist()):
        own.setdefault(name, []).append(place)
    kinds: dict[str, dict[int, list[int]]] = {}
    outside = []
    for name, places in own.items():
        number = block_number(name)
        if number is None:
            outside.append(_Band(name, _lines(places)))
        else:  # layers that are numbered inside a block, such as experts, stand above each other
            kinds.setdefault(star(name), {}).setdefault(number, []).extend(places)
    depth = 1 + max((max(blocks) for blocks in kinds.values()), default=_FEWEST_ACROSS - 1)
    prefixes = {kind.partition("*")[0] for kind in kinds}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""  # encoder and decoder keep their names
    inside = []
    for kind, blocks in kinds.items():
        label = kind.removeprefix(f"{prefix}*.").removeprefix(prefix) if prefix else kind
        inside.append(_Band("block" if label == "*" else label, square(blocks, depth)))
    return inside, outside, depth


def square(places: Mapping[int, Sequence[int]], columns: int) -> NDArray[np.int64]:
    """Return the places of each column below each other, (row, column), -1 for none."""
    found = np.full((max(map(len, places.values())), columns), -1, np.int64)
    for column, own in places.items():
        found[: len(own), column] = own
    return found


def _lines(places: Sequence[int]) -> NDArray[np.int64]:
    """Return (row, x) the places from left to right, in lines of equal length."""
    lines = -(-len(places) // _MOST_ACROSS)
    across = max(-(-len(places) // lines), _FEWEST_ACROSS)
    found = np.full(lines * across, -1, np.int64)
    found[: len(places)] = places
    return found.reshape(lines, across)


def block_number(layer: str) -> int | None:
    """Return the number of the block that a layer is in; None outside blocks."""
    number = next((part for part in layer.split(".") if part.isdigit()), None)
    return None if number is None else int(number)


# -- what is shown -------------------------------------------------------------------------------


def _colours(contrast: Contrast) -> tuple[NDArray[np.float64], str, ScalarMappable]:
    """Return (v,) what the colours follow, what that is, and the scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    asked = shorten(contrast.question, 60)
    values, label = contrast.g, f"Hedges g of {asked}"
    if contrast.is_f:
        values, label = np.sqrt(contrast.f), f"square root of F of {asked}"
    elif np.isnan(values).all():
        values, label = contrast.effect, f"difference of means, {asked}"
    known = np.abs(values[np.isfinite(values)])
    top = float(np.quantile(known, 0.995)) if len(known) else 1.0
    top = top or 1.0
    if contrast.is_f:  # has no sign
        return values, label, ScalarMappable(Normalize(0.0, top), _UNSIGNED_MAP)
    return values, label, ScalarMappable(Normalize(-top, top), _MAP)


def opacities(contrast: Contrast) -> NDArray[np.float64]:
    """Return (v,) opacity: the size of the statistic against the smallest one that survives."""
    size = np.abs(contrast.statistic)
    if np.isnan(size).all():
        return np.ones(len(contrast))
    kept = size[contrast.survives]
    full = float(kept.min()) if len(kept) else float(np.nanmax(size))
    return np.clip(np.nan_to_num(size / (full or 1.0), nan=1.0), _FAINTEST, 1.0)


def _cells(places: NDArray[np.int64], shades: _Shades) -> _Cells:
    """Return the cells of a band; of too many rows the strongest of some neighbours."""
    there = places >= 0
    at = np.where(there, places, 0)
    values = np.where(there, shades.values[at], np.nan)
    whole = _Cells(there, values, shades.sizes[at], there & shades.survives[at])
    every = _pooled(places)
    if every == 1:
        return whole
    parts = []
    for first in range(0, len(places), every):
        own = whole.rows(slice(first, first + every))
        size = np.nan_to_num(np.abs(own.values), nan=-1.0)
        strongest = own.values[size.argmax(0), np.arange(size.shape[1])]
        # A cell is outlined if any of those that it stands for survives.
        parts.append((own.there.any(0), strongest, own.sizes.max(0), own.survives.any(0)))
    return _Cells(*map(np.stack, zip(*parts, strict=True)))


def _pooled(places: NDArray[np.int64]) -> int:
    """Return how many rows of a band are drawn as one."""
    return max(-(-len(places) // _MOST_ROWS), 1)


# -- drawing -------------------------------------------------------------------------------------


def _draw_bands(
    ax: Axes, bands: Sequence[_Band], shades: _Shades, depth: int, at: float
) -> tuple[list[float], float]:
    """Draw bands below each other from `at` on; return their middles, and where they end."""
    middles = []
    for band in bands:
        _draw_cells(ax, _cells(band.places, shades), (at, at + band.inches), depth, shades.scale)
        middles.append(at + band.inches / 2)
        at += band.inches + _GAP
    return middles, at


def _draw_cells(
    ax: Axes, cells: _Cells, span: tuple[float, float], depth: int, scale: ScalarMappable
) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    colours = scale.to_rgba(np.ma.masked_invalid(cells.values))
    # Faint cells are mixed with the background here, so that hatching is not seen through them.
    back = np.array(to_rgb(ax.get_facecolor()))
    strength = np.where(cells.there, cells.sizes, 0.0)[..., None]
    colours[..., :3] = strength * colours[..., :3] + (1 - strength) * back
    untested = cells.there & ~np.isfinite(cells.values)
    colours[..., 3] = ~untested
    wide = depth / cells.there.shape[1]
    used = wide * (1 + int(np.flatnonzero(cells.there.any(0)).max(initial=0)))
    frame = (-0.5, span[0]), used, span[1] - span[0]
    if untested.any():
        hatch = Rectangle(
            *frame, facecolor="#e4e4e4", edgecolor="#bdbdbd", hatch="//////", linewidth=0, zorder=0
        )
        ax.add_patch(hatch)
    extent = (-0.5, depth - 0.5, span[1], span[0])
    ax.imshow(colours, extent=extent, aspect="auto", interpolation="nearest", zorder=1)
    ax.add_patch(Rectangle(*frame, fill=False, edgecolor="#cccccc", linewidth=0.4, zorder=2))
    _outline(ax, cells.survives, span, wide)


def _outline(ax: Axes, kept: NDArray[np.bool_], span: tuple[float, float], wide: float) -> None:
    """Draw a line around what survives: wherever a cell that does meets one that does not."""
    from matplotlib.collections import LineCollection

    if not kept.any():
        return
    framed = np.pad(kept, 1)
    high = (span[1] - span[0]) / len(kept)
    across = np.argwhere(framed[1:, 1:-1] != framed[:-1, 1:-1])
    down = np.argwhere(framed[1:-1, 1:] != framed[1:-1, :-1])
    corner, cell = np.array([span[0], -0.5]), np.array([high, wide])  # y before x
    ends = [np.stack([at, at + step], 1) for at, step in ((across, (0, 1)), (down, (1, 0)))]
    lines = (corner + cell * np.concatenate(ends))[..., ::-1]
    thick = min(0.9, 72 * high / 4)  # in points: a line must leave its cell to be seen
    drawn = LineCollection(lines, colors="black", linewidths=thick, zorder=3, clip_on=False)
    ax.add_collection(drawn)


def _write(ax: Axes, contrast: Contrast, wide: float, pooled: str) -> None:
    lines = wrap(contrast.summary.partition(": ")[2], int(17 * wide))
    lines += wrap(f"{_LEGEND}{pooled}", int(17 * wide))
    pad = 6 + 11 * len(lines)
    title = f"{contrast.model}: {contrast.question}" if contrast.model else contrast.question
    ax.set_title(escape(title), fontsize=11, loc="left", fontweight="bold", pad=pad)
    write_above(ax, "\n".join(lines), 5, fontsize=8, color=_GREY, va="bottom")
