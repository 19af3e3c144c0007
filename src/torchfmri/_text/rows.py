"""Rows of statistics, and the lines of text that tables make of them.

`table` draws the lines; figures and reports take numbers and words from here. Layers whose names
differ only in numbers fold into one line, but never one with NaN, Inf or a single value: a reader
has to find it. Statistics of a folded line are merged, which is exact. How numbers are written may
change freely; what counts as suspect must stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchfmri._arguments import few
from torchfmri._text.columns import Column
from torchfmri._text.labels import layer_label
from torchfmri.statistics import Statistics, merge_statistics

MEANING = {
    "activations": "output",
    "inputs": "input",
    "gradients": "dL/d output",
    "input_gradients": "dL/d input, through this call",
    "parameters": "parameter",
    "parameter_gradients": "dL/d parameter",
}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_QUOTED = re.compile(r"'[^']*'")


class Row(NamedTuple):
    """One line: a layer, what was watched of it, and its statistics (None: nothing arrived)."""

    layer: str
    kind: str
    what: str
    calls: int
    statistics: Statistics | None


class TableLine(NamedTuple):
    """One row of a table: one layer, or several whose names differ only in their numbers.

    Attributes:
        name: The layer, or the pattern that matches the layers: `layers.*.mlp`.
        kind: The class of the module.
        what: What was watched.
        calls: How often it was called; all layers together.
        statistics: The statistics of all values together.
        scales: The standard deviation of every layer, in model order.
    """

    name: str
    kind: str
    what: str
    calls: int
    statistics: Statistics
    scales: tuple[float, ...]


def make_lines(rows: Sequence[Row], *, fold: bool) -> dict[str, list[TableLine]]:
    """Return the lines of a table by `what`; rows without statistics are left out.

    Args:
        rows: One per layer and thing watched.
        fold: Whether to make one line of the layers whose names differ only in their numbers. A
            layer with something wrong (NaN, Inf, one value only) keeps a line of its own.
    """
    groups: dict[tuple[str, ...], list[tuple[Row, Statistics]]] = {}
    for row in rows:
        if row.statistics is not None:
            alone = not fold or is_suspect(row.statistics)
            key = (row.what, row.layer) if alone else (row.what, row.kind, star(row.layer), "*")
            groups.setdefault(key, []).append((row, row.statistics))
    lines: dict[str, list[TableLine]] = {}
    for members in groups.values():
        first = members[0][0]
        together = [statistics for _, statistics in members]
        lines.setdefault(first.what, []).append(
            TableLine(
                name=first.layer if len(members) == 1 else star(first.layer),
                kind=first.kind,
                what=first.what,
                calls=sum(row.calls for row, _ in members),
                statistics=merge_statistics(together),
                scales=tuple(
                    statistics.std if statistics.finite else math.nan for statistics in together
                ),
            )
        )
    return lines


def group_reasons(missing: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Return (layer or pattern, number of layers, reason), one for names alike but for numbers."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for layer, reason in missing.items():
        general = _QUOTED.sub(lambda quoted: f"'{star(quoted[0][1:-1])}'", reason)
        groups.setdefault((star(layer), general), []).append((layer, reason))
    return [
        (*members[0][:1], 1, members[0][1]) if len(members) == 1 else (key[0], len(members), key[1])
        for key, members in groups.items()
    ]


def say_reasons(
    missing: Mapping[str, str],
    mark: Callable[[str], str] = layer_label,
    plain: Callable[[str], str] = str,
) -> list[str]:
    """Return `layer: reason` of what is missing, one for names that differ only in numbers.

    Args:
        missing: Layer -> the reason.
        mark: Writes the name of a layer.
        plain: Writes the rest.
    """
    return [
        mark(layer) + (f" ({number} layers)" if number > 1 else "") + f": {plain(reason)}"
        for layer, number, reason in group_reasons(missing)
    ]


def say_note(
    text: str,
    layers: Sequence[str],
    mark: Callable[[str], str] = layer_label,
    plain: Callable[[str], str] = str,
) -> str:
    """Return a reservation with the first layers that it holds for; see `say_reasons`."""
    named = few(mark(layer) for layer in layers if layer)
    return plain(text) + (f": {named}" if named else "")


def lost_rows(rows: Sequence[Row], missing: Mapping[str, str]) -> dict[str, str]:
    """Return `missing`, with the rows without statistics that it does not mention."""
    lost = {
        row.layer: f"{row.what}: nothing arrived"
        for row in rows
        if row.statistics is None and row.layer not in missing
    }
    return {**missing, **lost}


def describe_positions(rows: Sequence[Row]) -> list[str]:
    """Return in words how many positions were left out as padding."""
    seen: dict[tuple[int, int], int] = {}
    for row in rows:
        if row.statistics is not None and row.statistics.positions is not None:
            counted, all_of_them = row.statistics.positions
            if counted < all_of_them:
                seen[counted, all_of_them] = seen.get((counted, all_of_them), 0) + 1
    return [
        f"padding is left out: {counted:,} of {total:,} positions counted ({plural(number, 'row')})"
        for (counted, total), number in seen.items()
    ]


def star(layer: str) -> str:
    """Return the name with `*` for every segment that is a number."""
    return _NUMBER.sub("*", layer)


def is_suspect(statistics: Statistics) -> bool:
    """Whether a reader should look at this one: NaN, Inf, or only one value."""
    return bool(statistics.nan or statistics.inf or describe_state(statistics))


def describe_state(statistics: Statistics) -> str:
    """Return why values have no distribution, in two words; "" for ordinary ones."""
    if not statistics.count:
        return "empty"
    if not statistics.finite:
        return "all NaN" if statistics.nan == statistics.count else "none finite"
    if statistics.zero == statistics.count:
        return "all zero"
    if statistics.min == statistics.max and statistics.finite > 1:
        return "constant"
    return ""


def describe_bad(statistics: Statistics) -> str:
    """Return the NaN and Inf in words: `12 NaN, 3 Inf`; "" if there are none."""
    counts = {"NaN": statistics.nan, "Inf": statistics.inf}
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def shape_text(line: TableLine) -> str:
    """Return the shape of one call (or the number of values), and how many layers or calls."""
    shape = line.statistics.shape
    text = f"{line.statistics.count:,}" if shape is None else "x".join(map(str, shape)) or "scalar"
    layers = len(line.scales)
    if layers > 1:
        return f"{text}, {layers} layers"
    return f"{text}, {line.calls} calls" if line.calls > 1 else text


def statistics_columns(lines: Sequence[TableLine]) -> list[Column]:
    """Return the columns that terminals and notebooks both show: shape, moments, NaN, zeros."""
    statistics = [line.statistics for line in lines]
    folded = any(len(line.scales) > 1 for line in lines)
    moments = {"mean": 8, "std": 10, "min": 5, "max": 6}
    zeros = [share_text(each.zero, each.count) for each in statistics]
    bad = [describe_bad(each) or "0" for each in statistics]
    marked = [each if each == "0" else f"<b>{each}</b>" for each in bad]
    return [
        Column("shape", [shape_text(line) for line in lines], 2 if folded else 1),
        *(
            Column(name, [number_text(each[name]) for each in statistics], importance)
            for name, importance in moments.items()
        ),
        Column("NaN/Inf", bad, 3 if bad == marked else 11, markup=marked),
        Column("zero", zeros, 4),
    ]


def first_bad(rows: Sequence[Row]) -> tuple[str, Row] | None:
    """Return how many rows have NaN or Inf, in words, and the first of them; None without any."""
    bad = [row for row in rows if row.statistics is not None and describe_bad(row.statistics)]
    return (f"NaN or Inf in {len(bad)} of {plural(len(rows), 'row')}", bad[0]) if bad else None


def number_text(value: float) -> str:
    """Return a number in eight characters or so: `-99.98`, `0.0124`, `-1.2e-7`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if 1 <= abs(value) < 99_999.5:
        return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"
    if 1e-3 <= abs(value) < 1:
        return f"{value:.3g}"
    mantissa, exponent = f"{float(value):.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def probability_text(p: float) -> str:
    """Return a p or q; no probability is 0, so 0 is one too small for a float."""
    return "<1e-300" if p == 0 else number_text(p)


def share_text(part: int, whole: int) -> str:
    """Return a percentage that is 0 or 100 only if that is exact."""
    if not whole or part in (0, whole):
        return "100%" if part else "0"
    share = 100 * part / whole
    return "<1%" if share < 1 else ">99%" if share > 99 else f"{share:.0f}%"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def bar_heights(statistics: Statistics, bins: int) -> list[float]:
    """Return the distribution between the 1st and 99th percentile as `bins` heights up to 1."""
    if statistics.histogram is None or describe_state(statistics):
        return []
    low, high = statistics.quantile(0.01), statistics.quantile(0.99)
    if not low < high:
        low, high = float(statistics.min), float(statistics.max)
    counts, _ = statistics.linear_histogram(bins, (low, high))
    top = float(counts.max())
    return [float(count) / top for count in counts] if top else []
