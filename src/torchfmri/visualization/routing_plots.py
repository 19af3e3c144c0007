"""Draw routing: prototypes on a plane, activation over training, what units are for.

`torchfmri routing` and users call these functions, which are public under `torchfmri.routing`. They
take histories, plain data, and anything with the fields of `Mapped`: this room must not import
`routing`, which stands above it. Colours and sizes may change freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torchfmri._arguments import require
from torchfmri._records import Floats, History
from torchfmri.exceptions import InspectionError
from torchfmri.visualization._figure import (
    GREEN,
    GREY,
    LINE_COLOURS,
    ORANGE,
    axes_or_new,
    draw_cells,
    draw_colour_bar,
    draw_grid,
    draw_legend,
    draw_ring,
    panels,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (*LINE_COLOURS, "#9467bd", "#8c564b", "#6b8e23", "#b22222", "#5f7a8a")
_MARKS = "os^Dv<>Pdph*"
_STATES = {"good": (GREEN, "o"), "bad": (ORANGE, "X"), "inactive": ("#b8b8b8", ".")}


class Mapped(Protocol):
    """The prototypes of one layer on a plane; see `torchfmri.routing.map_prototypes`."""

    @property
    def layer(self) -> str:
        """The name of the layer."""

    @property
    def points(self) -> Sequence[Sequence[float]]:
        """The place of each unit on the plane, (o, 2)."""

    @property
    def states(self) -> Sequence[str]:
        """One of good, bad and inactive per unit."""

    @property
    def variance(self) -> float:
        """The share of the prototypes' variance that the plane shows."""


def plot_prototypes(maps: Sequence[Mapped], title: str = "") -> Figure:
    """Draw every layer's prototypes on a plane: good, bad or inactive.

    Args:
        maps: One per layer.
        title: Above them all.
    """
    if not maps:
        raise InspectionError(
            "There are no prototypes to draw. Give what map_prototypes(model, ids, labels) returns."
        )
    figure, grid = panels(len(maps), 4, (2.5, 2.35))
    for ax, each in zip(grid, maps, strict=True):
        points, states = np.asarray(each.points, float), np.asarray(each.states)
        counts = []
        for state in ("inactive", "bad", "good"):
            colour, mark = _STATES[state]
            chosen = points[states == state]
            counts.append(f"{len(chosen)} {state}")
            ax.scatter(*chosen.T, s=14, c=colour, marker=mark, linewidths=0, alpha=0.85)
        ax.set_title(each.layer, fontsize=9, loc="left", pad=14)
        text = f"{', '.join(reversed(counts))}"
        ax.text(0, 1.02, text, transform=ax.transAxes, fontsize=7, color=GREY, va="bottom")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_xlabel(f"{each.variance:.0%} of the variance", fontsize=7, color=GREY)
        ax.spines[:].set_color("#d0d0d0")
    for state, (colour, mark) in _STATES.items():
        grid[0].scatter([], [], s=30, c=colour, marker=mark, label=state)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def plot_activation(
    histories: Mapping[str, Sequence[History]], what: str = "activation_rate"
) -> Figure:
    """Draw the share of active units over training: a panel per name, a band over seeds.

    Args:
        histories: Name -> the histories of its runs, with series "blocks.0.query" and so on.
        what: "activation_rate" or "selectivity".
    """
    meaning = "give {name: [history, ...]} with at least one name"
    require(isinstance(histories, Mapping) and bool(histories), "histories", histories, meaning)
    figure, grid = panels(len(histories), 3, (3.2, 2.1), sharex=True, sharey=True)
    for ax, (name, runs) in zip(grid, histories.items(), strict=True):
        _draw_blocks(ax, runs, what)
        ax.set_title(name, fontsize=9, loc="left")
    for ax in grid[-3:]:  # the lowest of each column
        ax.set_xlabel("step", fontsize=9)
        ax.tick_params(labelbottom=True)
    for ax in grid[::3]:
        ax.set_ylabel(what.replace("_", " "), fontsize=9)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=8, frameon=False, fontsize=9)
    return figure


