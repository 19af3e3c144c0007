"""One scanned sequence: its tokens, and what each layer did at each of them.

`run` makes a `ScannedSequence`, `store` writes and reads it, everything else reads it. Both classes
are public. A new field needs a default, because scans written before do not have it, and a place in
`store/packing`. The order of `METRICS`, `STATISTICS` and `VECTORS` is part of the stored format.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

METRICS = ("activation", "gradient", "learning_cost")
"""Measured per token: the rms of the activation, the norm of dL/d output, and the norm of the
gradient of the layer's own parameters."""
STATISTICS = ("count", "mean", "std", "min", "max", "nan", "inf", "zero")
"""The statistics of a layer over all tokens and units."""
VECTORS = ("all", "prompt", "generated", "last")
"""The tokens over which mean vectors are kept: all tokens, those of the prompt, those that the
model wrote, and the last one that the model was run on. Special tokens never count."""
_LISTED = 120
"""The largest number of characters of a text in lists."""
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
        """The text of each token, for display. A character stands at its last token.

        Its other tokens have the empty string, so that the pieces add up to the text.
        """
        return _spell(self.spelling)

    def pieces_of(self, first: int, last: int) -> list[str]:
        """Return `pieces[first:last]`, without spelling the whole of a long text."""
        first = min(first, len(self.spelling))
        start, before = first, 0
        while start > 0 and before < _CHARACTER:  # tokens may be without bytes
            start -= 1
            before += len(self.spelling[start])
        pieces = _spell(self.spelling[start:last], ends=last >= len(self.spelling))
        return pieces[first - start :]


_CHARACTER = 4
"""The largest number of bytes of a UTF-8 character."""


def _spell(spelling: Sequence[bytes], ends: bool = True) -> list[str]:
    """Return the characters that each token completes; `ends` if no further token follows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(each) for each in spelling]
    if ends and pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return pieces


@dataclass(frozen=True, eq=False)
class ScannedSequence:
    """One sequence of a scan. Values that were not measured are absent, or nan.

    Attributes:
        name: Its unique name in the scan.
        tokens: The text, token by token.
        layers: Metric -> (s, layer), in the order of the anatomy's layers; nan where a layer has no
            such value (the learning cost of a layer without parameters of its own).
        voxels: Metric -> (s, voxel).
        statistics: "activations" and "gradients" -> (layer, STATISTICS).
        tensors: Layer -> (s, unit), the activations of layers that were asked for in full.
            Other readings have the name of the layer, `@` and the name of the reading.
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
        # A token of 10 kB is not decoded as a whole.
        spelt = b"".join(tokens.spelling[at][: _CHARACTER * _LISTED] for at in kept)
        return " ".join(spelt.decode("utf-8", errors="replace").split())[:_LISTED]

    @property
    def unmeasured(self) -> list[str]:
        """Sentences that say which values are missing, and why."""
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
