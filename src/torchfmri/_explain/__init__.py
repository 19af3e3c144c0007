"""`explain`: an exception of PyTorch with its layer, line, reason and cure.

`crash` reads the traceback, `failed_backward` the graph, `*_clues` the tensors. A failure that can
be explained is an entry (pattern, what, why, cure) of a table in `*_failures`, with a row in
`docs/errors.md`.
"""

from torchfmri._explain.crash import SourceLine, TracebackStep
from torchfmri._explain.entry_points import explain, explained
from torchfmri._explain.explanation import Explanation

__all__ = [
    "Explanation",
    "SourceLine",
    "TracebackStep",
    "explain",
    "explained",
]
