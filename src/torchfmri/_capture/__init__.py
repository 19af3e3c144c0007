"""Hooks on modules that hand what they see to a sink, and that are always removed.

`Taps` calls a sink, which reduces or copies the tensor at once; it knows nothing of statistics.
`gradient_listeners` waits for the gradient of an output, of an input through one call, or of a
parameter. `padding` knows which positions are padding; `position` knows which layer is running.
Something new to watch needs a hook in `taps`.
"""

from torchfmri._capture.padding import Padding, TokenMask, masked_modules
from torchfmri._capture.position import (
    BACKWARD,
    FORWARD,
    LOSS,
    PAUSED,
    Position,
    RunningLayers,
)
from torchfmri._capture.taps import CallKey, Short, Sink, Taps, Target
