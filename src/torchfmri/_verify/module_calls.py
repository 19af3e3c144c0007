"""Which modules a model calls, with copies of the inputs of each.

`verify` runs the model once inside `logged_calls`. Inputs are copied before the call, because
modules may write into them. Calls are logged in the order in which they end, so children come
before parents. At most `CALLS_KEPT` calls of a layer are kept, one for each shape, so memory stays
bounded. `CALLS_KEPT` may change freely.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchfmri._model import each_once
from torchfmri._torch import Hook, flatten, hooked

CALLS_KEPT = 3  # of one layer, so that memory stays bounded


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        layer: The name of the layer.
        module: The module.
        inputs: A copy of its arguments and keywords, as they were when it was called.
        wanted: The ids of the tensors in `inputs` that a gradient goes to.
        index: The number of the layer's call, from 0.
        problem: Why its inputs could not be copied; "" if they could.
    """

    layer: str
    module: nn.Module
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    wanted: set[int]
    index: int
    problem: str = ""


@dataclass
class CallLog:
    """The calls in the order in which they ended, so children come before parents.

    Attributes:
        calls: The calls that are kept: at most three per layer, with inputs of different shapes.
        counts: Layer -> how often it was called.
        first_nan: The first layer that returned NaN although it got none.
        output: What the model returned.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    first_nan: str | None = None
    output: Any = None


@contextmanager
def logged_calls(layers: Mapping[str, nn.Module], chosen: Iterable[str]) -> Iterator[CallLog]:
    """Log the calls of the `chosen` layers while the block runs; look for NaN in all layers."""
    log = CallLog()
    wanted = set(chosen)
    running: list[ModuleCall | None] = []
    seen: dict[str, set[Any]] = {}

    def begin(layer: str, module: nn.Module, arguments: Any, keywords: Any) -> None:
        index = log.counts.get(layer, 0)
        log.counts[layer] = index + 1
        signature = _signature(arguments, keywords)
        known = seen.setdefault(layer, set())
        if layer not in wanted or signature in known or len(known) == CALLS_KEPT:
            running.append(None)
            return
        known.add(signature)
        running.append(copy_call(layer, module, (arguments, dict(keywords)), index))

    def end(layer: str, _: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        call = running.pop()
        if call is not None:
            log.calls.append(call)
        if log.first_nan is None and _has_nan(output) and not _has_nan((arguments, keywords)):
            log.first_nan = layer

    def handles() -> Iterator[RemovableHandle]:
        for layer, module in each_once(layers).items():
            before, after = (Hook(partial(act, layer), module) for act in (begin, end))
            yield module.register_forward_pre_hook(before, with_kwargs=True)
            yield module.register_forward_hook(after, with_kwargs=True)

    with hooked(handles()):
        yield log


def copy_with(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of any structure, with every tensor replaced by `replace(tensor)`.

    Tensors are found at any depth, also in objects such as a KV cache. Modules are not copied.
    """
    memo: dict[int, Any] = {}
    for found in _reachable(value):
        memo[id(found)] = replace(found) if isinstance(found, Tensor) else found
    return copy.deepcopy(value, memo)


def tensors_within(value: Any) -> list[Tensor]:
    """Return all tensors in a structure, at any depth, each once."""
    return [found for found in _reachable(value) if isinstance(found, Tensor)]


def copy_call(layer: str, module: nn.Module, inputs: Any, index: int) -> ModuleCall:
    """Return a call with copies of its inputs, which remember where gradients go."""
    wanted: set[int] = set()

    def detach(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        # Under no_grad (as in a reentrant checkpoint) it is unknown: any of them may be wanted.
        if tensor.requires_grad or not torch.is_grad_enabled():
            wanted.add(id(clone))
        return clone

    try:
        copied = copy_with(inputs, detach)
    except Exception as error:  # an object that cannot be copied: the report says so
        return ModuleCall(layer, module, ((), {}), wanted, index, problem=f"{error}")
    return ModuleCall(layer, module, copied, wanted, index)


def _signature(arguments: Any, keywords: Any) -> Any:
    return tuple(
        (element.path, element.tensor.shape, element.tensor.dtype)
        for element in [*flatten(arguments), *flatten(keywords)]
    )


def _has_nan(value: Any) -> bool:
    return any(
        bool(element.tensor.isnan().any())
        for element in flatten(value)
        if element.tensor.is_floating_point() and not element.tensor.is_nested
    )


# Values without tensors inside, where a search may stop.
_ATOMS = (str, bytes, int, float, complex, type, types.FunctionType, types.ModuleType, torch.Size)


def _reachable(value: Any) -> list[Any]:
    """Return the tensors and modules that a structure leads to, each once."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        if each is None or isinstance(each, _ATOMS) or id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, (Tensor, nn.Module)):
            found.append(each)
        else:
            waiting.extend(reversed(_inside(each)))
    return found


def _inside(value: Any) -> Sequence[Any]:
    inner: list[Any] = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        return [*value.values(), *inner]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value, *inner]
    if dataclasses.is_dataclass(value):
        return [getattr(value, each.name, None) for each in dataclasses.fields(value)] + inner
    return inner
