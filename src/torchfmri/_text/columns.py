"""Columns of text that fit a terminal: which of them, how wide, in which characters.

`Grid` and `table` draw with it, and reports use its colours and paragraphs; the head, the rows and
the style of HTML tables stand here too. The least important columns go first, and those that went
are named below the table. Whatever may come from a file passes `printable`, or it could move the
reader's cursor. Colour appears on terminals only, never with NO_COLOR. Widths, colours and the
style of HTML may change freely.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import NamedTuple

from torchfmri._arguments import check_number
from torchfmri._files import printable
from torchfmri._text.labels import display_width, shorten_apart, wrap

_WIDTH_OFF_TERMINAL = 120
_NARROWEST_NAME = 24
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
RED, BOLD, DIM, PLAIN = "\x1b[1;31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
MAX_CHARACTERS = 190_000
"""How long the HTML of a table may be: below 200 kB, so that a notebook with many stays small."""
_COLOURS = re.compile(f"({'|'.join(map(re.escape, (RED, BOLD, DIM, PLAIN)))})")

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


class Style(NamedTuple):
    """How the output may look."""

    unicode: bool
    colour: bool

    def paint(self, text: str, code: str) -> str:
        """Return the text in a colour, if the output has colours."""
        return f"{code}{text}{PLAIN}" if self.colour else text

    @property
    def ellipsis(self) -> str:
        """The character that stands for letters left out."""
        return "…" if self.unicode else "~"


@dataclass(frozen=True, eq=False)
class Column:
    """One column: its cells by line; the higher `importance`, the longer it stays.

    Notebooks show `markup`, which is HTML already, instead of the cells if it is given.
    """

    title: str
    cells: list[str]
    importance: int = 0
    right: bool = True
    markup: Sequence[str] | None = None

    @cached_property  # every cell is padded to it
    def width(self) -> int:
        """The width of its widest cell, in characters."""
        return max(map(display_width, [self.title, *self.cells]))

    def pad(self, cell: str) -> str:
        """Return the cell as wide as the column."""
        space = " " * (self.width - display_width(cell))
        return space + cell if self.right else cell + space


class FittedTable:
    """Names and the columns beside them, laid out for a terminal.

    The least important columns are dropped until the names have room, then names are shortened.

    Args:
        names: All that may stand in the first column.
        columns: Their cells are in the order of the lines.
        width: The width of the terminal in characters.
        style: Characters and colours that the terminal can show.

    Attributes:
        dropped: The titles of the columns that do not fit, the least important first.
    """

    def __init__(
        self, names: Sequence[str], columns: Sequence[Column], width: int, style: Style
    ) -> None:
        wanted = max(map(display_width, names))
        room = width - min(wanted, _NARROWEST_NAME)
        self._columns, self.dropped = list(columns), list[str]()
        while sum(each.width + 2 for each in self._columns) > room and len(self._columns) > 2:
            least = min(self._columns, key=lambda column: column.importance)
            self._columns.remove(least)
            self.dropped.append(least.title)
        self._room = min(wanted, max(width - sum(each.width + 2 for each in self._columns), 8))
        self._labels = shorten_apart(names, self._room, style.ellipsis)
        self._width, self._style = width, style

    def heading(self, name: str) -> str:
        """Return the line of titles, with this above the names."""
        return self._draw(name, [column.title for column in self._columns], BOLD)

    def line(self, index: int, name: str, code: str = "") -> str:
        """Return the line of this number, in a colour if one is given."""
        return self._draw(name, [column.cells[index] for column in self._columns], code)

    def missing_columns(self, *before: str) -> list[str]:
        """Return lines that name the dropped columns, after other remarks about the table."""
        remarks = list(before)
        if self.dropped:
            remarks.append(
                f"no room for {', '.join(dict.fromkeys(self.dropped))} in {self._width} columns"
            )
        return [self._style.paint(part, DIM) for part in wrap("; ".join(remarks), self._width)]

    def _draw(self, name: str, cells: Sequence[str], code: str) -> str:
        label = self._labels[name]
        padded = [column.pad(cell) for column, cell in zip(self._columns, cells, strict=True)]
        text = "  ".join([label + " " * (self._room - display_width(label)), *padded]).rstrip()
        return self._style.paint(text, code) if code else text


def output_style() -> Style:
    """Return what standard output can show."""
    stream = sys.stdout
    terminal = bool(getattr(stream, "isatty", lambda: False)())
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    try:
        (BLOCKS + "…").encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return Style(unicode=False, colour=terminal and not plain)
    return Style(unicode=True, colour=terminal and not plain)


def line_width(wanted: int | None) -> int:
    """Return how wide lines may be, in characters: as wanted, or as wide as the terminal.

    Raises:
        InspectionError: It is not a whole number above 0.
    """
    if wanted is None:
        return shutil.get_terminal_size((_WIDTH_OFF_TERMINAL, 24)).columns or _WIDTH_OFF_TERMINAL
    meaning = "give the characters of a line, such as 100, or None for the width of the terminal"
    check_number("width", wanted, 1, meaning)
    return wanted


def terminal_text(text: str) -> str:
    """Return the text without control characters, except our own colours."""
    parts = _COLOURS.split(text)  # every other one is a colour
    return "".join(
        part if number % 2 else printable(part, lines=True) for number, part in enumerate(parts)
    )


def paragraph(text: str, width: int) -> str:
    """Return the text as an indented paragraph."""
    return "\n".join(wrap(text, width, "  ", "    "))


def notes_below(notes: Sequence[str], width: int, style: Style) -> list[str]:
    """Return the notes below a table with their heading; nothing if there are no notes."""
    if not notes:
        return []
    return ["", style.paint("notes", BOLD), *(paragraph(each, width) for each in notes)]


def encodable(text: str) -> str:
    """Return the text with `?` for what standard output cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text


def html_head(heading: str, columns: Sequence[Column]) -> str:
    """Return the head of a table: what stands above the names, and the titles of the columns."""
    first = Column(heading, [], right=False)
    titles = "".join(
        f'<th scope="col"{_align(each)}>{escape(each.title)}</th>' for each in (first, *columns)
    )
    return f"<thead><tr>{titles}</tr></thead>"


def html_row(name: str, columns: Sequence[Column], index: int, bad: bool = False) -> str:
    """Return one row; `name` is HTML already, and a bad row is marked at its left."""
    cells = "".join(
        f"<td{_align(each)}>{each.markup[index] if each.markup else escape(each.cells[index])}</td>"
        for each in columns
    )
    return f'<tr{" class=bad" if bad else ""}><th scope="row">{name}</th>{cells}</tr>'


def _align(column: Column) -> str:
    """Return the attribute that puts a cell at the left; cells are at the right by default."""
    return "" if column.right else ' class="t"'
