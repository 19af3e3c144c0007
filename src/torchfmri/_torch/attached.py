"""Attach things for the time of a block: put on together, taken off together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

Own = TypeVar("Own", bound="Attached")


class Attached:
    """A context manager whose `_attach` puts things on, each with what takes it off again.

    What is on already is taken off where a later thing fails, and at the end of the block in
    reverse order, however the block ends.
    """

    _stack: ExitStack | None = None

    def _attach(self, stack: ExitStack) -> None:
        raise NotImplementedError

    def __enter__(self: Own) -> Own:
        with ExitStack() as stack:
            self._attach(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None


def hook_side(module: nn.Module, what: str, hook: Any, *, prepend: bool = False) -> RemovableHandle:
    """Register a hook before a module, which is handed its keywords too, or after it.

    Args:
        module: The module.
        what: "inputs", or anything else for what the module returns.
        hook: The hook.
        prepend: Whether it comes before those that are there.
    """
    if what == "inputs":
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)
    return module.register_forward_hook(hook, prepend=prepend)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks for the time of a block.

    Args:
        handles: What registering each hook returns. Give a generator: then a hook that cannot be
            registered takes off those before it, too.
    """
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
