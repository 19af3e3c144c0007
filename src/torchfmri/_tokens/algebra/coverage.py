"""`Coverage`: how each parameter's token gradients were found, and how well they add up.

`TokenGradients.coverage()` and `TokenLossGradients.coverage()` fill in the rows; users read them.
Fields and `to_dict` are public; the table may change. The rule "none" means that there are no token
gradients, and `missing` relies on that word. A residual of None means that nothing could be
compared, which is not 0, and a NaN must stay visible in `residual`, since `max` alone would lose
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchfmri._model import not_found


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """One parameter that received a gradient.

    Attributes:
        name: The parameter.
        rule: How its token gradients were found; "none" where there are none.
        tokens: Its token axes.
        residual: How far the tokens' sum is from the gradient that autograd found, relative to it;
            None where nothing could be compared.
        check: "sum" (entry by entry) or "probe" (between two random vectors); "" without one.
        note: Why something is missing, or what has to be known about it.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(torch.randn(1, 4, 3)).square().sum().backward()
        >>> tokens.coverage()["weight"].rule
        'linear'
    """

    name: str
    rule: str
    tokens: tuple[str, ...] = ()
    residual: float | None = None
    check: str = ""
    note: str = ""


class Coverage:
    """The proof beside the numbers, a row per parameter; see `TokenGradients.coverage`.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(torch.randn(1, 4, 3)).square().sum().backward()
        >>> tokens.coverage().missing
        []
    """

    def __init__(self, rows: Sequence[CoverageRow]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> CoverageRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise not_found(name, [row.name for row in self.rows], kind="parameter")

    @property
    def missing(self) -> list[CoverageRow]:
        """Parameters that received a gradient and have no token gradients."""
        return [row for row in self.rows if row.rule == "none"]

    @property
    def residual(self) -> float:
        """The largest residual of all parameters; 0.0 where none could be compared."""
        found = [row.residual for row in self.rows if row.residual is not None]
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [asdict(row) for row in self.rows]

    def __repr__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [9])
        rule = max([len(row.rule) for row in self.rows] + [4])
        lines = [f"{'parameter':<{width}}  {'rule':<{rule}}  {'tokens':<14}  residual"]
        for row in self.rows:
            residual = "-" if row.residual is None else f"{row.residual:.1e} ({row.check})"
            text = (
                f"{row.name:<{width}}  {row.rule:<{rule}}  {', '.join(row.tokens):<14}  {residual}"
            )
            lines.append(text + (f"  {row.note}" if row.note else ""))
        return "\n".join(lines)
