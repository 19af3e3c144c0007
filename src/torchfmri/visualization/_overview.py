"""One picture of a whole inspection: distributions by depth, and tokens by depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchfmri._inspection import Inspection
from torchfmri._rows import describe_state
from torchfmri.statistics import Statistics
from torchfmri.visualization._figure import MEANING, escape, new_figure
from torchfmri.visualization._layout import label_layer, layer_statistics, state_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_COLOURS = {"activations": "viridis", "gradients": "magma"}
_FILLS = {"activations": "#2a788e", "gradients": "#b63679"}
_OVERLAP = 1.9
_ONE_SIZE = 10


class Tokens(NamedTuple):
    """The texts of a batch.

    Attributes:
        sequences: For every text its tokens, all equally many; "" stands for padding.
        names: What to write above each.
    """

    sequences: list[list[str]]
    names: list[str]


def draw_overview(
    inspection: Inspection, title: str, loss: str, tokens: Tokens | None = None
) -> Figure:
    """Activations and gradients through the layers: how large per token, and how distributed.

    Args:
        inspection: With kept tensors of shape (b, s, o), where tokens are given.
        title: What was run.
        loss: What the gradients are of, in words.
        tokens: The batch; without it only distributions are drawn.
    """
    whats = [what for what in _COLOURS if any(what in each.what for each in inspection.values())]
    if tokens is None:
        figure = new_figure(6.0 * len(whats), 5.2)
        grid = [[axes] for axes in np.atleast_1d(figure.subplots(1, len(whats)))]
    else:
        figure = new_figure(16.0, 10.6)
        ratios = {"width_ratios": [2.6, 1]}
        grid = list(figure.subplots(len(whats), 2, gridspec_kw=ratios, squeeze=False))
    figure.suptitle(escape(title), fontsize=17, fontweight="bold")
    for axes, what in zip(grid, whats, strict=True):
        if tokens is not None:
            _draw_tokens(axes[0], inspection, what, tokens)
            axes[0].set_title(escape(_heading(what, loss)), fontsize=13, loc="left", pad=24)
        _draw_ridges(axes[-1], inspection, what, named=tokens is None)
    return figure


def _draw_tokens(ax: Axes, inspection: Inspection, what: str, tokens: Tokens) -> None:
    """Layers by tokens; the colour is the root mean square over the units of the layer."""
    found, _ = layer_statistics(inspection, what)
    rows = [_per_token(inspection[layer].tensors(what)) for layer in found]
    length = len(tokens.sequences[0])
    gap = 1
    image = np.full((len(rows), len(tokens.sequences) * (length + gap) - gap), np.nan)
    kept = np.array([[bool(token) for token in sequence] for sequence in tokens.sequences])
    for row, values in enumerate(rows):
        for index in range(len(tokens.sequences)):
            start = index * (length + gap)
            image[row, start : start + length] = np.where(kept[index], values[index], np.nan)
    from matplotlib.colors import LogNorm

    seen = image[np.isfinite(image) & (image > 0)]
    low, high = np.quantile(seen, [0.01, 0.995])
    drawn = ax.imshow(
        image, aspect="auto", cmap=_COLOURS[what], norm=LogNorm(low, high), interpolation="nearest"
    )
    labels, places = [], []
    for index, sequence in enumerate(tokens.sequences):
        start = index * (length + gap)
        places += [start + place for place, token in enumerate(sequence) if token]
        labels += [escape(token) for token in sequence if token]
        padded = sum(not token for token in sequence)
        if padded:
            _draw_padding(ax, start + length - padded, padded, len(rows))
        ax.text(start - 0.5, -0.75, escape(tokens.names[index]), fontsize=11)
    ax.set_xticks(places, labels, rotation=55, ha="right", rotation_mode="anchor", fontsize=10)
    names = [label_layer(layer, inspection) for layer in found]
    ax.set_yticks(range(len(names)), names, fontsize=9.5, family="monospace")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    label = f"root mean square of {'the output' if what == 'activations' else MEANING[what]}"
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))))
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 3, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    bar = ax.figure.colorbar(drawn, ax=ax, label=label, pad=0.01, aspect=28, ticks=ticks)
    bar.ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    bar.ax.set_yticks([], minor=True)


def _heading(what: str, loss: str) -> str:
    if what == "activations":
        return "activations, computed from top to bottom"
    return f"gradients, from bottom to top; loss = {loss}"


def _draw_padding(ax: Axes, start: int, count: int, rows: int) -> None:
    from matplotlib.patches import Rectangle

    patch = Rectangle((start - 0.5, -0.5), count, rows, facecolor="none", hatch="///")
    patch.set_edgecolor("#c8c8c8")
    patch.set_linewidth(0)
    ax.add_patch(patch)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2.0}
    place = (start + count / 2 - 0.5, rows / 2 - 0.5)
    ax.text(
        *place, "padding, not counted", rotation=90, ha="center", va="center", fontsize=9, bbox=box
    )


def _draw_ridges(ax: Axes, inspection: Inspection, what: str, *, named: bool) -> None:
    """One distribution per layer, the input on top, all on the same axis."""
    found, _ = layer_statistics(inspection, what)
    drawn = {layer: each for layer, each in found.items() if not describe_state(each)}
    scales = [each.std for each in drawn.values()]
    # Layers of very different size would be needles on one axis.
    relative = bool(scales) and max(scales) > _ONE_SIZE * min(scales)
    units = dict(zip(drawn, scales if relative else [1.0] * len(scales), strict=True))
    edges = _shared_edges([(each, units[layer]) for layer, each in drawn.items()])
    centres = (edges[:-1] + edges[1:]) / 2
    for index, (layer, statistics) in enumerate(found.items()):
        if layer not in drawn:
            ax.text(0, index, state_in_words(statistics, what), ha="center", fontsize=9)
            continue
        base = np.full(len(centres), index + 0.45)
        top = base - _density(statistics, edges * units[layer]) * _OVERLAP
        look: dict[str, Any] = {"zorder": index + 2, "clip_on": False}
        ax.fill_between(centres, base, top, color=_FILLS[what], alpha=0.8, linewidth=0, **look)
        ax.plot(centres, top, color="white", linewidth=1.1, **look)
    ax.set_ylim(len(found) - 0.5, -0.5)  # as in the picture of tokens, so that rows are level
    ax.set_xlim(float(edges[0]), float(edges[-1]))
    ax.locator_params(axis="x", nbins=5)
    names = [label_layer(layer, inspection) for layer in found] if named else []
    ax.set_yticks(range(len(names)), names, fontsize=9, family="monospace")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_title(f"distribution of {what}", fontsize=13, loc="left", pad=24)
    ax.set_xlabel(MEANING[what] + (" / its standard deviation in the layer" if relative else ""))


def _shared_edges(parts: Sequence[tuple[Statistics, float]]) -> Floats:
    """Edges of bins that hold nearly all values of all layers, each in its own unit."""
    ends = [(each.quantile(0.005) / unit, each.quantile(0.995) / unit) for each, unit in parts]
    low = min((low for low, _ in ends), default=-1.0)
    return np.linspace(low, max((high for _, high in ends), default=1.0), 122)


def _density(statistics: Statistics, edges: Floats) -> Floats:
    """How dense values lie between the edges, the densest place 1."""
    counts, _ = statistics.linear_histogram(len(edges) - 1, (float(edges[0]), float(edges[-1])))
    smooth = np.convolve(counts, [0.25, 0.5, 0.25], mode="same")
    top = float(smooth.max())
    return smooth / top if top else smooth


def _per_token(tensor: Any) -> Floats:
    """(b, s, o) -> (b, s): root mean square over the units."""
    assert isinstance(tensor, Tensor)
    result: Floats = tensor.detach().double().square().mean(-1).sqrt().cpu().numpy()
    return result
