"""A Monitor in Lightning's Trainer: `Trainer(..., callbacks=[MonitorCallback()])`.

Public, and imported by its own name, because it needs lightning. The Trainer calls the `on_...`
methods. Lightning divides the loss by the number of micro-batches before its backward pass; the
Monitor is told the loss that the user returned. Hooks are removed when training ends, also by an
error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchfmri._monitor import Monitor
from torchfmri.integrations.dashboards import Follower, lightning_runs

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError(
        "This needs lightning, which is not installed: pip install 'torchfmri[lightning]'"
    ) from error


class MonitorCallback(Follower, Callback):
    """Follows a Lightning Trainer: each optimizer step is one step.

    With several optimizers the last one ends a step. Validation is not watched. The loss is what
    `training_step` returns. What is found wrong is said at once, as a `FindingWarning`.

    Args:
        *writers: As for `Monitor.add_writer`. Without any, the TensorBoard or Weights & Biases
            run of the Trainer's loggers gets a summary.
        dashboards: False to leave that run alone.
        **options: As for `Monitor`: watch, what, every, histogram, history, scaler, max_bytes,
            on_nonfinite, incidents.

    Attributes:
        monitor: The Monitor; None until training begins.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the Monitor, if there is none for this model, and attach it."""
        self._detach()
        if self.monitor is None or self.monitor.model is not pl_module:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            options = {"scaler": scaler, **self._options}
            monitor = Monitor(pl_module, trainer.optimizers, **options)
            self._follow(monitor, lightning_runs(trainer))
        if self.monitor is not None:
            self.monitor.attach()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the Monitor the batch, which it keeps if the step is an incident."""
        if self.monitor is not None:
            self.monitor.batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Tell the Monitor the loss, which Lightning divided by the number of micro-batches."""
        if self.monitor is not None:
            self.monitor.loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say what was found."""
        self._warn()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach."""
        self._detach()

    def _detach(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()
