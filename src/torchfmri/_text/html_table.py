"""Tables of statistics for notebooks: one self-contained piece of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from torchfmri._text.labels import layer_label
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
from torchfmri.statistics import Statistics

MAX_CHARACTERS = 190_000
"""Below 200 kB, so that a notebook with many tables stays small."""
ROWS_BEFORE_FOLDING = 200
_ROWS_SHOWN_OPEN = 60
_BARS = 24
_NUMBERS = ("mean", "std", "min", "max")

# Colours come from the page (currentColor), so that light and dark themes both work.
STYLE = """<style>
.torchfmri{font:13px/1.45 system-ui,sans-serif;color:inherit}
.torchfmri table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;
margin:4px 0 8px}
.torchfmri th,.torchfmri td{padding:2px 10px 2px 0;text-align:right;border:0;white-space:nowrap;
background:none;color:inherit}
.torchfmri tr{background:none}
.torchfmri thead th{border-bottom:1px solid;font-weight:600}
.torchfmri tbody th,.torchfmri .t{text-align:left}
.torchfmri tbody th,.torchfmri td{font-weight:400}
.torchfmri tbody th{font-family:ui-monospace,monospace}
.torchfmri tr.bad{box-shadow:inset 3px 0 #d1495b}
.torchfmri tr.bad th{font-weight:700;padding-left:7px}
.torchfmri b{color:#d1495b}
.torchfmri caption{text-align:left;font-weight:600}
.torchfmri summary{cursor:pointer;font-weight:600}
.torchfmri svg{display:block}
.torchfmri .w{overflow-x:auto}
.torchfmri code{background:none;color:inherit;padding:0}
</style>"""


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
    around = [
        _list_of("not captured", reasons, open_if_few=True),
        _list_of("notes", [*map(escape, describe_positions(rows)), *remarks]),
    ]
    heading = f"<p><strong>{escape(title)}</strong><br>{_verdict(rows)}</p>"
    head = f'{STYLE}<div class="torchfmri">{heading}'
    tail = "".join(around) + "</div>"
    room = MAX_CHARACTERS - len((head + tail).encode())
    counted = sum(row.statistics is not None for row in rows)
    body = ""
    if counted <= ROWS_BEFORE_FOLDING:
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


def _verdict(rows: Sequence[Row]) -> str:
    bad = [row for row in rows if row.statistics is not None and describe_bad(row.statistics)]
    if not bad:
        return "no NaN or Inf"
    where = f"{bad[0].what} of {_code(bad[0].layer)}"
    return f"<b>NaN or Inf in {len(bad)} of {plural(len(rows), 'row')}</b>, first: {where}"


def _tables(lines: Mapping[str, Sequence[TableLine]], total: int) -> str:
    drawn = []
    for index, (what, group) in enumerate(lines.items()):
        caption = what if what not in MEANING or "grad" not in what else f"{what}: {MEANING[what]}"
        caption = f"{caption} ({plural(len(group), 'row')})"
        titles = ["type", "shape", *_NUMBERS, "NaN/Inf", "zero"]
        head = "".join(
            f'<th scope="col"{align(name not in ("layer", "type"))}>{name}</th>'
            for name in ("layer", *titles)
        )
        head += '<th scope="col" class="t">distribution, 1st to 99th percentile</th>'
        body = "".join(map(_row, group))
        table = (
            f'<div class="w"><table><caption>{escape(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
        if total > _ROWS_SHOWN_OPEN:
            opened = " open" if index == 0 and len(group) <= _ROWS_SHOWN_OPEN else ""
            table = f"<details{opened}><summary>{escape(caption)}</summary>{table}</details>"
        drawn.append(table)
    return "".join(drawn)


def align(right: bool) -> str:
    """Return the attribute of a cell; cells stand at the right unless they say otherwise."""
    return "" if right else ' class="t"'


def _row(line: TableLine) -> str:
    statistics = line.statistics
    bad = describe_bad(statistics)
    cells = [shape_text(line), *(number_text(statistics[name]) for name in _NUMBERS)]
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr{" class=bad" if bad else ""}><th scope="row">{escape(layer_label(line.name))}</th>'
        f'<td class="t">{escape(line.kind)}</td>{numbers}'
        f"<td>{f'<b>{bad}</b>' if bad else 0}</td>"
        f"<td>{escape(share_text(statistics.zero, statistics.count))}</td>"
        f'<td class="t">{_sparkline(statistics)}</td></tr>'
    )


def _sparkline(statistics: Statistics) -> str:
    """Return the distribution as bars, one path; in words for those who cannot see it."""
    heights = bar_heights(statistics, _BARS)
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
        f'<svg role="img" aria-label="{words}" width="{4 * _BARS}" height="16" '
        f'fill="currentColor"><title>{words}</title><path d="{bars}"/></svg>'
    )


def _code(layer: str) -> str:
    return f"<code>{escape(layer_label(layer))}</code>"


def _list_of(heading: str, items: Sequence[str], *, open_if_few: bool = False) -> str:
    if not items:
        return ""
    shown: list[str] = []
    size = 0
    for item in items:
        size += len(item)
        if size > MAX_CHARACTERS // 8:
            shown.append(f"and {len(items) - len(shown)} more: see inspection.{_HOME[heading]}")
            break
        shown.append(item)
    opened = " open" if open_if_few and len(items) <= 5 else ""
    entries = "".join(f"<li>{item}</li>" for item in shown)
    return (
        f"<details{opened}><summary>{heading} ({len(items)})</summary><ul>{entries}</ul></details>"
    )


_HOME = {"not captured": "missing", "notes": "notes"}
