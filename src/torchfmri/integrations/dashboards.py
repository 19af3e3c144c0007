"""A callback's Monitor, and the dashboard runs of its trainer, which get a summary.

The callbacks in `huggingface` and `lightning` are `Follower`s. They ask here for open runs, and
`writer_for` wraps each in a writer of `writers`. It never opens a run, and imports no dashboard
package: if a run is open, that has been imported already. Only the main process yields runs, since
the others have none. Trainer gives its TensorBoard writer to no other callback, so that one is
looked for among all objects; keep the comparison of exact types there, because `isinstance` makes
lazy objects load. Another dashboard is a branch in `writer_for` and in the function of its trainer.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_flag
from torchfmri._monitor import Monitor, Writer, check_options, check_writer
from torchfmri.exceptions import FindingWarning
from torchfmri.integrations.writers import TensorBoardWriter, TrackioWriter, WandbWriter


class Follower:
    """What the callbacks of all trainers share: their arguments, and the Monitor with its writers.

    Args:
        *writers: Writers for the Monitor.
        dashboards: Whether the run that the trainer has opened gets a summary if there are none.
        **options: Options of the Monitor.
    """

    def __init__(self, *writers: Writer, dashboards: bool = True, **options: Any) -> None:
        check_flag("dashboards", dashboards)
        self._dashboards = dashboards
        self.monitor: Monitor | None = None
        self._writers = [check_writer(each) for each in writers]
        self._options = check_options(options)

    def _follow(self, monitor: Monitor, runs: Iterable[Any]) -> None:
        """Take a new Monitor, and give it the user's writers, or those of the trainer's runs."""
        self.monitor = monitor
        open_runs = runs if self._dashboards and not self._writers else ()
        found = [write for run in open_runs if (write := writer_for(run)) is not None]
        for write in self._writers or found:
            monitor.add_writer(write)

    def _warn(self) -> None:
        """Warn of what the monitor found since it was last asked; remarks are left out."""
        for finding in self.monitor.new_findings() if self.monitor is not None else ():
            if finding.severity != "inform":
                said = f"torchfmri: {finding.text} {finding.advice}"
                warnings.warn(said, FindingWarning, stacklevel=3)


def writer_for(run: Any) -> Writer | None:
    """Return the writer of a summary for an open run; None for one of another kind.

    Args:
        run: A SummaryWriter of TensorBoard, or a run of Weights & Biases or trackio.
    """
    package = type(run).__module__.partition(".")[0]
    if package == "wandb" and hasattr(run, "log"):
        return WandbWriter(run)
    if package == "trackio" and hasattr(run, "log"):
        return TrackioWriter(run)
    return TensorBoardWriter(run) if hasattr(run, "add_scalar") else None


def trainer_runs(arguments: Any, state: Any) -> Iterator[Any]:
    """Yield the runs that the callbacks of Hugging Face's Trainer have opened.

    Args:
        arguments: Its TrainingArguments.
        state: Its TrainerState.
    """
    if not state.is_world_process_zero:  # other processes have none
        return
    wanted = arguments.report_to or ()
    if "tensorboard" in wanted:
        yield from _tensorboard_writers(Path(arguments.output_dir))
    if "wandb" in wanted and (wandb := sys.modules.get("wandb")) is not None:
        yield from _known(getattr(wandb, "run", None))
    if "trackio" in wanted and (trackio := sys.modules.get("trackio")) is not None:
        yield from _known(trackio.context_vars.current_run.get())


def lightning_runs(trainer: Any) -> Iterator[Any]:
    """Yield the runs of the loggers of a Lightning Trainer."""
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        yield from _known(getattr(logger, "experiment", None))


def _known(run: Any) -> Iterator[Any]:
    if run is not None:
        yield run


def _tensorboard_writers(output: Path) -> Iterator[Any]:
    """Yield the SummaryWriter that the Trainer has opened last.

    The Trainer hands its other callbacks to none of them, so theirs is looked for among all
    objects. A second writer in the same folder would not do: TensorBoard reads one file at a time.
    """
    from transformers.integrations.integration_utils import TensorBoardCallback

    # Not isinstance: it asks every object for its class, which makes lazy ones load themselves.
    callbacks = [each for each in gc.get_objects() if type(each) is TensorBoardCallback]
    open_ones = [each.tb_writer for each in callbacks if each.tb_writer is not None]
    own = [each for each in open_ones if output.resolve() in Path(each.log_dir).resolve().parents]
    yield from (own or open_ones)[-1:]
