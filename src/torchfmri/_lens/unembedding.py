"""How a model turns its stream into logits: final norm, head, scale and softcap, in one place.

Nothing is taken for granted: the layers are those that ran after the last block, the scale and the
softcap are the configuration's, and all of it is compared with the logits of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
        scale: What logits are multiplied with.
        softcap: c of c * tanh(logits / c); None without one.
        difference: How far its logits are from the model's own, relative to the largest of them.
    """

    layers: dict[str, nn.Module]
    scale: float
    softcap: float | None
    difference: float = 0.0

    def logits(self, stream: Tensor) -> Tensor:
        """The logits (..., vocabulary) of a stream (..., width)."""
        for module in self.layers.values():
            stream = flatten(module(stream))[0].tensor
        return self.finish(stream)

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and cap what the head returned."""
        logits = logits * self.scale if self.scale != 1 else logits
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def head(self) -> nn.Module:
        """The last layer."""
        return list(self.layers.values())[-1]

    @property
    def norm(self) -> nn.Module | None:
        """The layer before the head; None where there is not just one."""
        layers = list(self.layers.values())
        return layers[0] if len(layers) == 2 else None


def find_unembedding(model: nn.Module, stream: Stream, logits: Tensor | None) -> Unembedding:
    """What turned this stream into these logits.

    Args:
        model: The model.
        stream: The stream of one pass.
        logits: What the model returned in that pass, (b, s, vocabulary).

    Raises:
        InspectionError: There are no logits, or they are not what is known here of the model.
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
            f"{kind}: {chain} of the last block's output gives {tuple(own.shape)}, where the model "
            f"returns logits {tuple(logits.shape)}. A lens cannot read it."
        )
    own = own[:, -logits.shape[1] :].double()  # a head may run on the last positions alone
    largest = logits.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    difference = float((own - logits.double()).abs().max() / largest)
    if not difference <= _tolerance(logits.dtype):
        raise InspectionError(
            f"{kind}: {chain} of the last block's output is {difference:.2g} of the largest logit "
            "away from the logits of the model, which does something more in between. A lens "
            "cannot read it."
        )
    return Unembedding(found.layers, found.scale, found.softcap, difference)


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
