"""Why a layer differs: what stands in the module of a and not in that of b.

Only two live models can tell. Parameters and buffers come first, then the numbers and words that a
module keeps as attributes (eps, scaling, sliding_window), then those of its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchfmri._compare.difference import Kind
from torchfmri._compare.kinds import parameter_kind

_PLAIN = (bool, int, float, str, type(None))
_IGNORED = frozenset(
    {"training", "name_or_path", "_name_or_path", "transformers_version", "torch_dtype", "dtype"}
)
_MOST = 4


def causes_of(a: nn.Module, b: nn.Module) -> list[Kind]:
    """What differs between two modules, the surest first; empty where nothing is seen."""
    one, two = type(a), type(b)
    if one is not two and (one.__name__ == two.__name__ or not _own_tensors(a)):
        names = [f"{each.__module__}.{each.__name__}" for each in (one, two)]
        return [Kind("class", f"it is a {names[0]} in a and a {names[1]} in b")]
    found = [*_tensors(a, b), *_attributes(a, b)]
    return found[:_MOST] or _settings(a, b)[:_MOST]


def _tensors(a: nn.Module, b: nn.Module) -> Iterator[Kind]:
    one, two = _own_tensors(a), _own_tensors(b)
    for name in dict.fromkeys((*one, *two)):
        if name not in one or name not in two:
            side = "a" if name in one else "b"
            yield Kind("missing_parameter", f"only {side} has {name}")
        elif (kind := parameter_kind(name, one[name], two[name])) is not None:
            yield kind


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    # A layer of PEFT keeps its matrices in containers that are never called themselves.
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            found |= {f"{name}.{each}": value for each, value in child.named_parameters()}
    return found


def _attributes(a: nn.Module, b: nn.Module) -> Iterator[Kind]:
    one, two = _plain_values(vars(a)), _plain_values(vars(b))
    for name in one.keys() & two.keys():
        if one[name] == two[name]:
            continue
        said = f"{name} is {one[name]!r} in a and {two[name]!r} in b"
        is_epsilon = "eps" in name and isinstance(one[name], float)
        yield Kind("epsilon" if is_epsilon else "attribute", said)


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words by name, also those in dicts (the scaling of LoRA) and tuples."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("_") or name in _IGNORED:
            continue
        several = value if isinstance(value, tuple) else (value,)
        if all(isinstance(each, _PLAIN) for each in several):
            found[name] = value
        elif type(value) is dict and all(isinstance(each, _PLAIN) for each in value.values()):
            found |= {f"{name}[{key!r}]": each for key, each in value.items()}
    return found


def _settings(a: nn.Module, b: nn.Module) -> list[Kind]:
    """How the configurations differ, where the modules themselves do not."""
    one, two = (_plain_config(getattr(each, "config", None)) for each in (a, b))
    return [
        Kind("setting", f"config.{name} is {one[name]!r} in a and {two[name]!r} in b")
        for name in one
        if name in two and one[name] != two[name]
    ]


def _plain_config(config: Any) -> dict[str, Any]:
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return _plain_values(values)
