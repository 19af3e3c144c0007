"""What belongs to the whole process: signals, the compiler's stance, and the switch that is off.

Ctrl-C and other signals end what runs, but never while something is being put back. Every context
manager that puts something back enters `whole_restorations`; streams and dataset scans use the
others. The handler looks at the frames that are running when the signal comes, because no flag
could be set before the first instruction of an `__exit__`. So names matter: methods of this package
called `__enter__`, `__exit__` and `forget` are never interrupted, and neither is what contextlib
calls to end a block. A function of another name that attaches or puts back needs `kept_whole`. The
wait before a signal is sent again may change freely.

The entry points of the package ask `switched_off` first, and run models inside
`compiled_code_as_eager`. Users of the compiler's stance are counted, so that the last one out
restores what the first one in found, whatever the threads; the count must stay exact, or the user's
compiled models would stay eager. torch._dynamo is not imported if nobody else has imported it: that
takes long, and nothing can have been compiled.
"""

from __future__ import annotations

import _thread
import _weakrefset
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_AGAIN_SECONDS = 0.005
_WHOLE_FILES = (
    contextlib.ExitStack.__exit__.__code__.co_filename,
    weakref.WeakValueDictionary.__init__.__code__.co_filename,
    _weakrefset.WeakSet.__init__.__code__.co_filename,
    torch.set_grad_enabled.__init__.__code__.co_filename,  # changes the mode when it is made
    torch.autograd.set_detect_anomaly.__init__.__code__.co_filename,
)
"""Files of which nothing is interrupted."""
_WHOLE_FOLDERS = tuple(
    f"{Path(each).parent}{os.sep}" for each in (torch.__file__, Path(__file__).parent)
)
"""Folders of which none of these is interrupted: torch's and ours."""
# Our callbacks of weak references are called `forget`; Python drops what they raise.
_CHANGES = ("__enter__", "__exit__", "forget")
_whole_codes: set[CodeType] = set()
"""The code of the functions that `kept_whole` was given."""


class _Handler:
    """A signal handler that lets another one act, unless state is being changed or put back.

    In that case the signal is sent again a moment later, until it meets code that may be ended.
    The frames tell: a flag could not be set before the first instruction of an `__exit__`.
    """

    def __init__(self, act: Callable[[int, FrameType | None], Any], before: Any) -> None:
        self.act, self.before = act, before
        self.users = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_changing_state(frame):
            # No threading.Thread: its locks may be held by the very frame that was interrupted.
            _thread.start_new_thread(_send_again, (number,))
        else:
            self.act(number, frame)


@contextlib.contextmanager
def whole_restorations() -> Iterator[None]:
    """Let Ctrl-C end the block, but no `__enter__` or `__exit__` on its way in or out.

    An `__exit__` that is interrupted leaves the rest of its work undone: hooks stay, or the model
    stays in eval mode. Only the main thread receives signals; elsewhere there is nothing to do.
    """
    with _handled(signal.SIGINT, None):
        yield


def kept_whole(function: Callable[P, T]) -> Callable[P, T]:
    """Let Ctrl-C wait until a function is over that attaches something or puts something back."""

    @wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> T:
        with whole_restorations():
            return function(*arguments, **keywords)

    _whole_codes.update((run.__code__, function.__code__))  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def ending_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the block, so that what is open is closed.

    By default they end the process at once. Where the user handles them, that is left alone.
    """
    with contextlib.ExitStack() as stack:
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None:
                stack.enter_context(_handled(number, _exit))
        yield


@contextlib.contextmanager
def _handled(number: int, default: Callable[[int, FrameType | None], Any] | None) -> Iterator[None]:
    """Guard a signal while the block runs; `default` acts where the system's default would."""
    handler = _install(number, default)
    if handler is None:
        yield
        return
    before = handler.before
    handler.users += 1
    try:
        yield
    finally:
        handler.users -= 1
        # The user may have put another handler there in the meantime. And the garbage collector may
        # end the block in a thread that cannot set one; the next block of the main thread does.
        here = threading.current_thread() is threading.main_thread()
        if here and not handler.users and signal.getsignal(number) is handler:
            signal.signal(number, before)


def _install(
    number: int, default: Callable[[int, FrameType | None], Any] | None
) -> _Handler | None:
    """Return the handler that guards a signal now; None if there is nothing to guard."""
    if threading.current_thread() is not threading.main_thread():
        return None
    present = signal.getsignal(number)
    if isinstance(present, _Handler):
        return present
    act = default if present is signal.SIG_DFL else present
    if not callable(act):  # ignored, or handled outside Python
        return None
    handler = _Handler(act, before=present)
    signal.signal(number, handler)
    return handler


def _is_changing_state(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, attaches something or puts something back."""
    free = {"inner"}  # the body of a function that a context manager decorates
    if frame is not None and frame.f_code is threading.Condition.wait.__code__:
        free |= {"__enter__", "enter_context"}  # waiting for a turn may take long
    while frame is not None:
        if frame.f_code.co_name not in free and _keeps_whole(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _keeps_whole(code: CodeType) -> bool:
    return (
        code in _whole_codes
        or code.co_filename in _WHOLE_FILES
        or (code.co_name in _CHANGES and code.co_filename.startswith(_WHOLE_FOLDERS))
        or code.co_name == "__del__"  # Python drops what it raises
    )


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECONDS)
    if hasattr(signal, "pthread_kill"):  # wakes the main thread also while it waits
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def switched_off() -> bool:
    """Whether the environment says TORCHFMRI=off: every attachment is then a no-op."""
    return os.environ.get("TORCHFMRI", "").strip().lower() in ("off", "0", "false", "no")


def compiled_code_as_eager() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly: compiled code calls no hooks that were added after it.

    The compiled code is kept and used again afterwards.
    """
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled; the import is slow
        return nullcontext()
    return _stance()


_lock = threading.Lock()
_users = 0
_outer: Any = None


@contextmanager
def _stance() -> Iterator[None]:
    """Force eager execution while anybody needs it.

    The stance belongs to the whole process: the first one in keeps what was there before and the
    last one out restores it, in whichever order and thread they come and go.
    """
    global _users, _outer
    with whole_restorations():
        with _lock:
            _users += 1
            if _users == 1:
                _outer = torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            with _lock:
                _users -= 1
                if _users == 0:
                    _outer.__exit__(None, None, None)
                    _outer = None
