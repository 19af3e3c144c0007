"""The public function `token_loss_dots`: inner products of each token's gradient and a direction.

Users call it; nothing else in the package does. It needs one forward-mode pass for all tokens,
where their gradients would need one backward pass each, and it gives the same numbers as
`TokenLossGradients.dot`. Attention runs as plain matrix products meanwhile, since fused kernels
have no forward mode, and compiled code runs eagerly. The tangent is copied before it leaves,
because it ends with the dual level.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchfmri._arguments import check_module, require
from torchfmri._model import (
    compiled_code_as_eager,
    named_layers,
    not_found,
    unchanged,
)
from torchfmri._tokens.losses.gradient import check_direction
from torchfmri.exceptions import InspectionError


def token_loss_dots(
    model: nn.Module,
    losses_of: Callable[[nn.Module], Tensor],
    direction: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
) -> Tensor:
    """<d l_t / d parameters, direction> for every token t at once, (b, s).

    It is how fast each token's loss grows when the parameters move along the direction, exactly,
    and it costs one forward-mode pass for all tokens, where their gradients would cost a backward
    pass each. With another batch's gradient as direction it is that batch's influence on every
    token; with k random directions it is an exact k-dimensional projection.

    The model runs once per direction and is left as it was: buffers, random generators, `.grad`.
    Attention runs as plain matrix products meanwhile, because fused kernels have no forward mode.

    Args:
        model: The model.
        losses_of: Runs the model that it is handed and returns one loss per token, for example
            `lambda model: torchfmri.token_losses(model(ids).logits, ids)`.
        direction: Name of a parameter -> its part of the direction, of its shape; parameters that
            are not named stay fixed. Several directions give (b, s, k).

    Raises:
        InspectionError: An operation has no forward mode, or a shape does not fit.
        LayerNotFoundError: A parameter of that name does not exist.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> x = torch.randn(1, 4, 3)
        >>> direction = {"weight": torch.ones(2, 3)}
        >>> torchfmri.token_loss_dots(model, lambda m: m(x).square().sum(-1), direction).shape
        torch.Size([1, 4])
    """
    check_module("model", model)
    meaning = "give a function of the model that returns one loss per token"
    require(callable(losses_of), "losses_of", losses_of, meaning)
    meaning = "map names of parameters to tensors of their shape, or give a list of such maps"
    listed = isinstance(direction, (Mapping, list, tuple)) and bool(direction)
    require(listed, "direction", direction, meaning)
    if not isinstance(direction, Mapping):
        parts = [token_loss_dots(model, losses_of, each) for each in direction]
        return torch.stack(parts, -1)
    run = _Run(model, losses_of)
    moved = _moved(model, run, direction)
    with (
        unchanged(model),
        compiled_code_as_eager(),
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
        forward_ad.dual_level(),
    ):
        duals = {name: _dual(*pair) for name, pair in moved.items()}
        try:
            losses = functional_call(run, duals, ())
        except NotImplementedError as error:
            if not re.search("forward (mode )?AD", str(error)):
                raise
            raise InspectionError(
                f"An operation of the model has no forward mode: {str(error).strip()} Load the "
                'model with attn_implementation="eager" if it is attention; else use '
                "tokens.backward(losses, dot=direction), which needs backward passes only."
            ) from error
        if not isinstance(losses, Tensor):
            raise InspectionError(
                f"losses_of returned a {type(losses).__name__}, not a tensor. Return one loss per "
                "token, such as torchfmri.token_losses(model(ids).logits, ids)."
            )
        # Copied: what the tangent shares with the dual tensors ends with this level.
        primal, tangent = forward_ad.unpack_dual(losses)  # type: ignore[no-untyped-call]
        return torch.zeros_like(primal) if tangent is None else tangent.clone()


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return dual


class _Run(nn.Module):
    """The user's function as a module, so that its model's parameters can be replaced."""

    def __init__(self, model: nn.Module, losses_of: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._losses_of = losses_of

    def forward(self) -> Tensor:
        return self._losses_of(self.model)


def _moved(
    model: nn.Module, run: nn.Module, direction: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name inside `run` -> a parameter and how it moves."""
    known = {
        f"{layer}.{key}" if layer else key: parameter
        for layer, module in named_layers(model).items()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    inside = {id(parameter): name for name, parameter in run.named_parameters()}
    moved: dict[str, tuple[Tensor, Tensor]] = {}
    for name, part in direction.items():
        if name not in known:
            raise not_found(name, known, "dict(model.named_parameters())", "parameter")
        parameter = known[name]
        check_direction(name, part, tuple(parameter.shape))
        place = inside[id(parameter)]
        tangent = part.detach().to(parameter)
        if place in moved:  # one parameter under two names moves along both
            tangent = tangent + moved[place][1]
        moved[place] = (parameter.detach(), tangent)
    return moved
