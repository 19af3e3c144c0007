"""Show a contrast in the viewer: kinds of layers down, blocks across, as in its picture.

`viewing.board_of` makes a `ContrastBoard`. A cell is the strongest of a layer's voxels, and a row
expands to all of them. Colour is the effect, faint cells have a small statistic, and what survives
is outlined. The sequences of the board are the same contrast at several thresholds, its own first.
Texts may change freely; the names of metrics and the keys of panels are read by the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast.comparison import TestOptions, threshold
from torchfmri._contrast.picture import block_number, opacities, square
from torchfmri._contrast.record import Contrast
from torchfmri._contrast.remarks import WARNINGS
from torchfmri._contrast.thresholds import count_sentence, outline_meaning, threshold_title
from torchfmri._text import layer_label, number_text, plural, printable, probability_text, star
from torchfmri._viewer import LAYERS, TRACKS, Board, Entry, Health, Metric, Overlay, Panel

_BEFORE, _AFTER = "in", "out"
_PEAKS = 20
_UNTESTED = ["not tested", "No such layer in this block, or the same in every prompt."]
_ABSENT = ["not there", "No such layer in this block."]
"""What a grey cell says: where nothing is tested, cells that are coloured are not tested either."""
_OTHERS: tuple[tuple[str | None, float], ...] = (
    ("fdr", 0.05),
    ("fdr", 0.01),
    ("bonferroni", 0.05),
    (None, 0.0),
)
"""Thresholds that can be chosen besides that of the contrast itself; None outlines nothing."""


class ContrastBoard(Board):
    """The board of a contrast.

    Args:
        contrast: What is shown.
        path: Its file, for "copy Python".
    """

    kind, axis = "contrast", "block"

    def __init__(self, contrast: Contrast, path: Path | None = None) -> None:
        self.contrast, self.path = contrast, path and path.absolute()
        self._tested = not np.isnan(contrast.p).all()
        self._judged = _thresholds(contrast)
        self._rank = np.empty(len(contrast), np.int64)
        self._rank[contrast.ranked(None)] = np.arange(len(contrast))
        self._lay_out()
        shades = {name: getattr(contrast, name) for name in ("g", "effect", "statistic", "p")}
        shades["opacity"] = opacities(contrast)
        self._shades = [
            {**shades, "q": each.q, "survives": each.survives.astype(np.float64)}
            for each in self._judged
        ]

    def _lay_out(self) -> None:
        """Give every layer a row by its kind and a column by its block."""
        layers = [str(each) for each in self.contrast.columns.layer]
        names = list(dict.fromkeys(layers))
        numbers = {name: block_number(name) for name in names}
        inside = [name for name in names if numbers[name] is not None]
        blocks = sorted({numbers[name] for name in inside}, key=lambda each: each or 0)
        prefix = star(inside[0]).partition("*")[0] if inside else ""
        first = names.index(inside[0]) if inside else 0
        before = bool(inside) and any(numbers[name] is None for name in names[:first])
        after = any(numbers[name] is None for name in names[first:])
        self._pieces = [_BEFORE] * before + list(map(str, blocks)) + [_AFTER] * after
        column = {number: at + before for at, number in enumerate(blocks)}
        rows: dict[str, dict[int, list[int]]] = {}
        self._cells: dict[str, tuple[str, int]] = {}
        for at, name in enumerate(names):
            number = numbers[name]
            if number is None:
                row, place = name, 0 if inside and at < first else len(self._pieces) - 1
            else:
                row = star(name).removeprefix(f"{prefix}*.").removeprefix(prefix)
                row, place = ("block" if row == "*" else row), column[number]
            self._cells[name] = (layer_label(row), place)
        for index, name in enumerate(layers):
            row, place = self._cells[name]
            rows.setdefault(row, {}).setdefault(place, []).append(index)
        self._rows = list(rows)
        # (part, block) of each row: the places in the contrast's arrays, -1 for none.
        self._places = {row: square(places, len(self._pieces)) for row, places in rows.items()}

    @property
    def start(self) -> Mapping[str, Any]:
        """One scale for all rows, at the strongest peak."""
        peak = self.contrast.ranked(1)
        if not peak:
            return {"norm": "global"}
        row, column = self._cells[str(self.contrast.columns.layer[peak[0]])]
        return {"norm": "global", "layer": row, "column": column}

    @property
    def id(self) -> str:
        """The file, or the object itself."""
        return str(self.path or f"memory-{id(self.contrast)}")

    @property
    def layers(self) -> Sequence[str]:
        """The kinds of layers."""
        return self._rows

    @property
    def types(self) -> Sequence[str]:
        """The types of their modules."""
        modules = self.contrast.columns.module
        return [str(modules[places[places >= 0][0]]) for places in self._places.values()]

    @property
    def parts(self) -> Sequence[int]:
        """How many voxels, heads or units a layer of each kind has at most."""
        return [len(each) for each in self._places.values()]

    def about(self) -> dict[str, Any]:
        """Return what the head of the page says."""
        contrast = self.contrast
        place = f"torchfmri.load_contrast({str(self.path)!r})" if self.path else "contrast"
        about: dict[str, Any] = {
            "title": printable(contrast.question),
            "missing": _UNTESTED if self._tested else _ABSENT,
            "model": printable(contrast.model),
            "notes": [
                printable(each)
                for each in (contrast.summary, *contrast.notes)
                if not each.startswith(WARNINGS)
            ],
            "python": place,
            "rows": "↑ kinds of layers",
        }
        if len(self._judged) > 1:
            about["choices"] = [threshold_title(each) for each in self._judged]
        if not contrast.is_f:
            about["ends"] = ["lower", "higher"]
            if len(contrast.conditions) == 2:
                a, b = (printable(str(each)) for each in contrast.conditions)
                about["ends"] = [f"more in {b}", f"more in {a}"]
        return about

    def entries(self) -> Sequence[Entry]:
        """Return the contrast at each threshold."""
        sizes = ", ".join(str(len(each)) for each in self.contrast.prompts.values())
        question = printable(self.contrast.question)
        return [
            Entry(question, len(self._pieces), f"n = {sizes}; {threshold_title(each)}")
            for each in self._judged
        ]

    def length(self, sequence: int) -> int:
        """Return how many blocks there are, with what stands before and after them."""
        return len(self._pieces)

    def metrics(self, sequence: int) -> Sequence[Metric]:
        """Return the effect, if there is one, and the statistic."""
        contrast, level = self.contrast, self.contrast.level
        strongest = "" if level == "layer" else f" The strongest {level} of each layer."
        size = f"In standard deviations over prompts.{strongest}"
        apart, unit = f"Of the means over prompts.{strongest}", contrast.metric.replace("_", " ")
        test = f"{contrast.test} over {self._prompts()}.{strongest}"
        signed, statistic = not contrast.is_f, "F" if contrast.is_f else "t"
        found = [
            Metric("g", "Effect size", size, "Hedges g", signed=True),
            Metric("effect", "Difference", apart, f"difference of {unit}", signed=signed),
            Metric("statistic", statistic, test, statistic, signed=signed),
            *(Metric(name, "", "", shown=False) for name in ("opacity", "survives", "p", "q")),
        ]
        return [each for each in found if not np.isnan(self._shades[0][each.name]).all()]

    def _prompts(self) -> str:
        return " and ".join(
            f"{plural(len(names), 'prompt')} of {printable(str(condition))!r}"
            for condition, names in self.contrast.prompts.items()
        )

    def overlay(self, sequence: int) -> Overlay:
        """Return the overlay: opacity by the statistic, an outline around what survives."""
        judged = self._judged[sequence]
        return Overlay(
            opacity="opacity" if self._tested else "",
            outline="survives" if self._tested and judged.height_control else "",
            meaning=outline_meaning(judged),
        )

    def headline(self, sequence: int) -> str:
        """Return how many differ at this threshold, and which does most."""
        contrast = self._judged[sequence]
        return f"{count_sentence(contrast)}{self._peak(contrast)}"

    def _peak(self, contrast: Contrast) -> str:
        """Return the strongest of a contrast, where it is and which way it goes."""
        peak = contrast.ranked(1)
        if not peak:
            return ""
        layer = str(contrast.columns.layer[peak[0]])
        part = contrast.columns[[peak[0]]].names[0][len(layer) :]
        row, column = self._cells[layer]
        block = block_number(layer)
        place = f"{row}{part}" + (f" of block {self._pieces[column]}" if block is not None else "")
        p = contrast.p[peak[0]]
        evidence = "" if np.isnan(p) else f", p {probability_text(p)}"
        lead = "Largest effect" if np.isnan(p) else "Strongest evidence"
        if contrast.is_f:
            return f" {lead}: {place} (F {number_text(contrast.f[peak[0]])}{evidence})."
        size, name = contrast.g[peak[0]], "g"
        if np.isnan(size):
            size, name = contrast.effect[peak[0]], "difference"
        end = self.about()["ends"][int(size > 0)]
        return f" {lead}: {place}, {end} ({name} {number_text(size)}{evidence})."

    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Return how many survive in each block, if anything is tested."""
        if not self._tested:
            return []
        level = self.contrast.level
        meaning = (
            f"How many {level}s of the block survive: {threshold_title(self._judged[sequence])}."
        )
        return [Metric("survivors", "Survivors", meaning, f"{level}s")]

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """Return the numbers of some blocks."""
        pieces = self._pieces[first:last]
        nothing = [0] * len(pieces)
        ids = list(range(first, first + len(pieces)))
        return {"pieces": pieces, "ids": ids, "generated": nothing, "special": nothing}

    def values(self, sequence: int, metric: str, plane: str) -> NDArray[np.floating[Any]]:
        """Return (block, row) the values of a plane."""
        if plane == TRACKS:
            survives = self._shades[sequence]["survives"]
            kept = sum(self._taken(survives, row).sum(0) for row in self._rows)
            return np.asarray(kept, np.float32)[:, None][:, : int(self._tested)]
        shade = self._shades[sequence][metric]
        if plane == LAYERS:
            rows = [self._strongest(shade, row, metric == "survives") for row in self._rows]
            return np.stack(rows, 1).astype(np.float32)
        return _at(shade, self._places[plane]).T.astype(np.float32)

    def missing(self, sequence: int, metric: str, plane: str) -> NDArray[np.bool_] | None:
        """Return where a block has no such layer, or one that is the same in every prompt.

        What does not vary has a difference (0) and nothing to divide it by: no NaN was measured.
        """
        if plane == TRACKS:
            return None
        if plane == LAYERS:
            absent = np.stack([(each < 0).all(0) for each in self._places.values()], 1)
        else:
            absent = (self._places[plane] < 0).T
        constant = np.isfinite(self.values(sequence, "effect", plane))
        constant &= np.isnan(self.values(sequence, metric, plane))
        found: NDArray[np.bool_] = absent | constant
        return found

    def names(self, plane: str) -> Sequence[str]:
        """Return the names of the rows of a plane; parts are named by the layer with most."""
        if plane in (LAYERS, TRACKS):
            tracks = [each.name for each in self.tracks(0)]
            return self._rows if plane == LAYERS else tracks
        places = self._places[plane]
        longest = places[:, (places >= 0).sum(0).argmax()]
        own = self.contrast.columns[longest].names
        pairs = zip(self.contrast.columns.layer[longest], own, strict=True)
        found = [plane + name[len(layer) :] for layer, name in pairs]
        # Experts that are layers of their own share a row: their parts are numbered.
        unique = len(set(found)) == len(found)
        return found if unique else [f"{plane}[{at}]" for at in range(len(found))]

    def panels(self, sequence: int) -> Sequence[Panel]:
        """Return the table of peaks."""
        contrast = self._judged[sequence]
        size, values = ("F", contrast.f) if contrast.is_f else ("g", contrast.g)
        name, judged = ("q", contrast.q) if _is_corrected(contrast) else ("p", contrast.p)
        rows: list[list[Any]] = []
        for index in contrast.ranked(_PEAKS):
            layer = str(contrast.columns.layer[index])
            row, column = self._cells[layer]
            part = contrast.columns[[index]].names[0][len(layer) :]
            link = {"layer": row, "column": column, "text": row + part}
            if not self._tested:
                rows.append([self._pieces[column], link, number_text(contrast.effect[index])])
                continue
            mark = "●" if contrast.survives[index] else ""
            numbers = number_text(values[index]), probability_text(judged[index])
            rows.append([mark, self._pieces[column], link, *numbers])
        if not self._tested:
            data = {"columns": ["block", contrast.level, "difference"], "rows": rows}
            return (Panel("peaks", "Largest differences, not tested", "table", data),)
        data = {"columns": ["", "block", contrast.level, size, name], "rows": rows}
        count = plural(int(contrast.survives.sum()), contrast.level)
        title = f"Peaks: {count} survive" if contrast.height_control else "Peaks: no threshold"
        return (Panel("peaks", title, "table", data),)

    def panels_at(self, sequence: int, row: str, column: int) -> Sequence[Panel]:
        """Return a panel with everything about one cell."""
        kind, _, part = row.partition("[")
        if kind not in self._places:
            return ()
        places = self._places[kind][:, column]
        if part:
            places = places[[self.names(kind).index(row)]]
        index = self._first(places)
        if index is None:
            return ()
        contrast = self._judged[sequence]
        peak = contrast.row(index)
        pairs = {"n": f"{peak.n_a} and {peak.n_b}" if peak.n_b else str(peak.n_a)}
        if self._tested:
            interval = f"{number_text(peak.ci_low)} to {number_text(peak.ci_high)}"
            pairs[f"{1 - self.contrast.alpha:.0%} interval of g"] = interval
            pairs["F" if contrast.is_f else "t"] = number_text(contrast.statistic[index])
            pairs["degrees of freedom"] = number_text(peak.dof)
        pairs["p"] = probability_text(peak.p) if self._tested else "not tested"
        if self._tested and _is_corrected(contrast):
            pairs["q"] = probability_text(peak.q)
        if self._tested and contrast.height_control is not None:
            pairs["survives"] = "yes" if peak.survives else "no"
        data = {"columns": ["", ""], "rows": [[key, value] for key, value in pairs.items()]}
        return (Panel("cell", contrast.columns[[index]].names[0], "table", data),)

    def health(self, sequence: int) -> Sequence[Health]:
        """Return the notes without which the result misleads, such as that prompts are few."""
        found = [each for each in self.contrast.notes if each.startswith(WARNINGS)]
        return [Health(printable(each), "warn") for each in found]

    # -- cells -------------------------------------------------------------------------------

    def _taken(self, shade: NDArray[np.float64], row: str) -> NDArray[np.float64]:
        return np.nan_to_num(_at(shade, self._places[row]))

    def _first(self, places: NDArray[np.int64]) -> int | None:
        """Return the strongest of some places, in the order of the table of peaks."""
        kept = places[places >= 0]
        return int(kept[self._rank[kept].argmin()]) if len(kept) else None

    def _strongest(
        self, shade: NDArray[np.float64], row: str, is_outline: bool
    ) -> NDArray[np.float64]:
        """Return (block,) the value of the strongest part; an outline, if any part survives."""
        if is_outline:
            return np.asarray(self._taken(shade, row).max(0))
        chosen = [self._first(column) for column in self._places[row].T]
        return np.array([np.nan if at is None else shade[at] for at in chosen])


def _thresholds(contrast: Contrast) -> list[Contrast]:
    """Return the contrast as it is, and judged by other thresholds if anything was tested."""
    if np.isnan(contrast.p).all():
        return [contrast]
    found = [contrast]
    for control, alpha in _OTHERS:
        own = control == contrast.height_control
        if own and (control is None or alpha == contrast.alpha):
            continue
        q, survives = threshold(contrast.p, None, TestOptions(alpha or 0.05, control))
        known = alpha or contrast.alpha
        found.append(replace(contrast, height_control=control, alpha=known, q=q, survives=survives))
    return found


def _is_corrected(contrast: Contrast) -> bool:
    """Return whether q is another number than p."""
    return contrast.height_control not in (None, "fpr")


def _at(shade: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the values at places; nan where there is none."""
    found: NDArray[np.float64] = np.where(places >= 0, shade[places], np.nan)
    return found
