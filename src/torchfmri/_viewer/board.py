"""A board: what the viewer shows, whatever it comes from.

A board has sequences; a sequence has columns (tokens, or steps of a training run) and planes:
"layers", "tracks" (curves above the columns), and one plane for the voxels of each layer.

It is implemented by scans (`_scan/pictures/scan_board.py`, `_scan/run/live_board.py`), contrasts
(`_contrast/contrast_board.py`), runs and differences (here); the desk is the only one who asks it.
Several threads ask at once while a live board grows, so a length may only be raised after the
columns that it counts are there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchfmri._viewer.tiles import Mask, Table

LAYERS, TRACKS = "layers", "tracks"


@dataclass(frozen=True)
class Metric:
    """Something that can be shown as colours.

    Attributes:
        name: As in `Scan.values`.
        title: On its button.
        meaning: One sentence for somebody who sees it for the first time.
        unit: What a value is, for the colour bar.
        signed: Whether it compares, so that colours go both ways from 0.
        shown: Whether it has a button; others are read for `Overlay`.
        beside: Of a curve: the name of another one over whose bars it is drawn as a line.
        top: Of a curve: where its bars end, and larger ones are marked; 0 for its largest value.
    """

    name: str
    title: str
    meaning: str
    unit: str = ""
    signed: bool = False
    shown: bool = True
    beside: str = ""
    top: float = 0.0


@dataclass(frozen=True)
class Overlay:
    """What is drawn over the colours of a plane of few columns.

    Attributes:
        opacity: The metric, from 0 to 1, by which cells fade; "" where none does.
        outline: The metric that is not 0 where a cell is outlined; "" where none is.
        meaning: What both say, for the colour bar.
    """

    opacity: str
    outline: str
    meaning: str


@dataclass(frozen=True)
class Health:
    """One finding of the health strip; a click goes to its layer and column.

    Attributes:
        text: What is wrong.
        severity: "alarm", "warn" or "inform".
        layer: Where, or None.
        column: At which token or step, or None.
        advice: What to do.
    """

    text: str
    severity: str = "warn"
    layer: str | None = None
    column: int | None = None
    advice: str = ""


@dataclass(frozen=True)
class Panel:
    """A further panel of the page: the seam for what other results bring.

    Attributes:
        name: What identifies it.
        title: Above it.
        kind: How `data` is drawn. "table": `columns` (names) and `rows` (lists of cells); a cell
            that is a layer's name is a link to it, and so is `{"layer": ..., "column": n,
            "text": ...}` with a layer that the page knows, a column, or both.
            "lines": `x` and `series` (name -> values).
            "matrix": `rows`, `columns` (names) and `values` (row, column), with `signed`.
            "bars": `names`, `values`, and `columns`: the column that a bar leads to, or None.
            "text": `text`.
        data: What is drawn.
    """

    name: str
    title: str
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the panel as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """What is known of a sequence without reading it.

    Attributes:
        name: What identifies it.
        columns: How many it has.
        condition: Its label.
        text: How it begins, as it is listed; the name stands in where it is not known.
    """

    name: str
    columns: int
    condition: str = ""
    text: str = ""


class Board(ABC):
    """What the page asks for. A new kind of result becomes visible by one subclass of this."""

    kind = "scan"
    """"scan", "run" or "diff": what the page calls things."""
    axis = "token"
    """What a column is."""
    live = False
    """Whether columns may still be added."""

    growth = (4.0, 128)
    """How many times as long, and how long at least, a table gets before its colours are chosen
    anew."""

    @property
    def going(self) -> bool:
        """Whether columns are being added now; a live board rests between two prompts."""
        return self.live

    def is_going(self, sequence: int) -> bool:
        """Whether columns are being added to this sequence."""
        return self.going and sequence == len(self.entries()) - 1

    @property
    def start(self) -> Mapping[str, Any]:
        """The state that a page opens with, as far as it is not the usual one."""
        return {}

    @property
    @abstractmethod
    def id(self) -> str:
        """The same for the same content, so that a page that reconnects knows where it is."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[str]:
        """The names of the rows of the plane "layers", in model order."""

    @property
    def types(self) -> Sequence[str]:
        """The type of each layer's module."""
        return [""] * len(self.layers)

    @property
    def parts(self) -> Sequence[int]:
        """How many voxels each layer has; 0 or 1 where it cannot be expanded."""
        return [0] * len(self.layers)

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return `title`, `model`, `notes` (texts) and `python` (how to get the result).

        `python` of the difference of two boards is a list of both. Of a board that compares also
        `ends`: what values below and above 0 mean. Of one with curves `beside` others also `pair`:
        what those are of, and what the others are of. Of files that could not be read, `problems`.
        """

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """Return the sequences, without reading them."""

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Return how many columns a sequence has now."""

    @abstractmethod
    def metrics(self, sequence: int) -> Sequence[Metric]:
        """Return what can be shown of a sequence."""

    @abstractmethod
    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Return the rows of the plane "tracks"."""

    @abstractmethod
    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """Return `pieces` (texts), `generated` and `special` (0 or 1) of some columns."""

    @abstractmethod
    def values(self, sequence: int, metric: str, plane: str) -> Table:
        """Return the values of a plane, (column, row)."""

    def missing(self, sequence: int, metric: str, plane: str) -> Mask | None:
        """Return where nothing was measured, (column or 1, row or 1); None if everything was.

        A value there that is not finite is shown as none. Everywhere else it is a finding.
        """
        return None

    def voxels(self, sequence: int) -> Sequence[str]:
        """Return the metrics that voxels have, too."""
        return [each.name for each in self.metrics(sequence)]

    def opens(self, sequence: int) -> int:
        """Return the column that a page begins at if nothing else is asked for."""
        return 0

    def overlay(self, sequence: int) -> Overlay | None:
        """Return what is drawn over the colours; None for nothing."""
        return None

    def names(self, plane: str) -> Sequence[str]:
        """Return the names of the rows of a plane."""
        return self.layers

    def health(self, sequence: int) -> Sequence[Health]:
        """Return what is wrong, the worst first."""
        return ()

    def headline(self, sequence: int) -> str:
        """Return what came out, in one sentence for somebody who sees it for the first time."""
        return ""

    def panels(self, sequence: int) -> Sequence[Panel]:
        """Return further panels, such as a table of peaks."""
        return ()

    def panels_at(self, sequence: int, row: str, column: int) -> Sequence[Panel]:
        """Return further panels about one cell, such as what a head attended to."""
        return ()

    def doing(self) -> dict[str, str]:
        """Return `now`, what is being worked on, and `problem`, what went wrong last; or ""."""
        return {"now": "", "problem": ""}

    def refresh(self) -> bool:
        """Look for new sequences and columns; whether there are some."""
        return False
