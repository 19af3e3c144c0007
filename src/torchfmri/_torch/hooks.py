"""The object that is registered as a hook, hooks on for a block, and modes that our hooks pause.

All rooms register a `Hook`, by `hooked` around a block or as a class that is `Attached`. Three
things must stay. A `Hook` returns None, because what a hook returns replaces the model's own
output. It holds its module weakly and does nothing on another one, because deepcopy and torch.save
take hooks along. And its `__module__` stands in files that users saved while hooks were on:
`torchfmri._hooks` is the address where older and newer versions look for it.

Token gradients subclass `FollowingMode`; `Hook` and the fast hook of taps enter `Aside`. Hooks of
ours run inside the user's pass, and so inside a mode that follows it. A mode that took what they
compute for the model's would report that the model reads values or branches, wherever somebody
watches. The list of modes belongs to a thread, as torch's own does. `Aside` is entered at every
call of a watched layer, so it stays this small.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchfmri._torch.private import DispatchMode, take_off


class _Entered(threading.local):
    def __init__(self) -> None:
        self.modes: list[FollowingMode] = []  # of this thread


_entered = _Entered()


class FollowingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose `run` gets each operation of the pass inside it, but none of our own."""

    supports_higher_order_operators = True  # such as flex_attention, which torch refuses without it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not wrap the mode: the wrapper imports the compiler, in the user's own pass."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asides = 0

    def __enter__(self) -> Any:
        _entered.modes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        if self in _entered.modes:
            _entered.modes.remove(self)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if self.asides:
            return function(*arguments, **keywords)
        return self.run(function, arguments, keywords)

    def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operation of the pass, and return what it returns."""
        raise NotImplementedError


class Aside:
    """Keeps the operations inside its block from the modes that were entered before it."""

    __slots__ = ("_modes",)

    def __enter__(self) -> None:
        self._modes = tuple(_entered.modes)
        for each in self._modes:
            each.asides += 1

    def __exit__(self, *exception: object) -> None:
        for each in self._modes:
            each.asides -= 1


class Hook:
    """A hook that acts on one module or tensor only, and that copies and pickles as a no-op.

    deepcopy and torch.save carry hooks along; a copy of the model must not write into our record.
    Its hooks leave it at its first call: while it is being copied they cannot.
    It returns None whatever happens, so that nothing the model computes can change.

    Args:
        act: What to do.
        owner: The module it belongs to; on another one (a copy) it does nothing.
        failed: Called with an exception of `act`, which would end the user's pass.
    """

    __module__ = "torchfmri._hooks"  # in saved files, which outlive the file where this stands
    __slots__ = ("_act", "_failed", "_owner")
    __torch_unserializable__ = True  # tensors that carry it pickle without a warning

    def __init__(
        self,
        act: Callable[..., Any] | None,
        owner: nn.Module | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._act = act
        self._owner = None if owner is None else weakref.ref(owner)
        self._failed = failed

    def __call__(self, *arguments: Any) -> None:
        if self._act is None:
            take_off(self, arguments[0])
            return
        if self._owner is not None and self._owner() is not arguments[0]:
            return
        try:
            with Aside():
                self._act(*arguments)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:  # what deepcopy asks, too
        return (Hook, (None,))


class ReplacingHook(Hook):
    """A hook whose result takes the place of a module's arguments or output.

    It is the one kind of hook of ours that changes what a model computes. Errors pass through: a
    pass that goes on without the change would be taken for a changed one.
    """

    __module__ = "torchfmri._hooks"
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        if self._act is None:
            take_off(self, arguments[0])
            return None
        if self._owner is not None and self._owner() is not arguments[0]:
            return None
        return self._act(*arguments)

    def __reduce__(self) -> tuple[type[ReplacingHook], tuple[None]]:
        return (ReplacingHook, (None,))


Own = TypeVar("Own", bound="Attached")


class Attached:
    """A context manager whose `_attach` puts things on, each with what takes it off again.

    If putting on a later thing fails, the earlier ones are taken off. At the end of the block all
    are, in reverse order, however the block ends.
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
        handles: The handle that registering each hook returns. Give a generator: then a hook that
            cannot be registered takes off those before it, too.
    """
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
