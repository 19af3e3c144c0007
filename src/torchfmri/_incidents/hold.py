"""Holds a step before the optimizer applies something non-finite.

The Monitor calls it around each step. `raise` and `skip` hold: one number is read before the
optimizer steps, and the processes agree. `continue` never waits for a device: the number is read
once it has arrived. A step is left out by taking the gradients away until the optimizer has passed,
since an optimizer skips a parameter without one. They are given back whatever happens. A GradScaler
leaves steps out by itself, which is ordinary unless it goes on. That gradients are given back, and
that `continue` never waits, must stay: training goes on after both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from torchfmri._incidents.aftermath import Aftermath, IncidentSubject
from torchfmri._incidents.agreement import any_is_true
from torchfmri._incidents.content import gradients_of, is_finite, total_size
from torchfmri._incidents.incident import Action, Incident, Incidents
from torchfmri._incidents.seen_step import SeenStep, StepMemory
from torchfmri._model import StepCalls, spared_grad
from torchfmri._records import Finding, alarm
from torchfmri._torch import Deferred, is_compiled_in_place

SKIPS = 16
"""After this many skipped steps in a row a GradScaler is down from 65,536 to 1: an alarm."""


class _PendingStep(NamedTuple):
    """A step whose number is still on its way from the device."""

    number: int
    seen: SeenStep
    total: Deferred


class Hold:
    """Looks at each step before the optimizer applies it.

    Args:
        calls: Of the model and of the loss module.
        subject: The model that is guarded.
        action: What to do about a non-finite step.
        options: Which incidents to look into and to write.

    Attributes:
        action: What to do about a non-finite step.
    """

    def __init__(
        self, calls: StepCalls, subject: IncidentSubject, action: Action, options: Incidents
    ) -> None:
        self._calls, self.action = calls, action
        self._aftermath = Aftermath(subject, action, options)
        self._memory = StepMemory(calls, self._left_out, subject.failed)
        self._number = 0
        self._was_bad = self._stepped = self._is_known = False
        self._skips = 0
        self._spared = ExitStack()
        self._pending: deque[_PendingStep] = deque()

    @property
    def incidents(self) -> list[Incident]:
        """What was found so far."""
        return self._aftermath.incidents

    # -- following the loop ------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to see the model's calls; safe to call twice."""
        # A hook on a module that was compiled in place would have it compiled again.
        if not is_compiled_in_place(self._calls.model):
            self._calls.attach(self._memory)

    def detach(self) -> None:
        """Take everything off again; safe to call twice."""
        self._restore()
        self._calls.detach(self._memory)
        self._memory.step = SeenStep()

    def begin(self, number: int) -> None:
        """Begin a step."""
        self._restore()
        self._number, self._stepped, self._is_known = number, False, False
        self._memory.begin()

    def tell_loss(self, loss: Any) -> None:
        """Take the loss that the user tells."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._memory.step.told_losses.append(loss)

    def tell_batch(self, batch: Any) -> None:
        """Take the batch that the user tells."""
        self._memory.tell_batch(batch)

    def end(self) -> None:
        """End the step; if the optimizer has not stepped, the scaler has left it out.

        Raises:
            NonFiniteError: As `check`.
        """
        if not self._stepped and self._calls.scaler_went_on():
            self._left_out_by_scaler()

    def after_update(self) -> None:
        """Note that the optimizer has stepped."""
        self._restore()

    # -- looking -----------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> bool:
        """Look at the gradients as the optimizer finds them; True if it is to leave them out.

        Raises:
            NonFiniteError: They are not finite, and the action is to raise.
        """
        seen, self._stepped = self._memory.step, True
        self._memory.notice_overwriting()
        # A fused optimizer that divides by the scale leaves a bad step out by itself.
        leaves_out = getattr(optimizer, "grad_scale", None) is not None
        gradients = [] if leaves_out else gradients_of(optimizer)
        number = total_size(seen.known_losses, gradients)
        if self.action == "continue" and number is not None and number.is_cuda:
            seen.release_graphs()
            self._pending.append(_PendingStep(self._number, seen, Deferred([number])))
            self.read_pending(wait=False)
            return False
        bad = self._is_bad(number, [*seen.known_losses, *gradients])
        if leaves_out and self._skips_again(_found_inf(optimizer)):
            bad = True
        if not bad:
            self._skips = self._skips if leaves_out else 0
            self._was_bad = False
            return False
        self._happened(seen)
        if self.action == "skip":
            self._spare(optimizer)
        return self.action == "skip"

    def read_pending(self, wait: bool) -> None:
        """Look at the steps whose numbers have arrived since; all of them with `wait`."""
        while self._pending and (wait or self._pending[0].total.ready()):
            number, seen, total = self._pending.popleft()
            if math.isfinite(total.read()[0][0]):
                self._was_bad = False
            elif not self._was_bad:
                self._was_bad = True
                self._aftermath.report(number, seen, _late_finding(number, seen), exact=False)

    def _is_bad(self, number: Tensor | None, tensors: list[Tensor]) -> bool:
        """Whether these are not finite, here or (where steps are held) in another process."""
        bad = number is not None and not is_finite(number)
        if self.action == "continue":
            return bad and not all(map(is_finite, tensors))
        return any_is_true(bad) and any_is_true(not all(map(is_finite, tensors)))

    def _left_out(self) -> None:
        if not self._stepped:
            try:
                self._left_out_by_scaler()
            finally:
                self._memory.begin()

    def _left_out_by_scaler(self) -> None:
        """Look at a step that the GradScaler left out; that is ordinary unless it goes on."""
        seen = self._memory.step
        bad = self._skips_again(True) or not all(map(is_finite, seen.known_losses))
        if bad if self.action == "continue" else any_is_true(bad):
            self._happened(seen)

    def _skips_again(self, skipped: bool) -> bool:
        self._skips = self._skips + 1 if skipped else 0
        return self._skips >= SKIPS

    def _happened(self, seen: SeenStep) -> None:
        """Look into a bad step, with the buffers as they were before it."""
        # A second optimizer of the same step finds the same loss.
        goes_on = self._is_known or (self._was_bad and self.action == "continue")
        self._was_bad = self._is_known = True
        if goes_on:
            return
        put_back, spoilt = self._take_back_buffers()
        try:
            self._aftermath.look_into(self._number, seen, spoilt)
        finally:
            if self.action == "continue":
                put_back()

    def _take_back_buffers(self) -> tuple[Callable[[], None], list[str]]:
        """Put the buffers back as they were before the step.

        Returns a function that undoes this, and the buffers that are no longer finite: all of them
        if the step is applied, else those that were not copied.
        """
        buffers = self._memory.buffers
        try:
            spoilt = buffers.spoilt()
            put_back = buffers.restore()
            return put_back, spoilt if self.action == "continue" else buffers.spoilt()
        except Exception as error:  # the step is held all the same
            reason = f"{type(error).__name__}: {error}"
            self._aftermath.warn(f"The buffers could not be put back: {reason}")
            return lambda: None, []

    # -- leaving a step out ------------------------------------------------------------------

    def _spare(self, optimizer: Optimizer) -> None:
        """Take the gradients away until the optimizer has passed: it skips what has none."""
        trained = (each for group in optimizer.param_groups for each in group["params"])
        self._spared.enter_context(spared_grad(each for each in trained if each.grad is not None))

    def _restore(self) -> None:
        self._spared.close()


def _found_inf(optimizer: Optimizer) -> bool:
    """Whether the GradScaler told a fused optimizer to leave the step out."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found > 0)


def _late_finding(number: int, seen: SeenStep) -> Finding:
    of_loss = not all(map(is_finite, seen.known_losses))
    what = "The loss" if of_loss else "A gradient"
    return alarm(
        "nonfinite_loss" if of_loss else "nonfinite_backward",
        step=number,
        text=f"{what} of step {number} was not finite. It was noticed after the update, so its "
        "origin is not known.",
        advice="With on_nonfinite='skip' or 'raise' a step is held and looked into.",
    )
