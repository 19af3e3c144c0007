"""What is lesioned, one after the other: heads, MLPs, blocks, voxels, features, or places.

`lesion` and `patch` ask `find_targets`. A new kind is an entry of `KINDS`, a word with the places
that it means. The order is that of the blocks, and names are unique: maps, files and pictures find
lesions by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from torchfmri._arguments import require
from torchfmri._edit import Edit
from torchfmri._lens import FeatureSource, feature_name, find_sources
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
FEATURES = "features"
_FEATURE = re.compile(r"(?P<place>.+)\[feature (?P<number>\d+)\]")


@dataclass(frozen=True)
class LesionTarget:
    """One lesion.

    Attributes:
        place: Where.
        kind: "heads", "mlps", "attentions", "blocks", "voxels", "features" or "places".
        column: Its column in a map: the head, the voxel, the place of a feature in the list, or 0.
        feature: The feature that is taken out of the value; None for the value itself.
        source: The dictionary that the feature is of; None without.
    """

    place: Place
    kind: str
    column: int
    feature: int | None = None
    source: FeatureSource | None = None


def find_targets(model: nn.Module, of: str | Sequence[str]) -> list[LesionTarget]:
    """Return the lesions that words or names of places mean, block after block.

    Raises:
        LayerNotFoundError: A place matches no layer.
        InspectionError: A word means nothing in this model, or a place cannot be edited.
    """
    several = [of] if isinstance(of, str) else list(of) if isinstance(of, Sequence) else []
    known = ", ".join(map(repr, KINDS))
    meaning = f"give one or several of {known}, or names of places such as 'L3H*'"
    require(bool(several) and all(isinstance(each, str) for each in several), "of", of, meaning)
    layers = named_layers(model)
    found: dict[str, LesionTarget] = {}
    for word in several:
        kind = word if word in KINDS else "places"
        for place in places_of(layers, KINDS.get(word, word)):
            if place.read_only:
                raise InspectionError(f"{place.name!r} cannot be lesioned: {place.read_only}.")
            for each in _targets(layers, place, kind):
                found.setdefault(each.place.name, each)
    return sorted(found.values(), key=lambda each: each.place.block or 0)


def _targets(layers: Mapping[str, nn.Module], place: Place, kind: str) -> list[LesionTarget]:
    if kind != "voxels":
        return [LesionTarget(place, kind, place.head or 0)]
    width = width_in(layers[place.layer])
    if width is None:
        raise InspectionError(
            f"How many units the input of {place.layer!r} has is not known: its voxels cannot be "
            "told apart. Lesion 'mlps', or name places."
        )
    spans = [(first, min(first + VOXEL, width)) for first in range(0, width, VOXEL)]
    names = [f"L{place.block}.mlp.v{number}" for number in range(len(spans))]
    return [
        LesionTarget(replace(place, name=names[number], units=(span,)), kind, number)
        for number, span in enumerate(spans)
    ]


class FeatureChoice(NamedTuple):
    """Which features are lesioned.

    Attributes:
        sources: The dictionaries, by the names of their places.
        named: Place -> features that were named one by one.
        is_open: Whether those are meant too that are on at the prompts.
    """

    sources: Mapping[str, FeatureSource]
    named: Mapping[str, list[int]]
    is_open: bool

    def targets(self, active: Mapping[str, Sequence[int]]) -> list[LesionTarget]:
        """Return one lesion for each feature.

        Args:
            active: Place -> the features that are on at any token of the prompts.

        Raises:
            InspectionError: No feature is on.
        """
        found = []
        for place, source in self.sources.items():
            several = {*self.named.get(place, ()), *(active[place] if self.is_open else ())}
            where = replace(source.place, heads=None)  # dictionaries take heads side by side
            found += [
                LesionTarget(
                    place=replace(where, name=feature_name(place, feature)),
                    kind=FEATURES,
                    column=number,
                    feature=feature,
                    source=source,
                )
                for number, feature in enumerate(sorted(several))
            ]
        if self.is_open and not found:
            raise InspectionError(
                f"No feature of {', '.join(map(repr, self.sources))} is on at any token of the "
                "prompts, so there is none to lesion."
            )
        return found


def split_features(
    model: nn.Module, of: str | Sequence[str], features: object
) -> tuple[list[str], FeatureChoice | None]:
    """Return what else is lesioned, and which features.

    Raises:
        LayerNotFoundError: A dictionary is of no layer of the model.
        InspectionError: Features are named without a dictionary, or the other way round; or a
            dictionary cannot be lesioned.
    """
    several = [of] if isinstance(of, str) else list(of) if isinstance(of, Sequence) else [of]
    words = [each for each in several if isinstance(each, str)]
    matches = {each: _FEATURE.fullmatch(each) for each in words}
    chosen = [each for each in words if each == FEATURES or matches[each]]
    if not chosen and features is None:
        return several, None
    if features is None:
        raise InspectionError(
            f"of={of!r} names features, and no dictionary makes them: give features={{'L2': sae}}."
        )
    if not chosen:
        raise InspectionError(
            f"features= is given, and of={of!r} lesions none of them: write of='features' for all "
            "that are on at the prompts, or name some, such as of=['L2[feature 17]']."
        )
    sources = {each.name: each for each in find_sources(model, features)}
    for name, source in sources.items():
        if source.place.read_only:
            raise InspectionError(f"{name!r} cannot be lesioned: {source.place.read_only}.")
        Edit.without_features(source.dictionary, [0])  # refuses what cannot decode
    named: dict[str, list[int]] = {}
    for each in chosen:
        match = matches[each]
        if match is None:
            continue
        if match["place"] not in sources:
            known = ", ".join(map(repr, sources))
            raise InspectionError(f"{each!r}: there is a dictionary at {known}, none of that name.")
        named.setdefault(match["place"], []).append(int(match["number"]))
    rest = [each for each in several if each not in chosen]
    return rest, FeatureChoice(sources=sources, named=named, is_open=FEATURES in chosen)
