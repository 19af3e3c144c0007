"""The map of a contrast: kinds of layers down, depth across, what survives outlined."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._text import layer_label, shorten, star
from torchfmri.visualization import axes_or_new, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torchfmri._contrast.record import Contrast

_MOST_ROWS = 64
"""Voxels or units of a layer that are drawn above each other; of more, the strongest of some."""
_ROW, _THINNEST, _THICKEST, _GAP = 0.028, 0.2, 0.85, 0.07
_FAINTEST = 0.12
_MAP = "PuOr_r"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_GREY = "#7f7f7f"


class _Band(NamedTuple):
    """Layers of one kind: (row, x) places in the arrays of the contrast, -1 for none."""

    label: str
    places: NDArray[np.int64]


def plot_map(contrast: Contrast, ax: Axes | None) -> Axes:
    """Draw a contrast; see `Contrast.plot_contrast`."""
    bands, depth = _bands(contrast)
    heights = [min(max(_ROW * len(band.places), _THINNEST), _THICKEST) for band in bands]
    wide = min(max(4.5, 0.22 * depth), 8.0)
    ax = axes_or_new(ax, wide + 3.2, sum(heights) + _GAP * len(bands) + 1.9)
    shown, label, top = _colours(contrast)
    size = _sizes(contrast)
    at, ticks = 0.0, []
    for band, height in zip(bands, heights, strict=True):
        _draw_band(ax, band, (at, at + height), (shown, size, contrast.survives), depth, top)
        ticks.append(at + height / 2)
        at += height + _GAP
    ax.set_xlim(-0.5, depth - 0.5)
    ax.set_ylim(at, -_GAP)
    labels = [escape(shorten(layer_label(band.label), 34)) for band in bands]
    ax.set_yticks(ticks, labels, fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=7.5)
    ax.set_xlabel("block", fontsize=8)
    ax.spines[:].set_visible(False)
    _draw_bar(ax, label, top)
    _write(ax, contrast, wide)
    return ax


def _bands(contrast: Contrast) -> tuple[list[_Band], int]:
    """The kinds of layers with their places, and how many blocks there are.

    What is outside of numbered blocks has its voxels beside each other instead.
    """
    columns = contrast.columns
    names = list(dict.fromkeys(columns.layer.tolist()))
    own: dict[str, list[int]] = {name: [] for name in names}
    for place, name in enumerate(columns.layer):
        own[name].append(place)
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(star(name), []).append(name)
    numbers = [_depth(name) for name in names]
    depth = 1 + max((number for number in numbers if number is not None), default=0)
    prefix = _common_prefix(list(kinds))
    bands = []
    for kind, members in kinds.items():
        label = kind.removeprefix(f"{prefix}*.").removeprefix(prefix)
        label = "block" if label == "*" else label
        if _depth(members[0]) is None:
            bands += [_Band(label, np.array([own[member]], np.int64)) for member in members]
            continue
        rows = max(len(own[member]) for member in members)
        places = np.full((rows, depth), -1, np.int64)
        for member in members:
            number = _depth(member)
            assert number is not None
            # Numbers inside a block (experts of a list) share its column: the last one is drawn.
            places[: len(own[member]), number] = own[member]
        bands.append(_Band(label, places))
    return bands, depth


def _depth(layer: str) -> int | None:
    found = _NUMBER.search(layer)
    return int(found[0]) if found else None


def _common_prefix(kinds: Sequence[str]) -> str:
    inner = [kind for kind in kinds if "*" in kind]
    return inner[0].partition("*")[0] if inner else ""


def _colours(contrast: Contrast) -> tuple[NDArray[np.float64], str, float]:
    """(v,) what the colours follow, what that is, and the value of the strongest colour."""
    values, label = contrast.g, "Hedges g"
    if contrast.test.endswith("F"):
        values, label = np.sqrt(contrast.t), "square root of F"
    elif np.isnan(values).all():
        values, label = contrast.effect, "difference of means"
    known = np.abs(values[np.isfinite(values)])
    top = float(np.quantile(known, 0.995)) if len(known) else 1.0
    return values, label, top or 1.0


def _sizes(contrast: Contrast) -> NDArray[np.float64]:
    """(v,) opacity: the size of the statistic against the smallest one that survives."""
    size = np.abs(contrast.t)
    if np.isnan(size).all():
        return np.ones(len(contrast))
    kept = size[contrast.survives]
    full = float(kept.min()) if len(kept) else float(np.nanmax(size))
    return np.clip(np.nan_to_num(size / (full or 1.0), nan=1.0), _FAINTEST, 1.0)


def _draw_band(
    ax: Axes,
    band: _Band,
    span: tuple[float, float],
    drawn: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    depth: int,
    top: float,
) -> None:
    import matplotlib as mpl
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    shown, size, survives = drawn
    there = band.places >= 0
    places = np.where(there, band.places, 0)
    values = np.where(there, shown[places], np.nan)
    alpha, kept = np.where(there, size[places], 0.0), there & survives[places]
    values, alpha, kept = _pool(values, alpha, kept)
    colours = mpl.colormaps[_MAP](Normalize(-top, top)(values).filled(0.5))
    # Faint cells are mixed with the background here, so that hatching is not seen through them.
    back = np.array(mpl.colors.to_rgb(ax.get_facecolor()))
    colours[..., :3] = alpha[..., None] * colours[..., :3] + (1 - alpha[..., None]) * back
    colours[..., 3] = np.isfinite(values)
    whole = (-0.5, depth - 0.5, span[1], span[0])
    if (there & ~np.isfinite(shown[places])).any():
        ax.add_patch(
            Rectangle(
                (-0.5, span[0]), depth, span[1] - span[0], facecolor="#e4e4e4",
                edgecolor="#bdbdbd", hatch="//////", linewidth=0, zorder=0,
            )
        )  # fmt: skip
    ax.imshow(colours, extent=whole, aspect="auto", interpolation="nearest", zorder=1)
    ax.add_patch(
        Rectangle(
            (-0.5, span[0]), depth, span[1] - span[0], fill=False, edgecolor="#cccccc",
            linewidth=0.4, zorder=2,
        )
    )  # fmt: skip
    _outline(ax, kept, span, depth)


def _pool(
    values: NDArray[np.float64], alpha: NDArray[np.float64], kept: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """At most so many rows: of neighbours the strongest; it is outlined if any of them survives."""
    every = -(-len(values) // _MOST_ROWS)
    if every <= 1:
        return values, alpha, kept
    parts = []
    for at in range(0, len(values), every):
        part = slice(at, at + every)
        size = np.nan_to_num(np.abs(values[part]), nan=-1.0)
        chosen = size.argmax(0), np.arange(values.shape[1])
        parts.append((values[part][chosen], alpha[part].max(0), kept[part].any(0)))
    first, second, third = zip(*parts, strict=True)
    return np.stack(first), np.stack(second), np.stack(third)


def _outline(ax: Axes, kept: NDArray[np.bool_], span: tuple[float, float], depth: int) -> None:
    """Draw a line around what survives: wherever a cell that does meets one that does not."""
    from matplotlib.collections import LineCollection

    if not kept.any():
        return
    rows, columns = kept.shape
    framed = np.pad(kept, 1)
    high, wide = (span[1] - span[0]) / rows, depth / columns
    across = np.argwhere(framed[1:, 1:-1] != framed[:-1, 1:-1])
    down = np.argwhere(framed[1:-1, 1:] != framed[1:-1, :-1])
    lines = [
        [(x * wide - 0.5, span[0] + y * high), ((x + 1) * wide - 0.5, span[0] + y * high)]
        for y, x in across
    ] + [
        [(x * wide - 0.5, span[0] + y * high), (x * wide - 0.5, span[0] + (y + 1) * high)]
        for y, x in down
    ]
    ax.add_collection(LineCollection(lines, colors="black", linewidths=0.7, zorder=3))


def _draw_bar(ax: Axes, label: str, top: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    low = 0.0 if label.startswith("square") else -top
    scale = ScalarMappable(Normalize(low, top), _MAP)
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.015, fraction=0.035, aspect=30, extend="both")
    bar.set_label(f"{label}\nfaint: small statistic; outlined: survives", fontsize=7.5)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)


def _write(ax: Axes, contrast: Contrast, wide: float) -> None:
    lines = wrap(contrast.summary.partition(": ")[2], int(17 * wide))
    pad = 6 + 11 * len(lines)
    ax.set_title(
        escape(f"{contrast.model}: {contrast.question}" if contrast.model else contrast.question),
        fontsize=11, loc="left", fontweight="bold", pad=pad,
    )  # fmt: skip
    ax.annotate(
        escape("\n".join(lines)), (0, 1), xycoords="axes fraction", xytext=(0, 5),
        textcoords="offset points", fontsize=8, color=_GREY, va="bottom", annotation_clip=False,
    )  # fmt: skip
