"""Choices that differ: tokens that a router sends to other experts.

Two scores that are nearly equal change places by rounding. The experts of that token are others
then, and what follows differs by far more than noise.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchfmri._compare.difference import Kind
from torchfmri._compare.recording import FORWARD, Recording


def routing_kind(
    a: Recording, b: Recording, names: Mapping[str, str], before: str | None
) -> Kind | None:
    """Return the kind `routing` if a layer chose other experts for some tokens, else None.

    Args:
        a: One side.
        b: The other.
        names: Layer of a -> layer of b.
        before: The first layer that differs: later choices follow from that. None if the whole
            forward pass agrees.
    """
    theirs, order = b.choices(), a.layers
    end = len(order) if before is None else order.index(before)
    for (layer, call, path), ours in a.choices().items():
        partner = names.get(layer, layer)
        other = theirs.get((partner, call, path))
        if layer not in order[:end] or other is None or other.shape != ours.shape:
            continue
        moved = (ours.sort(1).values != other.sort(1).values).any(1)
        if moved.any():
            count = f"{int(moved.sum())} of {len(ours)} tokens"
            if _are_highest(a, layer, call, ours[moved], moved) and _are_highest(
                b, partner, call, other[moved], moved
            ):
                text = (
                    f"rounding sends {count} to other experts: the scores of {layer!r} agree "
                    "within noise, and those that change places are nearly equal"
                )
            else:
                text = f"{layer!r} chose other whole numbers for {count}, such as other experts"
            return Kind("routing", text)
    return None


def _are_highest(side: Recording, layer: str, call: int, chosen: Tensor, rows: Tensor) -> bool:
    """Whether the numbers chosen are the places of the highest scores that the layer returned.

    If they are on both sides, and the scores agree within noise, then noise is what tells them
    apart. A bias that is added only to choose, or a choice by groups, is not told from a mistake.
    """
    places = [each for each in side.places(FORWARD) if (each.layer, each.call) == (layer, call)]
    for place in places:
        table = side.rows(place)
        if table is None or len(table.values) != len(rows):
            continue
        scores, index = table.values[rows], chosen.long()
        if scores.shape[1] <= max(index.shape[1], int(index.max())) or int(index.min()) < 0:
            continue
        rest = scores.scatter(1, index, float("-inf"))
        if bool((scores.gather(1, index).amin(1) >= rest.amax(1)).all()):
            return True
    return False
