"""Text from a file or from somebody else, made harmless where it is printed."""

from __future__ import annotations

import unicodedata

_REVERSING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def printable(text: str, *, lines: bool = False) -> str:
    """The text with `?` for what would move the cursor, change colours or reverse the writing.

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
