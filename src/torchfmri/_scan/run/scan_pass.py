"""Two records that the passes of a scan share: `Sequences` go in, a `ScanPass` comes out.

`BatchRun` makes the sequences and chooses the pass; `gradient_pass`, `cached_pass` and
`token_loss_pass` fill a `ScanPass`, `batch_rows` cuts it into rows. All tensors are (b, s, ...)
over the padded batch. None means that a quantity was not measured, nan that it has no value at that
position, and what could not be measured has a reason in `missed`. A new quantity is a field here,
filled in a pass and cut in `batch_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfmri._scan.run.mean_vectors import MeanVectors
from torchfmri._scan.run.readings import Readings


@dataclass(eq=False)
class ScanPass:
    """What one pass over a batch of sequences brought.

    Attributes:
        activation: What was read off the activations.
        gradient: The same of dL/d output; None without a backward pass.
        cost: Norms of the parameters' gradients by voxel, (b, s, voxel), and `layer_cost` by layer.
        surprisal: (b, s), and `entropy`.
        tensors: Layer -> (b, s, w).
        vectors: Mean vectors, where some are kept.
        residual: The largest difference between what the tokens add up to and the gradient that
            autograd found, relative; None where nothing was compared.
        missed: Layer -> why something is missing.
        notes: What else has to be known.
        best: (b, s - 1) the likeliest next token at each position.
        gradient_positions: (b, s) which positions have a gradient at all.
    """

    activation: Readings = field(init=False)
    gradient: Readings | None = None
    cost: Tensor | None = None
    layer_cost: Tensor | None = None
    surprisal: Tensor | None = None
    entropy: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    vectors: MeanVectors | None = None
    residual: float | None = None
    missed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    best: Tensor | None = None
    gradient_positions: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.bool, device="cpu")
    )


@dataclass(frozen=True, eq=False)
class Sequences:
    """What was fed and written, as one padded batch.

    Attributes:
        ids: (b, s).
        mask: (b, s), 0 for padding on either side.
        generated: (b, s), what the model wrote.
        positions: (b, s), what the model is to be fed as `position_ids`; None leaves it to it.
    """

    ids: Tensor
    mask: Tensor
    generated: Tensor
    positions: Tensor | None = None
