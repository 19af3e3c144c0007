"""A norm as the linear map that it is at one token, once its scale there is held.

`logit_attribution` freezes the final norm, `block_parts` the norms behind projections. The map is
found by asking the norm, however its weight is stored (Gemma adds 1 to it), and is compared with
the norm's own output before it is used. A layer that is not a LayerNorm or an RMSNorm is refused.
Keep that comparison: without it the parts would not add up to the logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchfmri.exceptions import InspectionError

_LARGE = 1024.0
"""How large the numbers are that a norm is asked about: its epsilon is nothing beside them."""


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far apart two ways to compute the same may be, relative to the largest number.

    Far more than rounding explains, far less than a wrong formula gives.
    """
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """v -> scale * gain * (v, less its mean if the norm is centred); all in float64.

    Attributes:
        gain: (width,) what each unit is multiplied with.
        bias: (width,) what is added at the end, once.
        scale: One over the standard deviation, or the root mean square, at the token.
        is_centred: Whether the mean is taken off first (LayerNorm, not RMSNorm).
    """

    gain: Tensor
    bias: Tensor
    scale: float
    is_centred: bool

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the part of the norm's output that a part of its input makes, (..., width)."""
        vector = vector.double()
        if self.is_centred:
            vector = vector - vector.mean(-1, keepdim=True)
        return self.scale * self.gain * vector


def freeze_norm(name: str, module: nn.Module, vector: Tensor) -> FrozenNorm:
    """Return the linear map that a norm is for this input, found by asking it.

    Any LayerNorm or RMSNorm will do, however its weight is stored: its gain and bias are read off
    its answers to two vectors of opposite sign, and the scale off its answer to `vector`.

    Args:
        name: The layer.
        module: The norm.
        vector: (width,) its input at the token.

    Raises:
        InspectionError: The layer is neither a LayerNorm nor an RMSNorm.
    """
    width = vector.shape[-1]
    if width % 2:
        raise InspectionError(f"{name!r} has {width} units, an odd number: it cannot be frozen.")
    signs = torch.ones_like(vector)
    signs[1::2] = -1
    with torch.no_grad():
        ahead, back = (module(sign * _LARGE * signs).double() for sign in (1, -1))
        shifted = module(vector + vector.abs().max()).double()
        output = module(vector).double()
    gain, bias = (ahead - back) / 2 * signs.double(), (ahead + back) / 2
    tolerance, largest = tolerance_of(vector.dtype), output.abs().max()
    is_centred = bool((shifted - output).abs().max() <= tolerance * largest)
    unit = FrozenNorm(gain=gain, bias=bias, scale=1.0, is_centred=is_centred)(vector)
    scale = float((output - bias) @ unit / (unit @ unit))
    frozen = FrozenNorm(gain=gain, bias=bias, scale=scale, is_centred=is_centred)
    apart = float((frozen(vector) + bias - output).abs().max() / largest)
    if not apart <= tolerance:
        raise InspectionError(
            f"{name!r} ({type(module).__name__}) is neither a LayerNorm nor an RMSNorm: with its "
            f"scale held it is {apart:.2g} away from its own output."
        )
    return frozen
