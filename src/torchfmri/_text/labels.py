"""Layer names made to fit: into a column of a table, under an axis.

Tables, progress bars and figures shorten names here. How a name is shortened may change freely,
except that two names must not look alike (`shorten_apart`). A name may come from somebody's file
and be as long as that: no loop may look at all of it again and again.

Widths are counted with `unicodedata` and not with wcwidth or rich: the core depends on torch and
numpy alone, and names need no more than wide and combining characters.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable

from torchfmri._files import printable

_LONGEST = 1_000


def layer_label(layer: str) -> str:
    """Return the name as it is shown: control characters replaced, the model itself named."""
    return printable(layer) or "(the model)"


def shorten(name: str, room: int, ellipsis: str = "…") -> str:
    """Return the name in `room` columns: words in the middle go first, numbers and the end stay.

    Examples:
        >>> shorten("model.layers.10.self_attn.q_proj", 24)
        'model.layers.10.….q_proj'
    """
    if len(name) > _LONGEST:  # what follows looks at every word again and again
        name = name[: _LONGEST // 2] + ellipsis + name[-_LONGEST // 2 :]
    if display_width(name) <= room:
        return name
    segments = name.split(".")
    while display_width(".".join(segments)) > room:
        words = [
            index
            for index, segment in enumerate(segments[:-1])
            if segment not in (ellipsis, "*") and not segment.isdigit()
        ]
        if not words:
            break
        # The first word goes last: it says which part of the model this is.
        longest = max(words, key=lambda index: (index > 0, len(segments[index])))
        segments[longest] = ellipsis
        segments = [
            segment
            for index, segment in enumerate(segments)
            if segment != ellipsis or index == 0 or segments[index - 1] != ellipsis
        ]
    short = ".".join(segments)
    if display_width(short) <= room:
        return short
    head = max((room - 1) // 3, 0)
    start = take(short, head)
    return start + ellipsis + take(short[::-1], room - 1 - display_width(start))[::-1]


def shorten_apart(names: Iterable[str], room: int, ellipsis: str = "…") -> dict[str, str]:
    """Return each name in `room` columns; those that would look alike keep their end instead.

    Examples:
        >>> list(shorten_apart(["e.0.attention.dense", "e.0.intermediate.dense"], 15).values())
        ['…ttention.dense', '…rmediate.dense']
    """
    short = {name: shorten(name, room, ellipsis) for name in names}
    alike = Counter(short.values())
    return {
        name: label if alike[label] == 1 else ellipsis + take(name[::-1], room - 1)[::-1]
        for name, label in short.items()
    }


def display_width(text: str) -> int:
    """Return the columns that a text takes on a terminal: two for wide characters."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return the text in lines of at most `width` columns that begin with `first` and `rest`."""
    lines, line, used = [], first, display_width(first)
    empty = True
    for word in printable(text).split():
        wide = display_width(word)
        if not empty and used + 1 + wide > width:
            lines.append(line)
            line, used, empty = rest, display_width(rest), True
        while empty and used + wide > width:
            # Not more than fits is looked at: a word may be as long as a file.
            part = take(word, max(width - used, 2))
            if part == word:  # there is room for nothing: what begins the line is too wide already
                break
            lines.append(line + part)
            word, wide = word[len(part) :], wide - display_width(part)
            line, used = rest, display_width(rest)
        line = line + word if empty else f"{line} {word}"
        used, empty = used + wide + (not empty), False
    return [*lines, line] if not empty else lines


def take(text: str, columns: int) -> str:
    """Return as much of the beginning of a text as fits into `columns` columns."""
    used = 0
    for index, character in enumerate(text):
        used += _character_width(character)
        if used > columns:
            return text[:index]
    return text


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
