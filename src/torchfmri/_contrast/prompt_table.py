"""The table that is compared: one row per prompt, one column per layer, voxel, unit or feature.

`_scan/prompts` makes a `PromptTable`, and everything in this room reads it; the tests of this room
make tables without any scan. nan marks a prompt without a value. `vectors` is a function and not an
array: mean vectors are large, and few contrasts need them. Fields may be added with a default; nan
must stay the only mark of a missing value, because every test counts prompts by it. The size of a
block may change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

VectorReader = Callable[[Mapping[int, int], int], Mapping[str, NDArray[np.float64]]]
"""From {place of a prompt: its group} and the number of groups to {layer: (k, w)}, the means of the
prompts' mean vectors; it raises if there are none."""
MEASURED = ("metric", "level", "tokens", "model", "columns")
"""What a contrast says of what was measured, as its table or its linear model has it."""
BLOCK_BYTES = 32 << 20
"""How much of a table is worked on at once."""


@dataclass(frozen=True, eq=False)
class PromptColumns:
    """The meaning of the columns of a table.

    Attributes:
        layer: (v,) the layer's name.
        module: (v,) the type of its module.
        kind: (v,) "layer", "units", "head", "expert", "unit" or "feature".
        start: (v,) its first unit; the number of a feature; 0 for a layer.
        count: (v,) how many units it has; 0 for a layer.
        label: (v,) the user's text for a feature, "" where there is none; None without features.
    """

    layer: NDArray[Any]
    module: NDArray[Any]
    kind: NDArray[Any]
    start: NDArray[np.int64]
    count: NDArray[np.int64]
    label: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.layer)

    def __getitem__(self, where: Any) -> PromptColumns:
        chosen = {name: each[where] for name, each in vars(self).items() if each is not None}
        return PromptColumns(**chosen)

    @property
    def head(self) -> NDArray[np.int64]:
        """(v,) the number of the head (of the expert), -1 for what is neither."""
        heads = np.where(self.kind == "head", self.start // np.maximum(self.count, 1), -1)
        found: NDArray[np.int64] = np.where(self.kind == "expert", self.start, heads)
        return found

    @property
    def names(self) -> list[str]:
        """The column names: "mlp", "mlp[0:64]", "q_proj[head 3]", "mlp[17]", "L2[feature 5]"."""
        parts = zip(self.layer, self.kind, self.head, self.start, self.count, strict=True)
        return [_name(*part) for part in parts]

    @property
    def titles(self) -> list[str]:
        """The names, with the labels of features after them: "L2[feature 5] capital cities"."""
        labels = [""] * len(self) if self.label is None else self.label
        return [f"{name} {label}".rstrip() for name, label in zip(self.names, labels, strict=True)]


def _name(layer: str, kind: str, head: int, start: int, count: int) -> str:
    if kind == "layer":
        return layer
    if kind in ("head", "expert", "feature"):
        return f"{layer}[{kind} {start if kind == 'feature' else head}]"
    return f"{layer}[{start}]" if kind == "unit" else f"{layer}[{start}:{start + count}]"


@dataclass(eq=False)
class PromptTable:
    """The values of prompts, and what is known of each.

    Attributes:
        names: (n,) what each prompt is called.
        groups: (n,) the condition of each.
        pairs: (n,) what prompts of different conditions belong together by, None for a prompt that
            has no pair; or None.
        values: (n, v) the mean over the chosen tokens; nan where there is none.
        columns: What was measured.
        counts: (n,) how many tokens were chosen.
        metric: What the values are.
        level: "layer", "voxel", "head", "unit" or "feature".
        tokens: Which tokens count, in words.
        model: Whose values they are.
        places: (n,) where each prompt stands in its scans.
        vectors: Reads the mean vectors of prompts, if there are any.
        notes: What has to be known.
        scans: The names of the folders that the prompts are from.
        texts: (n,) the text of each, or its hash: what tells copies from prompts that happen to
            have the same values. Empty where it is not known.
    """

    names: Sequence[str]
    groups: NDArray[Any]
    pairs: NDArray[Any] | None
    values: NDArray[np.floating[Any]]
    columns: PromptColumns
    counts: NDArray[np.int64]
    metric: str
    level: str
    tokens: str
    model: str = ""
    places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    vectors: VectorReader | None = None
    notes: list[str] = field(default_factory=list)
    scans: tuple[str, ...] = ()
    texts: Sequence[Any] = ()

    def rows(self, where: NDArray[Any]) -> PromptTable:
        """Return the table of some prompts."""
        return replace(
            self,
            names=[self.names[row] for row in where],
            groups=self.groups[where],
            pairs=None if self.pairs is None else self.pairs[where],
            values=self.values[where],
            counts=self.counts[where],
            places=self.places[where] if len(self.places) else self.places,
            notes=list(self.notes),
            texts=[self.texts[row] for row in where] if len(self.texts) else self.texts,
        )


def blocks(values: NDArray[Any], rows: int = 0) -> Iterator[slice]:
    """Yield slices of columns whose values take about BLOCK_BYTES as float64.

    Args:
        values: (n, v).
        rows: How many rows the work makes of them, if more than n.
    """
    step = max(1, BLOCK_BYTES // (8 * max(len(values), rows, 1)))
    for first in range(0, values.shape[1], step):
        yield slice(first, min(first + step, values.shape[1]))
