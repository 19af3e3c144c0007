"""The tokens of a sequence in words: the texts of columns, and a sentence about all of them.

The boards of stored and of live scans share this, so that a token is spelt the same on both. A text
is sent as it is, whatever it contains; the page shows it as text and never as markup.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchfmri._scan.record.sequence import Tokens
from torchfmri._text import plural

LONGEST = 400
"""Characters of a token that are sent; the rest is counted."""
_SPELT = 24


def token_columns(tokens: Tokens, first: int, last: int) -> dict[str, Any]:
    """The texts of some tokens; one that is no character by itself is its bytes in hexadecimal."""
    spelling = tokens.spelling[first:last]
    pieces = [
        _cut(piece) if piece or not spelt else f"‹{spelt[:8].hex(' ')}›"
        for piece, spelt in zip(tokens.pieces_of(first, last), spelling, strict=True)
    ]
    return {
        "pieces": pieces,
        "ids": tokens.ids[first:last].tolist(),
        "generated": tokens.generated[first:last].astype(int).tolist(),
        "special": tokens.special[first:last].astype(int).tolist(),
    }


def tokens_sentence(tokens: Tokens) -> str:
    """What a model read and wrote, and which of it was expected least, if that is known."""
    count, written = len(tokens.ids), int(tokens.generated.sum())
    if not count:
        return ""
    told = f"The model read {plural(count - written, 'token')}"
    told += f" and wrote {written:,}" if written else ""
    judged = (tokens.generated | (written == 0)) & np.isfinite(tokens.surprisal) & ~tokens.special
    if int(judged.sum()) < 2:
        return f"{told}."
    least = int(np.where(judged, tokens.surprisal, -np.inf).argmax())
    # The page shows what is hidden in it by the same codes as everywhere else.
    text = token_columns(tokens, least, least + 1)["pieces"][0].strip(" ")
    if not text:
        return f"{told}."
    short = text if len(text) <= _SPELT else text[:_SPELT] + "…"
    chance = float(np.exp(-np.float64(tokens.surprisal[least])))
    if chance > 0.5:
        return f"{told}."  # a token that was likely was not unexpected
    return f"{told}. Least expected: “{short}” (token {least}, probability {share_text(chance)})."


def share_text(share: float) -> str:
    """A share of one in percent, with two digits where it is small.

    Examples:
        >>> share_text(0.4312), share_text(0.00123), share_text(3e-9)
        ('43 %', '0.12 %', 'less than 0.001 %')
    """
    percent = 100 * share
    return "less than 0.001 %" if percent < 1e-3 else f"{float(f'{percent:.2g}'):g} %"


def _cut(piece: str) -> str:
    return piece if len(piece) <= LONGEST else f"{piece[:LONGEST]}… ({len(piece):,} characters)"
