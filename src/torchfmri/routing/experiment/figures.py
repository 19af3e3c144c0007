"""Draw the figures of an experiment from the results of its runs.

`torchfmri routing` calls `write_figures` after the last run. Results are plain data read from the
files of the runs, so figures can be drawn again without training. Which figures there are and how
they look may change freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchfmri.routing.experiment.report import by_variant, value_of
from torchfmri.routing.prototype_map import PrototypeMap
from torchfmri.routing.routing_history import history_from_data
from torchfmri.visualization import (
    plot_activation,
    plot_prototypes,
    plot_selectivity,
    plot_tradeoff,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_figures(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw everything into a folder, and return the files."""
    return save(draw_figures(results), folder)


def draw_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Figure | Axes]:
    """Return name -> figure: activation over training, trade-offs, prototypes and units."""
    runs = by_variant(results)
    histories = {
        name: [history_from_data(each["history"]) for each in several]
        for name, several in runs.items()
    }
    figures: dict[str, Figure | Axes] = {"activation": plot_activation(histories)}
    for measure, label in (
        ("longest", "accuracy, longest"),
        ("relative_selectivity", "relative selectivity"),
        ("dead_units", "dead units"),
    ):
        points = {
            name: [(each["activation"], value_of(each, measure)) for each in several]
            for name, several in runs.items()
        }
        figures[f"tradeoff_{measure}"] = plot_tradeoff(points, labels=("active units", label))
    for name, several in runs.items():
        first = several[0]
        maps = [PrototypeMap(**each) for each in first["prototypes"]]
        figures[f"prototypes_{name}"] = plot_prototypes(maps, name)
        figures[f"units_{name}"] = plot_selectivity(first["rates"], first["tasks"])
    return figures
