"""What is remembered of the current step in case it goes wrong.

`Hold` owns one `StepMemory`. It listens at every step of a training, so nothing here waits for a
device, and tensors are kept by reference; graphs of earlier micro-batches are released, or their
activations stay in memory. Once a loop was seen to write into its batch, batches are copied.
`MOST_CALLS` may change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from torchfmri._incidents.buffers import Buffers
from torchfmri._incidents.model_call import ModelCall, call_of, versions
from torchfmri._model import CallListener, StepCalls, loss_in, unwrap

MOST_CALLS = 64
"""The most micro-batches of a step that are remembered; of more, only the latest."""


class SeenStep:
    """One step, by reference if nobody writes into its batch; no device is waited for.

    Attributes:
        calls: The calls of the model with gradients, one per micro-batch.
        losses: The losses that were seen.
        told_losses: The losses that the user told.
        told_batch: The batch that the user told.
        told_call: The call that this batch is for, in case no call is seen.
    """

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.losses: list[Tensor] = []
        self.told_losses: list[Tensor] = []
        self.told_batch: Any = None
        self.told_call: ModelCall | None = None

    @property
    def kept_calls(self) -> list[ModelCall]:
        """The calls to write down: those that were seen, or that of the told batch if none was."""
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


class StepMemory(CallListener):
    """Fills a `SeenStep` with what `StepCalls` tells.

    Args:
        calls: Of the model and of the loss module.
        left_out: Called when the GradScaler went on without the optimizer.
        failed: Called with an error of ours.

    Attributes:
        step: The step under way.
        buffers: The buffers of the model, as they were before the step.
    """

    def __init__(
        self,
        calls: StepCalls,
        left_out: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.step = SeenStep()
        self.left_out, self.failed = left_out, failed
        self._calls = calls
        self._copies = False  # whether batches are written into, so that references do not do
        self.buffers = Buffers(unwrap(calls.model))

    def begin(self) -> None:
        """Begin a step."""
        self.step = SeenStep()
        self.buffers.keep()

    def notice_overwriting(self) -> None:
        """Copy batches from now on, if somebody has written into those of this step."""
        self._copies = self._copies or any(call.overwritten for call in self.step.calls)

    def tell_batch(self, batch: Any) -> None:
        """Take the batch of the step that the user tells."""
        self.step.told_batch = batch
        is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
        keywords = dict(batch) if isinstance(batch, Mapping) else {}
        arguments = () if keywords else (batch[0] if is_pair else batch,)
        self.step.told_call = call_of(self._calls.model, arguments, keywords)
        self.step.told_call.given = versions(batch)

    # -- the calls of the step ---------------------------------------------------------------

    def entered(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Remember a call of the model before it runs."""
        if not self.step.calls:  # something may have run since the step began
            self.buffers.keep_if_written()
        self.step.release_graphs()
        self.step.calls.append(call_of(self._calls.model, arguments, keywords, self._copies))
        del self.step.calls[:-MOST_CALLS]

    def left(self, keywords: Mapping[str, Any], output: Any) -> None:
        """Remember where the output lies if a loss module follows, or the output's own loss."""
        if not self.step.calls:
            return
        self.step.calls[-1].ended()
        if self._calls.loss is not None:
            self.step.calls[-1].returned(output)
            return
        loss = loss_in(output)
        if loss is not None and loss.requires_grad:
            self.step.losses.append(loss)

    def left_loss(self, arguments: tuple[Any, ...], output: Any) -> None:
        """Remember what the loss module made of it."""
        if self.step.calls:
            self.step.calls[-1].reached_loss(arguments)
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            self.step.losses.append(output)