def _draw_blocks(ax: Axes, runs: Sequence[History], what: str) -> None:
    steps = runs[0].steps
    for block, curves in _by_block(runs, what).items():
        colour = _COLOURS[block % len(_COLOURS)]
        ax.plot(steps, curves.mean(0), color=colour, linewidth=1.3, label=f"block {block}")
        if len(curves) > 1:
            ax.fill_between(
                steps, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0
            )
    ax.set_ylim(bottom=0)
    draw_grid(ax)
    ax.tick_params(labelsize=8)


def _by_block(runs: Sequence[History], what: str) -> dict[int, Floats]:
    """Return block -> (run, step): the mean over its layers."""
    found: dict[int, list[Floats]] = {}
    for history in runs:
        names, values = history.matrix(what, "mean")
        blocks = np.array([_block_of(name) for name in names])
        for block in dict.fromkeys(blocks.tolist()):
            found.setdefault(block, []).append(values[blocks == block].mean(0))
    shortest = min(len(curve) for curves in found.values() for curve in curves)
    return {
        block: np.stack([each[:shortest] for each in curves]) for block, curves in found.items()
    }


def _block_of(layer: str) -> int:
    """Return the first number in a layer's name."""
    return next((int(part) for part in layer.split(".") if part.isdigit()), 0)


def plot_selectivity(
    rates: Mapping[str, Any], tasks: Sequence[str], *, ax: Axes | None = None
) -> Axes:
    """Draw how often every unit is on in every task, sorted by the task it prefers.

    Args:
        rates: Layer -> (task, o), the share of a task's tokens that reach each unit.
        tasks: Their names.
        ax: Where to draw.
    """
    if not rates:
        raise InspectionError(
            "There are no rates to draw. Give the rates of a UnitRates that has run."
        )
    ax = axes_or_new(ax, 9.0, 0.17 * len(rates) * len(tasks) + 1.2)
    lines = []
    for each in rates.values():
        values = np.asarray(each, float)
        order = np.lexsort((-values.max(0), values.argmax(0)))
        lines.append(values[:, order])
    widest = max(line.shape[1] for line in lines)
    image = np.full((len(lines) * len(tasks), widest), np.nan)
    for number, line in enumerate(lines):
        image[number * len(tasks) : (number + 1) * len(tasks), : line.shape[1]] = line
    drawn = draw_cells(ax, image, "magma", vmin=0)
    for number in range(1, len(lines)):
        ax.axhline(number * len(tasks) - 0.5, color="white", linewidth=1.5)
    places = [number * len(tasks) + (len(tasks) - 1) / 2 for number in range(len(lines))]
    ax.set_yticks(places, list(rates), fontsize=8)
    ax.set_xlabel(f"units, by the task they prefer (rows: {', '.join(tasks)})", fontsize=9)
    draw_colour_bar(ax, drawn, "share of tokens", pad=0.01)
    return ax


def plot_tradeoff(
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    labels: tuple[str, str] = ("active units", "accuracy, longest"),
    ax: Axes | None = None,
) -> Axes:
    """Draw two numbers of every run against each other, with the mean as a ring.

    Args:
        points: Variant -> (x, y) of each seed.
        labels: The labels of the two axes.
        ax: Where to draw.
    """
    meaning = "give {name: [(x, y), ...]} with at least one name"
    require(isinstance(points, Mapping) and bool(points), "points", points, meaning)
    ax = axes_or_new(ax, 7.0, 4.4)
    for number, (name, pairs) in enumerate(points.items()):
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        values = np.asarray(pairs, float)
        x, y = values.T
        ax.scatter(x, y, s=26, c=colour, marker=mark, alpha=0.55, linewidths=0)
        draw_ring(ax, x.mean(), y.mean(), colour, marker=mark, markersize=11, label=name)
    ax.set_xlabel(labels[0])
    ax.set_ylabel(labels[1])
    ax.set_xlim(left=0)
    draw_grid(ax, "both")
    draw_legend(ax, 9)
    return ax


def save(figures: Mapping[str, Figure | Axes], folder: Path) -> list[Path]:
    """Write figures into a folder as name.png, and return the files."""
    paths = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        save_figure(figure, path, dpi=130)
    return list(paths)
