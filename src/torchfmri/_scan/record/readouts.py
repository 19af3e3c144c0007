"""The names of readouts: what was read out of a model beside its activations.

A readout is a tensor (s, columns) of a sequence. Its name is that of a layer, `@`, and what it is:
`model.layers.3.self_attn@attention_entropy` has one column per head. `run/readouts` writes them,
`pictures` and `prompts` read them. The names stand in stored scans and must not change; names of
layers have no `@`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._model import (
    check_names,
    match_names,
    names_in_block,
    nearest_names,
    parse_place,
)
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri.exceptions import InspectionError, LayerNotFoundError

PATTERN = "attention"
"""The readout that has a column for each head and key, so another width in every sequence."""
LENS = "lens"
"""Stands for the layer of a lens, which is of all layers."""
LENS_PARTS = ("rank", "probability", "entropy", "top", "top_probability")


def readout_name(layer: str, what: str) -> str:
    """Return the name of a readout among the tensors of a sequence."""
    return f"{layer}@{what}"


def find_readouts(sequence: ScannedSequence, what: str) -> dict[str, NDArray[Any]]:
    """Return layer -> the readout of this kind, in the order in which the model ran."""
    found = {}
    for name, values in sequence.tensors.items():
        layer, separator, kind = name.rpartition("@")
        if separator and kind == what:
            found[layer] = values
    return dict(sorted(found.items(), key=lambda each: _order(each[0])))


def _order(layer: str) -> tuple[Any, ...]:
    """Return a key that sorts numbers in names as numbers: files list names by alphabet."""
    return tuple(
        (0, int(each), "") if each.isdigit() else (1, 0, each) for each in layer.split(".")
    )


def choose_readouts(
    sequence: ScannedSequence, what: str, pattern: str | Sequence[str], advice: str
) -> dict[str, NDArray[Any]]:
    """Return the readouts of the layers that match.

    Raises:
        LayerNotFoundError: None does.
        InspectionError: There are none of this kind; `advice` says how to get them.
    """
    found = find_readouts(sequence, what)
    if not found:
        raise InspectionError(f"This scan has no {what.replace('_', ' ')}. {advice}")
    chosen: set[str] = set()
    for each in check_names(pattern):
        matching = match_names(each, list(found)) or _in_block(each, list(found))
        if not matching:
            raise LayerNotFoundError(each, nearest_names(each, list(found)), len(found), "scan")
        chosen.update(matching)
    return {layer: values for layer, values in found.items() if layer in chosen}


def _in_block(name: str, layers: Sequence[str]) -> list[str]:
    """Return the layers that a name such as `L2.attn` means among those of one kind of readout.

    The model is gone, so that the number of the block has to tell: of the layers that compute
    attention, those in that block.

    Raises:
        InspectionError: It names a head, and readouts have all heads of a layer.
    """
    place = parse_place(name)
    if place is None:
        return []
    if place.head is not None:
        raise InspectionError(
            f"{name!r} names a head, and a scan has all heads of a layer together. Name the layer, "
            f"'L{place.block}.attn', and read head {place.head} of it."
        )
    return names_in_block(layers, place)


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts that a router chose for the tokens of a sequence.

    Attributes:
        layer: The router.
        ids: (s, k) the experts that were chosen.
        weights: (s, k) what their outputs are multiplied with.
        entropy: (s,) of softmax(router logits) over all experts, in nats.
    """

    layer: str
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    entropy: NDArray[np.float32]

    def load(self, experts: int | None = None) -> NDArray[np.int64]:
        """Return how many tokens each expert got.

        Args:
            experts: How many there are; as many as were seen by default.
        """
        return np.bincount(self.ids.reshape(-1), minlength=experts or 0)
