"""`TokenSelection`: token gradients of several parameters that share their tokens.

`TokenGradients.select` and `on` make it; users get norms, inner products and projections over all
of its parameters together. Only parameters with the same token axis may be put together, which the
maker has to ensure: numbers of different tokens can be added without any error, and mean nothing.
Norms are added up as squares, grouped by padding mask, so that hundreds of parameters take few
operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from torchfmri._model import match_names, not_found
from torchfmri._tokens.algebra.factors import mirrored
from torchfmri._tokens.algebra.gradient import TokenGradient
from torchfmri._tokens.algebra.grams import summed_gram
from torchfmri._tokens.algebra.precision import in_full
from torchfmri._tokens.algebra.reduced import summed_squares
from torchfmri.exceptions import InspectionError


class TokenSelection:
    """Token gradients of parameters with one token axis, taken together as one long vector.

    Examples:
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
        if not isinstance(name, str) or name not in self._gradients:
            raise not_found(name, self.names, "selection.names", "parameter")
        return self._gradients[name]

    def __repr__(self) -> str:
        return f"TokenSelection({self.axis!r}, {len(self._gradients)} parameters)"

    def select(self, pattern: str) -> TokenSelection:
        """Return the selection of the parameters whose names match."""
        chosen = match_names(pattern, self.names)
        if not chosen:
            raise not_found(pattern, self.names, "selection.names", "parameter")
        return TokenSelection(self.axis, {name: self._gradients[name] for name in chosen})

    @in_full
    def norm(self) -> Tensor:
        """The norm of each token's gradient over all the parameters, (b, s)."""
        by_mask: dict[int, list[TokenGradient]] = defaultdict(list)
        for each in self._gradients.values():
            by_mask[id(each.mask)].append(each)
        parts = []
        for same in by_mask.values():
            total, dtype = summed_squares([each.numbers() for each in same])
            parts.append((total if same[0].mask is None else total * same[0].mask.flatten(), dtype))
        squares = torch.stack([each for each, _ in parts]).sum(0)
        dtype = reduce(torch.promote_types, (each for _, each in parts))
        return squares.sqrt_().to(dtype).view(next(iter(self._gradients.values())).shape[:2])

    @in_full
    def gram(self) -> Tensor:
        """The inner product of every two tokens' gradients, (b * s, b * s)."""
        return mirrored(summed_gram(each.terms("gram()") for each in self._gradients.values()))

    @in_full
    def project(self, k: int, seed: int = 0) -> Tensor:
        """Each token's gradient under a random linear map to k numbers, (b, s, k)."""
        several = iter(self._gradients.values())
        total = next(several).project(k, seed)
        for each in several:
            total += each.project(k, seed)
        return total

    @in_full
    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """The inner product of each token's gradient with one tensor per parameter, (b, s)."""
        if not direction:
            raise InspectionError("dot({}): give at least one parameter's direction.")
        return torch.stack([self[name].dot(each) for name, each in direction.items()]).sum(0)
