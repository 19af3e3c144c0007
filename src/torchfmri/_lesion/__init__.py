"""`lesion`, `patch`: what answers lose when parts of a model are out or exchanged.

`questions` are prompts with the answer that counts, `targets` the parts that are lesioned.
`lesion_run` carries many lesions in one forward pass and estimates them by one backward pass,
`entry_point` is `lesion`, `patching` is `patch`, `lesion_map` the result and its file, and
`student` the t over prompts. A new kind of part is an entry of `KINDS` in `targets`.
"""

from torchfmri._lesion.entry_point import EDITS, METHODS, lesion
from torchfmri._lesion.lesion_map import LesionMap
from torchfmri._lesion.patching import PatchMap, patch
from torchfmri._lesion.questions import METRICS
from torchfmri._lesion.targets import KINDS

__all__ = ["EDITS", "KINDS", "METHODS", "METRICS", "LesionMap", "PatchMap", "lesion", "patch"]
