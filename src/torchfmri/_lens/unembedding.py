"""How a model turns its stream into logits: final norm, head, scale and softcap, in one place.

The lens, the attributions and scans ask `find_unembedding`. Nothing is taken for granted: the
layers are those that ran after the last block, the scale and the softcap come from the
configuration, and all of it is compared with the model's own logits. Do not loosen that comparison:
it is what keeps unknown architectures from giving wrong numbers. A new name of a scale is a line of
`_SCALES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._lens.frozen_norm import tolerance_of
from torchfmri._lens.stream import Stream
from torchfmri._model import unwrap
from torchfmri._torch import flatten
from torchfmri.exceptions import InspectionError

_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": float,  # Cohere
    "logits_scaling": lambda value: 1 / value,  # Granite
    "lm_head_multiplier": float,  # Falcon-H1
}
"""What configurations call a factor of the logits -> that factor."""
# Gemma 2, RecurrentGemma, xLSTM.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True, eq=False)
class Unembedding:
    """From the stream to logits, as the model does it.

    Attributes:
        layers: The layers that the stream passes, by name: final norm and head, usually.
        scale: The factor of the logits.
        softcap: c of c * tanh(logits / c); None without one.
        difference: How far its logits are from the model's own, relative to the largest of them.
    """

    layers: dict[str, nn.Module]
    scale: float
    softcap: float | None
    difference: float = 0.0

    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits (..., vocabulary) of a stream (..., width)."""
        for module in self.layers.values():
            stream = flatten(module(stream))[0].tensor
        return self.finish(stream)

    def finish(self, logits: Tensor) -> Tensor:
        """Return what the head returned, scaled and capped."""
        logits = logits * self.scale if self.scale != 1 else logits
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def find_unembedding(model: nn.Module, stream: Stream, logits: Tensor | None) -> Unembedding:
    """Return what turned this stream into these logits, after comparing the two.

    Args:
        model: The model.
        stream: The stream of one pass.
        logits: What the model returned in that pass, (b, s, vocabulary).

    Raises:
        InspectionError: There are no logits, or ours differ from the model's own.
    """
    kind = type(unwrap(model)).__name__
    if logits is None:
        raise InspectionError(
            f"{kind} returns no logits (b, s, vocabulary), so a lens has no head to read through. "
            "Load it with its language model head (AutoModelForCausalLM)."
        )
    config: Any = getattr(unwrap(model), "config", None)
    factors = [
        factor(value)
        for name, factor in _SCALES.items()
        if isinstance(value := getattr(config, name, None), (int, float)) and value
    ]
    caps = [value for name in _SOFTCAPS if (value := getattr(config, name, None))]
    cap = caps[0] if caps else None
    found = Unembedding(stream.tail, factors[0] if factors else 1.0, float(cap) if cap else None)
    chain = " -> ".join(stream.tail) or "no layer"
    try:
        with torch.no_grad():
            own = found.logits(stream.states[-1])
    except Exception as error:
        raise InspectionError(
            f"The logits of {kind} cannot be computed from its last block's output: {chain} "
            f"failed with {type(error).__name__}: {error}"
        ) from error
    if own.shape[2:] != logits.shape[2:] or own.shape[1] < logits.shape[1]:
        raise InspectionError(
            f"{kind}: {chain} of the last block's output gives {tuple(own.shape)}, but the model "
            f"returns logits {tuple(logits.shape)}. A lens cannot read it."
        )
    own = own[:, -logits.shape[1] :].double()  # a head may run on the last positions alone
    largest = logits.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    difference = float((own - logits.double()).abs().max() / largest)
    if not difference <= tolerance_of(logits.dtype):
        raise InspectionError(
            f"{kind}: {chain} of the last block's output is {difference:.2g} of the largest logit "
            "away from the logits of the model, which does something more in between. A lens "
            "cannot read it."
        )
    return replace(found, difference=difference)
