"""Text from a file or from somebody else, made harmless where it is printed.

Tables, errors about files and the viewer print names and texts through `printable`. It is the only
guard against control characters that move the cursor, clear the screen or reverse the writing, so
it may get stricter, never laxer.
"""

from __future__ import annotations

import unicodedata

_REVERSING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text with `?` for what moves the cursor, changes colours or reverses writing.

    Args:
        text: Perhaps somebody else's.
        lines: Whether it is running text: the ends of its lines stay, and what some scripts need
            between letters.
    """
    keep = _is_harmless if lines else str.isprintable
    return "".join(each if keep(each) else "?" for each in text)


def _is_harmless(character: str) -> bool:
    if character in "\n\t" or character.isprintable():
        return True
    kind = unicodedata.category(character)
    return kind in ("Cf", "Zs", "Co") and unicodedata.bidirectional(character) not in _REVERSING
