"""Tables of statistics for terminals; `html_table` makes the same for notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torchfmri._files import printable
from torchfmri._text.columns import (
    ASCII,
    BLOCKS,
    BOLD,
    DIM,
    RED,
    Column,
    FittedTable,
    Style,
    encodable,
    line_width,
    output_style,
    paragraph,
)
from torchfmri._text.html_table import html_table
from torchfmri._text.labels import (
    layer_label,
    shorten,
    wrap,
)
from torchfmri._text.rows import (
    MEANING,
    Row,
    TableLine,
    bar_heights,
    describe_bad,
    describe_positions,
    describe_state,
    lost_rows,
    make_lines,
    number_text,
    plural,
    say_note,
    say_reasons,
    shape_text,
    share_text,
)

__all__ = ["Row", "html_table", "text_table"]

ROWS_BEFORE_FOLDING = 100
_SPARK_BINS = 12
_WIDEST_TYPE = 14
_REASONS_SHOWN = 30


def text_table(
    rows: Sequence[Row],
    title: str,
    missing: Mapping[str, str],
    notes: Mapping[str, Sequence[str]],
    *,
    unfolded: str,
    reasons: str,
    width: int | None = None,
    fold: bool | None = None,
) -> str:
    """Return a table for the terminal, one line per layer and thing watched.

    It is as wide as the terminal. Colour appears only on a terminal and never with NO_COLOR;
    sparklines turn into ASCII where the output cannot encode blocks.

    Args:
        rows: What to show.
        title: The first line.
        missing: Layer -> why it, or something of it, is not there.
        notes: Reservation -> the layers it holds for.
        unfolded: The call that shows all rows, as the user writes it.
        reasons: Where the user finds all of `missing`.
        width: The width in characters; by default that of the terminal, or 120 without one.
        fold: Show layers whose names differ only in numbers as one line; by default from 100 rows.
    """
    width = line_width(width)
    style = output_style()
    fold = len(rows) > ROWS_BEFORE_FOLDING if fold is None else fold
    lines = make_lines(rows, fold=fold)
    parts = [*wrap(title, width), *_verdict(rows, width, style)]
    if lines:
        parts += ["", *_draw(lines, width, style)]
    if fold:
        parts += _say_folded(rows, lines, unfolded, width)
    lost = lost_rows(rows, missing)
    if lost:
        parts += ["", style.paint("not captured", BOLD), *_draw_reasons(lost, reasons, width)]
    remarks = [*describe_positions(rows), *(say_note(*note) for note in notes.items())]
    if remarks:
        parts += ["", style.paint("notes", BOLD)]
        parts += [paragraph(remark, width) for remark in remarks]
    return encodable("\n".join(parts))


def _verdict(rows: Sequence[Row], width: int, style: Style) -> list[str]:
    """Whether there is NaN or Inf, and where first."""
    bad = [row for row in rows if row.statistics is not None and describe_bad(row.statistics)]
    if not bad:
        return ["no NaN or Inf"]
    text = f"NaN or Inf in {len(bad)} of {plural(len(rows), 'row')}, first (in model order): "
    text += f"{bad[0].what} of {layer_label(bad[0].layer)}"
    return [style.paint(part, RED) for part in wrap(text, width)]


def _draw(lines: Mapping[str, Sequence[TableLine]], width: int, style: Style) -> list[str]:
    """Header and lines per thing watched, in columns that are the same for all."""
    everything = [line for group in lines.values() for line in group]
    bad = [bool(describe_bad(line.statistics)) for line in everything]
    names = [
        ("! " if flagged else "") + layer_label(line.name)
        for flagged, line in zip(bad, everything, strict=True)
    ]
    headings = [f"{what} ({MEANING[what]})" if "grad" in what else what for what in lines]
    table = FittedTable([*names, *headings], _columns(everything, style), width, style)
    drawn: list[str] = []
    first = 0
    for heading, group in zip(headings, lines.values(), strict=True):
        drawn += [""] if drawn else []
        drawn.append(table.heading(heading))
        for index in range(first, first + len(group)):
            drawn.append(table.line(index, names[index], RED if bad[index] else ""))
        first += len(group)
    dropped = ", ".join(table.dropped)
    legend = [] if "distribution" in table.dropped else ["distribution: 1st to 99th percentile"]
    legend += [f"no room for {dropped} in {width} columns"] if dropped else []
    return [*drawn, *(style.paint(part, DIM) for part in wrap("; ".join(legend), width))]


def _columns(lines: Sequence[TableLine], style: Style) -> list[Column]:
    statistics = [line.statistics for line in lines]
    bad = [describe_bad(each) or "0" for each in statistics]
    folded = any(len(line.scales) > 1 for line in lines)
    zeros = [share_text(each.zero, each.count) for each in statistics]
    # Where layers are numbered (nn.Sequential), only the type says what they are.
    numbered = any(line.name.rpartition(".")[2].isdigit() for line in lines)
    kinds = [shorten(printable(line.kind), _WIDEST_TYPE, style.ellipsis) for line in lines]
    columns = [
        Column("type", kinds, 7 if numbered else 0, right=False),
        Column("shape", [shape_text(line) for line in lines], 2 if folded else 1),
        Column("mean", [number_text(each.mean) for each in statistics], 8),
        Column("std", [number_text(each.std) for each in statistics], 10),
        Column("min", [number_text(each.min) for each in statistics], 5),
        Column("max", [number_text(each.max) for each in statistics], 6),
        Column("NaN/Inf", bad, 11 if any(map(describe_bad, statistics)) else 3),
        Column("zero", zeros, 4),
        Column("distribution", [_sparkline(each, style) for each in lines], 9, right=False),
    ]
    if folded:
        trends = [_trend(line.scales, style) for line in lines]
        columns.append(Column("std by depth", trends, 7, right=False))
    return columns


def _sparkline(line: TableLine, style: Style) -> str:
    heights = bar_heights(line.statistics, _SPARK_BINS)
    return _bars(heights, style) if heights else describe_state(line.statistics)


def _trend(scales: Sequence[float], style: Style) -> str:
    """Return the scale of the layers over depth, logarithmic, at most as long as a sparkline."""
    if len(scales) < 2:
        return ""
    step = max(1.0, len(scales) / _SPARK_BINS)
    picked = [scales[int(index * step)] for index in range(min(len(scales), _SPARK_BINS))]
    logs = [math.log10(value) if value > 0 else math.nan for value in picked]
    known = [value for value in logs if not math.isnan(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    # A factor of two over the depth is not yet a trend: it fills a quarter of the height.
    span = max(high - low, math.log10(2) * 4)
    middle = (low + high) / 2
    return _bars([(value - middle) / span + 0.5 + 1 / 16 for value in logs], style)


def _bars(heights: Sequence[float], style: Style) -> str:
    marks = BLOCKS if style.unicode else ASCII
    top = len(marks)
    return "".join(
        marks[min(max(math.ceil(height * top), 1), top) - 1] if height > 0 else " "
        for height in heights
    ).rstrip()


def _say_folded(
    rows: Sequence[Row], lines: Mapping[str, Sequence[TableLine]], unfolded: str, width: int
) -> list[str]:
    shown = sum(map(len, lines.values()))
    counted = sum(row.statistics is not None for row in rows)
    if shown == counted:
        return []
    text = (
        f"{counted:,} rows on {plural(shown, 'line')}: * stands for any number, statistics are of "
        "all its layers together; layers with NaN, Inf or only one value have a line of their own. "
        f"All rows: {unfolded}."
    )
    return wrap(text, width)


def _draw_reasons(missing: Mapping[str, str], place: str, width: int) -> list[str]:
    reasons = say_reasons(missing)
    drawn = [paragraph(each, width) for each in reasons[:_REASONS_SHOWN]]
    if len(reasons) > _REASONS_SHOWN:
        drawn.append(f"  and {len(reasons) - _REASONS_SHOWN} more: see {place}")
    return drawn
