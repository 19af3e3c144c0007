"""Notices the calls of a model and of its loss module that belong to a training step.

The Monitor's statistics (`StepHooks`) and the guard against NaN (`StepMemory`) are its listeners:
the guard at every step, the statistics at watched ones. The hooks are on the model while somebody
listens. Calls without gradients (evaluation), ours (`resting`) and those of a pipeline that looks
for shapes do not count. A GradScaler may leave the optimizer out and go on, which is noticed at the
next call. Whoever else has to follow steps becomes another listener and needs no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from torchfmri._model.threads import TrainedModel
from torchfmri._torch import Hook, HookSet, gradient_scale_version, infers_shapes, scaler_went_on
from torchfmri.exceptions import MEANT_FOR_THE_USER


class CallListener(Protocol):
    """Receives what happens to the model in a step; a subclass takes what it needs.

    Attributes:
        left_out: Called before `entered` when the GradScaler went on without the optimizer.
        failed: Called with an error of ours; one that is meant for the user goes to the user.
    """

    left_out: Callable[[], None]
    failed: Callable[[Exception], None]

    def entered(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Take note that the model is about to run."""
        return

    def left(self, keywords: Mapping[str, Any], output: Any) -> None:
        """Take what the model returned; None after an error."""

    def left_loss(self, arguments: tuple[Any, ...], output: Any) -> None:
        """Take what the loss module was called with, and what it returned."""


class StepCalls:
    """The hooks on a model and on its loss module, for everybody who listens.

    Args:
        model: The model as it is trained.
        loss: The loss module, or None.
        scaler: The GradScaler, or None.

    Attributes:
        trained: Keeps other threads from watching the model, from its first call until released.
    """

    def __init__(self, model: nn.Module, loss: nn.Module | None, scaler: Any) -> None:
        self.model, self.loss, self._scaler = model, loss, scaler
        self.trained = TrainedModel(model)
        self._listeners: list[CallListener] = []
        self._hooks = HookSet()
        self._counted: list[bool] = []  # of the calls that run now, one inside the other
        self._is_resting = False
        self._scale_version: int | None = None

    def attach(self, listener: CallListener, *, hooks_model: bool = True) -> None:
        """Begin to tell a listener, after those that listen already; safe to call twice.

        Args:
            listener: Who is told.
            hooks_model: Whether to hook the model; if not, `enter` and `leave` have to be called.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)
            if len(self._listeners) == 1:
                self._add_hooks(hooks_model)

    def _add_hooks(self, hooks_model: bool) -> None:
        if hooks_model:
            self._hooks.before([self.model], Hook(self.enter, self.model))
            self._hooks.after([self.model], Hook(self.leave, self.model), always=True)
        if self.loss is not None:
            self._hooks.after([self.loss], Hook(self._leave_loss, self.loss))

    def detach(self, listener: CallListener) -> None:
        """Tell a listener no longer; after the last the hooks are off. Safe to call twice."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            self._hooks.remove()
            self._counted.clear()  # calls that were entered are never left

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Ignore calls in this block: they are not those of the step."""
        self._is_resting = True
        try:
            yield
        finally:
            self._is_resting = False

    def counts(self) -> bool:
        """Whether a call that runs now is part of the step.

        What counts is whether gradients were on where the model was entered: a reentrant
        checkpoint turns them off inside.
        """
        if self._is_resting:
            return False
        return self._counted[-1] if self._counted else _is_trained()

    # -- the GradScaler ----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: what the scaler did before it does not count."""
        self._scale_version = None

    def note_scale(self) -> None:
        """Remember the version of the scale that the step is run with."""
        if self._scaler is not None and self._scale_version is None:
            self._scale_version = gradient_scale_version(self._scaler)

    def scaler_went_on(self) -> bool:
        """Whether the scaler has made its step; if the optimizer has not, it was left out."""
        version = self._scale_version
        return version is not None and scaler_went_on(self._scaler, version)

    # -- a call ------------------------------------------------------------------------------

    def enter(self, _: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """The model is about to run."""
        self._counted.append(_is_trained())
        if not self.counts():
            return
        self.trained.is_called()
        try:
            before, self._scale_version = self._scale_version, None
            self.note_scale()
        except Exception as error:
            for each in tuple(self._listeners):
                each.failed(error)
            return
        if before is not None and before != self._scale_version:
            self._tell(lambda each: each.left_out())
        self._tell(lambda each: each.entered(arguments, keywords))

    def leave(self, _: nn.Module, __: object, keywords: Mapping[str, Any], output: Any) -> None:
        """The model has run."""
        try:
            if self.counts():
                self._tell(lambda each: each.left(keywords, output))
        finally:
            del self._counted[-1:]

    def _leave_loss(
        self, _: nn.Module, arguments: tuple[Any, ...], __: object, output: Any
    ) -> None:
        if self.counts():
            self._tell(lambda each: each.left_loss(arguments, output))

    def _tell(self, act: Callable[[CallListener], None]) -> None:
        for listener in tuple(self._listeners):  # one that fails may leave
            try:
                act(listener)
            except MEANT_FOR_THE_USER:
                raise
            except Exception as error:
                listener.failed(error)


def _is_trained() -> bool:
    """Whether a call that begins now is part of a training step."""
    return torch.is_grad_enabled() and not infers_shapes()
