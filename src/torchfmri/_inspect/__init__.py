"""`Inspector`: name layers by pattern, run once, read what happened inside.

`inspector` finds the layers, attaches the taps, runs and removes them. `recorder` is the sink that
keeps each tensor as statistics or whole. `difference` finds the first layer where two runs part.
"""

from torchfmri._inspect.difference import Difference, first_difference
from torchfmri._inspect.inspector import Inspector

__all__ = [
    "Difference",
    "Inspector",
    "first_difference",
]
