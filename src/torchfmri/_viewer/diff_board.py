"""Two boards as one: the second minus the first, layers aligned by name and columns by position.

`torchfmri.view(before, after)` and `torchfmri view SCAN SCAN2` show it. It takes any two boards
and asks them what a page would ask. Values that only one of them has are missing, never 0: 0 says
that nothing differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._text import plural
from torchfmri._viewer.board import LAYERS, TRACKS, Board, Entry, Health, Metric, Panel
from torchfmri._viewer.change import NAMES, BoardChange, change_sentence, find_change
from torchfmri._viewer.tiles import Table

_MOST_LISTED = 200


class DiffBoard(Board):
    """The difference of two boards: second - first, of sequences at the same place.

    Layers that only one of them has keep their row without values, and are listed.

    Args:
        first: What is subtracted.
        second: What it is subtracted from.
    """

    kind = "diff"

    def __init__(self, first: Board, second: Board) -> None:
        self._pair = (first, second)
        known = dict.fromkeys(first.layers)
        self._names = list(known | dict.fromkeys(second.layers))
        self._both = [name for name in second.layers if name in known]
        self._alone = [sorted(set(self._names).difference(each.layers)) for each in self._pair]
        self.axis = first.axis
        self._entry = "run" if first.kind == second.kind == "run" else "sequence"

    @property
    def id(self) -> str:
        """Both."""
        return " - ".join(each.id for each in reversed(self._pair))

    @property
    def layers(self) -> Sequence[str]:
        """Those of the first, then those that only the second has."""
        return self._names

    @property
    def types(self) -> Sequence[str]:
        """The type of each layer's module."""
        known: dict[str, str] = {}
        for board in reversed(self._pair):
            known |= dict(zip(board.layers, board.types, strict=True))
        return [known[name] for name in self._names]

    @property
    def parts(self) -> Sequence[int]:
        """How many voxels each layer has, where both have the same number."""
        counts = [dict(zip(each.layers, each.parts, strict=True)) for each in self._pair]
        return [
            counts[0].get(name, 0) if counts[0].get(name) == counts[1].get(name) else 0
            for name in self._names
        ]

    def about(self) -> dict[str, Any]:
        """Return what the head of the page says."""
        first, second = (each.about() for each in self._pair)
        same = first["model"] == second["model"]
        before, after = self._titles()
        return {
            "title": f"{after} − {before}",
            "model": first["model"] if same else f"{second['model']} − {first['model']}",
            "notes": [*first["notes"], *second["notes"]],
            "problems": [*first.get("problems", ()), *second.get("problems", ())],
            "python": [first["python"], second["python"]],
            "ends": [f"lower in {after}", f"higher in {after}"],
            "pair": [before, after],
        }

    def _titles(self) -> tuple[str, str]:
        """Return what the two are called; scans that are not saved have the same title."""
        first, second = (str(each.about()["title"]) for each in self._pair)
        return (first, second) if first != second else ("first", "second")

    def entries(self) -> Sequence[Entry]:
        """Return pairs of sequences at the same place."""
        pairs = zip(*(each.entries() for each in self._pair), strict=False)
        return [
            Entry(
                b.name if a.name == b.name else f"{b.name} − {a.name}",
                max(a.columns, b.columns),
                b.condition if a.condition == b.condition else f"{b.condition} − {a.condition}",
            )
            for a, b in pairs
        ]

    def length(self, sequence: int) -> int:
        """Return how many columns the longer one has."""
        return max(each.length(sequence) for each in self._pair)

    def metrics(self, sequence: int) -> Sequence[Metric]:
        """Return the metrics that both have."""
        known = {each.name for each in self._pair[0].metrics(sequence)}
        title = self.about()["title"]
        found = [each for each in self._pair[1].metrics(sequence) if each.name in known]
        return [
            replace(
                each,
                signed=True,
                meaning=f"{title}. {each.meaning}",
                unit=f"difference of {each.unit}",
            )
            for each in found
        ]

    def voxels(self, sequence: int) -> Sequence[str]:
        """Return the metrics that the voxels of both have."""
        first, second = (each.voxels(sequence) for each in self._pair)
        return [each for each in second if each in first]

    def tracks(self, sequence: int) -> Sequence[Metric]:
        """Return the curves of the second, then those of the first beside them."""
        before, after = self._titles()
        known = {each.name for each in self._pair[0].tracks(sequence)}
        second = self._pair[1].tracks(sequence)
        found = [replace(each, meaning=f"{after}. {each.meaning}") for each in second]
        for each in second:
            if each.name in known:
                name, title = f"{before} {each.name}", f"{each.title}, {before}"
                meaning = f"{before}. {each.meaning}"
                beside = replace(each, name=name, title=title, meaning=meaning, beside=each.name)
                found.append(beside)
        return found

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        """Return the texts of the second; both if they differ, with ∅ where one has ended."""
        a, b = (each.columns(sequence, first, last) for each in self._pair)
        count = len(b["pieces"])
        told = {key: [*b[key], *a[key][count:]] for key in b}
        texts = zip_longest(b["pieces"], a["pieces"])
        told["pieces"] = [one if one == other else self._merged(one, other) for one, other in texts]
        return told

    def _merged(self, one: str | None, other: str | None) -> str:
        """Return two texts as one, which `details.ts` and `strip.ts` take apart; no steps."""
        if self.axis != "token" and None in (one, other):
            return one or other or ""
        return f" {' ≠ '.join('∅' if each is None else each.strip(' ') for each in (one, other))} "

    def values(self, sequence: int, metric: str, plane: str) -> Table:
        """Return second - first, (column, row); NaN where one of them has no value."""
        if plane == TRACKS:
            return self._curves(sequence)
        tables = [self._long(each.values(sequence, metric, plane), sequence) for each in self._pair]
        if plane != LAYERS:
            return tables[1] - tables[0]
        result = np.full((self.length(sequence), len(self._names)), np.nan, np.float32)
        pairs = zip(tables, self._pair, strict=True)
        first, second = (table[:, _places(each.layers, self._both)] for table, each in pairs)
        result[:, _places(self._names, self._both)] = second - first
        return result

    def _curves(self, sequence: int) -> Table:
        """Return the curves as `tracks` names them, (column, curve)."""
        tables = [each.values(sequence, TRACKS, TRACKS) for each in self._pair]
        first, second = (self._long(each, sequence) for each in tables)
        names = [each.name for each in self._pair[0].tracks(sequence)]
        beside = [each.beside for each in self.tracks(sequence) if each.beside]
        return np.concatenate([second, first[:, [names.index(name) for name in beside]]], 1)

    def missing(self, sequence: int, metric: str, plane: str) -> NDArray[np.bool_] | None:
        """Return what is not in both."""
        if plane == TRACKS:
            return np.isnan(self.values(sequence, metric, plane))
        names = self.names(plane)
        found = np.zeros((self.length(sequence), len(names)), np.bool_)
        for board in self._pair:
            absent, length = board.missing(sequence, metric, plane), board.length(sequence)
            own = _places(names, board.names(plane))
            found[length:] = True
            if plane == LAYERS:
                found[:, _places(names, set(names).difference(board.layers))] = True
            if absent is not None:
                found[:length, own] |= absent[:length]
        return found if found.any() else None

    def names(self, plane: str) -> Sequence[str]:
        """Return the names of the rows of a plane."""
        return self._names if plane == LAYERS else self._pair[0].names(plane)

    def health(self, sequence: int) -> Sequence[Health]:
        """Return what does not fit together."""
        found = []
        for alone, other in zip(self._alone, reversed(self._titles()), strict=True):
            if alone:
                text = f"{plural(len(alone), 'layer')} only in {other}: grey"
                found.append(Health(text, "warn", alone[0]))
        counts = [len(each.entries()) for each in self._pair]
        if counts[0] != counts[1]:
            more = int(counts[1] > counts[0])
            text = (
                f"Only {min(counts)} of the {plural(max(counts), self._entry)} of "
                f"{self._titles()[more]} can be compared, by their places: "
                f"{self._titles()[1 - more]} has {min(counts)}"
            )
            found.append(Health(text, "warn"))
        same, lengths = self._same(sequence), [each.length(sequence) for each in self._pair]
        if same < min(lengths):
            before, after = self._titles()
            text = (
                f"The {NAMES.get(self.axis, f'{self.axis}s')} differ from {self.axis} {same} on, "
                f"shown as {after} ≠ {before}: values beyond compare positions"
            )
            found.append(Health(text, "warn", None, same))
        elif lengths[0] != lengths[1]:
            text = f"One has {lengths[0]} {self.axis}s, the other {lengths[1]}: the rest is grey"
            found.append(Health(text, "inform", None, min(lengths)))
        return found

    def _same(self, sequence: int) -> int:
        """Return how many columns there are before the first that is not the same in both."""
        a, b = (each.columns(sequence, 0, 1 << 20)["pieces"] for each in self._pair)
        both = min(len(a), len(b))
        return next((at for at in range(both) if a[at] != b[at]), both)

    @property
    def start(self) -> Mapping[str, Any]:
        """The page opens at the largest change, else at the first column that is not the same."""
        change = self._change(0) if self.entries() else None
        if change is None:
            return {}
        found, layers = change
        if found.most is None:
            same = self._same(0)
            parts = same < min(each.length(0) for each in self._pair)
            return {"column": same} if parts else {}
        return {"layer": layers[found.most], "column": found.column}

    def headline(self, sequence: int) -> str:
        """Return how many layers differ, and which most."""
        change = self._change(sequence)
        if change is None:
            return ""
        found, layers = change
        first, second = (each.length(sequence) for each in self._pair)
        return change_sentence(
            found, self._metric(sequence).title.lower(), layers, axis=self.axis,
            same=self._same(sequence), lengths=(first, second),
        )  # fmt: skip

    def _metric(self, sequence: int) -> Metric:
        return next(each for each in self.metrics(sequence) if each.shown)

    def _change(self, sequence: int) -> tuple[BoardChange, list[str]] | None:
        """Return how the first metric differs while the columns are the same, and in which layers.

        Only layers of which it was measured in both count: parameters have no activations.
        None: there are no values.
        """
        if not any(each.shown for each in self.metrics(sequence)):
            return None
        name = self._metric(sequence).name
        end = self._same(sequence) or min(each.length(sequence) for each in self._pair)
        absent = self.missing(sequence, name, LAYERS)
        both = self._both
        if absent is not None:
            known = ~absent[:end, _places(self._names, both)]
            both = [each for each, seen in zip(both, known.T, strict=True) if seen.any()]
        if not both:
            return None
        first, second = (
            np.asarray(board.values(sequence, name, LAYERS))[:end, _places(board.layers, both)]
            for board in self._pair
        )
        kept = None if absent is None else absent[:end, _places(self._names, both)]
        found = find_change(first, second, kept)
        return None if found is None else (found, both)

    def panels(self, sequence: int) -> Sequence[Panel]:
        """Return the layers that are not in both."""
        rows = [
            [name, other]
            for alone, other in zip(self._alone, reversed(self._titles()), strict=True)
            for name in alone[:_MOST_LISTED]
        ]
        if not rows:
            return ()
        data = {"columns": ["layer", "only in"], "rows": rows}
        return (Panel("unmatched", "Layers without a partner", "table", data),)

    def refresh(self) -> bool:
        """Look for what was added to either."""
        return any(each.refresh() for each in self._pair)

    def _long(self, table: Table, sequence: int) -> NDArray[np.floating[Any]]:
        missing = self.length(sequence) - len(table)
        if missing <= 0:
            return table
        rest = np.full((missing, table.shape[1]), np.nan, np.float32)
        return np.concatenate([np.asarray(table, np.float32), rest])


def _places(names: Sequence[str], wanted: Iterable[str]) -> list[int]:
    """Return where each of the wanted names stands among the names."""
    place = {name: at for at, name in enumerate(names)}
    return [place[each] for each in wanted]
