"""`Monitor`: the statistics of every training step, while a model trains.

`monitor` follows the loop, `plan` says what is watched, `step_hooks` attaches to one step (of a
compiled model `compiled_calls`), `watched_step` and `collector` reduce what it brings (on a GPU
many tensors per launch), `updates` measures how far the weights move, `gather` joins processes,
`history_table` shows a step.
"""

from torchfmri._monitor.monitor import (
    Monitor,
    MonitoredStep,
    MonitorWarning,
    Writer,
    check_options,
    check_writer,
)
