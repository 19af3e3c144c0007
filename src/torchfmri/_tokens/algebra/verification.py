"""`TokenVerification`: which rows changed with a token, and the verdict on each layer.

`calls/verification.py` makes the rows and decides the verdicts; `TokenGradients.verify()` returns
the result to users. This file only counts and prints. Fields, `to_dict` and the words in `VERDICTS`
are public, and their order, from best to worst, decides which verdict a layer gets. "not judged"
comes last but must not outweigh a real verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

VERDICTS = ("local", "first", "mixed", "refuted", "not judged")  # from the best to the worst


@dataclass(frozen=True, slots=True)
class TokenVerificationRow:
    """One layer and one token that was changed.

    Attributes:
        layer: The layer; "" for the model itself.
        parameters: Its parameters.
        token: (b, s) of the token; None where the layer could not be judged at all.
        of: What the token belongs to, where the model is handed several kinds.
        verdict: "local", "first", "mixed", "refuted" or "not judged".
        note: Why, where that has to be said.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(torch.randn(1, 4, 3)).square().sum().backward()
        >>> tokens.verify(samples=1).rows[0].verdict
        'local'
    """

    layer: str
    parameters: tuple[str, ...]
    token: tuple[int, int] | None
    of: str
    verdict: str
    note: str = ""


class TokenVerification:
    """The rows that changed with each of some tokens; see `TokenGradients.verify`.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(torch.randn(1, 4, 3)).square().sum().backward()
        >>> tokens.verify().refuted
        []
    """

    def __init__(self, rows: Sequence[TokenVerificationRow]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[TokenVerificationRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def refuted(self) -> list[TokenVerificationRow]:
        """The rows in which the tokens of a layer are wrong."""
        return [row for row in self.rows if row.verdict == "refuted"]

    @property
    def layers(self) -> dict[str, str]:
        """The layers with the worst verdict of each; "not judged" if there is no other."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            found.setdefault(row.layer, []).append(row.verdict)
        return {
            layer: max(set(several) - {"not judged"} or several, key=VERDICTS.index)
            for layer, several in found.items()
        }

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [asdict(row) for row in self.rows]

    def __repr__(self) -> str:
        layers = self.layers
        counts = Counter((row.layer, row.verdict) for row in self.rows)
        notes = {row.layer: row.note for row in self.rows if row.verdict == layers[row.layer]}
        width = max([len(layer) for layer in layers] + [7])
        lines = [f"{'layer':<{width}}  {'  '.join(VERDICTS[:-1])}  verdict"]
        for layer, verdict in layers.items():
            numbers = "  ".join(f"{counts[layer, each]:>{len(each)}}" for each in VERDICTS[:-1])
            note = f": {notes[layer]}" if notes[layer] else ""
            lines.append(f"{layer or '(model)':<{width}}  {numbers}  {verdict}{note}")
        return "\n".join(lines)
