"""Group the rows of a picture into bands, and choose the labels beside them.

`figures` calls these functions for every picture of a scan; nothing is computed or drawn here.
Order, grouping and labels may change freely, as long as each row is in exactly one band: the rows
of a band are places in the table of values that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchfmri._scan.record.blocks import block_of, depth_of, kinds_of
from torchfmri._text import star
from torchfmri.visualization import Band

_FEW = 24
"""Up to so many layers are named one by one."""


def in_order(names: Sequence[str], columns: Sequence[int], order: str) -> list[int]:
    """Return the columns as they are drawn: in model order, or layers of one kind together."""
    if order == "depth":
        return list(columns)
    kinds: dict[str, list[int]] = {}
    for column in columns:
        kinds.setdefault(star(names[column]), []).append(column)
    return [column for members in kinds.values() for column in members]


def layer_bands(layers: Sequence[str], order: str) -> list[Band]:
    """Layers as bands: few of them one by one, else by kind or by block."""
    short = without_prefix(layers)
    if len(layers) <= _FEW:
        return [Band(short[layer], [row]) for row, layer in enumerate(layers)]
    if order == "depth":
        return _block_bands(layers, short)
    bands = []
    for rows in kinds_of(layers).values():
        if len(rows) == 1:
            bands.append(Band(short[layers[rows[0]]], rows))
        else:
            label = star(short[layers[rows[0]]])
            bands.append(Band(label, rows, _depth_marks([layers[row] for row in rows])))
    return bands


def _block_bands(layers: Sequence[str], short: dict[str, str]) -> list[Band]:
    """Return one band for the layers of a block that follow each other; in model order."""
    found: list[tuple[str, list[int]]] = []
    for row, layer in enumerate(layers):
        block = block_of(layer)
        if block and found and found[-1][0] == block:
            found[-1][1].append(row)
        else:
            found.append((block, [row]))
    return [
        Band(short.get(block, block) if len(rows) > 1 else short[layers[rows[0]]], rows)
        for block, rows in found
    ]


def voxel_bands(owners: Sequence[str]) -> list[Band]:
    """Return one band for the voxels of each layer.

    Args:
        owners: The layer of each row.
    """
    short = without_prefix(list(dict.fromkeys(owners)))
    rows: dict[str, list[int]] = {}
    for row, owner in enumerate(owners):
        rows.setdefault(owner, []).append(row)
    return [Band(short[owner], members) for owner, members in rows.items()]


def _depth_marks(layers: Sequence[str]) -> list[tuple[int, str]]:
    """Return some of the depths to write beside the rows: the first, and then in round steps."""
    depths = [depth_of(layer) for layer in layers]
    if len(set(depths)) < len(depths):  # several rows per block: numbers would mislead
        return [(0, "")]
    step = next((each for each in (1, 2, 5, 10, 20, 50, 100, 200) if len(depths) <= 6 * each), 500)
    return [
        (row, str(depth))
        for row, depth in enumerate(depths)
        if depth is not None and not depth % step
    ]


def without_prefix(layers: Sequence[str]) -> dict[str, str]:
    """Return layer -> its name without the first segment that (nearly) all of them share."""
    first = [layer.partition(".")[0] for layer in layers if "." in layer]
    prefix = f"{first[0]}." if first and len(set(first)) == 1 else ""
    short = {layer: layer.removeprefix(prefix) for layer in layers}
    clear = len(set(short.values())) == len(short) and not any(
        name.partition(".")[0].isdigit() for name in short.values()
    )
    return short if clear else {layer: layer for layer in layers}
