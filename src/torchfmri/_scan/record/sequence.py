"""One scanned sequence: its tokens, and what each layer did at each of them.

`run` makes a `ScannedSequence`, `store` writes and reads it, everything else reads it. Both classes
are public. A new field needs a default, because scans written before do not have it, and a place in
`store/packing`. The order of `METRICS`, `STATISTICS` and `VECTORS` is part of the stored format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

METRICS = ("activation", "gradient", "learning_cost")
"""What is measured per token: rms of the activation, norm of dL/d output, and the norm of the
layer's own parameters' gradient."""
STATISTICS = ("count", "mean", "std", "min", "max", "nan", "inf", "zero")
"""The statistics of a layer over all tokens and units."""
VECTORS = ("all", "prompt", "generated", "last")
"""The tokens over which mean vectors are kept: all, those given, those written, the last one that
the model was run on. Special tokens never count."""
_LISTED = 120
"""Characters of a text by which it is listed."""
_PASS = " while generating (live=False takes them from a pass over the finished sequence)"


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a sequence, without padding.

    Attributes:
        ids: (s,)
        spelling: The bytes of each; a character may be spread over several tokens.
        surprisal: (s,) -log p(token | those before it) in nats, nan for the first.
        entropy: (s,) of the distribution that the token was drawn from, in nats, nan for the first.
        generated: (s,) whether the model wrote it.
        special: (s,) whether it is a special token of the tokenizer.

    Examples:
        >>> number, no = np.zeros(3, np.float32), np.zeros(3, bool)
        >>> parts = (b"caf", "é".encode()[:1], "é".encode()[1:])  # a letter in two tokens
        >>> tokens = Tokens(np.arange(3), parts, number, number, no, no)
        >>> tokens.text, tokens.pieces
        ('café', ['caf', '', 'é'])
    """

    ids: NDArray[np.int64]
    spelling: tuple[bytes, ...]
    surprisal: Floats
    entropy: Floats
    generated: NDArray[np.bool_]
    special: NDArray[np.bool_]

    @classmethod
    def none(cls) -> Tokens:
        """Return no tokens, in arrays of the types that tokens have."""
        number, flag = np.empty(0, np.float32), np.empty(0, bool)
        return cls(np.empty(0, np.int64), (), number, number, generated=flag, special=flag)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return b"".join(self.spelling).decode("utf-8", errors="replace")

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token, for display: a character stands with the token that ends it.

        The other tokens of a character are the empty string, so that the pieces add up to the text.
        """
        return _spell(self.spelling)

    def pieces_of(self, first: int, last: int) -> list[str]:
        """Return `pieces[first:last]`, without spelling the whole of a long text."""
        start = max(0, first - _CHARACTER)
        return _spell(self.spelling[start : last + _CHARACTER])[first - start : last - start]


_CHARACTER = 4
"""Bytes of a character in UTF-8 at most, so that it has begun at most so many tokens earlier."""


def _spell(spelling: Sequence[bytes]) -> list[str]:
    pieces: list[str] = []
    pending = b""
    for each in spelling:
        text, pending = _complete(pending + each)
        pieces.append(text)
    if pending and pieces:
        pieces[-1] += pending.decode("utf-8", errors="replace")
    return pieces


def _complete(data: bytes) -> tuple[str, bytes]:
    """Return the characters that are complete, and the bytes of one that may yet become so."""
    if data.isascii():  # most tokens of most texts
        return data.decode("ascii"), b""
    for length in range(min(3, len(data)), 0, -1):
        tail = data[-length:]
        needed = 2 if tail[0] >> 5 == 0b110 else 3 if tail[0] >> 4 == 0b1110 else 4
        if tail[0] >= 0xC0 and length < needed:
            return data[:-length].decode("utf-8", errors="replace"), tail
    return data.decode("utf-8", errors="replace"), b""


@dataclass(frozen=True, eq=False)
class ScannedSequence:
    """One sequence of a scan. Values that were not measured are absent, or nan.

    Attributes:
        name: What identifies it in its scan.
        tokens: The text, token by token.
        layers: Metric -> (s, layer), in the order of the anatomy's layers; nan where a layer has no
            such value (the learning cost of a layer without parameters of its own).
        voxels: Metric -> (s, voxel).
        statistics: "activations" and "gradients" -> (layer, STATISTICS).
        tensors: Layer -> (s, unit), the activations of layers that were asked for in full; and
            what else was read out, under the name of a layer, `@` and what it is.
        condition: The label by which scans are contrasted, or "".
        padding: How many padded positions were left out.
        checks: What the scan proved about itself, by name.
        fields: The row of the dataset that it comes from: name -> text, number, bool, None, or a
            list or mapping of these.
        vectors: Some of VECTORS -> layer -> (unit,), the mean of the layer's signed activation over
            those tokens.

    Examples:
        >>> one, no = np.zeros(1, np.float32), np.zeros(1, bool)
        >>> tokens = Tokens(np.array([7]), (b"Hello",), one, one, no, no)
        >>> sequence = ScannedSequence("greeting", tokens, {"activation": np.ones((1, 2))}, {})
        >>> sequence.text, len(sequence), sequence.layers["activation"].shape
        ('Hello', 1, (1, 2))
    """

    name: str
    tokens: Tokens
    layers: Mapping[str, Floats]
    voxels: Mapping[str, Floats]
    statistics: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    condition: str = ""
    padding: int = 0
    checks: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        """The whole text."""
        return self.tokens.text

    @property
    def beginning(self) -> str:
        """The beginning of the prompt, on one line and without special tokens, for lists."""
        tokens = self.tokens
        given = ~tokens.special & ~tokens.generated
        kept = np.flatnonzero(given if given.any() else ~tokens.special)[:_LISTED]
        spelt = b"".join(tokens.spelling[at][: 4 * _LISTED] for at in kept)
        return " ".join(spelt.decode("utf-8", errors="replace").split())[:_LISTED]

    @property
    def unmeasured(self) -> list[str]:
        """The values that tokens of this sequence lack, in words, with the reason."""
        found = []
        lacking, written = np.isnan(self.tokens.surprisal[1:]), self.tokens.generated[1:]
        if lacking.any():
            which = "the prompt" if not lacking[written].any() else "some tokens"
            if lacking.all():
                which = "any token"
            reason = "the model gave no logits (b, s, vocabulary) that predict them"
            found.append(
                f"no surprisal and entropy of {which}: {reason}{'' if lacking.all() else _PASS}"
            )
        activation = self.layers.get("activation")
        if activation is not None and activation.size and np.isnan(activation[-1]).all():
            reason = "the model was not run on it"
            found.append(f"no activations of the last token: {reason}{_PASS}")
        return found
