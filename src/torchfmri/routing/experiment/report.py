"""Summarise and draw the results of an experiment: a table, data for `--json`, and figures.

Results are plain data read from the files of the runs, so all of it can be made again without
training. `torchfmri routing` prints `table`, `--json` prints `to_data`, whose keys are public, and
`write_figures` comes last. A new measure is an entry of `MEASURES`, a number in the result of a run
(`training_run.judge_routing`), and a note. Which figures there are may change freely.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchfmri._text import Column, Grid
from torchfmri.exceptions import InspectionError
from torchfmri.routing.experiment.training_run import VARIANTS, load_json
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

MEASURES = {
    "accuracy": "accuracy",
    "longest": "longest",
    "accuracy_of_whole_answers": "whole",
    "activation": "active",
    "middle_activation": "middle",
    "selectivity": "selectivity",
    "relative_selectivity": "relative",
    "dead_units": "dead",
}
"""What is reported of each run, and the heading of its column."""
_NOTES = (
    "mean and standard deviation over seeds",
    "accuracy: answer tokens that are right; longest: of the last group alone",
    "whole: answers without a mistake",
    "active: units that are on, all tokens; middle: without the first and last block",
    "selectivity: standard deviation over tasks of a unit's rate, mean over units",
    "relative: selectivity divided by the unit's rate, living units alone",
    "dead: units that no token of the test reached",
)


class MeanOverSeeds(NamedTuple):
    """A number over seeds."""

    mean: float
    spread: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ±{self.spread:.2f}"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the finished runs in a folder.

    Raises:
        InspectionError: There are none.
    """
    results = []
    for path in sorted(folder.glob("*-*.json")):
        data = load_json(path)
        if isinstance(data, dict) and "plan" in data and "rates" in data:
            results.append(data)
    if not results:
        raise InspectionError(
            f"There are no results in {folder}; write some with torchfmri routing --out {folder}."
        )
    return results


def by_variant(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return variant -> its runs by seed, in the order of `VARIANTS`."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name in VARIANTS:
        runs = [each for each in results if each["plan"]["variant"] == name]
        if runs:
            found[name] = sorted(runs, key=lambda each: each["plan"]["seed"])
    return found


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, MeanOverSeeds]]:
    """Return variant -> measure -> mean and spread over seeds; activation also by block."""
    summary: dict[str, dict[str, MeanOverSeeds]] = {}
    for name, runs in by_variant(results).items():
        values = {measure: [value_of(each, measure) for each in runs] for measure in MEASURES}
        for block in range(len(runs[0]["activation_by_block"])):
            values[f"block_{block}"] = [each["activation_by_block"][block] for each in runs]
        summary[name] = {measure: _measured(each) for measure, each in values.items()}
    return summary


def table(results: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the summary for a terminal."""
    summary = summarise(results)
    names = list(summary)
    columns = [
        Column(
            MEASURES.get(measure) or measure.replace("_", " "),
            [str(summary[name][measure]) for name in names],
            20 - position if measure in MEASURES else 1,
        )
        for position, measure in enumerate(summary[names[0]])
    ]
    plan = results[0]["plan"]
    seeds = max(len(runs) for runs in by_variant(results).values())
    title = (
        f"Routing after {plan['steps']} steps, {plan['blocks']} blocks of {plan['hidden_size']}, "
        f"{seeds} seeds: {', '.join(results[0]['tasks'])}"
    )
    return Grid(title, "routing learns from", names, columns, _NOTES)


def to_data(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary and the runs' numbers, for --json."""
    summary = {
        name: {measure: each._asdict() for measure, each in measures.items()}
        for name, measures in summarise(results).items()
    }
    left_out = ("rates", "prototypes", "history")
    runs = [{key: value for key, value in each.items() if key not in left_out} for each in results]
    return {"summary": summary, "runs": runs}


def value_of(run: Mapping[str, Any], measure: str) -> float:
    """Return one measure of a run; "longest" is the accuracy on its last group."""
    if measure != "longest":
        return float(run[measure])
    groups = [key for key in run["accuracy_by"] if key != "tasks"]
    return float(run["accuracy_by"][groups[-1]]["tokens"])


def _measured(values: Sequence[float]) -> MeanOverSeeds:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return MeanOverSeeds(statistics.fmean(values), spread)


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
