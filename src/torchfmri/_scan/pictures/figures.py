"""The methods of a `Scan` that draw a sequence: which rows, in which order, under which title.

`Scan` inherits from `PictureMethods`. Each method reads values through a `Reading` and hands arrays
to `visualization`, which knows nothing of scans; colours and layout are changed there. The
signatures are public. Choice of rows, titles and subtitles may change freely; they must stay true
of what is drawn, so a text that says "median" or "80%" stands beside the line that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_file
from torchfmri._scan.pictures.bands import in_order, layer_bands, voxel_bands, without_prefix
from torchfmri._scan.pictures.readouts import ReadoutMethods
from torchfmri._scan.record.blocks import depth_of, kinds_of, outline_of
from torchfmri._scan.record.delta_sc import log10, standardised
from torchfmri._scan.record.reading import (
    DELTA,
    FROM_LOSS,
    Reading,
    only_layer,
    quantile,
    span_text,
    voxel_name,
)
from torchfmri._scan.record.sequence import METRICS, STATISTICS, Tokens
from torchfmri._text import plural, shorten, star
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import (
    MOST_LINES,
    Band,
    Brain,
    Line,
    TokenTrack,
    axes_or_new,
    check_picture,
    draw_brain,
    draw_lines,
    escape,
    in_context,
    meaning,
    new_figure,
    save_figure,
    scale_wide,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORDERS = ("kind", "depth")
_PANEL_INCHES = 2.7
_NARROWEST_FIGURE = 9.5
_DOTS_PER_INCH = 160
_LONGEST = 300
Pattern = str | Sequence[str] | None


class PictureMethods(ReadoutMethods):
    """The methods of a `Scan` that draw."""

    def plot_brain(
        self, metric: str = "activation", *, sequence: int | None = None,
        layers: Pattern | None = None, normalise: str = "layer", by: str = "layer",
        order: str = "kind", ax: Axes | None = None,
    ) -> Axes:  # fmt: skip
        """Draw layers down and tokens across, with the text below and its surprisal above.

        Colours follow the value divided by the 99.5th percentile of its row: linear for
        activations, over two powers of ten for gradients and learning costs. What has no value is
        hatched.

        Args:
            metric: "activation", "gradient", "learning_cost" or "delta_sc".
            sequence: Which sequence; may be left out if there is only one.
            layers: A pattern, or several; "*" for all. By default those that give an overview: the
                numbered blocks, their parts that have parts (attention, MLP), and what is outside
                of blocks; the learning cost of a block is then that of everything inside it.
            normalise: "layer" for each row by itself, "global" for one scale.
            by: "layer", or "voxel" for a row per voxel.
            order: "kind" for layers of one kind together, "depth" for the order of the model.
            ax: Where to draw.

        Raises:
            LayerNotFoundError: No layer matches.
            InspectionError: The scan has no such metric.
        """
        reading = self._reading(sequence)
        brain = _brain(reading, metric, layers, normalise, by, order)
        return draw_brain(axes_or_new(ax, *brain.figure_inches), brain)

    def plot_layers(
        self, metric: str = "activation", *, sequence: int | None = None,
        layers: Pattern | None = None, ax: Axes | None = None,
    ) -> Axes:  # fmt: skip
        """Draw a metric over depth, a line per kind of layer: the median and 80% of the tokens.

        Of gradients and learning costs, of the tokens that the loss reaches in that layer.

        Args:
            metric: "activation", "gradient", "learning_cost" or "delta_sc".
            sequence: Which sequence; may be left out if there is only one.
            layers: A pattern, or several; those that give an overview by default.
            ax: Where to draw.
        """
        reading = self._reading(sequence)
        values = reading.whole(metric)
        columns = _rows(reading, layers)
        kept = reading.counted(metric, values)
        low, middle, high = (quantile(values, kept, q) for q in (0.1, 0.5, 0.9))
        lines = [
            Line(
                label=kind,
                depths=depths,
                middle=middle[members],
                low=low[members],
                high=high[members],
                is_outside=_outside(reading, members),
            )
            for kind, members, depths in _by_depth(reading, columns)
        ]
        ax = draw_lines(axes_or_new(ax, 9.0, 4.6), lines, value=meaning(metric))
        if metric != DELTA:
            scale_wide(ax, lines)
        _name_layers(ax, reading, columns)
        reached = " that the loss reaches" if metric in FROM_LOSS else ""
        count = _tokens(reading, kept[:, columns])
        said = f"median over {count}{reached}, 10th to 90th percentile shaded"
        ax.set_title(escape(f"{_model(reading)}: {_words(metric)} over depth\n{said}"), fontsize=10)
        return ax

    def plot_token(
        self, index: int, metric: str = "activation", *, sequence: int | None = None,
        layers: Pattern | None = None, ax: Axes | None = None,
    ) -> Axes:  # fmt: skip
        """Draw what each layer did at one token against all others: z of log10 values over tokens.

        Args:
            index: Which token.
            metric: "activation", "gradient", "learning_cost" or "delta_sc" (without log10).
            sequence: Which sequence; may be left out if there is only one.
            layers: A pattern, or several; those that give an overview by default.
            ax: Where to draw.
        """
        reading = self._reading(sequence)
        tokens = reading.sequence.tokens
        if not hasattr(index, "__index__") or not -len(tokens) <= index < len(tokens):
            raise InspectionError(
                f"There is no token {index!r}: this sequence has {plural(len(tokens), 'token')}, "
                f"counted from 0. Choose one of 0 to {len(tokens) - 1}."
            )
        index %= len(tokens)
        values = reading.whole(metric)
        scores = standardised(values if metric == DELTA else log10(values), axis=0)[index]
        columns = _rows(reading, layers)
        lines = [
            Line(kind, depths, scores[members], is_outside=_outside(reading, members))
            for kind, members, depths in _by_depth(reading, columns)
        ]
        of = "" if metric == DELTA else "log10 of "
        ax = draw_lines(
            axes_or_new(ax, 9.0, 4.6), lines, value=f"z of {of}{_words(metric)}\namong the tokens"
        )
        for height in (-2, 0, 2):
            ax.axhline(height, color="0.5", linewidth=0.8, linestyle="-" if not height else ":")
        _name_layers(ax, reading, columns)
        text = in_context(tokens.pieces, index)
        surprisal = float(tokens.surprisal[index])
        said = f"; surprisal {surprisal:.2f} nats" if np.isfinite(surprisal) else ""
        above = f"{_model(reading)}: {_words(metric)} at token {index}{said}"
        ax.set_title(escape(f"{above}\n{text}"), fontsize=10)
        return ax

    def plot_voxels(
        self, layer: str, metric: str = "activation", *, sequence: int | None = None,
        normalise: str = "layer", ax: Axes | None = None,
    ) -> Axes:  # fmt: skip
        """Draw the voxels of one layer down, tokens across.

        Args:
            layer: Its name.
            metric: "activation", "gradient", "learning_cost" or "delta_sc".
            sequence: Which sequence; may be left out if there is only one.
            normalise: "layer" for each voxel by itself, "global" for one scale.
            ax: Where to draw.
        """
        reading = self._reading(sequence)
        layer = only_layer(layer, reading.anatomy, reading.meta)
        span = reading.anatomy.voxels_of(layer)
        voxels = list(range(span.start, span.stop))
        values = reading.table(metric, "voxel")[:, span].T
        bands = [
            Band(_part(voxel_name(reading.anatomy, voxel).removeprefix(layer)), [row])
            for row, voxel in enumerate(voxels)
        ]
        brain = Brain(
            bands=bands,
            values=values,
            tokens=_track(reading),
            metric=metric,
            normalise=normalise,
            title=f"{_model(reading)}: {_words(metric)} of the voxels of {layer}",
            subtitle=_subtitle(reading, metric),
        )
        return draw_brain(axes_or_new(ax, *brain.figure_inches), brain)

    def draw(
        self,
        path: str | Path | None = None,
        *,
        sequence: int | None = None,
        title: str | None = None,
    ) -> Figure:
        """Draw activation, gradient and learning cost over the same tokens, as one figure.

        Args:
            path: Where to save it too; the ending says in which format.
            sequence: Which sequence; may be left out if there is only one.
            title: Above it; the name of the model by default.
        """
        if path is not None:
            check_picture("path", check_file("path", path))
        reading = self._reading(sequence)
        metrics = [metric for metric in METRICS if metric in reading.sequence.layers]
        if not metrics:
            raise InspectionError(
                "This scan has no values per layer, so there is nothing to draw. Scan again with "
                "per='position'."
            )
        brains = [
            _brain(reading, metric, None, "layer", "layer", "kind")._replace(
                title=f"{letter}   {_words(metric)}",
                subtitle=_meaning(metric, inside=True),
                most_inches=_PANEL_INCHES,
                beside=True,
                remark=_loss(reading) if len(metrics) > 1 else "",
            )
            for letter, metric in zip("abc", metrics, strict=False)
        ]
        wide, _ = brains[0].figure_inches
        high = sum(brain.inches[1] for brain in brains) + 0.4 * len(brains) + 2.2
        figure = new_figure(max(wide, _NARROWEST_FIGURE), high)
        panels = figure.subplots(len(brains), 1, squeeze=False)[:, 0]
        for number, (panel, brain) in enumerate(zip(panels, brains, strict=True)):
            draw_brain(panel, brain, text=number == len(brains) - 1, surprisal=number == 0)
        said = title or f"{_model(reading)}, token by token"
        figure.suptitle(escape(said), fontsize=13, fontweight="bold", x=0.01, ha="left")
        if path is not None:
            save_figure(figure, path, dpi=_DOTS_PER_INCH)
        return figure


# -- rows ----------------------------------------------------------------------------------------


def _brain(
    reading: Reading, metric: str, layers: Pattern, normalise: str, by: str, order: str
) -> Brain:
    if order not in ORDERS:
        raise InspectionError(f"order={order!r} is neither 'kind' nor 'depth'. Choose one.")
    columns = _rows(reading, layers)
    names = reading.anatomy.layers
    if by == "layer":
        table = reading.whole(metric) if layers is None else reading.table(metric, by)
        values = table[:, columns].T
        bands = layer_bands([names[column] for column in columns], order)
    else:
        table = reading.table(metric, by)
        owner = reading.anatomy.layer
        order_of = {column: place for place, column in enumerate(in_order(names, columns, order))}
        voxels = [voxel for voxel in range(len(owner)) if int(owner[voxel]) in order_of]
        voxels.sort(key=lambda voxel: (order_of[int(owner[voxel])], voxel))
        values = table[:, voxels].T
        bands = voxel_bands([names[int(owner[voxel])] for voxel in voxels])
    return Brain(
        bands=bands,
        values=values,
        tokens=_track(reading),
        metric=metric,
        normalise=normalise,
        title=f"{_model(reading)}: {_words(metric)} of each {by} at each token",
        subtitle=_subtitle(reading, metric, inside=by == "layer" and layers is None),
    )


def _rows(reading: Reading, layers: Pattern) -> list[int]:
    """Return the columns to show: those that match, or those that give an overview."""
    if layers is not None:
        return reading.columns(layers)
    columns = outline_of(reading.anatomy.layers)
    found = reading.sequence.statistics.get("gradients")
    if found is None:
        return columns
    # What no gradient reaches (a table of positions) is no part of what is done with the tokens.
    # One that arrived as nan is: it was counted.
    count = found[:, STATISTICS.index("count")]
    return [column for column in columns if count[column] > 0] or columns


# -- lines ---------------------------------------------------------------------------------------


def _by_depth(reading: Reading, columns: Sequence[int]) -> list[tuple[str, list[int], list[float]]]:
    """Return (kind, columns, places on the x axis) of each line; layers outside of blocks too."""
    names = reading.anatomy.layers
    chosen = [names[column] for column in columns]
    short = without_prefix(chosen)
    depths = [depth_of(layer) for layer in chosen]
    kinds = kinds_of(chosen)
    if len(kinds) > MOST_LINES:
        raise InspectionError(
            f"{len(kinds)} kinds of layers cannot be told apart as lines: choose at most "
            f"{MOST_LINES}, such as layers='*.mlp'."
        )
    known = [depth for depth in depths if depth is not None]
    if not known:
        return [(short[chosen[i]], [columns[i]], [float(i)]) for i in range(len(chosen))]
    first = next(row for row, depth in enumerate(depths) if depth is not None)
    places = [
        float(depth if depth is not None else row - first if row < first else 0.0)
        for row, depth in enumerate(depths)
    ]
    after = max(known) + 1
    for row in range(first, len(chosen)):
        if depths[row] is None:
            places[row], after = float(after), after + 1
    return [
        (
            star(short[chosen[rows[0]]]) if len(rows) > 1 else short[chosen[rows[0]]],
            [columns[row] for row in rows],
            [places[row] for row in rows],
        )
        for rows in kinds.values()
    ]


def _outside(reading: Reading, members: Sequence[int]) -> bool:
    """Return whether these are a layer outside of the numbered blocks."""
    return depth_of(reading.anatomy.layers[members[0]]) is None


def _name_layers(ax: Axes, reading: Reading, columns: Sequence[int]) -> None:
    """Name the x axis where there are no numbered blocks: it counts layers then."""
    names = [reading.anatomy.layers[column] for column in columns]
    if all(depth_of(name) is None for name in names):
        ax.set_xlabel("layer, in model order")


def _part(name: str) -> str:
    """Return the name of a voxel within its layer: "head 3", or "[0:64]" for units."""
    return name.strip("[]") if name[1:2].isalpha() else name


def _tokens(reading: Reading, kept: NDArray[np.bool_]) -> str:
    """Return how many tokens a summary is made of, in words; the number may differ by layer."""
    everything, some = plural(len(reading.sequence), "token"), span_text(kept.sum(0))
    return everything if some == f"{len(kept):,}" else f"{some} of {everything}"


# -- words ---------------------------------------------------------------------------------------


def _track(reading: Reading) -> TokenTrack:
    tokens: Tokens = reading.sequence.tokens
    return TokenTrack(tokens.pieces, tokens.surprisal, tokens.generated, tokens.special)


def _model(reading: Reading) -> str:
    return shorten(str(reading.meta.get("model") or "model"), _LONGEST)


def _words(metric: str) -> str:
    return metric if metric == DELTA else metric.replace("_", " ")


def _subtitle(reading: Reading, metric: str, *, inside: bool = False) -> str:
    """Return what a metric is, and which loss its gradients are of."""
    loss = "" if metric == "activation" else _loss(reading)
    return "\n".join(part for part in (_meaning(metric, inside=inside), loss) if part)


def _meaning(metric: str, *, inside: bool) -> str:
    return meaning(metric) + (
        ", all that are inside the layer" if inside and metric == "learning_cost" else ""
    )


def _loss(reading: Reading) -> str:
    """Return which loss the gradients are of, and which gradients they are."""
    loss, per = reading.meta.get("loss"), reading.meta.get("per")
    text = f"L: {loss}" + (f" (per={per!r})" if per else "") if loss else ""
    return shorten(text, _LONGEST)
