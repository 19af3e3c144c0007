"""Spell token ids as bytes: `Speller`.

`Scanner` and `lenses` make one for a tokenizer; scans store what it returns. It returns bytes
because a token may be a part of a character: bytes can be joined and then decoded. Byte-level,
SentencePiece and WordPiece vocabularies are told apart by their contents, not by the tokenizer's
class; a new kind is a branch in `_look_up`. `two_scans` pairs tokens by these bytes, so a change
here also changes which tokens are compared.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_SPACE = "▁"  # what SentencePiece writes for a space


@lru_cache(maxsize=1)
def _byte_of_symbol() -> dict[str, int]:
    """The bytes behind the printable symbols that byte-level tokenizers (GPT-2) write for them."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    moved = {chr(256 + index): byte for index, byte in enumerate(rest)}
    return {**{chr(byte): byte for byte in kept}, **moved}


class Speller:
    """Token ids -> bytes, for one tokenizer.

    Args:
        tokenizer: That of the model; without one a token is spelt as its number.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.special = frozenset(getattr(tokenizer, "all_special_ids", ()) or ())
        self._added = _added_tokens(tokenizer)
        self._byte_level = _is_byte_level(tokenizer)

    def spell(self, ids: list[int]) -> tuple[bytes, ...]:
        """The bytes of each token."""
        return tuple(self._spell(each) for each in ids)

    @property
    def special_ids(self) -> frozenset[int]:
        """All tokens that `is_special` calls so."""
        return self.special | {token for token, (_, special) in self._added.items() if special}

    def is_special(self, token: int) -> bool:
        """Whether it is a special token: of the tokenizer, or of its chat template."""
        return token in self.special or self._added.get(token, (b"", False))[1]

    def _spell(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"{token} ".encode()
        if token in self._added:
            return self._added[token][0]
        if not hasattr(tokenizer, "convert_ids_to_tokens"):  # not one of transformers
            return str(tokenizer.decode([token])).encode()
        piece = tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return f"<{token}>".encode() if piece is None else bytes(piece)
        if self._byte_level:
            symbols = _byte_of_symbol()
            if all(each in symbols for each in piece):
                return bytes(symbols[each] for each in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if _SPACE in piece:
            return piece.replace(_SPACE, " ").encode()
        if piece.startswith("##"):  # WordPiece: goes on a word
            return piece[2:].encode()
        return piece.encode() if token in self.special else self._plain(piece)

    def _plain(self, piece: str) -> bytes:
        """A piece that marks nothing: WordPiece begins a word with it, others stand as they are."""
        vocabulary = getattr(self._tokenizer, "vocab", None) or {}
        word_pieces = self._word_pieces(vocabulary)
        return (f" {piece}" if word_pieces else piece).encode()

    def _word_pieces(self, vocabulary: Any) -> bool:
        if not hasattr(self, "_is_word_piece"):
            self._is_word_piece = any(str(each).startswith("##") for each in vocabulary)
        return self._is_word_piece


def _added_tokens(tokenizer: Any) -> dict[int, tuple[bytes, bool]]:
    """Id -> bytes and whether it is special, of tokens that were added and are written as text."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {
        int(token): (
            str(getattr(each, "content", each)).encode(),
            bool(getattr(each, "special", True)),
        )
        for token, each in decoder.items()
    }


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary is written in the symbols of a byte-level tokenizer."""
    vocabulary = getattr(tokenizer, "vocab", None)
    if not vocabulary:
        get = getattr(tokenizer, "get_vocab", None)
        vocabulary = get() if callable(get) else {}
    spaces = pieces = 0
    for each in map(str, vocabulary):
        spaces += each.startswith("Ġ")
        pieces += each.startswith(_SPACE)
    return spaces > pieces  # Ġ is a letter as well, and a piece of large vocabularies
