"""Read one sequence of a scan: its values by layer or voxel, chosen by name.

Tables, pictures, contrasts and the command line all read values through `Reading`, so that a name
such as `L3.mlp` and a metric such as "delta_sc" mean the same everywhere. Values come as they were
measured; `whole` and `counted` hold the two rules that summaries need: a block's learning cost is
that of everything inside it, and only tokens that the loss reaches count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._model import check_names, match_names, not_found, stored_layers
from torchfmri._scan.record.anatomy import KINDS, Anatomy
from torchfmri._scan.record.blocks import inside_of, kinds_of
from torchfmri._scan.record.delta_sc import delta_between_layers, delta_within_layers
from torchfmri._scan.record.sequence import METRICS, STATISTICS, ScannedSequence
from torchfmri.exceptions import InspectionError

DELTA = "delta_sc"
BY = ("layer", "voxel")
FROM_LOSS = ("gradient", "learning_cost")
"""The metrics that are zero wherever the loss does not depend on a layer."""
OWN_LOSS, ALL_TOKENS = "your own loss", "all tokens"
"""How `meta["loss"]` begins for a user's loss, and what it says of one over every token."""
_ADVICE = {
    "activation": "",
    "gradient": " Gradients are measured with per='position', 'cached' or 'token_loss'.",
    "learning_cost": " It is measured with per='position', 'cached' or 'token_loss'.",
}


class Values(NamedTuple):
    """Values with the names of their columns.

    Attributes:
        names: One per column: layers, or voxels such as "layers.0.mlp[64:128]".
        values: (s, name)
    """

    names: tuple[str, ...]
    values: NDArray[np.floating]


def matching_layers(
    pattern: str | Sequence[str], layers: Sequence[str], meta: Mapping[str, Any]
) -> list[str]:
    """Return the layers of a scan, in order, that match a pattern or are places such as `L3.mlp`.

    Raises:
        LayerNotFoundError: None does.
        InspectionError: It is a place that the scan does not hold as a layer.
    """
    chosen: set[str] = set()
    for each in check_names(pattern):
        found = match_names(each, layers) or stored_layers(each, layers, meta.get("places"))
        if not found:
            raise not_found(each, layers, "scan.layers")
        chosen.update(found)
    return [each for each in layers if each in chosen]


def only_layer(name: str, anatomy: Anatomy, meta: Mapping[str, Any]) -> str:
    """Return the one layer of a scan that a name, or a place such as `L3.mlp`, stands for.

    Raises:
        LayerNotFoundError: There is no such layer in the scan.
        InspectionError: It stands for several.
    """
    if name in anatomy.index:
        return name
    found = stored_layers(name, anatomy.layers, meta.get("places"))
    if len(found) > 1:
        raise InspectionError(f"{name!r} stands for {len(found)} layers: name one of them.")
    if not found:
        raise not_found(name, anatomy.layers, "scan.layers")
    return found[0]


