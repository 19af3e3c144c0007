"""Switch autocast off where token gradients are computed or read.

`in_full` decorates the methods of results, and `without_autocast` surrounds computations in hooks,
which run inside the user's autocast. Without them products of factors would be rounded to 16 bits,
and the tokens would no longer add up to `.grad`. `in_full` runs at every call of a method, so it
asks `may_autocast` first and costs little where autocast is off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchfmri._torch import may_autocast

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """No autocast for what is computed of a tensor in a hook, which may run inside the user's."""
    return _switched_off(tensor.device.type)


def in_full(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with autocast off: results may be read inside the user's autocast."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not may_autocast():
            return function(*arguments, **keywords)
        accelerator = torch.accelerator.current_accelerator()
        with ExitStack() as stack:
            stack.enter_context(_switched_off("cpu"))
            if accelerator is not None:
                stack.enter_context(_switched_off(accelerator.type))
            return function(*arguments, **keywords)

    return call


def _switched_off(kind: str) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
