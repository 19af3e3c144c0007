"""A Monitor in Hugging Face's Trainer: `Trainer(..., callbacks=[MonitorCallback()])`.

Public, and imported by its own name, because it needs transformers. The Trainer calls the `on_...`
methods; which of them runs when is theirs to say, so a step that was begun and never ended is
dropped and not recorded. The model is unwatched whenever training ends, also by an error.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from torchfmri._monitor import Monitor, MonitoredStep, Writer
from torchfmri.exceptions import InspectionError, NonFiniteWarning
from torchfmri.integrations.dashboards import Follower, trainer_runs

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "This needs transformers, which is not installed: pip install 'torchfmri[scan]'"
    ) from error


class MonitorCallback(Follower, TrainerCallback):
    """Follows a Trainer: each optimizer step is one step, however many micro-batches it takes.

    Evaluation and prediction are not watched. The loss is the one that the model returns. What is
    found wrong is said at once, as a `FindingWarning`.

    Args:
        *writers: As for `Monitor.add_writer`. Without any, the TensorBoard, Weights & Biases or
            trackio run that the Trainer opened (`report_to`) gets a summary.
        dashboards: False to leave that run alone.
        **options: As for `Monitor`: watch, what, every, histogram, history, max_bytes,
            on_nonfinite, incidents.

    Attributes:
        monitor: The Monitor; None until training begins.
    """

    def __init__(self, *writers: Writer, dashboards: bool = True, **options: Any) -> None:
        super().__init__(*writers, dashboards=dashboards, **options)
        self._step: AbstractContextManager[MonitoredStep] | None = None
        self._warned = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Make the Monitor, or go on with the one of the last `train()`."""
        self._leave(finished=False)
        if model is None:
            raise InspectionError(
                "The Trainer handed no model to its callbacks. Put a Monitor around your own loop "
                "instead: Monitor(model, optimizer)."
            )
        if self.monitor is None or self.monitor.model is not model:
            self._follow(Monitor(model, **self._options), trainer_runs(args, state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to watch a step."""
        self._leave(finished=False)
        if self.monitor is not None:
            self._step = self.monitor.step()
            self._step.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step that the optimizer has just taken, and warn of findings."""
        self._leave(finished=True)
        self._warn()

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warn once if the Trainer's log hides a loss that is not finite."""
        if self._warned or self.monitor is None or not args.logging_nan_inf_filter:
            return
        step = _first_nonfinite_step(self.monitor)
        if step is not None:
            self._warned = True
            warnings.warn(
                f"torchfmri: the loss of step {step} was not finite, but the Trainer's "
                "log does not show it: logging_nan_inf_filter=True leaves such losses out. Set it "
                "to False in TrainingArguments.",
                NonFiniteWarning,
                stacklevel=2,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks of a step that did not end."""
        self._leave(finished=False)

    def _leave(self, finished: bool) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if finished:
            step.__exit__(None, None, None)
            return
        left = _LeftEarly()  # a step that did not reach its end is not recorded
        try:
            step.__exit__(_LeftEarly, left, None)
        except _LeftEarly:
            return


def _first_nonfinite_step(monitor: Monitor) -> int | None:
    """Return the first step whose loss or gradients were not finite; None if there is none."""
    held = [step.number for step in monitor.history if "nonfinite" in step.scalars]
    found = [
        each.step
        for finding in monitor.findings
        for each in (finding, *finding.consequences)
        if each.problem.startswith("nonfinite") and each.step is not None
    ]
    return min([*held, *found], default=None)


class _LeftEarly(Exception):  # noqa: N818 (no error: it never leaves this file)
    """Ends a step that was begun and never finished."""
