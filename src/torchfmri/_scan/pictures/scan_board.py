"""Show a scan in the viewer: the `Board` of its sequences, layers, voxels, curves and problems.

`Scan` makes one for `save_html` and `widget`, and `viewing.board_of` for `torchfmri.view`; the
server of `_viewer` calls its methods from several threads. The texts of `METRICS` and `CURVES` may
change freely; their keys are in saved views and are read by the page. `missing` must not call a NaN
of the model "not measured": a user who looks for a NaN would not be shown it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.pictures.cell_panels import Spelling, cell_panels
from torchfmri._scan.pictures.curves import CURVES, curve_values, curves_of
from torchfmri._scan.pictures.summary import failed_checks
from torchfmri._scan.pictures.token_texts import token_columns, tokens_sentence
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.blocks import inside_of
from torchfmri._scan.record.reading import Reading, metrics_of, voxel_name
from torchfmri._scan.record.readouts import LENS
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._text import layer_label, plural, printable
from torchfmri._viewer import LAYERS, TRACKS, Board, Entry, Health, Metric, Panel

_METRICS = (
    Metric(
        "activation", "Activation", "How strongly each layer responds to each token.",
        "root mean square of the layer's output",
    ),
    Metric(
        "gradient", "Gradient", "How much the loss would change with the layer's output there.",
        "norm of dL/d output",
    ),
    Metric(
        "learning_cost", "Learning cost",
        "How far this token alone would move the layer's weights; of a block, of all inside it.",
        "norm of dL/d parameters",
    ),
    Metric(
        "delta_sc", "Activation vs gradient",
        "Above 0: loud, though the loss hardly depends on it. Below 0: quiet, but it matters.",
        "z(activation) − z(gradient)", signed=True,
    ),
)  # fmt: skip
METRICS = {each.name: each for each in _METRICS}
_KEPT = 4
LOOK = 5.0
"""Seconds between looks at the folder of a scan that somebody may be adding to."""


class Scanned(Protocol):
    """The part of a `Scan` that the board needs."""

    anatomy: Anatomy
    meta: Mapping[str, Any]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> ScannedSequence: ...
    def refresh(self) -> int:
        """Return how many sequences were added."""
        ...

    @property
    def problems(self) -> tuple[str, ...]:
        """The files that could not be read."""
        ...


class ScanBoard(Board):
    """The board of a scan.

    Args:
        scan: What is shown.
        listed: Lists what is known of its sequences without reading them.
        path: Where it is stored, for "copy Python".
        layers: The columns of the layers that are shown; all by default.

    Attributes:
        further: Panels of other results, such as lesions.
        tokenizer: Spells tokens that a lens names and the text does not have; may be None.
    """

    def __init__(
        self,
        scan: Scanned,
        listed: Callable[[], Sequence[Entry]],
        path: Path | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.scan, self.path = scan, path
        self._listed, self._entries = listed, list(listed())
        self.further: tuple[Panel, ...] = ()
        self._lock, self._looked = threading.Lock(), time.monotonic()
        count = len(scan.anatomy.layers)
        self._chosen = list(range(count)) if layers is None else list(layers)
        self._names = [layer_label(scan.anatomy.layers[each]) for each in self._chosen]
        self._readings: OrderedDict[int, Reading] = OrderedDict()
        self.tokenizer: Any = None

    @property
    def id(self) -> str:
        """The path, or the object itself."""
        return str(self.path or f"memory-{id(self.scan)}")

    @property
    def layers(self) -> Sequence[str]:
        """The names, in model order."""
        return self._names

    @property
    def types(self) -> Sequence[str]:
        """The type of each layer's module."""
        return [self.scan.anatomy.types[each] for each in self._chosen]

    @property
    def parts(self) -> Sequence[int]:
        """The number of voxels of each layer."""
        counts = np.bincount(self.scan.anatomy.layer, minlength=len(self.scan.anatomy.layers))
        return [int(counts[each]) for each in self._chosen]

    def about(self) -> dict[str, Any]:
        """Return what the head of the page says."""
        meta = self.scan.meta
        place = f"torchfmri.load({str(self.path)!r})" if self.path else "scan"
        missed = meta.get("missed") or {}
        problems = [printable(each) for each in self.scan.problems]
        notes = []
        if missed:
            number = plural(len(missed), "layer")
            notes.append(f"{number} not captured; scan.table() names them")
        return {
            "title": self.path.name if self.path else "scan",
            "model": printable(str(meta.get("model") or "a model")),
            "loss": printable(str(meta.get("loss") or "")),
            "notes": notes,
            "problems": problems,
            "python": place,
        }

    def entries(self) -> Sequence[Entry]:
        """Return the sequences, without reading them."""
        return self._entries

    def length(self, sequence: int) -> int:
        """Return how many tokens a sequence has."""
        return self._entries[sequence].columns

    def refresh(self) -> bool:
        """Look for sequences that were added to the folder."""
        with self._lock:
            if time.monotonic() - self._looked < LOOK:
                return False
            self._looked = time.monotonic()
            added = self.scan.refresh() > 0
            if added:
                self._entries = list(self._listed())
            return added

    def reading(self, sequence: int) -> Reading:
        """Return one sequence; the last few stay in memory."""
        if sequence not in self._readings:
            found = Reading(self.scan.anatomy, self.scan[sequence], self.scan.meta)
            self._readings[sequence] = found
            while len(self._readings) > _KEPT:
                self._readings.popitem(last=False)
        return self._readings[sequence]

    def metrics(self, sequence: int) -> Sequence[Metric]:
        """Return what was measured per layer."""
        return [METRICS[name] for name in self.reading(sequence).metrics if name in METRICS]

    def voxels(self, sequence: int) -> Sequence[str]:
        """Return what was measured per voxel, too."""
        return metrics_of(self.reading(sequence).sequence, "voxel")

    def opens(self, sequence: int) -> int:
        """Return the first token that the model wrote; the one before if it was never run on it."""
        written = self._written(sequence)
        first = int(written.argmax()) if written.any() else 0
        for metric in self.metrics(sequence)[:1]:
            if first and np.isnan(self.values(sequence, metric.name, LAYERS)[first]).all():
                return first - 1
        return first

    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Surprisal, entropy, and the norm of the token's gradient where it was measured."""
        return curves_of(self.reading(sequence).sequence)

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """Return the texts of some tokens."""
        return token_columns(self.reading(sequence).sequence.tokens, first, last)

    def values(self, sequence: int, metric: str, plane: str) -> NDArray[np.floating[Any]]:
        """Return (token, row) the values of a plane."""
        reading = self.reading(sequence)
        if plane == TRACKS:
            return curve_values(reading.sequence)
        if plane == LAYERS:
            table = reading.whole(metric)
            everything = len(self._chosen) == table.shape[1]
            return table if everything else table[:, self._chosen]
        place = self.scan.anatomy.voxels_of(self._layer(plane))
        if metric not in metrics_of(reading.sequence, "voxel"):
            raise LookupError(f"the voxels have {metrics_of(reading.sequence, 'voxel')}")
        return reading.table(metric, "voxel")[:, place]

    def missing(self, sequence: int, metric: str, plane: str) -> NDArray[np.bool_] | None:
        """Tokens and layers that were not measured."""
        if plane == TRACKS:
            found = np.isnan(self.values(sequence, metric, TRACKS))
        else:
            found = self._unmeasured(sequence, metric)
            if plane != LAYERS:
                found = found[:, [self._names.index(plane)]]
        return found if found.any() else None

    def _unmeasured(self, sequence: int, metric: str) -> NDArray[np.bool_]:
        """Return (token, layer) what was not measured.

        A NaN that the model computed must not be taken for that. So of the tokens only the first
        and last ones count, in which no layer has a value: they were in a cache, or never run. Of
        the layers, those that the scan says it missed, those without a learning cost, and those
        that no gradient reached. And a head that `generate` runs on the last token of the prompt
        alone.
        """
        if metric == "delta_sc":
            return self._not_compared(sequence)
        known = ~np.isnan(self.values(sequence, metric, LAYERS))
        columns, rows = known.any(1), known.any(0)
        if not columns.any() or known.all():
            return np.zeros((1, len(rows)), np.bool_)
        first, last = int(columns.argmax()), len(columns) - int(columns[::-1].argmax())
        places = np.arange(len(columns))[:, None]
        layers = [self.scan.anatomy.layers[each] for each in self._chosen]
        missed = self.scan.meta.get("missed") or {}
        listed = np.array([name in missed or metric == "learning_cost" for name in layers])
        if metric == "gradient":
            # A NaN would have gone on to the embedding, so rows without any gradient had none.
            embeds = np.array([kind.endswith("Embedding") for kind in self.types])
            listed |= (rows & embeds).any()
        written = self._written(sequence)
        start = (int(written.argmax()) if written.any() else len(written)) - 1
        outside = np.array([not any(map(str.isdigit, name.split("."))) for name in layers])
        head = outside & rows & (known.argmax(0) == start)
        beyond = (places < first) | (places >= last)
        found: NDArray[np.bool_] = beyond | (~rows & listed) | (head & (places < start))
        return found

    def _not_compared(self, sequence: int) -> NDArray[np.bool_]:
        """Return (token, layer) whether delta_sc is missing though no NaN was computed."""
        found: NDArray[np.bool_] = np.isnan(self.values(sequence, "delta_sc", LAYERS))
        for metric in ("activation", "gradient"):
            computed = ~np.isfinite(self.values(sequence, metric, LAYERS))
            found &= ~computed | self._unmeasured(sequence, metric)
        return found

    def _written(self, sequence: int) -> NDArray[np.bool_]:
        """Return (token,) whether the model wrote it."""
        return self.reading(sequence).sequence.tokens.generated

    def names(self, plane: str) -> Sequence[str]:
        """Return the names of the rows of a plane."""
        if plane in (LAYERS, TRACKS):
            return self._names if plane == LAYERS else list(CURVES)
        layer = self._layer(plane)
        place = self.scan.anatomy.voxels_of(layer)
        found = (voxel_name(self.scan.anatomy, each) for each in range(place.start, place.stop))
        return [plane + name[len(layer) :] for name in found]

    def health(self, sequence: int) -> Sequence[Health]:
        """Return what is wrong: values that are not finite, silent layers, checks that failed."""
        reading = self.reading(sequence)
        found = list(self._broken(sequence))
        found += [Health(text, "warn") for text in failed_checks(reading.sequence)]
        found += [Health(text, "inform") for text in reading.sequence.unmeasured]
        return found

    def _broken(self, sequence: int) -> Iterator[Health]:
        """Yield layers whose measured activations are not finite, and silent layers."""
        if "activation" not in self.reading(sequence).sequence.layers or not self.length(sequence):
            return
        table = self.values(sequence, "activation", LAYERS)
        silent = ~table.any(0)  # NaN is true here
        finite = np.isfinite(table)
        if not finite.all():
            bad = ~finite & ~self._unmeasured(sequence, "activation")
            if bad.any():
                origin, column, known = self._origin(sequence, bad)
                layer = self._names[origin]
                layers = plural(int(bad.any(0).sum()), "layer")
                first = "first at" if known else "first in model order at"
                text = f"{layers} with NaN or infinite activations, {first} {layer}, token {column}"
                yield Health(text, "alarm", layer, column)
            silent = _silent(table)
        dead = [self._names[row] for row in np.flatnonzero(silent)]
        if dead:
            text = f"{plural(len(dead), 'layer')} silent at every token: {', '.join(dead[:3])}"
            yield Health(text + (" …" if len(dead) > 3 else ""), "warn", dead[0])

    def _origin(self, sequence: int, bad: NDArray[np.bool_]) -> tuple[int, int, bool]:
        """Return the row that was computed first of those not finite, its token, and more.

        The last value says whether the order of execution is known. Where it is not, as of scans by
        earlier versions, the row is the first in model order that contains no other: a container
        finishes after the layers inside it.

        All tokens of a prompt are computed in one pass, so the order of the layers comes before
        that of the tokens: in later layers a NaN may have spread to tokens before its own.
        """
        layers = [self.scan.anatomy.layers[each] for each in self._chosen]
        first_pass = bad[: self._read_at_once(sequence)]
        start = 0 if first_pass.any() else int(bad.any(1).argmax())
        at_once = first_pass if first_pass.any() else bad[start : start + 1]
        rows = np.flatnonzero(at_once.any(0)).tolist()
        order = self.scan.meta.get("order")
        listed = order if isinstance(order, list) else []
        place = {name: at for at, name in enumerate(listed) if isinstance(name, str)}
        known = all(layers[row] in place for row in rows)
        if known:
            origin = min(rows, key=lambda row: place[layers[row]])
        else:
            inside, broken = inside_of(layers), set(rows)
            origin = next(row for row in rows if broken.isdisjoint(inside[row][1:]))
        return origin, start + int(at_once[:, origin].argmax()), known

    def _read_at_once(self, sequence: int) -> int:
        """How many tokens the first pass of the model read: the prompt, or all of them."""
        written = self._written(sequence)
        # A model that generates is never run on the last token: it has values from a single pass.
        if not written.any() or np.isfinite(self.values(sequence, "activation", LAYERS)[-1]).any():
            return len(written)
        return int(written.argmax())

    def headline(self, sequence: int) -> str:
        """What the model read and wrote, and which token it had expected least."""
        return tokens_sentence(self.reading(sequence).sequence.tokens)

    def panels(self, sequence: int) -> Sequence[Panel]:
        """Return the panels that were handed over."""
        return self.further

    def panels_at(self, sequence: int, row: str, column: int) -> Sequence[Panel]:
        """Return what heads attended to there, and what a lens reads."""
        label, part = row.partition("[")[0], None
        if label not in self._names:
            return ()
        if label != row:
            names = list(self.names(label))
            if row not in names:
                return ()
            if "[head " in row:
                part = (names.index(row), len(names))
        own = self.reading(sequence).sequence
        lens = (self.scan.meta.get("readouts") or {}).get(LENS) or []
        return tuple(
            cell_panels(own, self._layer(label), part, column, lens=lens, spelling=self._spell(own))
        )

    def _spell(self, sequence: ScannedSequence) -> Mapping[int, str]:
        """Return the tokens of a sequence by id, and all others if there is a tokenizer."""
        known = dict(zip(sequence.tokens.ids.tolist(), sequence.tokens.pieces, strict=True))
        return known if self.tokenizer is None else Spelling(known, self.tokenizer)

    def _layer(self, label: str) -> str:
        return self.scan.anatomy.layers[self._chosen[self._names.index(label)]]


def _silent(table: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Return (layer,) whether a layer has values, and all of them are 0."""
    finite = np.isfinite(table)
    found: NDArray[np.bool_] = ~table.any(0, where=finite) & finite.any(0)
    return found
