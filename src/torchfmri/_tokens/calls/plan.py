"""What to watch: the parameters that a pattern selects, and the modules that use them.

`plans` calls these functions once per model and keeps the result, and
`token_gradients(per="token_loss")` uses `find_parameters`. A tied parameter has one first name and
is watched in all of its layers. The code of forward methods is read to find containers that use
weights of modules below them without calling those. When that reading is in doubt, the container
must be watched: a missed use would make token gradients that do not add up, whereas one watched in
vain only costs time.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

from torchfmri._model import Pattern, find_layers, match_names, not_found
from torchfmri._tokens.algebra.parameter import ParameterInfo, describe
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.record import Watched
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
        before = f"{layer}." if layer else ""
        for key, parameter in own_parameters(module).items():
            name = before + key
            everything[name] = parameter
            aliases[name] = first.setdefault(id(parameter), name)
    chosen = {aliases[name] for name in _matched(layers, everything, pattern)}
    found = {
        name: each for name, each in everything.items()
        if name in chosen and aliases[name] == name and each.requires_grad
    }  # fmt: skip
    if not chosen:
        raise InspectionError(
            f"{pattern!r} matches layers that have no parameters of their own. Those of the layers "
            "inside them are matched by a name that ends in '.*'."
        )
    if not found:
        raise InspectionError(
            f"{pattern!r} matches {len(chosen)} parameters, and none of them requires a gradient. "
            "Switch them on with parameter.requires_grad_()."
        )
    return found, {name: to for name, to in aliases.items() if to in found}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself; those of a scripted one are in no dict."""
    return {key: each for key, each in module._parameters.items() if each is not None}


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
                    raise not_found(single, everything, kind="parameter") from None
                names = [
                    f"{layer}.{key}" if layer else key
                    for layer in chosen
                    for key in own_parameters(layers[layer])
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
    stacks: Stacks,
) -> dict[str, Watched]:
    """The modules whose calls are captured: each once, under its first name."""
    names: dict[int, str] = {}
    for layer, module in layers.items():
        names.setdefault(id(module), layer)
    uses: dict[str, int] = defaultdict(int)
    watched: dict[str, Watched] = {}
    for layer in names.values():
        module = layers[layer]
        own = _watched_parameters(layer, module, aliases)
        if own and not isinstance(module, torch.jit.ScriptModule):
            for name in own.values():
                uses[name] += 1
            rule = rules.rule_of(module)
            reads = rule is None and _reads_weights(module)
            stack = stacks.of(layer)
            watched[layer] = Watched(
                layer=layer,
                reference=ref(module),
                rule=rule,
                parameters=own,
                below={},
                is_shared=False,
                stack=stack,
                reads_weights=reads,
            )
    for name in (name for name, count in uses.items() if count > 1):
        for each in watched.values():
            each.is_shared |= name in each.parameters.values()
    owners: dict[str, Watched | None] = {}  # by the name that layers begin with
    for layer, each in list(watched.items()):
        start = layer.rpartition(".")[0] if layer else None
        if start is None:
            continue
        if start not in owners:
            owners[start] = _container(_owner_of(layer, layers), layers, names, stacks, watched)
        container = owners[start]
        if container is not None and container.rule is None:
            container.below[layer] = each
            each.is_shared |= container.reads_weights
    for each in watched.values():
        if each.rule is None and not each.parameters and not each.reads_weights:
            each.only_calls = _only_calls(each)
    return {layer: watched[layer] for layer in names.values() if layer in watched}


def _watched_parameters(
    layer: str, module: nn.Module, aliases: Mapping[str, str]
) -> dict[str, str]:
    """The parameters of a module itself that are watched: name in the module -> first name."""
    before = f"{layer}." if layer else ""
    keys = own_parameters(module)
    return {key: aliases[before + key] for key in keys if before + key in aliases}


