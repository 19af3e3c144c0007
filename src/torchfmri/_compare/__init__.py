"""`compare`: where two runs part, and whether that is rounding or a bug.

`run` runs a model and records it, `rounding` lets its layers round anew, `grid` and `recording`
turn tensors into rows of tokens. `sources` makes a side of whatever is given, `matching` finds the
partner of each layer, `pairing` measures, `origin`, `causes` and `kinds` say where a difference
comes from and what it is, `comparison` and `pictures` show it. A new kind is a test in `kinds`.
"""

from torchfmri._compare.compare import compare
from torchfmri._compare.comparison import Comparison
from torchfmri._compare.difference import Difference
from torchfmri._compare.run import Run

__all__ = ["Comparison", "Difference", "Run", "compare"]
