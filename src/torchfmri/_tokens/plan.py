"""WIRE: what to watch: the parameters that a pattern selects, and the modules that use them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from torchfmri._layers import Pattern, find_layers
from torchfmri._patterns import match_names, nearest_names
from torchfmri._tokens import rules
from torchfmri._tokens.parameter import ParameterInfo, describe
from torchfmri._tokens.record import Watched
from torchfmri.exceptions import InspectionError, LayerNotFoundError

_NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_parameters(
    layers: Mapping[str, nn.Module], pattern: Pattern
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The trainable parameters that a pattern selects, and other names of tied ones.

    The pattern matches the names of parameters or of layers, whose own parameters are then meant.

    Raises:
        LayerNotFoundError: It matches nothing.
        InspectionError: It matches frozen parameters alone.
    """
    everything: dict[str, nn.Parameter] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for layer, module in layers.items():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{layer}.{key}" if layer else key
            everything[name] = parameter
            aliases[name] = first.setdefault(id(parameter), name)
    chosen = {aliases[name] for name in _matched(layers, everything, pattern)}
    found = {
        name: each for name, each in everything.items()
        if name in chosen and aliases[name] == name and each.requires_grad
    }  # fmt: skip
    if not found:
        raise InspectionError(
            f"{pattern!r} matches {len(chosen)} parameters, and none of them requires a gradient. "
            "Switch them on with parameter.requires_grad_()."
        )
    return found, {name: to for name, to in aliases.items() if to in found}


def _matched(
    layers: Mapping[str, nn.Module], everything: Mapping[str, nn.Parameter], pattern: Pattern
) -> set[str]:
    patterns = [pattern] if isinstance(pattern, (str, type)) else pattern
    if isinstance(patterns, (list, tuple, set, frozenset)) and patterns:
        found: set[str] = set()
        for single in patterns:
            names = match_names(single, everything) if isinstance(single, str) else []
            if not names or not isinstance(single, str):
                try:
                    chosen = find_layers(dict(layers), single)
                except LayerNotFoundError:
                    known = list(everything)
                    raise LayerNotFoundError(
                        single, nearest_names(str(single), known), len(known)
                    ) from None
                names = [
                    f"{layer}.{key}" if layer else key
                    for layer in chosen
                    for key, each in layers[layer]._parameters.items()
                    if each is not None
                ]
            found.update(names)
        return found
    find_layers(dict(layers), pattern)  # raises with the reason
    return set()


def describe_all(
    parameters: Mapping[str, nn.Parameter],
    layers: Mapping[str, nn.Module],
    head: int | None,
    units: int,
) -> dict[str, ParameterInfo]:
    return {
        name: describe(name, layers[name.rpartition(".")[0]], parameter, head, units)
        for name, parameter in parameters.items()
    }


def watched_modules(
    layers: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    aliases: Mapping[str, str],
) -> dict[str, Watched]:
    """The modules whose calls are captured: each once, under its first name."""
    names: dict[int, str] = {}
    for layer, module in layers.items():
        names.setdefault(id(module), layer)
    uses: dict[str, int] = defaultdict(int)
    stacks = Stacks(layers)
    watched: dict[str, Watched] = {}
    for layer in names.values():
        module = layers[layer]
        if not module._parameters:
            continue
        own = {
            key: aliases[name]
            for key in module._parameters
            if (name := f"{layer}.{key}" if layer else key) in aliases
        }
        if not own:
            continue
        for name in own.values():
            uses[name] += 1
        rule = rules.rule_of(module)
        reads = rule is None and _reads_weights(module)
        watched[layer] = Watched(layer, module, rule, own, {}, False, stacks.of(layer), reads)
    for each in watched.values():
        each.is_shared = any(uses[name] > 1 for name in each.parameters.values())
    for layer in list(watched):
        owner = _owner_of(layer, layers)
        if owner is not None:
            first = names[id(layers[owner])]
            if first not in watched:
                above, reads = layers[owner], _reads_weights(layers[owner])
                watched[first] = Watched(first, above, None, {}, {}, False, stacks.of(first), reads)
            container = watched[first]
            if container.rule is None:
                container.below[layer] = watched[layer]
                watched[layer].is_shared |= container.reads_weights
    return {layer: watched[layer] for layer in names.values() if layer in watched}


def _owner_of(layer: str, layers: Mapping[str, nn.Module]) -> str | None:
    """The nearest module above that has a forward of its own, and may use the layer's weights."""
    while layer:
        layer = layer.rpartition(".")[0]
        if layer in layers and not isinstance(layers[layer], _NO_FORWARD):
            return layer
    return None


class Stacks:
    """Which layers belong to an encoder and which to the decoder that reads what it returned."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.encoder = self.decoder = ""
        for name, module in layers.items():
            if not name.endswith("decoder"):
                continue
            head, _, last = name.rpartition(".")
            encoder = f"{head}.encoder" if head else "encoder"
            if last == "decoder" and encoder in layers and _reads_memory(module):
                self.encoder, self.decoder = encoder, name

    def of(self, layer: str) -> str:
        if not self.encoder:
            return ""
        return "encoder" if f"{layer}.".startswith(f"{self.encoder}.") else "decoder"


def _reads_memory(decoder: nn.Module) -> bool:
    names = inspect.signature(decoder.forward).parameters
    return any(name in names for name in ("memory", "encoder_hidden_states", "encoder_outputs"))


def _reads_weights(module: nn.Module) -> bool:
    """Whether the code of a module reads the weights of modules below it."""
    return _mentions_weights(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _mentions_weights(kind: Any) -> bool:
    for name, function in vars(kind).items():
        code = getattr(function, "__code__", None)
        if code is not None and "init" not in name and {"weight", "bias"} & {*code.co_names}:
            return True
    return False
