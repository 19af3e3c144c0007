"""What differs between groups of prompts, and whether it can be believed.

Works on tables with a row per prompt, which `_scan` makes of its scans. `weights` reads a contrast
such as "true - false"; `group_tests` and `permutations` test it, `corrections` for many columns at
once; `comparison` puts them together into a `Contrast`, the record that users hold, with its
`picture`, its `report` and its file. `linear_model` and `classification` ask in other ways.
"""

from torchfmri._contrast.classification import Classification, LayerAccuracy, classify
from torchfmri._contrast.comparison import TestOptions, compare
from torchfmri._contrast.linear_model import GLM, Level, first_level
from torchfmri._contrast.loading import load_contrast
from torchfmri._contrast.prompt_table import Columns, PromptTable
from torchfmri._contrast.record import Contrast, Direction, Peak
from torchfmri._contrast.report import ContrastReport

__all__ = [
    "GLM",
    "Classification",
    "Columns",
    "Contrast",
    "ContrastReport",
    "Direction",
    "LayerAccuracy",
    "Level",
    "Peak",
    "PromptTable",
    "TestOptions",
    "classify",
    "compare",
    "first_level",
    "load_contrast",
]
