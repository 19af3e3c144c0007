"""One step of a `History` as a table for the terminal: `history_table`.

Only `Monitor.table` calls it, and `text_table` of `_text` lays the table out. The wording may
change. A series without values at that step has no line, and a history without steps gives a
sentence instead of an error, since a table may be asked for before training begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torchfmri._records import NO_STEPS, History, Step
from torchfmri._text import Row, text_table


def history_table(
    history: History,
    kinds: Mapping[str, str],
    model: str,
    position: int,
    fold: bool | None = None,
) -> str:
    """The statistics of one step, one line per layer and thing watched.

    Args:
        history: What to show.
        kinds: Layer -> its type.
        model: The type of the model.
        position: Which of the steps kept; -1 for the latest.
        fold: As in `text_table`.

    Without any step it says so.

    Raises:
        InspectionError: There is no such step.
    """
    if not len(history):
        return NO_STEPS
    step = history[position]
    rows = []
    for layer, what in history.series:
        found = history.statistics(layer, what, position)
        kind = kinds.get(layer, kinds.get(layer.rpartition(".")[0], ""))
        if found.count:
            rows.append(Row(layer, kind, what, 1, found))
    notes = {**history.notes, **_update_notes(step)}
    return text_table(
        rows,
        f"step {step.number} of {model}; {step.loss_text}",
        history.missing,
        notes,
        unfolded="monitor.table(fold=False)",
        reasons="monitor.history.missing",
        fold=fold,
    )


def _update_notes(step: Step) -> dict[str, list[str]]:
    known = {name: ratio for name, ratio in step.update_ratios.items() if math.isfinite(ratio)}
    if not known:
        return {}
    ordered = sorted(known, key=lambda name: known[name])
    middle, largest = ordered[len(ordered) // 2], ordered[-1]
    text = f"update / weight: median {known[middle]:.2g}, largest {known[largest]:.2g} in"
    return {text: [largest]}
