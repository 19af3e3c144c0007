"""Draw the distribution of one layer's values: `plot_histogram`.

`Inspector.plot_histogram` and users call it through `plots`. Counts come from the statistics, so no
tensor needs to be kept. What lies beyond the axis, and a bar that is cut, is written out as a
number. Sizes and colours may change freely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchfmri._records import Inspection
from torchfmri._text import describe_bad, describe_state, layer_label, number_text, share_text
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics, calculate_statistics
from torchfmri.visualization._figure import (
    BLUE,
    GREY,
    MEANING,
    ORANGE,
    axes_or_new,
    behind_text,
    escape,
    write_middle,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

_OUTSIDE = 0.001
_DWARFED = 6


def plot_histogram(
    data: Inspection | Statistics | Tensor,
    layer: str | None = None,
    what: str | None = None,
    *,
    ax: Axes | None = None,
    bins: int = 64,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    **options: Any,
) -> Axes:
    """Draw the distribution of one layer's values, merged over its calls, or of any tensor.

    Counts come from the statistics, so no tensors need to be kept; within 3 % of a value they are
    spread evenly. Where a few values lie far out, the axis leaves them out and says how many.

    Args:
        data: An inspection, or a tensor or statistics to show as they are.
        layer: The layer of an inspection; else a title.
        what: activations by default, or the first thing watched.
        ax: Where to draw.
        bins: How many bars.
        limits: The values to show; all of them by default, unless few lie far out.
        log: Whether counts are shown on a logarithmic axis.
        **options: `element` and `call` of `Record.statistics`.

    Raises:
        LayerNotFoundError: The layer was not inspected.
        InspectionError: Nothing of it was captured; the reason is in the message.
    """
    if isinstance(data, Inspection):
        statistics, title, meaning = _of_layer(data, layer, what, options)
    else:
        statistics = data if isinstance(data, Statistics) else calculate_statistics(data)
        title, meaning = layer or "values", "value"
    ax = axes_or_new(ax, 6.4, 3.8)
    ax.set_title(escape(title), fontsize=11)
    ax.set_xlabel(meaning)
    ax.set_ylabel("number of values")
    ax.spines[["top", "right"]].set_visible(False)
    if statistics.finite:
        shown = limits or _limits(statistics)
        counts, edges = statistics.linear_histogram(bins, shown)
        ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=BLUE, linewidth=0)
        ax.axvline(statistics.mean, color=ORANGE, linewidth=1.5, linestyle="--")
        if log:
            ax.set_yscale("log")
        else:
            _cut_tallest(ax, counts, edges)
        ax.set_xlim(float(edges[0]), float(edges[-1]))
        ax.locator_params(axis="x", nbins=6)
        outside = statistics.finite - round(float(counts.sum()))
    else:
        outside = 0
        words = f"{describe_state(statistics)}: nothing to draw"
        write_middle(ax, words, color=GREY, fontsize=12)
        ax.set_xticks([])
        ax.set_yticks([])
    look: dict[str, Any] = {"va": "top", "fontsize": 9, "linespacing": 1.5}
    ax.text(1.02, 1.0, "\n".join(_summary(statistics, outside)), transform=ax.transAxes, **look)
    return ax


def _of_layer(
    inspection: Inspection, layer: str | None, what: str | None, options: dict[str, Any]
) -> tuple[Statistics, str, str]:
    """Return the statistics of a layer, the title and the label of their histogram."""
    if layer is None:
        raise InspectionError(
            f"plot_histogram of an inspection shows one layer; name one of {list(inspection)}."
        )
    statistics: Statistics = inspection.statistics(layer, what, **options)
    record = inspection[layer]
    what = what or ("activations" if "activations" in record.what else record.what[0])
    return statistics, f"{what} of '{layer_label(layer)}' ({record.kind})", MEANING[what]


def _summary(statistics: Statistics, outside: int) -> list[str]:
    """Return the numbers beside a histogram."""
    lines = [f"{statistics.count:,} values"]
    if statistics.finite:
        lines += [
            f"{name} {number_text(statistics[name])}" for name in ("mean", "std", "min", "max")
        ]
        lines[1] += " (dashed)"
        lines.append(f"zero {share_text(statistics.zero, statistics.count)}")
    if describe_bad(statistics):
        lines.append(describe_bad(statistics).replace(", ", "\n"))
    if describe_state(statistics):
        lines.append(describe_state(statistics))
    if outside:
        lines.append(f"{outside:,} beyond the axis")
    if statistics.positions and statistics.positions[0] < statistics.positions[1]:
        lines.append("{:,} of {:,} positions\n(no padding)".format(*statistics.positions))
    return lines


def _cut_tallest(ax: Axes, counts: Floats, edges: Floats) -> None:
    """End the axis below the top of a bar that dwarfs the others, and write its count."""
    second, tallest = (float(each) for each in np.sort(counts)[-2:]) if len(counts) > 1 else (0, 0)
    if not 0 < second * _DWARFED < tallest:
        return
    ax.set_ylim(0, second * 1.6)
    index = int(counts.argmax())
    middle = float(edges[index] + edges[index + 1]) / 2
    side, shift = ("left", 10) if index < len(counts) / 2 else ("right", -10)
    look: dict[str, Any] = {"ha": side, "va": "top", "fontsize": 9, "bbox": behind_text(ax)}
    look |= {"xytext": (shift, 0), "textcoords": "offset points"}
    words = f"cut: {tallest:,.0f} in this bar"
    ax.annotate(words, (middle, 0.97), xycoords=("data", "axes fraction"), **look)


def _limits(statistics: Statistics) -> tuple[float, float]:
    """Return all values, or nearly all where the others would squeeze them into a few bars."""
    low, high = float(statistics.min), float(statistics.max)
    inner = statistics.quantile(_OUTSIDE), statistics.quantile(1 - _OUTSIDE)
    far = 0 < inner[1] - inner[0] < (high - low) / 4
    return inner if far else (low, high)
