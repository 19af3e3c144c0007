"""`lesion`, `patch`, `steer`: answers when parts are out, exchanged or pushed.

`questions` are prompts with the answer that counts, `targets` the parts that are lesioned.
`lesion_run` carries many lesions in one forward pass and estimates them by one backward pass,
`entry_point` is `lesion`, `lesion_map` its result, with a file and the t over prompts.
`patching` is `patch`, which matches tokens by role, and its result; `paths` patches with all else
held. `steering` is `steer`. A new kind of part is an entry of `KINDS` in `targets`.
"""

from torchfmri._lesion.entry_point import EDITS, METHODS, lesion
from torchfmri._lesion.lesion_map import LesionMap
from torchfmri._lesion.patching import PatchMap, patch
from torchfmri._lesion.questions import METRICS
from torchfmri._lesion.steering import Steering, steer
from torchfmri._lesion.targets import KINDS
