"""Find the tensor that an edit means in the inputs or the output of a module, and replace it there.

`attached` uses both functions to edit. `_lesion` also uses them to read a value, with a `change`
that returns its argument, so edits and lesions mean the same tensor. In a tuple or list it is the
first element, in a mapping or a dataclass the first tensor of more than one dimension; a loss that
stands before the logits never counts. The container is copied and keeps its class, because the
model uses it afterwards. A new kind of container is a new branch of `change_output`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# Maps the tensor at a place to its replacement.
Change = Callable[[Tensor], Tensor]


def change_output(output: Any, change: Change) -> Any:
    """Return the output with its tensor changed, in copies of what holds it.

    Returns None if there is no such tensor.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, (tuple, list)):
        return _change_elements(output, change)
    if isinstance(output, Mapping):
        values: Mapping[Any, Any] = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = dataclasses.fields(output)
        values = {each.name: getattr(output, each.name, None) for each in fields}
    else:
        return None
    key = _first_value(values)
    if key is None:
        return None
    changed: Any = copy.copy(output)
    if isinstance(output, Mapping):
        changed[key] = change(values[key])
    else:
        object.__setattr__(changed, key, change(values[key]))  # a dataclass may be frozen
    return changed


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


def _change_elements(output: tuple[Any, ...] | list[Any], change: Change) -> Any:
    at = next((n for n, each in enumerate(output) if not _is_loss(each)), None)
    inner = None if at is None else change_output(output[at], change)
    if at is None or inner is None:
        return None
    elements = [*output[:at], inner, *output[at + 1 :]]
    return type(output)(*elements) if hasattr(output, "_fields") else type(output)(elements)


def _first_value(values: Mapping[Any, Any]) -> Any:
    """Return the key of the first tensor, preferably one of two or more dimensions; or None."""
    for least in (2, 1):
        for key, value in values.items():
            if _is_value(value) and value.ndim >= least:
                return key
    return None


def _is_loss(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _is_value(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