@dataclass(frozen=True, eq=False)
class Reading:
    """One sequence of a scan, with the names of what was measured.

    Attributes:
        anatomy: The layers and voxels.
        sequence: What was measured.
        meta: How.
    """

    anatomy: Anatomy
    sequence: ScannedSequence
    meta: Mapping[str, Any]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that can be read per layer."""
        return metrics_of(self.sequence, "layer")

    def columns(self, pattern: str | Sequence[str]) -> list[int]:
        """Return the layers whose names match one of the patterns.

        Raises:
            LayerNotFoundError: None does.
        """
        chosen = matching_layers(pattern, self.anatomy.layers, self.meta)
        return [self.anatomy.index[each] for each in chosen]

    def table(self, metric: str, by: str) -> NDArray[np.floating]:
        """Return the values of all layers (s, layer), or of all voxels (s, voxel).

        Raises:
            InspectionError: There is no such metric in the scan.
        """
        if by not in BY:
            raise InspectionError(f"by={by!r} is neither 'layer' nor 'voxel'. Choose one.")
        tables = self.sequence.layers if by == "layer" else self.sequence.voxels
        if metric == DELTA:
            parts = self.table("activation", by), self.table("gradient", by)
            if by == "layer":
                return delta_between_layers(*parts, kinds_of(self.anatomy.layers).values())
            return delta_within_layers(*parts, self.anatomy.layer)
        if metric in tables:
            return tables[metric]
        has = ", ".join(metrics_of(self.sequence, by)) or "nothing"
        if metric not in METRICS:
            raise InspectionError(f"There is no metric {metric!r}: this scan has {has} per {by}.")
        raise InspectionError(f"This scan has no {metric} per {by}: it has {has}.{_ADVICE[metric]}")

    def values(self, metric: str, by: str, pattern: str | Sequence[str]) -> Values:
        """Return the values of the layers that match, or of their voxels."""
        table, columns = self.table(metric, by), self.columns(pattern)
        if by == "layer":
            return Values(
                tuple(self.anatomy.layers[column] for column in columns), table[:, columns]
            )
        voxels = np.flatnonzero(np.isin(self.anatomy.layer, columns)).tolist()
        return Values(tuple(voxel_name(self.anatomy, voxel) for voxel in voxels), table[:, voxels])

    def whole(self, metric: str) -> NDArray[np.floating]:
        """Return (s, layer); the learning cost of a layer is that of everything inside it.

        Norms of different parameters add up as squares, so that a block gets a learning cost too.
        A parameter that two layers share counts for both.
        """
        table = self.table(metric, "layer")
        if metric != "learning_cost":
            return table
        result = np.full(table.shape, np.nan)
        for column, members in enumerate(inside_of(self.anatomy.layers)):
            parts = table[:, members].astype(np.float64)
            known = ~np.isnan(parts)
            total = np.sqrt(np.where(known, parts * parts, 0.0).sum(1))
            result[:, column] = np.where(known.any(1), total, np.nan)
        return result

    def counted(self, metric: str, values: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return (s, layer) whether a value of a metric counts in a summary over tokens.

        All that are finite. Of a gradient or a learning cost, only those at positions that the loss
        reaches in that layer: where the loss is computed, or where the value is not zero. (The
        output of the head matters nowhere but where the loss is computed.) Where a layer has no
        such position, all of them: then zero is what was measured.

        Args:
            metric: What the values are.
            values: (s, layer), as `table` or `whole` gives them.
        """
        finite: NDArray[np.bool_] = np.isfinite(values)
        if metric not in FROM_LOSS:
            return finite
        reached = finite & (self._has_loss()[:, None] | (values != 0))
        kept: NDArray[np.bool_] = np.where(reached.any(0), reached, finite)
        return kept

    def _has_loss(self) -> NDArray[np.bool_]:
        """Return (s,): whether the loss is computed there; of a user's own loss it is not known."""
        loss = str(self.meta.get("loss") or "")
        if loss.startswith(OWN_LOSS):
            return np.zeros(len(self.sequence), dtype=bool)
        if ALL_TOKENS in loss:
            return np.ones(len(self.sequence), dtype=bool)
        return np.append(self.sequence.tokens.generated[1:], False)  # t predicts token t + 1

    def medians(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return (layer,) the median of a metric over the tokens that count, and their number."""
        values = self.table(metric, "layer")
        kept = self.counted(metric, values)
        return quantile(values, kept, 0.5), kept.sum(0)


def quantile(
    values: NDArray[np.floating], kept: NDArray[np.bool_], q: float
) -> NDArray[np.float64]:
    """Return (layer,) a quantile of each column's values that are kept; nan where there is none."""
    pairs = zip(values.T, kept.T, strict=True)
    return np.array([np.quantile(v[k], q) if k.any() else np.nan for v, k in pairs], np.float64)


def span_text(counts: NDArray[np.integer]) -> str:
    """Return how many tokens several layers have, those without any left out: "8", or "8 to 17"."""
    known = sorted(set(counts[counts > 0].tolist()))
    return " to ".join(f"{each:,}" for each in dict.fromkeys(known[:1] + known[-1:])) or "-"


def metrics_of(sequence: ScannedSequence, by: str) -> tuple[str, ...]:
    """Return what can be read of a sequence, delta_sc included."""
    tables = sequence.layers if by == "layer" else sequence.voxels
    stored = tuple(metric for metric in METRICS if metric in tables)
    return (*stored, DELTA) if {"activation", "gradient"} <= set(stored) else stored


def voxel_name(anatomy: Anatomy, voxel: int) -> str:
    """Return what a voxel is called: its layer, and which head, expert or units of it.

    Examples:
        >>> anatomy = Anatomy.of_widths(["q", "mlp"], ["Linear"] * 2, [128, 100], [64, 64],
        ...                             ["head", "units"])
        >>> [voxel_name(anatomy, voxel) for voxel in range(4)]
        ['q[head 0]', 'q[head 1]', 'mlp[0:64]', 'mlp[64:100]']
    """
    layer = int(anatomy.layer[voxel])
    start, count = int(anatomy.start[voxel]), int(anatomy.count[voxel])
    kind = KINDS[int(anatomy.kind[voxel])]
    if kind == "units":
        return f"{anatomy.layers[layer]}[{start}:{start + count}]"
    number = start if kind == "expert" else start // _head_size(anatomy, layer)
    return f"{anatomy.layers[layer]}[{kind} {number}]"


def _head_size(anatomy: Anatomy, layer: int) -> int:
    """Return how many units a head of the layer has: as many as its first voxel."""
    return int(anatomy.count[np.searchsorted(anatomy.layer, layer)])


def merged_statistics(
    sequences: Sequence[ScannedSequence], column: int
) -> dict[str, dict[str, float]]:
    """Return what was watched -> the statistics of one layer over several sequences.

    Mean and standard deviation (that of the population) are of the finite values.
    """
    found: dict[str, list[NDArray[np.float64]]] = {}
    for sequence in sequences:
        for what, table in sequence.statistics.items():
            found.setdefault(what, []).append(table[column])
    return {what: _merge(np.stack(rows)) for what, rows in found.items()}


def _merge(rows: NDArray[np.float64]) -> dict[str, float]:
    """Return the statistics of all together, from rows (sequence, STATISTICS).

    `Statistics.merge` does this for tensors. Rows read from a file may hold anything, also NaN for
    a count, so nothing here becomes a whole number.
    """
    part = {name: rows[:, index] for index, name in enumerate(STATISTICS)}
    finite = part["count"] - part["nan"] - part["inf"]
    used = finite > 0
    whole = {name: float(part[name].sum()) for name in ("count", "nan", "inf", "zero")}
    total = float(finite[used].sum())
    if not total:
        return {name: whole.get(name, np.nan) for name in STATISTICS}
    weight = finite[used] / total
    mean = float((weight * part["mean"][used]).sum())
    spread = part["std"][used] ** 2 + (part["mean"][used] - mean) ** 2
    whole["mean"], whole["std"] = mean, float(np.sqrt((weight * spread).sum()))
    whole["min"], whole["max"] = float(part["min"][used].min()), float(part["max"][used].max())
    return {name: whole[name] for name in STATISTICS}
