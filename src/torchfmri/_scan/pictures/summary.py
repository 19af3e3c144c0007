"""Make the tables of a scan: medians per layer over the tokens, and the list of its sequences.

`Scan.table` and the notebook's view of a scan call `summary_grid` and `sequences_grid`;
`failed_checks` also feeds the viewer. Columns and wording may change freely. A median must only be
over tokens that count (`Reading.counted`), because the zeros of the prompt would hide all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.record.blocks import kinds_of
from torchfmri._scan.record.reading import Reading, quantile, span_text
from torchfmri._scan.record.sequence import METRICS, ScannedSequence
from torchfmri._text import (
    ASCII,
    BLOCKS,
    Column,
    Grid,
    layer_label,
    number_text,
    output_style,
    plural,
    printable,
)

_TITLES = {
    "activation": "activation rms",
    "gradient": "gradient norm",
    "learning_cost": "learning cost",
}
_LONGEST_LINE = 24
_TEXT = 60
_NAME = 200
_SUSPICIOUS = 0.05
"""A relative difference that no rounding explains, in 16 bits neither."""


def summary_grid(reading: Reading, title: str, *, fold: bool, notes: Sequence[str]) -> Grid:
    """Return a table with a line per layer or kind of layer: the median over tokens.

    Gradients and learning costs are summarised over the positions that the loss reaches; the table
    says how many these are.

    Args:
        reading: The sequence.
        title: Above the table.
        fold: Whether layers whose names differ only in numbers make one line; their medians over
            depth are drawn beside it.
        notes: What else to say.
    """
    layers, types = reading.anatomy.layers, reading.anatomy.types
    kinds = kinds_of(layers) if fold else {layer: [at] for at, layer in enumerate(layers)}
    groups = list(kinds.values())
    names = [kind if len(group) > 1 else layers[group[0]] for kind, group in kinds.items()]
    folded = any(len(group) > 1 for group in groups)
    columns = [Column("type", [_type_of(types, group) for group in groups], 1, right=False)]
    if folded:
        columns.append(Column("layers", [f"{len(group):,}" for group in groups], 4))
    for place, metric in enumerate(each for each in METRICS if each in reading.sequence.layers):
        table = reading.sequence.layers[metric]
        kept = reading.counted(metric, table)
        medians = quantile(table, kept, 0.5)
        cells = [number_text(_median(table[:, group][kept[:, group]])) for group in groups]
        columns.append(Column(_TITLES[metric], cells, 9 - place))
        if metric == "gradient":
            counts = [span_text(kept[:, group].sum(0)) for group in groups]
            columns.append(Column("positions", counts, 5))
        if folded:
            lines = [_sparkline(medians[group]) for group in groups]
            columns.append(Column("over depth", lines, 3 - place, right=False))
    return Grid(title, "layer", [printable(layer_label(name)) for name in names], columns, notes)


def sequences_grid(
    shown: Sequence[ScannedSequence], total: int, title: str, problems: Sequence[str]
) -> Grid:
    """Return a table with a line per sequence: its length, its condition, how it begins."""
    rest = total - len(shown)
    notes = [f"{plural(rest, 'more sequence')}"] if rest else []
    notes += [f"not read: {problem}" for problem in problems]
    columns = [
        Column("tokens", [f"{len(each):,}" for each in shown], 5),
        Column("generated", [f"{int(each.tokens.generated.sum()):,}" for each in shown], 3),
        Column("surprisal", [_mean_surprisal(each) for each in shown], 2),
        Column("condition", [_cut(each.condition) for each in shown], 4, right=False),
        Column("text", [_beginning(each) for each in shown], 1, right=False),
    ]
    names = [_cut(each.name) or "-" for each in shown]
    return Grid(title, "sequence", names, columns, notes)


def failed_checks(sequence: ScannedSequence) -> list[str]:
    """Return what a sequence found wrong with itself, in words; rounding is far below the limit."""
    checks, found = sequence.checks, []
    meanings = {
        "live_difference": "activations while generating and those of the pass are {:.0%} apart: "
        "the model did not do the same in both (does it look ahead, or go wrong with its cache or "
        "with padding?)",
        "gradient_residual": "the tokens' gradients are {:.0%} off autograd's: some gradient came "
        "through no token, or a learning cost is wrong",
    }
    for name, meaning in meanings.items():
        value = checks.get(name)
        if isinstance(value, int | float):
            found += [f"check: {meaning.format(value)}"] if value > _SUSPICIOUS else []
        elif value is not None:  # whoever wrote it: a file may say anything
            found.append(f"check: {name!r} is {repr(value)[:100]}, not a number")
    if checks.get("tokens_identical") is False:
        found.append("check: the tokens differ from those of generate without hooks")
    return found


def _type_of(types: Sequence[str], group: Sequence[int]) -> str:
    found = list(dict.fromkeys(types[column] for column in group))
    return printable(found[0]) + (f" and {len(found) - 1} more" if len(found) > 1 else "")


def _median(values: NDArray[np.floating]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


def _sparkline(values: NDArray[np.float64]) -> str:
    """Return a sparkline of the logarithms of values over depth; "" for fewer than 3 values."""
    if len(values) < 3:
        return ""
    if len(values) > _LONGEST_LINE:
        parts = np.array_split(values, _LONGEST_LINE)
        values = np.array([_median(part) for part in parts])
    known = np.isfinite(values) & (values > 0)
    if not known.any():
        return ""
    logs = np.log10(np.where(known, values, 1.0))
    low, high = float(logs[known].min()), float(logs[known].max())
    bars = BLOCKS if output_style().unicode else ASCII
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(
        bars[round((value - low) * scale)] if seen else " "
        for value, seen in zip(logs.tolist(), known.tolist(), strict=True)
    )


def _mean_surprisal(sequence: ScannedSequence) -> str:
    finite = sequence.tokens.surprisal[np.isfinite(sequence.tokens.surprisal)]
    return number_text(float(finite.mean())) if len(finite) else "-"


def _beginning(sequence: ScannedSequence) -> str:
    return _cut(" ".join(sequence.text[: 4 * _TEXT].split()), _TEXT)


def _cut(text: str, most: int = _NAME) -> str:
    """Return the beginning of a text, with nothing in it that a terminal would obey."""
    return printable(text if len(text) <= most else text[: most - 1] + "…")
