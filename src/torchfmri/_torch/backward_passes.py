"""Numbers for backward passes, so that no gradient is counted into the wrong one.

Every gradient hook of `_capture.taps` asks `Backwards.current()`; token gradients ask
`runs_checkpoint` and `runs_grad`. A reentrant checkpoint runs a backward pass inside another, under
a number of its own: it must count as the outer one, or its parameters seem to get two gradients.
Autograd tells nobody when a backward pass fails, so one that is no longer on the Python stack is
taken for over; the comparison of depths in `current` does this. An exception that leaves `_close`
would end the user's backward pass.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils import checkpoint

from torchfmri._torch.private import (
    NO_BACKWARD,
    at_end_of_backward,
    current_backward,
    frames,
    saved_tensor_hooks,
)


class _Running(NamedTuple):
    task: int
    depth: int  # how many backward passes were on the Python stack when it was first seen


class Backwards:
    """The backward passes of one recording; one inside another (reentrant) counts as the outer.

    Attributes:
        expects_nested: A reentrant checkpoint was seen: its backward pass runs inside another,
            and parameters get their gradients in parts.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.expects_nested = False
        self._failed = failed
        self._root: dict[int, int] = {}
        self._open: dict[int, list[_Running]] = defaultdict(list)
        self._at_end: dict[int, dict[object, Callable[[int], None]]] = defaultdict(dict)

    def current(self) -> int:
        """Return the number of the outermost backward pass that runs in this thread."""
        task = current_backward()
        if task == NO_BACKWARD:
            return NO_BACKWARD
        if task not in self._root:
            running = self._open[threading.get_ident()]
            depth = _depth()
            # One that is no longer on the stack has failed: autograd calls nobody back then.
            while running and running[-1].depth >= depth:
                running.pop()
            self._root[task] = self._root[running[-1].task] if running else task
            entry = _Running(task, depth)
            if at_end_of_backward(lambda: self._close(running, entry)):
                running.append(entry)
        return self._root[task]

    def notice(self, *_: object) -> None:
        """Note that a module runs here: a hook for modules of which only gradients are wanted."""
        self.is_checkpointed()
        self.current()

    def is_checkpointed(self) -> bool:
        """Whether the forward pass of a reentrant checkpoint is running."""
        if torch.is_grad_enabled() or not _runs_checkpoint():
            return False
        self.expects_nested = True
        return True

    def at_end(self, backward: int, act: Callable[[int], None]) -> None:
        """Have `act(backward)` called when this backward pass is over, once."""
        self._at_end[backward].setdefault(act, act)

    def forget(self) -> None:
        """Forget backward passes that are over."""
        running = {entry.task for entries in self._open.values() for entry in entries}
        kept = {self._root[task] for task in running}
        self._root = {task: root for task, root in self._root.items() if root in kept}
        self._at_end = defaultdict(
            dict, {task: acts for task, acts in self._at_end.items() if task in kept}
        )

    def _close(self, running: list[_Running], entry: _Running) -> None:
        if entry in running:
            running.remove(entry)
        if self._root.get(entry.task) != entry.task:
            return
        for act in self._at_end.pop(entry.task, {}).values():
            try:
                act(entry.task)
            except Exception as error:  # an exception here would end the user's backward pass
                self._failed(error)


def runs_checkpoint() -> bool:
    """Whether the code that is running stands inside an activation checkpoint, and gradients on."""
    if saved_tensor_hooks(False) is None:
        return False
    return any(frame.f_code in _CHECKPOINTS for frame in frames())


def runs_grad() -> bool:
    """Whether the backward pass of this thread is torch.autograd.grad, which fills no `.grad`."""
    found = (frame.f_code for frame in frames() if frame.f_code in _BACKWARD)
    return next(found, None) is torch.autograd.grad.__code__


_BACKWARD = frozenset({torch.autograd.backward.__code__, torch.autograd.grad.__code__})
_CHECKPOINT = checkpoint.CheckpointFunction.forward.__code__
_CHECKPOINTS = frozenset({inspect.unwrap(checkpoint.checkpoint).__code__})


def _depth() -> int:
    """Return how many backward passes the Python code of this thread is in."""
    return sum(frame.f_code in _BACKWARD for frame in frames())


def _runs_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs its first pass, for gradients that will be wanted."""
    return any(
        frame.f_code is _CHECKPOINT and any(frame.f_locals["ctx"].needs_input_grad)
        for frame in frames()
    )
