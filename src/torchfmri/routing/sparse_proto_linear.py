"""A linear layer whose output units are switched on token by token.

`MoIETransformerBlock` uses four of them, and users may put them into models of their own. The
class is public, and the names of its parameters and submodules stand in checkpoints. The
definition of `route` is what papers and results refer to: a variant of it is another class.
`computation_output` does nothing, so that mu(x) and its gradient can be watched under its name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._arguments import check_number
from torchfmri.routing.scaling import mas


class Routing(NamedTuple):
    """The routing of a call: which units each token goes through.

    Attributes:
        logits: (b, s, o): match minus cost.
        weights: MAS(logits): 0 where a unit is off.
    """

    logits: Tensor
    weights: Tensor


class SparseProtoLinear(nn.Module):
    """(x + mu(x)) * weights: a linear map whose units a token reaches only where they match.

    The computation mu is an `nn.Linear`. Beside it every output unit has a prototype p and a gate
    g, both of the size of the input: match = x p^T / sqrt(d), cost = MAS(x g^T),
    weights = MAS(match - cost). Where input and output have different sizes there is no residual:
    the output is mu(x) * weights. The layer `computation_output` passes mu(x) on unchanged: dL/d
    mu(x) of every token is what `Inspector.watch("*.computation_output", "gradients")` shows.

    Args:
        in_features: Size of the input, d.
        out_features: How many units.

    Examples:
        >>> import torch
        >>> layer = SparseProtoLinear(8, 8)
        >>> x = torch.randn(2, 5, 8)
        >>> layer(x).shape
        torch.Size([2, 5, 8])
        >>> bool((layer.route(x).weights == 0).any())
        True
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            check_number(name, value, 1, "give the number of features, at least 1")
        self.in_features, self.out_features = in_features, out_features
        self.computation = nn.Linear(in_features, out_features)
        self.computation_output = nn.Identity()  # so that mu(x) can be watched by this name
        self.prototypes = nn.Parameter(torch.empty(out_features, in_features))
        self.gate = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a saved layer, also of one saved before `computation_output` was."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._modules.setdefault("computation_output", nn.Identity())

    def reset_parameters(self) -> None:
        """Draw new parameters: matches of size 1 for inputs of size 1, and half the units on."""
        nn.init.normal_(self.computation.weight, std=1 / math.sqrt(self.in_features))
        nn.init.zeros_(self.computation.bias)
        nn.init.normal_(self.prototypes)
        # The scale of a gate is of no consequence: MAS divides by it.
        nn.init.normal_(self.gate, std=1 / math.sqrt(self.in_features))

    def effective_prototypes(self, inherited: Tensor | None = None) -> Tensor:
        """Return the prototypes in use, (o, i): this layer's own, and those it builds upon."""
        return self.prototypes if inherited is None else self.prototypes + inherited

    def route(self, x: Tensor, inherited: Tensor | None = None) -> Routing:
        """Return which units each token of x goes through.

        Args:
            x: (b, s, i).
            inherited: Prototypes of an earlier layer to build upon, (o, i).
        """
        scale = 1 / math.sqrt(self.in_features)
        match = F.linear(x, self.effective_prototypes(inherited) * scale)
        logits = match - mas(F.linear(x, self.gate))
        return Routing(logits, mas(logits))

    def forward(self, x: Tensor, inherited: Tensor | None = None) -> Tensor:
        """Return the output, (b, s, o), with zeros where a unit is off."""
        computed = self.computation_output(self.computation(x))
        if self.in_features == self.out_features:
            computed = x + computed
        weighted: Tensor = computed * self.route(x, inherited).weights
        return weighted

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
