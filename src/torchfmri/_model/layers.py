"""The layers of a model: their dotted names, without what wrappers add to them, and modules.

All rooms name layers by `named_layers`. These names are keys of saved scans, histories and
inspections, so a name must not depend on how the model is wrapped today: each wrapper belongs in
`_WRAPPERS`. Wrappers are known by the names of their classes, so that nothing is imported for them.
An instance under several names keeps all of them here; `each_once` takes its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeAlias, TypeVar

from torch import nn

from torchfmri._model.patterns import match_names, nearest_names, not_found
from torchfmri._model.places import layers_at, whole_layers
from torchfmri.exceptions import InspectionError, LayerNotFoundError

Named = TypeVar("Named", bound="nn.Module | nn.Parameter")
Pattern: TypeAlias = "str | type[nn.Module] | Sequence[str | type[nn.Module]]"

# Class (or base class) of a wrapper -> the child that holds the module it wraps. The class is
# compared by name so that nothing has to be imported; the child's name alone would not do,
# because `module` and `model` are ordinary names in other people's code.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "PeftMixedModel": "base_model",
    "BaseTuner": "model",
    "AdaptionPromptModel": "model",
}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any number of wrappers (DDP, compile, FSDP, checkpoint, PEFT)."""
    inner = _wrapped(module)
    return module if inner is None else unwrap(inner)


def runnable(module: nn.Module) -> nn.Module:
    """Return the module to call for one run on this process alone.

    DDP would wait for the other processes and a compiled module would run compiled code; other
    wrappers (FSDP gathers shards, PEFT adds prompts) do work that the run needs.
    """
    if type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        inner = _wrapped(module)
        return module if inner is None else runnable(inner)
    return module


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return all layers of `model` in model order; the model itself is `""`.

    One instance under two names appears under both. A wrapper and the module it wraps share one
    name, which stands for the wrapped module.
    """
    found: dict[str, nn.Module] = {}
    _add_layers(unwrap(model), "", (), found)
    return found


def named_parameters(layers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the layers' own parameters by full name; a tied one appears under all its names."""
    return {
        f"{layer}.{key}" if layer else key: parameter
        for layer, module in layers.items()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, itself first, each once and in model order.

    `model.modules()` returns the same, from a generator for each level that also joins names: a
    scan that asks a dozen times for a thousand modules waits for that.
    """
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += reversed(module._modules.values())
    return list(found.values())


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model, each once and in model order, as `parameters()` does."""
    tables = [module._parameters.values() for module in every_module(model)]
    return list({id(each): each for table in tables for each in table if each is not None}.values())


def first_names(named: Mapping[str, Named]) -> dict[str, str]:
    """Return every name -> the first name of the same module or parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in named.items()}


def each_once(named: Mapping[str, Named]) -> dict[str, Named]:
    """Return each module or parameter once, under its first name."""
    return {name: named[name] for name in dict.fromkeys(first_names(named).values())}


def find_layers(
    layers: dict[str, nn.Module],
    pattern: Pattern,
    exclude: Pattern | None = None,
    *,
    hint: str = "torchfmri.Inspector(model).layers()",
    whole: bool = True,
) -> list[str]:
    """Return the names of `layers` that `pattern` selects and `exclude` does not, in model order.

    The model itself is selected by the pattern `""`, by its type, and by `"*"` if it has no
    children. A pattern that matches no layer may be a name of `places`, such as `L3.mlp`; `whole`
    refuses names that do not mean a layer's whole output, such as `L3H2`. If a pattern selects
    nothing, `hint` says where the names are listed.

    Raises:
        LayerNotFoundError: A pattern selects nothing.
        InspectionError: A pattern is neither a string nor a module type.
    """
    resolve = whole_layers if whole else layers_at

    def matching(single: str | type[nn.Module]) -> list[str]:
        found = _match(layers, single)
        return resolve(layers, single) if not found and isinstance(single, str) else found

    chosen: set[str] = set()
    for single in check_pattern(pattern):
        if not (found := matching(single)):
            raise _not_found(layers, single, hint)
        chosen.update(found)
    for single in check_pattern(exclude) if exclude is not None else ():
        chosen.difference_update(matching(single))
    if not chosen:
        raise InspectionError(
            f"Nothing is left: every layer that {pattern!r} matches is excluded by {exclude!r}. "
            "Leave exclude out, or exclude fewer."
        )
    return [name for name in layers if name in chosen]


def leaf_layers(layers: dict[str, nn.Module]) -> list[str]:
    """Return the names of the layers that have no children."""
    return [name for name, module in layers.items() if not any(True for _ in module.children())]


@cache
def _wrapped_name(kind: type) -> str | None:
    """Return the name of the child that a wrapper of this class wraps; None for other modules."""
    names = (_WRAPPERS.get(each.__name__) for each in kind.__mro__)
    return next((name for name in names if name is not None), None)


def _wrapped(module: nn.Module) -> nn.Module | None:
    name = _wrapped_name(type(module))  # type: ignore[arg-type]
    return module._modules[name] if name is not None and name in module._modules else None


def _add_layers(
    module: nn.Module, name: str, above: tuple[int, ...], found: dict[str, nn.Module]
) -> None:
    """Add a module and all below it; no generators, which are slow when they are nested."""
    found[name] = module
    above = (*above, id(module))
    before = f"{name}." if name else ""
    for key, child in module._modules.items():
        if child is None:
            continue
        inner = child if _wrapped_name(type(child)) is None else unwrap(child)  # type: ignore[arg-type]
        if not inner._modules:
            found[before + key] = inner
        elif id(inner) not in above:  # else a child that knows its parent
            _add_layers(inner, before + key, above, found)


def check_pattern(pattern: Pattern) -> Sequence[str | type[nn.Module]]:
    """Return the single patterns of one or several.

    Raises:
        InspectionError: One is neither a string nor a module type.
    """
    patterns = [pattern] if isinstance(pattern, (str, type)) else pattern
    if not isinstance(patterns, (list, tuple, set, frozenset)) or not patterns:
        raise InspectionError(
            f"A pattern is a string such as '*.mlp', a module type such as nn.Linear, or a list of "
            f"these, not {pattern!r}."
        )
    for single in patterns:
        if not isinstance(single, str) and not (
            isinstance(single, type) and issubclass(single, nn.Module)
        ):
            raise InspectionError(
                f"{single!r} in a pattern is neither a string nor a module type such as nn.Linear."
            )
    return list(patterns)


def _match(layers: dict[str, nn.Module], pattern: str | type[nn.Module]) -> list[str]:
    if isinstance(pattern, type):
        return [name for name, module in layers.items() if isinstance(module, pattern)]
    if pattern == "":
        return [""]
    names = [name for name in layers if name] or [""]
    return match_names(pattern, names)


def _not_found(
    layers: dict[str, nn.Module], pattern: str | type[nn.Module], hint: str
) -> LayerNotFoundError:
    names = [name for name in layers if name]
    if isinstance(pattern, type):
        kinds = sorted({type(module).__name__ for module in layers.values()})
        return LayerNotFoundError(
            pattern.__name__, nearest_names(pattern.__name__, kinds), len(names), hint
        )
    return not_found(pattern, names, hint)
