"""`Inspector`: name layers by pattern, run once, read what happened inside.

`inspector` finds the layers, attaches the taps, runs and removes them. `recorder` is the sink that
keeps each tensor as statistics or whole.
"""

from torchfmri._inspect.inspector import Inspector
