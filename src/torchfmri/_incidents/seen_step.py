"""What is remembered of a step in case it goes wrong: its calls, and the buffers before it.

`Hold` owns one `StepMemory`. It listens at every step of a training, so nothing here waits for a
device, and tensors are kept by reference; graphs of earlier micro-batches are released, or their
activations stay in memory. Once a loop was seen to write into its batch, batches are copied.
`MOST_CALLS` may change freely.

A forward pass writes into buffers (running statistics) before anybody can see that it is bad, so
the guard keeps `Buffers` at each step, and `diagnose` around its own. It costs one call for all
copies in a step, and large buffers that nobody writes to are not copied. Batch norm writes without
a new version, so versions alone must not decide what is copied. Values go back through `.data`, so
that autograd counts no write. `LARGE` may change freely: it weighs the cost of copies against
losing the first write to a large buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchfmri._incidents.content import is_finite
from torchfmri._incidents.model_call import ModelCall, call_of, versions
from torchfmri._model import CallListener, StepCalls, kept_whole, loss_in, unwrap
from torchfmri._torch import copy_into

LARGE = 1 << 20
"""Buffers with more values are copied only once somebody has written to them: most are tables."""
_Owner: TypeAlias = "dict[str, Tensor | None]"


class _KeptBuffer(NamedTuple):
    """A buffer, its place, and a copy of it; None if it is large and nobody has written to it."""

    owner: _Owner
    name: str
    label: str
    buffer: Tensor
    copy: Tensor | None


class Buffers:
    """Keeps what the buffers of a model hold, and gives it back.

    Args:
        model: The model; its modules are looked up once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (name, module._buffers) for name, module in model.named_modules() if module._buffers
        ]
        self._contents: list[_Owner] = []
        self._kept: list[_KeptBuffer] = []
        self._copies: list[Tensor] = []
        self._originals: list[Tensor] = []
        self._versions: list[int] = []

    def keep(self) -> None:
        """Remember what the buffers hold now; memory of the last time is used again."""
        if not self._are_known() or any(each.copy is None for each in self._written()):
            self._look_up()
        # Batch norm writes without a new version, so what has a copy is always copied.
        with torch.no_grad():
            copy_into(self._copies, self._originals)
        self._versions = [each.buffer._version for each in self._kept]

    def keep_if_written(self) -> None:
        """Remember them anew, if anybody wrote to one since."""
        if not self._are_known() or any(True for _ in self._written()):
            self.keep()

    def restore(self) -> Callable[[], None]:
        """Give the buffers what was kept; returns a function that undoes this."""
        now = [
            each._replace(buffer=found, copy=found.detach().clone())
            for each in self._kept
            if each.copy is not None and (found := each.owner.get(each.name)) is not None
        ]
        _put_back(self._kept)
        return lambda: _put_back(now)

    def spoilt(self) -> list[str]:
        """Return the buffers that are not finite now and were when they were kept."""
        return [
            each.label
            for each in self._kept
            if (now := each.owner.get(each.name)) is not None
            and not is_finite(now)
            and (each.copy is None or is_finite(each.copy))
        ]

    def _are_known(self) -> bool:
        """Whether the buffers are the tensors that were looked up."""
        return len(self._contents) == len(self._owners) and all(
            owner.keys() == content.keys() and all(map(is_, owner.values(), content.values()))
            for (_, owner), content in zip(self._owners, self._contents, strict=True)
        )

    def _look_up(self) -> None:
        """Find the buffers anew, and make room for copies: of small and of written ones."""
        copied = {each.label for each in self._kept if each.copy is not None}
        copied |= {each.label for each in self._written()}
        self._contents, self._kept = [], []
        for prefix, owner in self._owners:
            found = {name: each for name, each in owner.items() if not _is_empty(each)}
            self._contents.append(found)
            for name, buffer in found.items():
                if buffer is None or buffer.is_inference():
                    continue
                label = f"{prefix}.{name}" if prefix else name
                due = buffer.numel() <= LARGE or label in copied
                copy = buffer.detach().clone() if due else None
                self._kept.append(_KeptBuffer(owner, name, label, buffer, copy))
        self._copies = [each.copy for each in self._kept if each.copy is not None]
        self._originals = [each.buffer for each in self._kept if each.copy is not None]

    def _written(self) -> Iterable[_KeptBuffer]:
        """Return the buffers that were written to since they were kept, as far as versions tell."""
        return (
            each
            for each, version in zip(self._kept, self._versions, strict=False)
            if each.buffer._version != version
        )


@kept_whole
def _put_back(kept: list[_KeptBuffer]) -> None:
    """Give the modules these buffers again, with what the copies hold."""
    for owner, name, _, buffer, copy in kept:
        if copy is None:
            continue
        owner[name] = buffer
        # Through .data: views follow, and autograd does not count it as a write.
        if buffer.shape != copy.shape:
            buffer.data = copy.clone()
        else:
            buffer.data.copy_(copy)


def _is_empty(buffer: Tensor | None) -> bool:
    """Whether a buffer has yet to get its values."""
    return buffer is not None and (is_lazy(buffer) or buffer.is_meta)


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
