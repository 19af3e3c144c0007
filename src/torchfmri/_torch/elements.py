"""The tensors inside whatever a module takes or returns, in order, each with its path.

All rooms call `flatten`. Its order and its paths are a contract: captured elements are named by
them, and saved inspections and incidents hold them. A new kind of container is added in
`_children`.

Not by `torch.utils._pytree`: to it every container that nobody registered is a leaf (dataclasses,
BatchEncoding and other mappings), and a container that holds itself ends it with a RecursionError.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Element(NamedTuple):
    """One tensor and the path that leads to it: `""` alone, `"0"` in a tuple, `"logits"` by key."""

    path: str
    tensor: Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, which may be sharded, without its graph."""
    detached = tensor.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory behind a tensor; None if it has no ordinary one (sparse, nested)."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return None


def flatten(value: object, prefix: str = "") -> list[Element]:
    """Return the tensors in nested tuples, lists, mappings, named tuples and dataclasses, in order.

    Mappings include ModelOutput and BatchEncoding. Anything else (`None`, numbers, a KV cache)
    holds no element.
    """
    if isinstance(value, Tensor):
        return [Element(prefix, value)]
    return list(_walk(value, prefix, ()))


def flatten_arguments(
    arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> list[Element]:
    """Return the tensors among a call's arguments: positional ones by index, keywords by name."""
    return flatten(arguments) + (flatten(keywords) if keywords else [])


def map_tensors(value: Any, act: Callable[[Tensor], Any]) -> Any:
    """Return the value with `act` done to each tensor in tuples, lists, named tuples and mappings.

    The containers are new ones of the same class: a model may read the attributes of a ModelOutput
    or BatchEncoding. Anything else, a dataclass too, stays as it is.
    """
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, each in value.items():
            changed[key] = map_tensors(each, act)
        return changed
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        found = [map_tensors(each, act) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def _walk(value: object, path: str, above: tuple[int, ...]) -> Iterator[Element]:
    if isinstance(value, Tensor):
        yield Element(path, value)
        return
    children = _children(value)
    if children is None or id(value) in above:  # a container that holds itself ends here
        return
    for name, child in children:
        yield from _walk(child, f"{path}.{name}" if path else name, (*above, id(value)))


def _children(value: object) -> list[tuple[str, object]] | None:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        ]
    return None
