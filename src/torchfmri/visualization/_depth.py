"""Draw statistics over the depth of a model: `plot_statistics`.

`Inspector.plot_statistics` and users call it through `plots`. Everything is read from statistics,
so no tensor needs to be kept. Layers that are dead or not finite are marked in words (`_layout`).
Sizes, colours and words may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchfmri._records import Inspection
from torchfmri._text import plural
from torchfmri.visualization._figure import (
    GREY,
    MEANING,
    axes_or_new,
    escape,
    ink,
    scale_values,
)
from torchfmri.visualization._layout import (
    arrange,
    draw_layers,
    layer_statistics,
    mark_states,
    quantiles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BANDS = (
    (0.01, 0.99, "98% of the values", "#cfe3f1"),
    (0.05, 0.95, "90%", "#93c1e0"),
    (0.25, 0.75, "50%", "#4a97cb"),
)


def plot_statistics(
    inspection: Inspection,
    what: str = "activations",
    *,
    layers: str | Sequence[str] = "*",
    ax: Axes | None = None,
) -> Axes:
    """Draw how values change over the depth of the model: the mean and where most lie.

    The input is on top. Layers with NaN, Inf or only one value are marked in words. Where there
    are too many layers to name, those of one kind (`layers.*.mlp`) stand together.

    Args:
        inspection: What to show.
        what: activations, gradients (dL/d output), or anything else that was watched.
        layers: A pattern, or several, for the layers to show.
        ax: Where to draw.

    Raises:
        LayerNotFoundError: No inspected layer matches.
        InspectionError: `what` was not captured of any of them.
    """
    found, absent = layer_statistics(inspection, what, layers)
    layout = arrange(list(found))
    statistics = [found[layer] for layer in layout.layers]
    ax = axes_or_new(ax, 8.5, layout.inches)
    gap = 0.72 if len(layout.groups) == 1 else 1.0
    for low, high, label, colour in _BANDS:
        left, right = quantiles(statistics, low), quantiles(statistics, high)
        look: dict[str, Any] = {"color": colour, "linewidth": 0, "label": label}
        ax.barh(layout.places, right - left, layout.heights * gap, left, **look)
    means = [each.mean for each in statistics]
    for start, end in layout.spans:
        single = len(layout.groups) == 1 or end - start == 1
        look = {"marker": "o" if single else "", "label": "mean" if start == 0 else None}
        look |= {"color": ink(ax), "linewidth": 0.9, "markersize": 3.5}
        ax.plot(means[start:end], layout.places[start:end], **look)
    outer = zip(quantiles(statistics, 0.01), quantiles(statistics, 0.99), strict=True)
    ax.use_sticky_edges = False
    scale_values(ax, [(float(low), float(high)) for low, high in outer])
    ax.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    draw_layers(ax, layout, inspection)
    mark_states(ax, layout, statistics, what)
    note = (
        f"\n({plural(len(absent), 'layer')} not captured: see inspection.missing)" if absent else ""
    )
    ax.set_xlabel(MEANING[what] + note)
    ax.set_title(escape(f"{what} over the depth of {inspection.model}"), fontsize=11, pad=22)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
    return ax
