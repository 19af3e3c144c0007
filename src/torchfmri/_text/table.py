"""Tables of statistics for terminals and notebooks; `grid` draws all other tables.

Inspections and Monitors call `text_table`, and inspections `html_table`; both show the same lines.
What is missing is listed with its reason, NaN and Inf come first. HTML is self-contained, escaped
and below `MAX_CHARACTERS`: rows are folded, then left out, and it says so. `text_table` names no
method of its caller: `unfolded` and `reasons` say what to write. Only inspections have HTML tables.
How it looks may change freely; NaN and Inf must never be hidden in a folded line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from torchfmri._files import printable
from torchfmri._text.columns import (
    ASCII,
    BLOCKS,
    BOLD,
    MAX_CHARACTERS,
    RED,
    STYLE,
    Column,
    FittedTable,
    Style,
    encodable,
    html_head,
    html_row,
    line_width,
    notes_below,
    output_style,
    paragraph,
)
from torchfmri._text.labels import layer_label, shorten, wrap
from torchfmri._text.rows import (
    MEANING,
    Row,
    TableLine,
    bar_heights,
    describe_bad,
    describe_positions,
    describe_state,
    first_bad,
    lost_rows,
    make_lines,
    number_text,
    plural,
    say_note,
    say_reasons,
    statistics_columns,
)
from torchfmri.statistics import Statistics

ROWS_BEFORE_FOLDING = 100
_HTML_ROWS_BEFORE_FOLDING, _HTML_ROWS_OPEN = 200, 60
_SPARK_BINS, _SVG_BARS = 12, 24
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
    sparklines turn into ASCII if the output cannot encode blocks.

    Args:
        rows: What to show.
        title: The first line.
        missing: Layer -> why it, or something of it, is not there.
        notes: Reservation -> the layers it holds for.
        unfolded: The call that shows all rows, as the user writes it.
        reasons: The attribute in which the user finds all of `missing`.
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
    return encodable("\n".join([*parts, *notes_below(remarks, width, style)]))


def _verdict(rows: Sequence[Row], width: int, style: Style) -> list[str]:
    """Return the lines that say if there is NaN or Inf, and where first."""
    found = first_bad(rows)
    if found is None:
        return ["no NaN or Inf"]
    said, first = found
    text = f"{said}, first (in model order): {first.what} of {layer_label(first.layer)}"
    return [style.paint(part, RED) for part in wrap(text, width)]


def _draw(lines: Mapping[str, Sequence[TableLine]], width: int, style: Style) -> list[str]:
    """Return a heading and lines for each thing watched, with the same columns for all."""
    everything = [line for group in lines.values() for line in group]
    named = [_name_of(line) for line in everything]
    names = [f"! {name}" if bad else name for name, bad in named]
    headings = [f"{what} ({MEANING[what]})" if "grad" in what else what for what in lines]
    table = FittedTable([*names, *headings], _columns(everything, style), width, style)
    drawn: list[str] = []
    first = 0
    for heading, group in zip(headings, lines.values(), strict=True):
        drawn += [""] if drawn else []
        drawn.append(table.heading(heading))
        for index in range(first, first + len(group)):
            drawn.append(table.line(index, names[index], RED if named[index][1] else ""))
        first += len(group)
    legend = [] if "distribution" in table.dropped else ["distribution: 1st to 99th percentile"]
    return [*drawn, *table.missing_columns(*legend)]


def _name_of(line: TableLine) -> tuple[str, bool]:
    """Return what stands at the left of a line, and whether the line has NaN or Inf."""
    return layer_label(line.name), bool(describe_bad(line.statistics))


def _columns(lines: Sequence[TableLine], style: Style) -> list[Column]:
    # Where layers are numbered (nn.Sequential), only the type says what they are.
    numbered = any(line.name.rpartition(".")[2].isdigit() for line in lines)
    kinds = [shorten(printable(line.kind), _WIDEST_TYPE, style.ellipsis) for line in lines]
    columns = [
        Column("type", kinds, 7 if numbered else 0, right=False),
        *statistics_columns(lines),
        Column("distribution", [_sparkline(each, style) for each in lines], 9, right=False),
    ]
    if any(len(line.scales) > 1 for line in lines):
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


# -- the same for notebooks ----------------------------------------------------------------------


def html_table(
    rows: Sequence[Row],
    title: str,
    missing: Mapping[str, str],
    notes: Mapping[str, Sequence[str]],
) -> str:
    """Return the table as HTML: escaped, without scripts or anything from elsewhere, below 200 kB.

    Long tables show layers whose names differ only in their numbers as one row.

    Args:
        rows: What to show.
        title: The heading.
        missing: Layer -> why it, or something of it, is not there.
        notes: Reservation -> the layers it holds for.
    """
    reasons = say_reasons(lost_rows(rows, missing), _code, escape)
    remarks = [say_note(*note, _code, escape) for note in notes.items()]
    said, first = first_bad(rows) or ("", None)
    verdict = "no NaN or Inf"
    if first is not None:
        verdict = f"<b>{said}</b>, first: {first.what} of {_code(first.layer)}"
    title = f"<p><strong>{escape(title)}</strong><br>{verdict}</p>"
    head = f'{STYLE}<div class="torchfmri">{title}'
    tail = (
        _list_of("not captured", "missing", reasons, open_if_few=True)
        + _list_of("notes", "notes", [*map(escape, describe_positions(rows)), *remarks])
        + "</div>"
    )
    room = MAX_CHARACTERS - len((head + tail).encode())
    counted = sum(row.statistics is not None for row in rows)
    body = ""
    if counted <= _HTML_ROWS_BEFORE_FOLDING:
        body = _tables(make_lines(rows, fold=False), counted)
    if not body or len(body.encode()) > room:
        lines = make_lines(rows, fold=True)
        shown = sum(map(len, lines.values()))
        said = ""
        if shown < counted:
            said = (
                f"<p>{counted:,} rows as {shown:,}: * stands for any number, statistics are of all "
                "its layers together; layers with NaN, Inf or only one value stand alone. All rows:"
                " <code>print(inspection.table(fold=False))</code></p>"
            )
        body = said + _cut(lines, shown, room - len(said))
    return head + body + tail


def _cut(lines: Mapping[str, Sequence[TableLine]], shown: int, room: int) -> str:
    """Return the tables with as many rows each as fit."""
    limit = shown
    while limit >= 1:
        body = _tables({what: group[:limit] for what, group in lines.items()}, shown)
        left_out = sum(max(len(group) - limit, 0) for group in lines.values())
        if left_out:
            body += (
                f"<p>{plural(left_out, 'row')} left out for size: inspection.rows() has all.</p>"
            )
        if len(body.encode()) <= room:
            return body
        limit //= 2
    return f"<p>{plural(shown, 'row')}: too long to show here; see inspection.rows().</p>"


def _tables(lines: Mapping[str, Sequence[TableLine]], total: int) -> str:
    drawn = []
    for index, (what, group) in enumerate(lines.items()):
        meaning = f": {MEANING[what]}" if "grad" in what else ""
        caption = f"{what}{meaning} ({plural(len(group), 'row')})"
        bars = [_svg(line.statistics) for line in group]
        columns = [
            Column("type", [line.kind for line in group], right=False),
            *statistics_columns(group),
            Column("distribution, 1st to 99th percentile", bars, right=False, markup=bars),
        ]
        body = "".join(
            html_row(escape(name), columns, row, bad)
            for row, (name, bad) in enumerate(map(_name_of, group))
        )
        table = (
            f'<div class="w"><table><caption>{escape(caption)}</caption>'
            f"{html_head('layer', columns)}<tbody>{body}</tbody></table></div>"
        )
        if total > _HTML_ROWS_OPEN:
            opened = " open" if index == 0 and len(group) <= _HTML_ROWS_OPEN else ""
            table = f"<details{opened}><summary>{escape(caption)}</summary>{table}</details>"
        drawn.append(table)
    return "".join(drawn)


def _svg(statistics: Statistics) -> str:
    """Return the distribution as bars, one path; in words for those who cannot see it."""
    heights = bar_heights(statistics, _SVG_BARS)
    if not heights:
        return describe_state(statistics)
    bars = "".join(
        f"M{4 * index} 16v-{max(height * 16, 0.5):.3g}h3v{max(height * 16, 0.5):.3g}"
        for index, height in enumerate(heights)
        if height > 0
    )
    words = ", ".join(
        f"{name} {number_text(statistics.quantile(q))}"
        for name, q in (("1%", 0.01), ("median", 0.5), ("99%", 0.99))
    )
    return (
        f'<svg role="img" aria-label="{words}" width="{4 * _SVG_BARS}" height="16" '
        f'fill="currentColor"><title>{words}</title><path d="{bars}"/></svg>'
    )


def _code(layer: str) -> str:
    return f"<code>{escape(layer_label(layer))}</code>"


def _list_of(heading: str, place: str, items: Sequence[str], *, open_if_few: bool = False) -> str:
    """Return remarks under a heading that unfolds them; `place` of the inspection has them all."""
    if not items:
        return ""
    shown: list[str] = []
    size = 0
    for item in items:
        size += len(item)
        if size > MAX_CHARACTERS // 8:
            shown.append(f"and {len(items) - len(shown)} more: see inspection.{place}")
            break
        shown.append(item)
    opened = " open" if open_if_few and len(items) <= 5 else ""
    entries = "".join(f"<li>{item}</li>" for item in shown)
    return (
        f"<details{opened}><summary>{heading} ({len(items)})</summary><ul>{entries}</ul></details>"
    )
