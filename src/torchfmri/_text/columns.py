"""Columns of text that fit a terminal: which of them, how wide, in which characters."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchfmri._files import printable
from torchfmri._text.labels import display_width, wrap
from torchfmri.exceptions import InspectionError

_WIDTH_OFF_TERMINAL = 120
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
RED, BOLD, DIM, PLAIN = "\x1b[1;31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
_COLOURS = re.compile(f"({'|'.join(map(re.escape, (RED, BOLD, DIM, PLAIN)))})")


class Style(NamedTuple):
    """How the output may look."""

    unicode: bool
    colour: bool

    def paint(self, text: str, code: str) -> str:
        """The text in a colour, where there is colour."""
        return f"{code}{text}{PLAIN}" if self.colour else text

    @property
    def ellipsis(self) -> str:
        """What stands for letters left out."""
        return "…" if self.unicode else "~"


@dataclass(frozen=True, eq=False)
class Column:
    """One column: its cells by line; the higher `importance`, the longer it stays."""

    title: str
    cells: list[str]
    importance: int
    right: bool = True

    @cached_property  # every cell is padded to it
    def width(self) -> int:
        """In characters."""
        return max(map(display_width, [self.title, *self.cells]))

    def pad(self, cell: str) -> str:
        """The cell as wide as the column."""
        space = " " * (self.width - display_width(cell))
        return space + cell if self.right else cell + space


def output_style() -> Style:
    """What standard output can show."""
    stream = sys.stdout
    terminal = bool(getattr(stream, "isatty", lambda: False)())
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    try:
        (BLOCKS + "…").encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return Style(unicode=False, colour=terminal and not plain)
    return Style(unicode=True, colour=terminal and not plain)


def line_width(wanted: int | None) -> int:
    """How wide lines may be, in characters: as wanted, or as wide as the terminal.

    Raises:
        InspectionError: It is no whole number above 0.
    """
    if wanted is None:
        return shutil.get_terminal_size((_WIDTH_OFF_TERMINAL, 24)).columns or _WIDTH_OFF_TERMINAL
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise InspectionError(
            f"width={wanted!r}: how many characters a line has, such as 100, or None for the "
            "width of the terminal."
        )
    return wanted


def terminal_text(text: str) -> str:
    """The text as a terminal may get it: of what controls terminals only our own colours stay."""
    parts = _COLOURS.split(text)  # every other one is a colour
    return "".join(
        part if number % 2 else printable(part, lines=True) for number, part in enumerate(parts)
    )


def fit(columns: list[Column], room: int) -> tuple[list[Column], list[str]]:
    """The columns that fit, and the titles of those that do not, the least important first."""
    columns, dropped = list(columns), []
    while sum(column.width + 2 for column in columns) > room and len(columns) > 2:
        least = min(columns, key=lambda column: column.importance)
        columns.remove(least)
        dropped.append(least.title)
    return columns, dropped


def paragraph(text: str, width: int) -> str:
    """The text as an indented paragraph."""
    return "\n".join(wrap(text, width, "  ", "    "))


def encodable(text: str) -> str:
    """The text with `?` for what standard output cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text
