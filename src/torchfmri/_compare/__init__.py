"""`compare`: where two runs part, and whether that is rounding or a bug.

`run` records a model, `rounding` redraws its rounding, `grid`, `parts` and `recording` make rows of
tokens. `sources` makes sides, `matching` and `weights` find partners, `pairing`, `arrangement` and
`repetition` measure. `origin` locates a difference; `explanation` says what it is, with `causes`,
`kinds` (a new kind is a test there) and `choices`. `changes` lists what two models differ in before
they run, `comparison` and `pictures` show it all. `histories` compares training runs,
`hidden_states` imports what other engines export, `settings` makes runs for the command line.
"""

from torchfmri._compare.comparison import Comparison
from torchfmri._compare.difference import Difference
from torchfmri._compare.entry_point import compare
from torchfmri._compare.hidden_states import import_hidden_states
from torchfmri._compare.history_comparison import HistoryComparison, StepDifference
from torchfmri._compare.run import Run
from torchfmri._compare.settings import CHOICES as SETTINGS
from torchfmri._compare.settings import parse_settings, run_with
