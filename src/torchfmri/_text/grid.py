"""A table of names and columns, for terminals and for notebooks.

Every result but statistics of layers is shown by it: costs, contrasts, lenses, lesions, scans,
verification. HTML stays below `MAX_CHARACTERS` and says how many lines were left out; names and
cells are escaped, `Column.markup` is not. How a table looks may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torchfmri._files import printable
from torchfmri._text.columns import (
    BOLD,
    MAX_CHARACTERS,
    STYLE,
    Column,
    FittedTable,
    encodable,
    html_head,
    html_row,
    line_width,
    notes_below,
    output_style,
)
from torchfmri._text.labels import wrap


@dataclass(frozen=True)
class Grid:
    """A table of lines, each with a name and a cell in every column.

    Attributes:
        title: The subject of the table, in a sentence.
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
        lines += [*table.missing_columns(), *notes_below(self.notes, width, style)]
        return encodable("\n".join(lines))

    def html(self) -> str:
        """Return the table for a notebook: self-contained, escaped, no scripts, below 200 kB."""
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        before = (
            f'{STYLE}<div class="torchfmri"><p><strong>{escape(self.title)}</strong></p>'
            f'<div class="w"><table>{html_head(self.heading, self.columns)}<tbody>'
        )
        after = f"</tbody></table></div>{f'<ul>{notes}</ul>' if notes else ''}"
        room = MAX_CHARACTERS - len((before + after).encode())
        rows: list[str] = []
        for index in range(len(self.names)):
            name = escape(self.names[index])
            if index in self.emphasised:
                name = f"<strong>{name}</strong>"
            row = html_row(name, self.columns, index)
            room -= len(row.encode())
            if room < 0:
                left_out = len(self.names) - index
                after += f"<p>{left_out:,} more lines.</p>"
                break
            rows.append(row)
        return f"{before}{''.join(rows)}{after}</div>"
