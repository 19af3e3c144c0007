"""What is remembered of the current step in case it goes wrong, and the hooks that see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._incidents.buffers import Buffers
from torchfmri._incidents.model_call import ModelCall, call_of, versions
from torchfmri._model import loss_in, unwrap
from torchfmri._torch import (
    Hook,
    gradient_scale_version,
    infers_shapes,
    is_compiled_in_place,
    scaler_went_on,
)
from torchfmri.exceptions import MEANT_FOR_THE_USER

MOST_CALLS = 64
"""Of a step with more micro-batches the latest are remembered."""


class SeenStep:
    """One step, by reference where nobody writes into its batch; no device is waited for.

    Attributes:
        calls: The calls of the model with gradients, one per micro-batch.
        losses: The losses that were seen.
        told_losses: The losses that the user told.
        told_batch: The batch that the user told.
        told_call: The call that this batch is for, in case that none is seen.
        scale_version: The version of the GradScaler's scale when the step began.
    """

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.losses: list[Tensor] = []
        self.told_losses: list[Tensor] = []
        self.told_batch: Any = None
        self.told_call: ModelCall | None = None
        self.scale_version: int | None = None

    @property
    def kept_calls(self) -> list[ModelCall]:
        """The calls to write down: those that were seen, else the one that was told of."""
        return self.calls or ([self.told_call] if self.told_call is not None else [])

    @property
    def overwritten(self) -> set[int]:
        """The identities of the tensors that were written into since they were seen or told."""
        told = [self.told_call] if self.told_call is not None else []
        return set().union(*(call.overwritten for call in (*self.calls, *told)))

    def release_graphs(self) -> None:
        """Let go of the graphs of the losses: only the latest may be of use."""
        self.losses = [loss.detach() for loss in self.losses]
        self.told_losses = [loss.detach() for loss in self.told_losses]

    @property
    def known_losses(self) -> list[Tensor]:
        """The losses, as they were told or else seen."""
        return self.told_losses or self.losses


class StepWatch:
    """Hooks on the model and the loss module that fill a `SeenStep`.

    Args:
        model: The model as it is trained.
        loss: The loss module, or None.
        scaler: The GradScaler, or None.
        entered: Called when the model is about to run.
        failed: Told of our own failures.

    Attributes:
        step: The step under way.
        is_resting: Whether calls do not count: they are ours.
        buffers: The buffers of the model, as they were before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None,
        scaler: Any,
        entered: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.step, self.is_resting = SeenStep(), False
        self._model, self._loss, self._scaler = model, loss, scaler
        self._entered, self._stop = entered, failed
        self._handles: list[Any] = []
        self._copies = False  # whether batches are written into, so that references do not do
        self.buffers = Buffers(unwrap(model))

    def begin(self) -> None:
        """Begin a step."""
        self.step = SeenStep()
        self.buffers.keep()

    def attach(self) -> None:
        """Put the hooks on; safe to call twice."""
        # A hook on a module that was compiled in place would have it compiled again.
        if self._handles or is_compiled_in_place(self._model):
            return
        model, loss, failed = self._model, self._loss, self._failed
        before, after = Hook(self._enter, model, failed), Hook(self._leave, model, failed)
        self._handles += [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]
        if loss is not None:
            seen = Hook(self._leave_loss, loss, failed)
            self._handles.append(loss.register_forward_hook(seen))

    def detach(self) -> None:
        """Take the hooks off, and forget the step; safe to call twice."""
        while self._handles:
            self._handles.pop().remove()
        self.step = SeenStep()

    def notice_overwriting(self) -> None:
        """Copy batches from now on, if somebody has written into those of this step."""
        self._copies = self._copies or any(call.overwritten for call in self.step.calls)

    def was_skipped(self) -> bool:
        """Whether the scaler has gone on to the next step without the optimizer."""
        version = self.step.scale_version
        return version is not None and gradient_scale_version(self._scaler) != version

    def ended_without_optimizer(self) -> bool:
        """Whether the scaler has made its step; if the optimizer has not, it was left out."""
        version = self.step.scale_version
        return version is not None and scaler_went_on(self._scaler, version)

    def tell_batch(self, batch: Any) -> None:
        """Take the batch of the step that the user tells."""
        self.step.told_batch = batch
        is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
        keywords = dict(batch) if isinstance(batch, Mapping) else {}
        arguments = () if keywords else (batch[0] if is_pair else batch,)
        self.step.told_call = call_of(self._model, arguments, keywords)
        self.step.told_call.given = versions(batch)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, MEANT_FOR_THE_USER):
            raise error
        self._stop(error)

    def _counts(self) -> bool:
        """Whether a call is part of the step: not ours, no evaluation, no search for shapes."""
        return not self.is_resting and torch.is_grad_enabled() and not infers_shapes()

    def _enter(self, _: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if not self._counts():
            return
        self._entered()
        if self._scaler is not None and self.step.scale_version is None:
            self.step.scale_version = gradient_scale_version(self._scaler)
        if not self.step.calls:  # something may have run since the step began
            self.buffers.keep_if_written()
        self.step.release_graphs()
        self.step.calls.append(call_of(self._model, arguments, keywords, self._copies))
        del self.step.calls[:-MOST_CALLS]

    def _leave(self, _: nn.Module, __: object, output: Any) -> None:
        if not self._counts() or not self.step.calls:
            return
        self.step.calls[-1].ended()
        if self._loss is not None:
            self.step.calls[-1].returned(output)
            return
        loss = loss_in(output)
        if loss is not None and loss.requires_grad:
            self.step.losses.append(loss)

    def _leave_loss(self, _: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not self._counts():
            return
        if self.step.calls:
            self.step.calls[-1].reached_loss(arguments)
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            self.step.losses.append(output)
