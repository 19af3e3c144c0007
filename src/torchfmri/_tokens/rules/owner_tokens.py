"""`OwnerTokens`: what following a pass has found out about one call of a layer that is run again.

`token_map` makes it and keeps it with the plan, `rerun` reads it when the backward pass is over. It
holds tokens and no data: it outlives the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchfmri._tokens.rules.numbers import NOBODY, compact
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import Sources, TokenSource
from torchfmri._tokens.rules.step_uses import StepUse


class OwnerTokens(NamedTuple):
    """The tokens of a call of a layer that is run again.

    Attributes:
        origins: Of its arguments, in order.
        sources: What their numbers mean.
        made: The grids of positions that the call makes, in order.
        sums: The parameters of other layers of which each argument is the sum.
        steps: By parameter, its uses in the call that may be steps of a recurrence.
        returned: Of what it made of constants alone; they are known once that is added to data.
        names: The parameters of that call.
        shapes: Those of its arguments.
    """

    origins: Sequence[Origins | None] = ()
    sources: Sources = Sources()
    made: Sequence[TokenSource] = ()
    sums: Sequence[frozenset[str]] = ()
    steps: Mapping[str, Sequence[StepUse]] = {}
    returned: Origins | None = None
    names: Sequence[str] = ()
    shapes: Sequence[torch.Size] = ()


def says_nothing(origins: Origins | None) -> bool:
    """Whether a tensor is a constant for all that is known of its tokens."""
    return origins is None or bool((compact(origins.first) == NOBODY).all())
