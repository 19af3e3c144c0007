"""Draw a diagnosis: the run as a heat map, with its findings marked where they begin.

`Diagnosis.plot` calls `plot_diagnosis`, which draws on `plot_history`. `findings` are anything with
the fields of a `Finding`; this room must not import `_diagnosis`, which stands above it. Colours
and the number of named findings may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchfmri._records import NO_STEPS, History
from torchfmri._text import layer_label, shorten
from torchfmri.exceptions import InspectionError
from torchfmri.visualization._figure import draw_ring, write_above
from torchfmri.visualization.history_plots import plot_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"alarm": "#D55E00", "warn": "#E69F00", "inform": "#0072B2"}
_MOST_NAMED = 6
_PREFERRED = ("gradients", "parameter_gradients", "activations")


def plot_diagnosis(
    history: History | None, findings: Sequence[Any], model: str, ax: Axes | None = None
) -> Axes:
    """Draw the rms of each layer's gradients, the loss, and where findings begin.

    Args:
        history: The history of the run.
        findings: Findings; each begins at its step, in its layers.
        model: Its name, for the title.
        ax: Where to draw.

    Raises:
        InspectionError: There is nothing to draw.
    """
    if history is None or not len(history):
        raise InspectionError(NO_STEPS)
    known = {series.what for series in history.series}
    what = next((each for each in _PREFERRED if each in known), None)
    if what is None:
        raise InspectionError(
            "Neither activations nor gradients were watched: nothing to draw. Watch one of them: "
            "Monitor(model, optimizer, what=('activations', 'gradients'))."
        )
    ax = plot_history(history, "rms", what, ax=ax)
    places = {layer: place for place, layer in enumerate(history.matrix(what, "rms")[0])}
    first = int(history.steps[0])
    for finding in findings:
        _mark(ax, finding, places, first)
    _name(ax, findings, model)
    return ax


def _mark(ax: Axes, finding: Any, places: dict[str, int], first: int) -> None:
    """Draw a line where a finding begins, and frames around its layers."""
    colour = COLOURS[finding.severity]
    step = first if finding.step is None else finding.step
    ax.axvline(step, color=colour, linewidth=1.4, linestyle="--", zorder=4)
    rows = sorted({places[layer] for layer in finding.layers if layer in places})
    for row in rows:
        draw_ring(ax, step, row, colour, markersize=8, zorder=5, clip_on=False)


def _name(ax: Axes, findings: Sequence[Any], model: str) -> None:
    """Write the findings above the map, the worst first."""
    title = ax.get_title(loc="left")
    ax.set_title("", loc="left")
    lines = [(f"{model}: {'nothing found' if not findings else 'findings'}", "#222222")]
    for finding in findings[:_MOST_NAMED]:
        where = ", ".join(shorten(layer_label(each), 24) for each in finding.layers[:2])
        when = "" if finding.step is None else f", step {finding.step}"
        name = finding.problem.replace("_", " ")
        place = f" ({where}{when})" if where else f" ({when.removeprefix(', ')})" if when else ""
        lines.append((f"{finding.severity}: {name}{place}", COLOURS[finding.severity]))
    if len(findings) > _MOST_NAMED:
        lines.append((f"and {len(findings) - _MOST_NAMED} more", "#222222"))
    lines.append((title.replace("\\$", "$"), "#777777"))
    for number, (text, colour) in enumerate(reversed(lines)):
        weight = "bold" if number == len(lines) - 1 else "normal"
        look = {"fontsize": 9 if number else 8, "fontweight": weight, "color": colour}
        write_above(ax, text, 6 + 14 * number, **look)
