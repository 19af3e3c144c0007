"""The public function `token_gradients`: it chooses between two kinds of token gradients.

Users call it for `TokenGradients` (per="position", from one ordinary backward pass) or
`TokenLossGradients` (per="token_loss", a backward pass per token). It only checks and hands on; the
work is done in `calls` and `losses`. The signature is public, and the overloads tell type checkers
which class comes back, so a new argument goes into them too. "cached" is refused here because it
needs a model that generates, which is a scan.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import nn

from torchfmri._arguments import check_module
from torchfmri._model import Pattern, named_layers
from torchfmri._tokens.algebra.parameter import VOXEL
from torchfmri._tokens.calls.gradients import TokenGradients
from torchfmri._tokens.calls.plan import find_parameters
from torchfmri._tokens.losses.gradients import TokenLossGradients
from torchfmri.exceptions import InspectionError

MAX_BYTES = 1 << 34


@overload
def token_gradients(
    model: nn.Module,
    pattern: Pattern = "*",
    per: Literal["position"] = "position",
    *,
    keep: Literal["factors", "norms", "voxels"] | None = None,
    max_bytes: int = MAX_BYTES,
    voxel: int = VOXEL,
    channels: Literal["last", "first"] | None = None,
) -> TokenGradients: ...


@overload
def token_gradients(
    model: nn.Module,
    pattern: Pattern = "*",
    per: Literal["token_loss"] = ...,
    *,
    keep: Literal["factors", "norms"] | None = None,
    max_bytes: int = MAX_BYTES,
) -> TokenLossGradients: ...


def token_gradients(
    model: nn.Module,
    pattern: Pattern = "*",
    per: str = "position",
    *,
    keep: Literal["factors", "norms", "voxels"] | None = None,
    max_bytes: int = MAX_BYTES,
    voxel: int = VOXEL,
    channels: Literal["last", "first"] | None = None,
) -> TokenGradients | TokenLossGradients:
    """A context manager around a forward and a backward pass: gradients token by token.

    With `per="position"` the gradient of a parameter is split by the position of the layer through
    which it came: one ordinary `loss.backward()` brings them all, exactly, and they add up to
    `.grad`. With `per="token_loss"` it is the gradient of each token's own loss, which costs a pass
    per token. See the page on token gradients for when to use which.

    Args:
        model: The model; nothing on it is changed.
        pattern: Names of parameters or layers (wildcards), a module type, or a list of these.
        per: "position" or "token_loss".
        keep: "factors", from which everything can be asked, or "norms": numbers per token alone,
            at no memory to speak of. "voxels", per position only, are norms by voxel of output
            units, (b, s, voxels), from which the others follow. By default factors per position
            and norms per token loss.
        max_bytes: How much the factors may keep in memory.
        voxel: How many neighbouring output units are one voxel, where it is no head or expert.
        channels: Where the features of the model's float inputs are: "last", (b, s, d), or "first",
            (b, d, s). Per position only; by default the layers tell, and what they leave open is
            refused.

    Returns:
        The token gradients, to be read after the block: `tokens["0.weight"].norm()`.

    Raises:
        LayerNotFoundError: The pattern matches no parameter.
        InspectionError: The matching parameters require no gradient, or an option is wrong.
    """
    check_module("model", model)
    if per == "position":
        return TokenGradients(
            model,
            pattern,
            keep=keep or "factors",
            max_bytes=max_bytes,
            voxel=voxel,
            channels=channels,
        )
    if channels is not None:
        raise InspectionError(f"channels={channels!r} belongs to per='position': leave it out.")
    if per == "token_loss":
        parameters, _ = find_parameters(named_layers(model), pattern)
        return TokenLossGradients(model, parameters, max_bytes, keep or "norms")
    extra = " per='cached' belongs to a scan of a generating model." if per == "cached" else ""
    raise InspectionError(f"per={per!r}: choose 'position' or 'token_loss'.{extra}")
