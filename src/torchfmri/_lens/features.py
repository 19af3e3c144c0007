"""Features of a dictionary (a sparse autoencoder, or any function) at one place of a model.

`_scan` opens a `FeatureReader`, `_lesion` asks for the sources. The dictionary is the user's: its
errors are raised with the place and the shapes. A feature of 0 or less is silent and is stored as
id -1 and value 0, which stored scans rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchfmri._arguments import require
from torchfmri._model import Place, named_layers, places_of
from torchfmri._torch import Attached, Hook, flatten, hook_side
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True, eq=False)
class FeatureSource:
    """Where features are read, and what makes them.

    Attributes:
        name: What the user called the place.
        place: The layer, whether its input or output is meant, and which units.
        encode: Activations (b, s, w) -> features (b, s, f), where 0 means that one is silent.
        dictionary: What the user gave: an object with `encode`, or the function itself.
    """

    name: str
    place: Place
    encode: Callable[[Tensor], Tensor]
    dictionary: Any

    def features(self, values: Tensor) -> Tensor:
        """Return the features that the dictionary makes of activations.

        Raises:
            InspectionError: The dictionary fails, usually because it was made for another width.
        """
        try:
            return self.encode(values)
        except RuntimeError as error:
            raise InspectionError(
                f"The encoder at {self.name!r} failed on values {tuple(values.shape)} of layer "
                f"{self.place.layer!r}: {error}"
            ) from error


def find_sources(model: nn.Module, features: object) -> list[FeatureSource]:
    """Return the dictionaries that the user gave, with their places in the model.

    Args:
        model: The model.
        features: {place: encoder}; or one encoder that knows its place (SAELens:
            `sae.cfg.hook_name`, or `sae.cfg.metadata.hook_name`). An encoder is an object with
            `encode`, or a function.

    Raises:
        LayerNotFoundError: A place is not in the model.
        InspectionError: Something is not an encoder, or stands for several places.
    """
    given = features if isinstance(features, Mapping) else {_own_place(features): features}
    layers = named_layers(model)
    found = []
    for name, encoder in given.items():
        encode = getattr(encoder, "encode", encoder)
        if not isinstance(name, str) or not callable(encode):
            raise InspectionError(
                f"features={{{name!r}: {type(encoder).__name__}}}: give the name of a layer and an "
                "object with encode(activations), or a function of activations."
            )
        places = places_of(layers, name)
        if len(places) != 1:
            shown = ", ".join(each.layer for each in places[:3])
            raise InspectionError(
                f"features: {name!r} stands for {len(places)} places ({shown}, ...), and an "
                "encoder belongs to one. Name one of them."
            )
        if places[0].what == "attention":
            raise InspectionError(
                f"features: {name!r} is an attention pattern, not an activation. Name a layer, "
                "such as 'L3.attn' or 'L3.mlp'."
            )
        found.append(FeatureSource(name=name, place=places[0], encode=encode, dictionary=encoder))
    return found


def _own_place(encoder: object) -> str:
    config = getattr(encoder, "cfg", None)
    for holder in (config, getattr(config, "metadata", None), encoder):
        name = getattr(holder, "hook_name", None)
        if isinstance(name, str):
            return name
    raise InspectionError(
        f"features={type(encoder).__name__} does not say where it belongs (it has no "
        "cfg.hook_name): write features={'L3.mlp': encoder}."
    )


def feature_name(place: str, feature: int) -> str:
    """Return the name of a feature in contrasts and lesions."""
    return f"{place}[feature {feature}]"


def feature_labels(labels: object, place: str, ids: Iterable[int]) -> list[str]:
    """Return the user's texts for some features of a place; "" if the table has none.

    Args:
        labels: {feature: text}, a list of texts by feature, {place: either of these} where features
            are of several places, or None.
        place: Where the features are.
        ids: The features.

    Raises:
        InspectionError: `labels` is not such a table.
    """
    table: Any = labels
    if isinstance(table, Mapping) and any(isinstance(each, str) for each in table):
        table = table.get(place, {})
    if isinstance(table, Sequence) and not isinstance(table, str):
        table = dict(enumerate(table))
    table = {} if table is None else table
    meaning = "give {feature: text}, a list of texts, or {place: one of these}"
    require(isinstance(table, Mapping), "labels", labels, meaning)
    found = [table.get(each, "") for each in ids]
    require(all(isinstance(each, str) for each in found), "labels", labels, meaning)
    return found


class FeatureReader(Attached):
    """Hands over the strongest features of each token while its block runs; a context manager.

    Args:
        model: The model.
        sources: The dictionaries, each with its place.
        count: How many features of a token are kept at most.
        found: Called with the name of a place, ids (b, s, count) and values; where fewer are
            active the id is -1 and the value 0.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: list[FeatureSource],
        count: int,
        found: Callable[[str, Tensor, Tensor], None],
    ) -> None:
        self._layers, self._sources = named_layers(model), sources
        self._count, self._found = count, found

    def _attach(self, stack: ExitStack) -> None:
        for source in self._sources:
            module = self._layers[source.place.layer]
            hook = Hook(partial(self._read, source), module)
            stack.callback(hook_side(module, source.place.what, hook).remove)

    def _read(self, source: FeatureSource, _: nn.Module, arguments: Any, other: Any) -> None:
        holder = (arguments, other) if source.place.what == "inputs" else other
        values = source.place.units_of(flatten(holder)[0].tensor.detach())
        features = source.features(values)
        if not isinstance(features, Tensor) or features.shape[:-1] != values.shape[:-1]:
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features)
            raise InspectionError(
                f"The encoder at {source.name!r} made {shape} of activations "
                f"{tuple(values.shape)}: it must return one row of features per token."
            )
        best = features.detach().float().topk(min(self._count, features.shape[-1]), -1)
        silent = best.values <= 0
        self._found(
            source.name, best.indices.masked_fill(silent, -1), best.values.masked_fill(silent, 0.0)
        )
