"""`OperatorCall`: one operation on data, with its operands by name and what is known of them.

`TokenRules` of `operations` extends it: `trace` makes one for each operation that it follows, and
the rules read it. It finds names of operands in the operation's schema, so that a rule does not
depend on whether they were given by place or by name. `Known` is the part of `TokenTrace` that
rules may use; it is a protocol because `trace` imports `operations`, and importing it here would be
a cycle.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.joins import Joins
from torchfmri._tokens.rules.layouts import Layouts
from torchfmri._tokens.rules.moves import tensors_in
from torchfmri._tokens.rules.numbers import UNKNOWN, constant
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import Sources, TokenSource
from torchfmri._tokens.rules.steps import Steps
from torchfmri._tokens.rules.sums import Sums


class Known(Protocol):
    """What is known of the tensors of a run."""

    sources: Sources
    grids: Grids
    layouts: Layouts
    steps: Steps
    joins: Joins
    sums: Sums
    count: int
    of_layers: frozenset[str]

    def origins(self, tensor: Tensor) -> Origins | None: ...

    def leaves(self, tensor: Tensor) -> frozenset[str]: ...

    def is_fixed(self, tensor: Tensor) -> bool: ...

    def is_state(self, tensor: Tensor) -> bool: ...

    def land(self, tensor: Tensor, source: TokenSource) -> None: ...


class OperatorCall:
    """One operation on data, with its operands by name.

    Attributes:
        is_move: It turned out that the operation moves rows, and computes none.
    """

    is_move = False

    def __init__(
        self, trace: Known, function: Any, name: str, arguments: Any, keywords: Any, results: Any
    ) -> None:
        self.trace, self.grids, self.layouts = trace, trace.grids, trace.layouts
        self.steps, self.joins, self.sums = trace.steps, trace.joins, trace.sums
        self.function, self.name = function, name
        self.arguments, self.keywords, self.results = arguments, keywords, results
        schema = getattr(function, "_schema", None)
        names = [each.name for each in schema.arguments] if schema is not None else []
        self.named = {**dict(zip(names, arguments, strict=False)), **keywords}

    def of(self, value: object) -> Origins | None:
        found = self.trace.origins(value) if isinstance(value, Tensor) else None
        return found if found is None or found.grown is None else found.grown

    def only_first(self, origins: Origins | None) -> list[Origins | None]:
        return [origins, *[None] * (len(self.results) - 1)]

    def unknown(self, result: Tensor, reason: str = "") -> Origins:
        several = [self.of(each) for each in tensors_in(self.arguments, self.keywords)]
        dynamic = any(each.is_dynamic for each in several if each is not None)
        text = reason or f"the operation {self.name}"
        return Origins(constant(UNKNOWN, result), is_dynamic=dynamic, reason=text)
