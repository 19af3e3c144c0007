"""Draw two inspections side by side: `plot_compare`.

`Inspector.plot_compare` and users call it through `plots`. The layout of layers is that of
`_layout`. Where two layers cannot be compared, words stand in the place of a number ("shapes
differ"): a gap would be read as "no difference". Sizes and colours may change freely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchfmri._records import Inspection, Record, Value
from torchfmri._text import few, layer_label
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics
from torchfmri.visualization._figure import (
    BLUE,
    GREY,
    MEANING,
    ORANGE,
    axes_or_new,
    behind_text,
    escape,
    ink,
    scale_values,
    split_off,
    write_beside,
)
from torchfmri.visualization._layout import (
    LayerLayout,
    arrange,
    draw_layers,
    layer_statistics,
    quantiles,
    state_in_words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOT_KEPT = "tensors not kept"


def plot_compare(
    a: Inspection,
    b: Inspection,
    what: str = "activations",
    *,
    names: tuple[str, str] = ("a", "b"),
    ax: Axes | None = None,
) -> Axes:
    """Draw two inspections side by side: per layer the mean, 50% and 90% of the values.

    Where both kept their tensors, a second panel (the next axes of the figure) shows how far they
    are apart: |a - b| / |a| over the whole tensor (L2). Layers are matched by name.

    Args:
        a: The reference.
        b: The one to compare.
        what: What to compare.
        names: What to call the two in the legend.
        ax: Where to draw.

    Raises:
        InspectionError: `what` was not captured, or the two have no layer in common.
    """
    of_a, of_b = layer_statistics(a, what)[0], layer_statistics(b, what)[0]
    shared = [layer for layer in of_a if layer in of_b]
    if not shared:
        examples = [repr(next(iter(found))) for found in (of_a, of_b)]
        raise InspectionError(
            f"No layer is in both: {examples[0]} against {examples[1]}. Watch the same layers in "
            "both runs."
        )
    layout = arrange(shared)
    apart = [_relative_difference(a, b, layer, what, names) for layer in layout.layers]
    known = any(value != _NOT_KEPT for value in apart)
    ax = axes_or_new(ax, 10.0 if known else 8.5, layout.inches + 0.2)
    both = [[found[layer] for layer in layout.layers] for found in (of_a, of_b)]
    pair = _Pair(layout, both, names)
    singles = [span for span in layout.spans if len(layout.groups) == 1 or span[1] - span[0] == 1]
    for span in layout.spans:
        if span in singles:
            # An underscore keeps an entry out of the legend: one per inspection is enough.
            shown = names if span == singles[0] else ("_", "_")
            pair.draw_intervals(ax, span, shown)
        else:
            pair.draw_bands(ax, span)
    if not singles:
        for name, colour, look in zip(names, (BLUE, ORANGE), ("-", "--"), strict=True):
            ax.plot([], [], look, color=colour, label=escape(name))
    ends = [
        (float(low), float(high))
        for each in both
        for low, high in zip(quantiles(each, 0.05), quantiles(each, 0.95), strict=True)
    ]
    scale_values(ax, ends)
    ax.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    draw_layers(ax, layout, a)
    ax.set_xlabel(f"{MEANING[what]}: mean, 50% and 90% of the values")
    ax.set_title(escape(_title(what, names, (of_a, of_b), shared)), fontsize=11, pad=22)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=9)
    if known:
        pair.draw_apart(split_off(ax, 0.28, "right"), apart)
    pair.mark_differences(ax, what)
    return ax


class _Pair(NamedTuple):
    """Two inspections as they are drawn.

    Attributes:
        layout: Where the layers are.
        both: The statistics of each, in the order of the layout.
        names: What they are called.
    """

    layout: LayerLayout
    both: Sequence[Sequence[Statistics]]
    names: tuple[str, str]

    def draw_bands(self, ax: Axes, span: tuple[int, int]) -> None:
        """Draw many layers of one kind: the first inspection as a band, the second as outlines."""
        start, end = span
        places = self.layout.places[start:end]
        for low, high, colour, dash in ((0.05, 0.95, "#cfe3f1", ":"), (0.25, 0.75, "#93c1e0", "-")):
            left, right = (quantiles(self.both[0][start:end], q) for q in (low, high))
            ax.fill_betweenx(places, left, right, color=colour, linewidth=0)
            for q in (low, high):
                edge = quantiles(self.both[1][start:end], q)
                ax.plot(edge, places, color=ORANGE, linewidth=0.9, linestyle=dash)
        looks = (("-", BLUE, 1.8), ("--", ORANGE, 1.0))
        for of_one, (dash, colour, width) in zip(self.both, looks, strict=True):
            means = [each.mean for each in of_one[start:end]]
            ax.plot(means, places, dash, color=colour, linewidth=width)

    def draw_intervals(self, ax: Axes, span: tuple[int, int], shown: Sequence[str]) -> None:
        """Draw one interval per layer: thin for 90%, thick for 50%, a mark at the mean."""
        start, end = span
        looks = ((BLUE, "o", -0.2), (ORANGE, "s", 0.2))
        for all_of_one, name, (colour, marker, shift) in zip(self.both, shown, looks, strict=True):
            statistics = all_of_one[start:end]
            places = self.layout.places[start:end] + shift * self.layout.heights[start:end]
            for low, high, width in ((0.05, 0.95, 1.5), (0.25, 0.75, 4.5)):
                ends = quantiles(statistics, low), quantiles(statistics, high)
                ax.hlines(places, *ends, color=colour, linewidth=width, alpha=0.65)
            means = [each.mean for each in statistics]
            ax.plot(means, places, marker, color=colour, markersize=4.5, label=escape(name))

    def draw_apart(self, panel: Axes, apart: Sequence[float | str]) -> None:
        """Draw how far the two are apart on a logarithmic axis; in words if it is not a number."""
        shown = [math.nan if isinstance(value, str) else value for value in apart]
        panel.plot(shown, self.layout.places, "D", color=ink(panel), markersize=3)
        finite = [value for value in shown if not math.isnan(value)]
        if finite:
            panel.set_xscale("log")
            low, high = math.log10(min(finite)), math.log10(max(finite))
            panel.set_xlim(10.0 ** (low - 0.5), 10.0 ** (high + 0.5))
        else:
            panel.set_xticks([])
        words = [value if isinstance(value, str) else "" for value in apart]
        for text, first, last in self.layout.runs(words):
            middle = float(self.layout.places[first] + self.layout.places[last]) / 2
            write_beside(panel, text, 0.5, middle, ha="center", color=GREY)
        panel.tick_params(axis="y", left=False, labelleft=False)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", color="0.5", alpha=0.25, linewidth=0.6)
        panel.set_xlabel(escape("relative difference\n|{0} − {1}| / |{0}|".format(*self.names)))

    def mark_differences(self, ax: Axes, what: str) -> None:
        """Write words at layers that are unusual in one of the two."""
        for index, pair in enumerate(zip(*self.both, strict=True)):
            words = [
                f"{name}: {state}"
                for name, each in zip(self.names, pair, strict=True)
                if (state := state_in_words(each, what))
            ]
            if words:
                look = {"ha": "right", "color": ORANGE, "fontweight": "bold"}
                place = self.layout.places[index]
                write_beside(ax, "; ".join(words), 0.99, place, bbox=behind_text(ax), **look)


def _relative_difference(
    a: Inspection, b: Inspection, layer: str, what: str, names: tuple[str, str]
) -> float | str:
    """Return |a - b| / |a| over the calls of a layer; words if it is not a positive number."""
    pairs = _pairs(a[layer], b[layer], what)
    if not pairs:
        return "called differently"
    gap, size = 0.0, 0.0
    for value, other in pairs:
        if value is None or other is None:
            return "in one only"
        if value.shape != other.shape:
            return "shapes differ"
        if not (value.has_tensor and other.has_tensor):
            return _NOT_KEPT
        wide = torch.complex128 if value.tensor.is_complex() else torch.float64
        first, second = (each.tensor.detach().to("cpu", wide) for each in (value, other))
        same = (first == second) | (first.isnan() & second.isnan())
        gap += float(torch.where(same, 0.0, first - second).abs().square().sum())
        size += float(torch.where(first.isfinite(), first, 0.0).abs().square().sum())
    if gap == 0:
        return "equal"
    if not math.isfinite(gap):
        return "NaN or Inf in one only"
    return math.sqrt(gap / size) if size else f"{names[0]} is all zero"


def _pairs(one: Record, two: Record, what: str) -> list[tuple[Value | None, Value | None]]:
    """Return what to compare of a layer: its parameters by name, its calls in order."""
    if "parameter" in what:
        ours, theirs = one.parameter_values(what), two.parameter_values(what)
        return [(value, theirs.get(name)) for name, value in ours.items()]
    if len(one.calls) != len(two.calls):
        return []
    calls = zip(one.calls, two.calls, strict=True)
    return [(ours.value(what), theirs.value(what)) for ours, theirs in calls]


def _title(
    what: str,
    names: tuple[str, str],
    found: tuple[dict[str, Statistics], dict[str, Statistics]],
    shared: Sequence[str],
) -> str:
    """Return what is compared, and which layers are in one of the two only."""
    lines = [f"{what} of {names[0]} and {names[1]}"]
    for name, layers in zip(names, found, strict=True):
        alone = [layer_label(layer) for layer in layers if layer not in set(shared)]
        if alone:
            lines.append(f"only in {name}: {few(alone)}")
    return "\n".join(lines)
