"""Modes that follow the operations of a pass, and operations of ours that are not part of it.

Token gradients subclass `FollowingMode`; `Hook` and the fast hook of taps enter `Aside`. Hooks of
ours run inside the user's pass, and so inside a mode that follows it. What they compute is not the
model's: a mode that took it for the model's would report that the model reads values or branches,
wherever somebody watches. The list of modes belongs to a thread, as torch's own does. `Aside` is
entered at every call of a watched layer, so it stays this small.
"""

from __future__ import annotations

import threading
from typing import Any

from torchfmri._torch.private import DispatchMode


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
