"""The tensor that a place means in what a module takes or returns, and how it is replaced there.

`attached` and `_lesion` use both functions: `_lesion` also to read a value, with a `change` that
returns its argument. An output is the tensor itself, element 0 of a tuple, or the first tensor of
more than one dimension in a mapping (a loss may stand before the logits). Edits and lesions must
find the same tensor, so both go through here. What holds the tensor is copied and keeps its class,
because the model reads it afterwards. A new kind of container is a new branch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# From the tensor at a place to the one that takes its place.
Change = Callable[[Tensor], Tensor]


def change_output(output: Any, change: Change) -> Any:
    """Return the output with its tensor changed: itself, element 0, or the first of a mapping.

    What holds it is copied, never written to. Returns None if there is no such tensor.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, (tuple, list)) and output:
        inner = change_output(output[0], change)
        if inner is None:
            return None
        rest = [inner, *output[1:]]
        return type(output)(*rest) if hasattr(output, "_fields") else type(output)(rest)
    if isinstance(output, Mapping):
        return _change_mapping(output, change)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            value = getattr(output, field.name, None)
            if isinstance(value, Tensor) and value.is_floating_point():
                return dataclasses.replace(output, **{field.name: change(value)})
    return None


def change_arguments(
    arguments: tuple[Any, ...], keywords: dict[str, Any], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a call with the first tensor changed; None if there is none."""
    for index, value in enumerate(arguments):
        if _is_value(value):
            return (*arguments[:index], change(value), *arguments[index + 1 :]), keywords
    for name, value in keywords.items():
        if _is_value(value):
            return arguments, {**keywords, name: change(value)}
    return None


def _change_mapping(output: Mapping[Any, Any], change: Change) -> Any:
    for key, value in output.items():
        if _is_value(value) and value.ndim > 1:  # a loss may stand before the logits
            changed: Any = copy.copy(output)
            changed[key] = change(value)
            return changed
    return None


def _is_value(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
