"""Draw the figures of docs/routing.md and print its table, from the results of `torchfmri routing`.

python scripts/draw_routing.py RESULTS_FOLDER
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from torchfmri.routing.experiment.report import by_variant, read_results, summarise, value_of
from torchfmri.routing.prototype_map import PrototypeMap
from torchfmri.routing.routing_history import history_from_data
from torchfmri.visualization.routing_plots import (
    plot_activation,
    plot_prototypes,
    plot_selectivity,
    plot_tradeoff,
)

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
CURVES = ("token", "aggregate", "token-and-unit", "joint-token", "l1", "agreement")
JOINT = (
    "dense", "l1-weak", "l1", "l1-strong", "joint-token", "helpfulness", "agreement",
    "agreement-strong", "harmony",
)  # fmt: skip
PAIRS = (("agreement", "l1"), ("harmony", "l1"), ("harmony", "joint-token"))
COLUMNS = {
    "accuracy": "accuracy", "longest": "longest", "activation": "active",
    "middle_activation": "middle blocks", "selectivity": "selectivity",
    "relative_selectivity": "relative", "dead_units": "dead",
}  # fmt: skip
Runs = dict[str, list[Mapping[str, Any]]]


def main() -> None:
    """Print, then draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder that torchfmri routing wrote")
    results = read_results(parser.parse_args().results)
    runs = by_variant(results)
    print(markdown(results))
    for first, second in PAIRS:
        print(compared(runs, first, second))
    for name, figure in draw(runs).items():
        path = FIGURES / f"routing_{name}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
        print(f"wrote {path.name}")


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page: mean and standard deviation over seeds."""
    lines = ["| `--signal` | " + " | ".join(COLUMNS.values()) + " |", "|---" * 8 + "|"]
    for name, summary in summarise(results).items():
        cells = [f"{summary[key].mean:.2f} ± {summary[key].spread:.2f}" for key in COLUMNS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compared(runs: Runs, first: str, second: str) -> str:
    """The difference of two variants by seed: its mean, and in how many it is above 0."""
    parts = []
    for measure in ("longest", "activation", "relative_selectivity", "dead_units"):
        pairs = zip(runs[first], runs[second], strict=True)
        found = [value_of(a, measure) - value_of(b, measure) for a, b in pairs]
        above = sum(each > 0 for each in found)
        parts.append(f"{measure} {statistics.fmean(found):+.3f} ({above} of {len(found)} above 0)")
    return f"{first} - {second}: " + ", ".join(parts)


def draw(runs: Runs) -> dict[str, Figure]:
    """Name -> figure."""
    histories = {
        name: [history_from_data(each["history"]) for each in runs[name]]
        for name in CURVES
        if name in runs
    }
    figures = {"activation": plot_activation(histories), "tradeoff": tradeoff(runs)}
    for name in ("token", "aggregate"):
        maps = [PrototypeMap(**each) for each in runs[name][0]["prototypes"]]
        middle = [each for each in maps if each.layer.split(".")[1] in "12"]
        figures[f"prototypes_{name}"] = plot_prototypes(middle, name)
    figures["units"] = units(runs)
    return figures


def tradeoff(runs: Runs) -> Figure:
    """Accuracy and dead units against activation, of the variants with the main loss."""
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, measure, label in zip(
        axes, ("longest", "dead_units"), ("accuracy on the longest sequences", "dead units"),
        strict=True,
    ):  # fmt: skip
        points = {
            name: [(each["activation"], value_of(each, measure)) for each in runs[name]]
            for name in JOINT
            if name in runs
        }
        plot_tradeoff(points, labels=("active units", label), ax=ax)
    axes[0].get_legend().remove()
    return figure


def units(runs: Runs) -> Figure:
    """What the units of the middle blocks are on for, sparse in two ways."""
    figure = Figure(figsize=(10.0, 6.2), layout="constrained")
    for ax, name in zip(figure.subplots(2, 1), ("l1", "agreement"), strict=True):
        first = runs[name][0]
        middle = {key: each for key, each in first["rates"].items() if key.split(".")[1] in "12"}
        plot_selectivity(middle, first["tasks"], ax=ax)
        ax.set_title(name, fontsize=10, loc="left")
    return figure


if __name__ == "__main__":
    main()
