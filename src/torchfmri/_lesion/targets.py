"""What is lesioned, one after the other: heads, MLPs, blocks, voxels, or places of one's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from torchfmri._arguments import require
from torchfmri._model import Place, named_layers, places_of, width_in
from torchfmri._tokens import VOXEL
from torchfmri.exceptions import InspectionError

KINDS: Mapping[str, str] = {
    "heads": "L*H*",
    "mlps": "L*.mlp",
    "attentions": "L*.attn",
    "blocks": "L*",
    "voxels": "blocks.*.mlp.hook_post",
}
"""Words for what is lesioned -> the places that they mean."""


@dataclass(frozen=True)
class Target:
    """One lesion.

    Attributes:
        place: Where.
        kind: "heads", "mlps", "attentions", "blocks", "voxels" or "places".
        column: Its column in a map: the head, the voxel, or 0.
    """

    place: Place
    kind: str
    column: int


def find_targets(model: nn.Module, of: str | Sequence[str]) -> list[Target]:
    """The lesions that words or names of places mean, block after block.

    Raises:
        LayerNotFoundError: A place matches no layer.
        InspectionError: A word means nothing in this model, or a place cannot be edited.
    """
    several = [of] if isinstance(of, str) else list(of) if isinstance(of, Sequence) else []
    known = ", ".join(map(repr, KINDS))
    meaning = f"give one or several of {known}, or names of places such as 'L3H*'"
    require(bool(several) and all(isinstance(each, str) for each in several), "of", of, meaning)
    layers = named_layers(model)
    found: dict[str, Target] = {}
    for word in several:
        kind = word if word in KINDS else "places"
        for place in places_of(layers, KINDS.get(word, word)):
            if place.read_only:
                raise InspectionError(f"{place.name!r} cannot be lesioned: {place.read_only}.")
            for each in _targets(layers, place, kind):
                found.setdefault(each.place.name, each)
    return sorted(found.values(), key=lambda each: each.place.block or 0)


def _targets(layers: Mapping[str, nn.Module], place: Place, kind: str) -> list[Target]:
    if kind != "voxels":
        return [Target(place, kind, place.head or 0)]
    width = width_in(layers[place.layer])
    if width is None:
        raise InspectionError(
            f"How many units the input of {place.layer!r} has is not known: its voxels cannot be "
            "told apart. Lesion 'mlps', or name places."
        )
    return [
        Target(
            replace(
                place,
                name=f"L{place.block}.mlp.v{number}",
                units=((first, min(first + VOXEL, width)),),
            ),
            kind,
            number,
        )
        for number, first in enumerate(range(0, width, VOXEL))
    ]
