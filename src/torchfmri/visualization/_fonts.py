"""Find fonts that have the characters of a text; what none has is replaced and reported.

Pictures with tokens call `fonts_for`. Without it matplotlib draws empty boxes for Chinese or
Japanese tokens and warns once per character. The order of `_PREFERRED` may change freely.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from torchfmri._text import plural

REPLACEMENT = "□"
_PREFERRED = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "WenQuanYi Zen Hei"),
    *("WenQuanYi Micro Hei", "Droid Sans Fallback", "Noto Sans CJK JP", "Arial Unicode MS"),
)
"""Fonts with Chinese, Japanese and Korean characters, the best to read first."""


class Fonts(NamedTuple):
    """The fonts to write a text with.

    Attributes:
        families: The fonts in the order in which they are asked for a character.
        missing: The characters that no installed font has.
    """

    families: list[str]
    missing: frozenset[str]

    def writable(self, text: str) -> str:
        """Return the text with a box for each character that no font has."""
        return "".join(REPLACEMENT if each in self.missing else each for each in text)

    def note(self) -> str:
        """Return in words how many characters are missing; "" if none is."""
        if not self.missing:
            return ""
        many = plural(len(self.missing), "character")
        return (
            f"{REPLACEMENT}: no installed font has {many} of this text; for Chinese, Japanese and "
            "Korean install Noto Sans CJK"
        )


def fonts_for(texts: Iterable[str]) -> Fonts:
    """Return the fonts for these texts: matplotlib's own, then others that have what it lacks."""
    from matplotlib import font_manager, rcParams

    families = list(rcParams["font.family"])
    own = font_manager.findfont(font_manager.FontProperties(family=families))
    wanted = {each for text in texts for each in text if not each.isspace()}
    missing = wanted - _characters(own, frozenset(wanted))
    if not missing:
        return Fonts(families, frozenset())
    rank = {name: place for place, name in enumerate(_PREFERRED)}
    entries = sorted(
        # A font of last resort claims every character, and draws its number in a box.
        (each for each in font_manager.fontManager.ttflist if "lastresort" not in _plain(each)),
        key=lambda entry: (rank.get(entry.name, len(rank)), entry.name, entry.style != "normal"),
    )
    for entry in entries:
        found = missing & _characters(entry.fname, frozenset(missing))
        if found:
            families.append(entry.name)
            missing -= found
        if not missing:
            break
    return Fonts(families, frozenset(missing))


def _plain(entry: Any) -> str:
    return str(entry.name).lower().replace(" ", "")


@lru_cache(maxsize=64)
def _characters(path: str, wanted: frozenset[str]) -> frozenset[str]:
    """Return the wanted characters that a font file has; none if it cannot be read."""
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
        font.set_size(8, 100)  # raises for fonts of coloured bitmaps, which cannot be drawn
        known = font.get_charmap()
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(each for each in wanted if ord(each) in known)
