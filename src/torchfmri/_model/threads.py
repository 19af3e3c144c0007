"""Threads: whose turn it is to run a model, and which thread watches which one.

`unchanged` and the Inspector take the turn; the Monitor, edits and token gradients register what
they watch. Modes, hooks and random generators are the same for all threads, so two runs that put
them back must not overlap: the second waits (`own_turn`) or is refused with both threads' names
(`watched`). A turn ends inside `whole_restorations`, so that Ctrl-C cannot leave it taken. A forked
process begins without owners that it does not have. How a thread waits for its turn may change
freely.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from torchfmri._model.generators import RandomState, random_state
from torchfmri._model.layers import every_module, runnable, unwrap
from torchfmri._model.process import whole_restorations
from torchfmri._torch import Hook, hooked
from torchfmri.exceptions import InspectionError


class _Turn:
    """The turn to run models: one thread at a time has it, and may take it again.

    The random generators belong to the whole process. Those of the program are put back whenever
    the turn is given back.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._owner: threading.Thread | None = None
        self._depth = 0
        self._generators: RandomState | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._take(1)
        try:
            yield
        finally:
            self._give(1)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Give the turn back for the block, at any depth, with the generators of the program."""
        if self._owner is not threading.current_thread():
            yield
            return
        depth, inner = self._depth, random_state()
        self._give(depth)
        try:
            yield
        finally:
            self._take(depth)
            inner.restore()

    def _take(self, depth: int) -> None:
        own = threading.current_thread()
        with self._change:
            while self._owner not in (None, own):
                self._change.wait()
            if self._owner is None:
                self._generators = random_state()
            self._owner = own
            self._depth += depth

    def _give(self, depth: int) -> None:
        with self._change:
            self._depth -= depth
            if not self._depth:
                if self._generators is not None:
                    self._generators.restore()
                self._owner = None
                self._change.notify()

    def after_fork(self) -> None:
        """Take the turn from a thread that the new process does not have."""
        self._change = threading.Condition()
        if self._owner is not threading.current_thread():
            self._owner, self._depth = None, 0


class _Watch:
    """A model, and the thread that has it."""

    def __init__(self, model: nn.Module) -> None:
        # Weak references, because an id is given to another module once this one is gone: a Monitor
        # that was never detached would hinder a model that has nothing to do with it.
        self._modules = weakref.WeakValueDictionary(
            (id(each), each) for each in every_module(model)
        )
        self.thread = threading.current_thread()

    @property
    def modules(self) -> frozenset[int]:
        """The ids of the modules that still exist."""
        return frozenset(self._modules)

    def hinders(self, other: _Watch) -> bool:
        """Whether another thread has a part of the same model, and may still use it."""
        return (
            self.thread is not other.thread
            and self.thread.is_alive()
            and not self.modules.isdisjoint(other.modules)
        )


_turn = _Turn()
_lock = threading.RLock()  # a block that the garbage collector ends may come in between
_watches: list[_Watch] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _turn.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def own_turn() -> Iterator[None]:
    """Run models while no other thread does through torchfmri; wait until it is this one's turn.

    Random generators and modes are the same for all threads, so two runs that put them back must
    not overlap. The generators are afterwards as they were.
    """
    with whole_restorations(), _turn.taken():
        yield


def resting() -> AbstractContextManager[None]:
    """Let other threads have their turn, while this one is in the user's hands.

    A reader of a stream takes as long as he likes, and may run other models in between. The random
    generators are meanwhile those of the program.
    """
    return _turn.resting()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: with several, sums are added up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def watched(model: nn.Module, *, alone: bool = True) -> Iterator[None]:
    """Have a model for this thread while hooks are on it or its state is changed.

    Args:
        model: The model.
        alone: Calls of the model in other threads raise; if False, they are told apart.

    Raises:
        InspectionError: Another thread watches or runs the model, or modules of it.
    """
    with whole_restorations():
        watch = _Watch(model)
        with _lock:
            known = _is_known(watch)
            _watches.append(watch)
        try:
            if known or not alone:
                yield
            else:
                with _refusing_other_threads(model):
                    yield
        finally:
            with _lock:
                _watches.remove(watch)


def _is_known(watch: _Watch) -> bool:
    """Whether the thread has the whole model already.

    Raises:
        InspectionError: Another thread, which still runs, has a part of it.
    """
    for other in _watches.copy():
        if other.hinders(watch):
            raise InspectionError(
                f"The model is watched or run by torchfmri in thread {other.thread.name!r}, and "
                f"this is {watch.thread.name!r}: hooks and modes of both would mix. Do it in that "
                "thread or when it has finished, or use a copy: copy.deepcopy(model)."
            )
    own = (each.modules for each in _watches if each.thread is watch.thread)
    return any(watch.modules <= each for each in own)


class TrainedModel:
    """A model that is trained under watch, by whichever thread calls it.

    Until it is released, other threads may not watch or run it through torchfmri: they would change
    its mode in the middle of a step.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watch = _Watch(model)

    def is_called(self) -> None:
        """Remember the thread that calls the model now."""
        self._watch.thread = threading.current_thread()
        if self._watch not in _watches:
            with _lock:
                _watches.append(self._watch)

    def release(self) -> None:
        """Let other threads have it; safe to call twice."""
        with _lock:
            if self._watch in _watches:
                _watches.remove(self._watch)


@contextmanager
def _refusing_other_threads(model: nn.Module) -> Iterator[None]:
    """Refuse calls of the model in other threads, which would be taken for this one's."""
    owner = threading.current_thread()

    def refuse(module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():  # by this thread, and a graph asks for no thread
            return
        own = threading.current_thread()
        if own is not owner and owner.is_alive():
            raise InspectionError(
                f"{type(module).__name__} was called in thread {own.name!r} while torchfmri "
                f"watches or runs it in thread {owner.name!r}: the call would be recorded there, "
                "or run in its mode. Call it before or after, or give each thread a copy: "
                "copy.deepcopy(model)."
            )

    doors = {id(each): each for each in (model, runnable(model), unwrap(model))}
    with hooked(
        each.register_forward_pre_hook(Hook(refuse, each), prepend=True)
        for each in doors.values()
        if not isinstance(each, torch.jit.ScriptModule)
    ):
        yield
