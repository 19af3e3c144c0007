"""A table of names and columns, for terminals and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torchfmri._files import printable
from torchfmri._text.columns import (
    BOLD,
    DIM,
    Column,
    FittedTable,
    encodable,
    line_width,
    output_style,
    paragraph,
)
from torchfmri._text.html_table import MAX_CHARACTERS, STYLE, align
from torchfmri._text.labels import wrap


@dataclass(frozen=True)
class Grid:
    """A table of lines, each with a name and a cell in every column.

    Attributes:
        title: What it is about, in a sentence.
        heading: The heading above the names.
        names: One per line.
        columns: Their cells by line.
        notes: Reservations, below.
        emphasised: The numbers of the lines that stand out.
    """

    title: str
    heading: str
    names: Sequence[str]
    columns: Sequence[Column]
    notes: Sequence[str] = ()
    emphasised: frozenset[int] = frozenset()

    def text(self, width: int | None = None) -> str:
        """Return the table for a terminal of this width; columns that do not fit are named."""
        width = line_width(width)
        style = output_style()
        # Heading and names may come from somebody else's file.
        heading, *names = map(printable, (self.heading, *self.names))
        table = FittedTable([heading, *names], self.columns, width, style)
        lines = [*wrap(self.title, width), "", table.heading(heading)]
        for index, name in enumerate(names):
            lines.append(table.line(index, name, BOLD if index in self.emphasised else ""))
        if table.dropped:
            text = f"no room for {', '.join(table.dropped)} in {width} columns"
            lines += [style.paint(part, DIM) for part in wrap(text, width)]
        if self.notes:
            lines += ["", style.paint("notes", BOLD)]
            lines += [paragraph(note, width) for note in self.notes]
        return encodable("\n".join(lines))

    def html(self) -> str:
        """Return the table for a notebook: self-contained, escaped, no scripts, below 200 kB."""
        head = "".join(
            f'<th scope="col"{align(column.right)}>{escape(column.title)}</th>'
            for column in self.columns
        )
        head = f'<th scope="col" class="t">{escape(self.heading)}</th>{head}'
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        before = (
            f'{STYLE}<div class="torchfmri"><p><strong>{escape(self.title)}</strong></p>'
            f'<div class="w"><table><thead><tr>{head}</tr></thead><tbody>'
        )
        after = f"</tbody></table></div>{f'<ul>{notes}</ul>' if notes else ''}"
        room = MAX_CHARACTERS - len((before + after).encode())
        rows: list[str] = []
        for index in range(len(self.names)):
            row = self._html_row(index)
            room -= len(row.encode())
            if room < 0:
                left_out = len(self.names) - index
                after += f"<p>{left_out:,} more lines.</p>"
                break
            rows.append(row)
        return f"{before}{''.join(rows)}{after}</div>"

    def _html_row(self, index: int) -> str:
        name = escape(self.names[index])
        if index in self.emphasised:
            name = f"<strong>{name}</strong>"
        cells = "".join(
            f"<td{align(column.right)}>{escape(column.cells[index])}</td>"
            for column in self.columns
        )
        return f'<tr><th scope="row">{name}</th>{cells}</tr>'
