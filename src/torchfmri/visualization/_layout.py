"""Lay out layers down the y axis: where each one is drawn, and what is written beside it.

`_compare` and `_depth` share this, so that both pictures of a model line up. When there are too
many layers, they are grouped by kind; that limit, sizes and colours may be changed freely. What
must be kept: `places`, `heights` and whatever a caller draws are parallel to `layout.layers`, which
is in another order than the layers given to `arrange` once they are grouped. States are in the
words of tables; only an activation that is all zero is called dead here, because a picture has room
to say what that means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfmri._arguments import require
from torchfmri._model import match_all
from torchfmri._records import Inspection, check_what
from torchfmri._text import describe_bad, describe_state, layer_label, share_text, shorten, star
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics
from torchfmri.visualization._figure import ORANGE, escape, write_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

_MOST_SINGLE_LAYERS = 72
_LONGEST_LABEL = 44
_TALLEST_GROUP = 5.0


class LayerLayout(NamedTuple):
    """The places of layers on the y axis.

    Attributes:
        layers: In the order in which they are drawn.
        places: The middle of each on the y axis.
        heights: How high each is.
        labels: What to write on the axis, and where.
        groups: Where each group of layers begins in `layers`; one group if they stand alone.
    """

    layers: list[str]
    places: Floats
    heights: Floats
    labels: list[tuple[float, str]]
    groups: list[int]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The begin and the end of each group in `layers`."""
        return list(zip(self.groups, [*self.groups[1:], len(self.layers)], strict=True))

    def runs(self, words: Sequence[str]) -> Iterator[tuple[str, int, int]]:
        """Yield each run of neighbouring layers that have the same words.

        Args:
            words: One text for each of `layers`, in that order; runs of "" are skipped.

        Yields:
            The text, and the indices of the first and the last layer.
        """
        start = 0
        for index in range(1, len(words) + 1):
            if index < len(words) and words[index] == words[start] and index not in self.groups:
                continue
            if words[start]:
                many = f" ({index - start} layers)" if index - start > 1 else ""
                yield words[start] + many, start, index - 1
            start = index

    @property
    def end(self) -> float:
        """The lower end of the axis."""
        return float(self.places[-1] + self.heights[-1] / 2)

    @property
    def inches(self) -> float:
        """A height for the figure that gives every label room."""
        return min(max(0.24 * self.end + 1.5, 3.2), 15.0)


