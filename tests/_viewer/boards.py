"""Boards of plain arrays, to test the viewer without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri import Anatomy, Scan, ScannedSequence, Tokens
from torchfmri._viewer import LAYERS, TRACKS, Board, Entry, GrowingTable, Health, Metric, Panel


class ArrayBoard(Board):
    """One sequence of an array (column, layer)."""

    def __init__(
        self, values: NDArray[Any], names: Sequence[str] | None = None,
        pieces: Sequence[str] | None = None, panels: Sequence[Panel] = (),
        metric: str = "activation",
    ) -> None:  # fmt: skip
        self.table = values
        self._names = list(names or (f"layers.{row}" for row in range(values.shape[1])))
        self._pieces, self._panels, self._metric = pieces, panels, metric

    @property
    def id(self) -> str:
        return "array"

    @property
    def layers(self) -> Sequence[str]:
        return self._names

    def about(self) -> dict[str, Any]:
        return {"title": "array", "model": "a model", "notes": [], "python": "scan"}

    def entries(self) -> Sequence[Entry]:
        return [Entry("only", self.length(0))]

    def length(self, sequence: int) -> int:
        return len(self.table)

    def metrics(self, sequence: int) -> Sequence[Metric]:
        return [Metric(self._metric, "Activation", "What it is.", "units")]

    def tracks(self, sequence: int) -> Sequence[Metric]:
        return [Metric("surprisal", "Surprisal", "How unexpected.", "nats")]

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        last = min(last, self.length(0))
        pieces = [self._pieces[t] if self._pieces else f" t{t}" for t in range(first, last)]
        nothing = [0] * len(pieces)
        ids = list(range(first, max(first, last)))
        return {"pieces": pieces, "ids": ids, "generated": nothing, "special": nothing}

    def values(self, sequence: int, metric: str, plane: str) -> NDArray[Any]:
        if plane == TRACKS:
            return np.asarray(self.table[:, :1])
        if plane != LAYERS:
            raise LookupError("no voxels")
        return self.table

    def panels(self, sequence: int) -> Sequence[Panel]:
        return self._panels


class StreamBoard(ArrayBoard):
    """Columns that come while a page looks: column t is a function of t, so that tests know it."""

    live = True

    def __init__(self, layers: int = 40) -> None:
        self._rows = layers
        self._growing = GrowingTable(layers)
        super().__init__(np.zeros((0, layers), np.float32))

    @property
    def table(self) -> NDArray[Any]:  # type: ignore[override]
        return self._growing.values

    @table.setter
    def table(self, values: NDArray[Any]) -> None:
        pass

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self._growing.append(stream_column(len(self._growing), self._rows))

    def health(self, sequence: int) -> Sequence[Health]:
        return ()


def stream_column(column: int, rows: int) -> NDArray[np.float32]:
    """What column t of a stream is; its size grows, so that codes have to be made anew."""
    random = np.random.default_rng(column)
    return (random.lognormal(0, 0.4, rows) * (1 + column / 400)).astype(np.float32)


def long_scan(tokens: int, layers: int) -> Scan:
    """A scan of many tokens, of random values."""
    random = np.random.default_rng(0)
    names = [f"model.layers.{at}.mlp" for at in range(layers)]
    anatomy = Anatomy.of_widths(names, ["MLP"] * layers, [4] * layers, [4] * layers)
    values = np.exp(random.standard_normal((tokens, layers), np.float32))
    some = random.gamma(1.5, 2.0, tokens).astype(np.float32)
    no = np.zeros(tokens, bool)
    spelling = tuple(b" word%d" % (at % 5000) for at in range(tokens))
    tokens_ = Tokens(np.arange(tokens), spelling, some, some, no, no)
    return Scan(
        anatomy, [ScannedSequence("long", tokens_, {"activation": values}, {})], {"model": "m"}
    )
