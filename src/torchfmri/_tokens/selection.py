"""RESULT: token gradients of several parameters that share their tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchfmri._patterns import match_names, nearest_names
from torchfmri._tokens.factors import Shared, mirrored
from torchfmri._tokens.gradient import TokenGradient
from torchfmri.exceptions import InspectionError, LayerNotFoundError


class TokenSelection:
    """Token gradients of parameters with one token axis, taken together as one long vector.

    Example:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(torch.randn(1, 4, 3)).square().sum().backward()
        >>> tokens.on("1 x 4").gram().shape
        torch.Size([4, 4])
    """

    def __init__(self, axis: str, gradients: Mapping[str, TokenGradient]) -> None:
        self.axis, self._gradients = axis, dict(gradients)

    @property
    def names(self) -> list[str]:
        """The parameters, in model order."""
        return list(self._gradients)

    def __getitem__(self, name: str) -> TokenGradient:
        if name not in self._gradients:
            raise LayerNotFoundError(name, nearest_names(name, self.names), len(self.names))
        return self._gradients[name]

    def __repr__(self) -> str:
        return f"TokenSelection({self.axis!r}, {len(self._gradients)} parameters)"

    def select(self, pattern: str) -> TokenSelection:
        """Those of the parameters whose names match."""
        chosen = match_names(pattern, self.names)
        if not chosen:
            raise LayerNotFoundError(pattern, nearest_names(pattern, self.names), len(self.names))
        return TokenSelection(self.axis, {name: self._gradients[name] for name in chosen})

    def norm(self) -> Tensor:
        """The norm of each token's gradient over all the parameters, (b, s)."""
        several = list(self._gradients.values())
        squares = torch.stack([each.squares() for each in several])
        return (
            squares.sum(0, dtype=torch.float64).sqrt().to(squares.dtype).view(several[0].shape[:2])
        )

    def gram(self) -> Tensor:
        """The inner product of every two tokens' gradients, (b * s, b * s)."""
        shared: Shared = {}  # q, k and v multiply the same x
        several = iter(self._gradients.values())
        total = next(several).lower_gram(shared)
        for each in several:
            total = total + each.lower_gram(shared)
        return mirrored(total)

    def project(self, k: int, seed: int = 0) -> Tensor:
        """Each token's gradient under a random linear map to k numbers, (b, s, k)."""
        several = iter(self._gradients.values())
        total = next(several).project(k, seed)
        for each in several:
            total += each.project(k, seed)
        return total

    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """The inner product of each token's gradient with one tensor per parameter, (b, s)."""
        if not direction:
            raise InspectionError("dot({}): give at least one parameter's direction.")
        return torch.stack([self[name].dot(each) for name, each in direction.items()]).sum(0)
