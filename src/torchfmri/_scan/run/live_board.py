"""`LiveBoard`: a scan in the viewer while it is being made.

`torchfmri scan` and `torchfmri chat` tell it of each token, and the viewer's server reads it from
other threads. The finished sequences are an ordinary `ScanBoard`; the one that is coming has only
activations, and every method must first ask `_now` which of the two it is asked about.
`_Coming.add` appends to `tokens` last, because readers take that length as the length of the
sequence. A new method of `Board` needs its answer for an unfinished sequence here.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.pictures.curves import CURVES
from torchfmri._scan.pictures.scan_board import METRICS, ScanBoard
from torchfmri._scan.pictures.token_texts import token_columns
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import ScannedSequence, Tokens
from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.scan_record import Scan
from torchfmri._viewer import LAYERS, TRACKS, Board, Entry, GrowingTable, Health, Metric, Panel

TELL_EVERY = 0.1
"""Seconds for which the tokens of a fast model wait to be shown together: a page that is drawn ten
times a second looks live, and a step that is read by itself costs a small model a third of its
time."""


class _Coming:
    """A sequence whose tokens are coming."""

    def __init__(self, name: str, anatomy: Anatomy) -> None:
        self.name = name
        self.layers = GrowingTable(len(anatomy.layers))
        self.voxels = GrowingTable(len(anatomy.layer))
        self.curves = GrowingTable(2)
        self.tokens: list[LiveToken] = []

    def add(self, token: LiveToken) -> None:
        self.layers.append(token.activation)
        self.voxels.append(token.voxels)
        self.curves.append(np.array([token.surprisal, token.entropy], np.float32))
        self.tokens.append(token)  # last: its length is that of the sequence


class LiveBoard(ScanBoard):
    """Sequences that were scanned, and behind them the one that is being scanned.

    Hand `on_token` to a scan, with `tell_every=TELL_EVERY`; when it is done, hand the result to
    `finish`.

    Args:
        anatomy: That of the model.
        meta: What is measured and how.
        changed: Called when there is another sequence, or more is known of the last one.

    Attributes:
        now: What is being worked on, for the page.
        problem: What went wrong last.
    """

    live = True
    refresh = Board.refresh  # it is told what is new, and must not look for it: that takes time

    def __init__(
        self, anatomy: Anatomy, meta: Mapping[str, Any],
        changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._done: list[ScannedSequence] = []
        super().__init__(Scan(anatomy, self._done, meta), list)
        self._coming: _Coming | None = None
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self.changed = changed
        self.now = self.problem = ""

    @property
    def id(self) -> str:
        """Another for each process: what came live is gone with it."""
        return self._id

    @property
    def going(self) -> bool:
        """Whether a sequence is being scanned."""
        return self._coming is not None

    def doing(self) -> dict[str, str]:
        """What is being worked on, and what went wrong last."""
        return {"now": self.now, "problem": self.problem}

    def begin(self, name: str) -> None:
        """A sequence begins."""
        with self._lock:
            self._coming = _Coming(name, self.scan.anatomy)
        self.changed()

    def on_token(self, token: LiveToken) -> None:
        """A token has come; only the first sequence of a batch is shown live."""
        if self._coming is not None and token.row == 0:
            self._coming.add(token)

    def finish(self, scan: Scan | None) -> None:
        """The sequence is scanned: gradients are known, too. None: it failed, and is dropped."""
        with self._lock:
            self._coming = None
            if scan is not None:
                self.scan.meta = scan.meta
                self._done.extend(scan)
            self._entries = [
                Entry(each.name, len(each), each.condition, each.beginning) for each in self._done
            ]
        self.changed()

    def entries(self) -> Sequence[Entry]:
        """The sequences that are scanned, and the one that is coming."""
        coming = self._coming
        now = [Entry(coming.name, len(coming.tokens))] if coming is not None else []
        return [*self._entries, *now]

    def _now(self, sequence: int) -> _Coming | None:
        return self._coming if sequence >= len(self._entries) else None

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has now."""
        now = self._now(sequence)
        return super().length(sequence) if now is None else len(now.tokens)

    def metrics(self, sequence: int) -> Sequence[Metric]:
        """Activations alone, until the sequence is finished."""
        live = self._now(sequence) is not None
        return [METRICS["activation"]] if live else super().metrics(sequence)

    def voxels(self, sequence: int) -> Sequence[str]:
        """Activations, too, until the sequence is finished."""
        live = self._now(sequence) is not None
        return ["activation"] if live else super().voxels(sequence)

    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Surprisal and entropy; the gradient's norm when it is known."""
        if self._now(sequence) is None:
            return super().tracks(sequence)
        return [each for each in CURVES.values() if each.name != "gradient_norm"]

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """The texts of some tokens."""
        now = self._now(sequence)
        if now is None:
            return super().columns(sequence, first, last)
        # A character may have begun some tokens earlier.
        start = max(0, first - 4)
        tokens = now.tokens[start:last]
        flags = np.array([each.generated for each in tokens], bool)
        none = np.zeros(len(tokens), np.float32)
        ids = np.array([each.id for each in tokens], np.int64)
        spelt = tuple(each.spelling for each in tokens)
        piece = Tokens(
            ids=ids,
            spelling=spelt,
            surprisal=none,
            entropy=none,
            generated=flags,
            special=np.array([each.special for each in tokens], bool),
        )
        return token_columns(piece, first - start, last - start)

    def values(self, sequence: int, metric: str, plane: str) -> NDArray[np.floating[Any]]:
        """(token, row) the values of a plane."""
        now = self._now(sequence)
        if now is None:
            return super().values(sequence, metric, plane)
        length = len(now.tokens)
        if plane == TRACKS:
            return now.curves.values[:length]
        if plane == LAYERS:
            return now.layers.values[:length]
        return now.voxels.values[:length, self.scan.anatomy.voxels_of(self._layer(plane))]

    def panels_at(self, sequence: int, row: str, column: int) -> Sequence[Panel]:
        """Read out when the sequence is finished."""
        live = self._now(sequence) is not None
        return () if live else super().panels_at(sequence, row, column)

    def _written(self, sequence: int) -> NDArray[np.bool_]:
        now = self._now(sequence)
        if now is None:
            return super()._written(sequence)
        return np.array([each.generated for each in now.tokens], bool)

    def headline(self, sequence: int) -> str:
        """Said when the sequence is finished."""
        return "" if self._now(sequence) is not None else super().headline(sequence)

    def health(self, sequence: int) -> Sequence[Health]:
        """Judged when the sequence is finished."""
        return () if self._now(sequence) is not None else super().health(sequence)
