"""What differs between groups of prompts, and whether it can be believed.

Works on tables with a row per prompt, which `_scan` makes of its scans. `weights` reads a contrast
such as "true - false"; `group_tests` and `permutations` test it, `corrections` for many columns at
once; `comparison` puts them together into a `Contrast`, the record that users hold, with its
`picture`, its `report`, its page (`contrast_board`, with `thresholds` in words) and its file.
`linear_model` (with its `second_level`) and `classification` ask in other ways; `calibration` says
how often any of them finds something in nothing.
"""

from torchfmri._contrast.calibration import Calibration
from torchfmri._contrast.classification import Classification, LayerAccuracy, classify
from torchfmri._contrast.comparison import TestOptions, compare
from torchfmri._contrast.contrast_board import ContrastBoard
from torchfmri._contrast.contrast_table import Peak
from torchfmri._contrast.direction import Direction
from torchfmri._contrast.distributions import t_quantile, t_tail
from torchfmri._contrast.linear_model import GLM, first_level
from torchfmri._contrast.loading import load_contrast
from torchfmri._contrast.prompt_table import PromptColumns, PromptTable
from torchfmri._contrast.record import Contrast
from torchfmri._contrast.report import ContrastReport
from torchfmri._contrast.second_level import Level
from torchfmri._contrast.weights import difference