def arrange(layers: Sequence[str]) -> LayerLayout:
    """Return where layers are drawn: in the given order, or by kind if they are too many.

    `layers.0.mlp`, `layers.1.mlp`, ... make one group, named `layers.*.mlp`.
    """
    groups: dict[str, list[str]] = {}
    for layer in layers:
        groups.setdefault(star(layer), []).append(layer)
    if len(layers) <= _MOST_SINGLE_LAYERS or len(groups) > len(layers) / 3:
        step = -(-len(layers) // _MOST_SINGLE_LAYERS)
        places: Floats = np.arange(len(layers), dtype=np.float64) + 0.5
        labels = [(index + 0.5, layers[index]) for index in range(0, len(layers), step)]
        return LayerLayout(list(layers), places, np.ones(len(layers)), labels, [0])
    order: list[str] = []
    middles: list[float] = []
    sizes: list[float] = []
    labels, starts, top = [], [], 0.0
    for name, members in groups.items():
        whole = min(max(len(members) / 8, 1.0 if len(members) == 1 else 2.5), _TALLEST_GROUP)
        each = whole / len(members)
        starts.append(len(order))
        order += members
        middles += [top + each * (index + 0.5) for index in range(len(members))]
        sizes += [each] * len(members)
        labels.append((top + whole / 2, name if len(members) > 1 else members[0]))
        top += whole + 0.35
    return LayerLayout(order, np.array(middles), np.array(sizes), labels, starts)


def draw_layers(ax: Axes, layout: LayerLayout, inspection: Inspection) -> None:
    """Write the names of the layers, the input on top; with types if names are numbers."""
    ticks = [place for place, _ in layout.labels]
    names = [label_layer(name, inspection) for _, name in layout.labels]
    ax.set_yticks(ticks, names, fontsize=8, family="monospace")
    ax.set_ylim(layout.end + 0.1, -0.1)
    grouped = len(layout.groups) > 1
    ax.set_ylabel("layers of a kind together, the first on top" if grouped else "layer")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    starts = [layout.places[first] - layout.heights[first] / 2 for first in layout.groups[1:]]
    for start in starts:
        ax.axhline(start - 0.175, color="0.5", alpha=0.35, linewidth=0.6, zorder=0)


def label_layer(name: str, inspection: Inspection) -> str:
    """Return a layer's name to write beside it, with its type where it is only a number."""
    text = shorten(layer_label(name), _LONGEST_LABEL)
    numbered = name in inspection and name.rpartition(".")[2].isdigit()
    return escape(f"{text} {inspection[name].kind}" if numbered else text)


def mark_states(ax: Axes, layout: LayerLayout, statistics: Sequence[Statistics], what: str) -> None:
    """Write in the margin what is unusual about a layer; neighbours alike share one note.

    Args:
        ax: Where to write.
        layout: Where the layers are.
        statistics: Of each of `layout.layers`, in that order.
        what: What they are statistics of, such as "activations".
    """
    for text, first, last in layout.runs([state_in_words(each, what) for each in statistics]):
        top = float(layout.places[first] - layout.heights[first] / 2)
        end = float(layout.places[last] + layout.heights[last] / 2)
        ax.axhspan(top, end, color=ORANGE, alpha=0.12, linewidth=0, zorder=0)
        write_beside(ax, text, 1.01, (top + end) / 2, color=ORANGE, fontweight="bold")


def state_in_words(statistics: Statistics, what: str) -> str:
    """Return what is unusual about a layer; "" if nothing is."""
    state = describe_state(statistics)
    bad = describe_bad(statistics)
    if bad and not state:
        return f"{bad} ({share_text(statistics.nan + statistics.inf, statistics.count)})"
    return "dead: all zero" if state == "all zero" and what == "activations" else state


def layer_statistics(
    inspection: Inspection, what: str, layers: str | Sequence[str] = "*"
) -> tuple[dict[str, Statistics], list[str]]:
    """Return the statistics of the layers that match, and the layers without any.

    The order is that of execution: a block comes after what it is made of.

    Raises:
        LayerNotFoundError: No inspected layer matches.
        InspectionError: `what` was not captured of any of them.
    """
    check_what(what)
    meaning = "give an Inspection: inspector.run_inspection(data)"
    require(isinstance(inspection, Inspection), "inspection", inspection, meaning)
    names = list(inspection)
    chosen = match_all(layers, names, "list(inspection)")
    rows = [row for row in inspection.rows(what) if row.layer in chosen]
    rows.sort(key=lambda row: _first_finished(inspection, row.layer))
    found = {row.layer: row.statistics for row in rows if row.statistics is not None}
    if found:
        return found, [row.layer for row in rows if row.statistics is None]
    if not rows:
        raise InspectionError(
            f"{what!r} was not watched. Write inspector.watch('*', what={what!r}) before the run."
        )
    reason = next((inspection.missing[r.layer] for r in rows if r.layer in inspection.missing), "")
    raise InspectionError(f"No {what} were captured{': ' * bool(reason)}{reason}.")


def _first_finished(inspection: Inspection, layer: str) -> int:
    """Return when the layer's first call finished; -1 for a layer that was not called."""
    calls = inspection[layer].calls
    return calls[0].order if calls else -1


def quantiles(statistics: Sequence[Statistics], q: float) -> Floats:
    """Return one quantile of every layer; nan where no value is finite."""
    return np.array([each.quantile(q) for each in statistics])
