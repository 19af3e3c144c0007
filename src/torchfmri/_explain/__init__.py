"""`explain`: an exception of PyTorch with its layer, line, reason and cure.

`crash` reads the traceback, `backward_clues` the graph. A failure that can be explained is an
entry (pattern, what, why, cure) of a table in `*_failures`, beside the functions that read clues
from the tensors, and a row in `docs/errors.md`.
"""

from torchfmri._explain.crash import SourceLine, TracebackStep
from torchfmri._explain.entry_points import add_note, explain, explained
from torchfmri._explain.explanation import Explanation