def scripted_parameters(
    layers: Mapping[str, nn.Module], aliases: Mapping[str, str]
) -> dict[str, str]:
    """The parameters of modules that run as TorchScript, unseen by any hook -> their layers."""
    return {
        name: layer
        for layer, module in layers.items()
        if isinstance(module, torch.jit.ScriptModule)
        for name in _watched_parameters(layer, module, aliases).values()
    }


def _container(
    owner: str | None,
    layers: Mapping[str, nn.Module],
    names: Mapping[int, str],
    stacks: Stacks,
    watched: dict[str, Watched],
) -> Watched | None:
    """What is watched of a module above others, for its own sake or for theirs."""
    if owner is None:
        return None
    module = layers[owner]
    first = names[id(module)]
    if first not in watched:
        reads = _reads_weights(module)
        stack = stacks.of(first)
        watched[first] = Watched(
            layer=first,
            reference=ref(module),
            rule=None,
            parameters={},
            below={},
            is_shared=False,
            stack=stack,
            reads_weights=reads,
        )
    return watched[first]


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
                both = (layers[encoder], module)
                if not any(isinstance(each, torch.jit.ScriptModule) for each in both):
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


_READ = frozenset(
    {"weight", "bias", "_parameters", "parameters", "named_parameters", "get_parameter"}
    | {"state_dict", "functional_call", "forward"}
)
_FAR = 4  # functions that call each other


def _only_calls(container: Watched) -> bool:
    """Whether a module uses those below it by calling them, as far as its code tells.

    Code can reach a weight in more ways than can be followed, so this is asked only of code that
    is known not to hide any. Containers that only call need no hook on their calls: that saves 7
    hundredths of a plain step that is mostly Python (`benchmarks token_gradients --without
    code_reading`).
    """
    module = container.module
    kind: Any = type(module)
    if not _is_known(kind) or holds_functions(module):
        return False
    keys: set[str] = set()
    for below in container.below.values():
        if below.rule is None:
            return False  # it may make something of its weights alone, which this one uses
        keys.update(below.parameters)
    names = _reached_names(kind, kind.forward)
    return names is not None and names.isdisjoint(_READ) and names.isdisjoint(keys)


_FUNCTIONS = (FunctionType, MethodType, partial)


def holds_functions(module: nn.Module) -> bool:
    """Whether a function is an attribute of the module, which may do anything."""
    return any(map(is_function, set(map(type, vars(module).values()))))


def is_function(kind: type) -> bool:
    """Whether things of this kind are called, and may do anything."""
    return issubclass(kind, _FUNCTIONS)


@lru_cache(maxsize=4096)
def _is_known(kind: Any) -> bool:
    """Whether a class and its forward are written as those of transformers and Sequential are."""
    if kind.forward is nn.Sequential.forward:
        return True
    known = "transformers.models."
    return all(str(each.__module__).startswith(known) for each in (kind, kind.forward))


@lru_cache(maxsize=4096)
def _reached_names(kind: Any, forward: Any) -> frozenset[str] | None:
    """The names and texts in a forward and in what it calls by name; None if that leads far."""
    found: set[str] = set()
    seen: set[CodeType] = set()
    waiting: list[tuple[Any, int]] = [(forward, 0)]
    while waiting:
        function, far = waiting.pop()
        function = inspect.unwrap(function)
        if far > _FAR or not hasattr(function, "__code__"):
            return None
        known = getattr(function, "__globals__", {})
        for code in _codes(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            found.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))
            named = [known.get(name) for name in code.co_names]
            named += [_function(getattr(kind, name, None)) for name in code.co_names]
            waiting += [(each, far + 1) for each in named if _is_ours(each)]
    return frozenset(found)


def _function(attribute: Any) -> Any:
    """The function behind an attribute of a class."""
    if isinstance(attribute, property):
        return attribute.fget
    return getattr(attribute, "__func__", attribute)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _is_ours(function: Any) -> bool:
    """Whether something is a function, and not one of torch."""
    return inspect.isfunction(function) and not str(function.__module__).startswith("torch.")
