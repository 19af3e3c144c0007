"""The cause of a difference: what the modules of the two sides do not have in common.

Only two live models can tell. Parameters and buffers come first, then the numbers and words that a
module keeps as attributes (eps, scaling, sliding_window), then those of its configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchfmri._compare.difference import Kind
from torchfmri._compare.kinds import is_same, parameter_kind
from torchfmri._compare.run import can_drop
from torchfmri._model import named_layers
from torchfmri._text import apart

_PLAIN = (bool, int, float, str, type(None))
_IGNORED = frozenset(
    {"training", "name_or_path", "_name_or_path", "transformers_version", "torch_dtype", "dtype"}
)
_SPELLED = ("eps", "scal")
"""Parts of names by which an attribute is found that two implementations call differently."""
_MOST = 4


Convention = frozenset[tuple[type[nn.Module], type[nn.Module]]]
"""Pairs of classes of which one keeps the weight that the other has transposed."""


def transposing_classes(
    a: Mapping[str, nn.Module], b: Mapping[str, nn.Module], names: Mapping[str, str]
) -> Convention:
    """Return which classes keep their weights transposed in b, as Linear does those of Conv1D.

    Args:
        a: The modules of one side by layer.
        b: Those of the other.
        names: Layer of a -> layer of b.
    """
    votes: Counter[tuple[type[nn.Module], type[nn.Module]]] = Counter()
    for layer, partner in names.items():
        pair = a.get(layer), b.get(partner)
        if pair[0] is None or pair[1] is None or type(pair[0]) is type(pair[1]):
            continue
        one, two = own_tensors(pair[0]), own_tensors(pair[1])
        shapes = [{n: x.shape for n, x in each.items() if x.ndim == 2} for each in (one, two)]
        for name, other in partner_names(*shapes).items():
            ours, theirs = one[name], two[other]
            turned = ours.shape == theirs.T.shape and is_same(ours, theirs.T)
            votes[type(pair[0]), type(pair[1])] += 1 if turned else -1
    return frozenset(classes for classes, count in votes.items() if count > 0)


def replaced_classes(
    a: Mapping[str, nn.Module], b: Mapping[str, nn.Module], names: Mapping[str, str]
) -> Convention:
    """Return the pairs of classes that differ in a few modules only; in a port they differ in all.

    Args:
        a: The modules of one side by layer.
        b: Those of the other.
        names: Layer of a -> layer of b.
    """
    known = ((a.get(layer), b.get(partner)) for layer, partner in names.items())
    counts = Counter(
        (type(one), type(two)) for one, two in known if not (one is None or two is None)
    )
    pairs = (pair for pair in counts if pair[0] is not pair[1])
    return frozenset(pair for pair in pairs if counts[pair[0], pair[0]] >= counts[pair])


def causes_of(
    a: nn.Module, b: nn.Module, turned: Convention, replaced: Convention = frozenset()
) -> list[Kind]:
    """Return what differs between two modules, the surest cause first; empty if nothing does.

    Args:
        a: One module.
        b: Its partner.
        turned: Classes that keep their weights transposed in b.
        replaced: Classes that are others in b for a few modules only.
    """
    other_class = class_kind(a, b, replaced)
    if other_class is not None and not own_tensors(a) and next(a.children(), None) is None:
        return [other_class]
    tensors = dict(tensor_kinds(a, b, turned))
    found = [other_class] if other_class is not None else []
    found += [*tensors.values(), *attribute_kinds(a, b)]
    settings = setting_kinds(a, b)
    if any(each.text.startswith("config.model_type ") for each in settings):
        settings = []  # another architecture has settings of its own, and most explain nothing
    if any("inv_freq" in name for name in tensors):  # in bfloat16 they do not tell the base
        found += [each for each in settings if "rope" in each.text]
    return found[:_MOST] or settings[:_MOST]


def mode_kinds(a: nn.Module, b: nn.Module) -> list[Kind]:
    """Return the kind `mode` if two modules are in other modes and do something else then."""
    modal = can_drop(a) or can_drop(b) or isinstance(a, nn.modules.batchnorm._BatchNorm)
    if a.training == b.training or not modal:
        return []
    return [Kind("mode", f"training is {a.training} in a and {b.training} in b")]


def dropout_kinds(a: nn.Module, b: nn.Module) -> list[Kind]:
    """Return the kind `mode` if dropout is on, in a module or inside it, on one side only."""
    drops = [[n for n, m in each.named_modules() if m.training and can_drop(m)] for each in (a, b)]
    if bool(drops[0]) == bool(drops[1]):
        return []
    only, name = ("a", drops[0][0]) if drops[0] else ("b", drops[1][0])
    inside = f", in {name!r}" if name else ""
    return [Kind("mode", f"dropout is on in {only} only{inside}")]


def class_kind(a: nn.Module, b: nn.Module, replaced: Convention = frozenset()) -> Kind | None:
    """Return the kind `class` if the two modules compute with different classes, else None.

    A port has other classes throughout. A module with parameters, or with layers inside it, is
    compared by these instead, unless it is one of few of another class.
    """
    one, two = type(a), type(b)
    has_parts = bool(own_tensors(a)) or next(a.children(), None) is not None
    is_port = has_parts and one.__name__ != two.__name__ and (one, two) not in replaced
    if one is two or is_port:
        return None
    names = [f"{each.__module__}.{each.__name__}" for each in (one, two)]
    return Kind("class", f"it is a {names[0]} in a and a {names[1]} in b")


def tensor_kinds(
    a: nn.Module, b: nn.Module, turned: Convention = frozenset()
) -> Iterator[tuple[str, Kind]]:
    """Yield each parameter or buffer of two modules that differs, and how; see `causes_of`."""
    one, two = own_tensors(a), own_tensors(b)
    if (type(a), type(b)) in turned:
        two = {name: each.T if each.ndim == 2 else each for name, each in two.items()}
    names = partner_names(
        {n: x.shape for n, x in one.items()}, {n: x.shape for n, x in two.items()}
    )
    for name, other in names.items():
        if (kind := parameter_kind(name, one[name], two[other])) is not None:
            yield name, kind
    for side, only in (("a", one.keys() - names.keys()), ("b", two.keys() - set(names.values()))):
        for name in sorted(only):
            yield name, Kind("missing_parameter", f"only {side} has {name}")


def partner_names(
    one: Mapping[str, tuple[int, ...]], two: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Match the parameters of two layers: by name, or by a shape that only one of them has.

    Args:
        one: The shapes of the parameters of a by name.
        two: Those of b.
    """
    found = {name: name for name in one if name in two}
    rest = [{n: tuple(sorted(side[n])) for n in side if n not in found} for side in (one, two)]
    shapes = [list(each.values()) for each in rest]
    for name, shape in rest[0].items():
        if shapes[0].count(shape) == shapes[1].count(shape) == 1:
            found[name] = next(other for other in rest[1] if rest[1][other] == shape)
    return found


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, by name."""
    found = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    # A layer of PEFT keeps its matrices in containers that are never called themselves.
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            found |= {f"{name}.{each}": value for each, value in child.named_parameters()}
    return found


def attribute_kinds(a: nn.Module, b: nn.Module) -> Iterator[Kind]:
    """Yield the numbers and words that two modules keep as attributes and that differ."""
    one, two = _plain_values(vars(a)), _plain_values(vars(b))
    names = {name: name for name in one if name in two}
    for word in _SPELLED:  # `variance_epsilon` in one implementation is `eps` in another
        found = [[name for name in side if word in name.lower()] for side in (one, two)]
        if all(len(each) == 1 for each in found):
            names[found[0][0]] = found[1][0]
    for name, other in names.items():
        if one[name] == two[other]:
            continue
        said = name if name == other else f"{name} ({other} in b)"
        text = f"{said} {_both(one[name], two[other])}"
        is_epsilon = "eps" in name and isinstance(one[name], float)
        yield Kind("epsilon" if is_epsilon else "attribute", text)


def tied_kinds(a: nn.Module, b: nn.Module, names: Mapping[str, str]) -> dict[str, Kind]:
    """Return the layers that share a weight with another layer on one side only.

    Their gradients are sums over the layers that share them.

    Args:
        a: One model.
        b: The other.
        names: Layer of a -> layer of b.
    """
    back = {other: one for one, other in names.items()}
    shared = [_shared_layers(a, {each: each for each in names}), _shared_layers(b, back)]
    found: dict[str, Kind] = {}
    for side, ours, theirs in (("a", shared[0], shared[1]), ("b", shared[1], shared[0])):
        for group in ours - theirs:
            text = f"{' and '.join(map(repr, sorted(group)))} share a weight in {side} only"
            found |= {layer: Kind("tied", text) for layer in group}
    return found


def _shared_layers(model: nn.Module, names: Mapping[str, str]) -> set[frozenset[str]]:
    """Return the groups of layers that share a parameter, by the names they have in a."""
    owners: dict[int, set[str]] = {}
    for layer, module in named_layers(model).items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(names.get(layer, layer))
    return {frozenset(each) for each in owners.values() if len(each) > 1}


def _both(one: Any, two: Any) -> str:
    """Write the values of both sides in words."""
    said = [repr(one), repr(two)]
    if isinstance(one, float) and isinstance(two, float):
        said = list(apart(one, two, 6))
    return f"is {said[0]} in a and {said[1]} in b"


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and words by name, also those in dicts (LoRA's scaling) and tuples."""
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


def setting_kinds(a: nn.Module, b: nn.Module) -> list[Kind]:
    """Return how the configurations of two modules differ."""
    one, two = (_plain_config(getattr(each, "config", None)) for each in (a, b))
    return [
        Kind("setting", f"config.{name} {_both(one[name], two[name])}")
        for name in one
        if name in two and one[name] != two[name]
    ]


def _plain_config(config: Any) -> dict[str, Any]:
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return _plain_values(values)
