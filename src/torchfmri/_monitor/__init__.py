"""`Monitor`: the statistics of every training step, while a model trains.

`monitor` follows the loop, `step_hooks` attaches to one step, `watched_step` and `collector` reduce
what it brings (on a GPU many tensors per launch, read later), `updates` measures how far the
weights move. `gather` joins the histories of several processes, `history_table` shows one step.
"""

from torchfmri._monitor.monitor import (
    Monitor,
    MonitoredStep,
    MonitorWarning,
    Writer,
    check_options,
    check_writer,
)

__all__ = [
    "Monitor",
    "MonitorWarning",
    "MonitoredStep",
    "Writer",
    "check_options",
    "check_writer",
]
