"""The `Comparison` that `torchfmri.compare` returns for two runs of a model.

`entry_point` makes it, users and `torchfmri compare` read it. It judges nothing: each `Pair`
already knows whether it differs. Wording, the layout of the table and the number of its lines may
change. The attributes and the keys of `to_dict` are public, since `--json` prints them, and `agree`
must stay False where both sides are NaN, because nothing was compared there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from torchfmri._compare import pictures
from torchfmri._compare.changes import Change
from torchfmri._compare.difference import Difference, Pair, beyond_text, finite, spread_text
from torchfmri._compare.matching import Matching
from torchfmri._compare.recording import BACKWARD, FORWARD, PARAMETERS
from torchfmri._text import Column, Grid, listed, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SAID = {FORWARD: "forward", BACKWARD: "backward", PARAMETERS: "parameter gradients"}
_WHERE = {FORWARD: "forward pass", BACKWARD: "backward pass", PARAMETERS: "parameter gradients"}
_MOST_LINES, _MOST_CHANGES = 40, 8
_EXPECTED = frozenset({"dtype", "autocast"})
"""Changes that people make on purpose before they compare: agreement needs no remark."""


class Comparison:
    """The result of `compare`: where two runs part, or that they agree.

    Attributes:
        first: The first difference beyond the noise of both sides; None where they agree.
        differences: Direction (forward, backward, parameters) -> its first difference.
        pairs: Every tensor of both sides with its distance, in order.
        only_a: Layers of a without a partner.
        only_b: Layers of b without a partner.
        changes: What differs between the two models before they run: settings, attributes,
            parameters. It is listed also where its effect is within noise.
        notes: What to know about the comparison: doubts, what was not compared and why.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> comparison = torchfmri.compare(model, model.double().float(), data=torch.randn(8, 4))
        >>> comparison.agree, comparison.first
        (True, None)
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        differences: dict[str, Difference],
        matching: Matching,
        changes: Sequence[Change],
        notes: Sequence[str],
        tokens: Sequence[str],
        tolerance: float | None = None,
    ) -> None:
        self.pairs, self.differences = list(pairs), differences
        self.only_a, self.only_b = matching.only_a, matching.only_b
        self.changes, self.notes = list(changes), list(notes)
        self._tokens, self._tolerance = list(tokens), tolerance

    @property
    def first(self) -> Difference | None:
        """The first difference: in the forward pass, else going back, else in the parameters."""
        return next(iter(self.differences.values()), None)

    @property
    def agree(self) -> bool:
        """Whether no tensor differs by more than both sides differ from themselves.

        False too where both sides are NaN: nothing is known about these values.
        """
        return not self.differences and not self._nan

    @property
    def _nan(self) -> list[Pair]:
        """The tensors that are NaN in the same places on both sides."""
        return [pair for pair in self.pairs if pair.nonfinite == "NaN"]

    def __repr__(self) -> str:
        return f"<Comparison: {self.summary()}>"

    def summary(self) -> str:
        """The result in a sentence."""
        count = plural(len(self.pairs), "tensor")
        directions = [_SAID[each] for each in dict.fromkeys(pair.direction for pair in self.pairs)]
        if self.first is None:
            beyond = beyond_text(self._tolerance)
            said = f"no difference{beyond} in {count} ({', '.join(directions)})"
            if all(pair.worst == 0 for pair in self.pairs):
                said += ": equal to the last bit"
            if self._nan:
                said += f", but not all could be compared: {nonfinite_note(self._nan)}"
            told = [each for each in self.changes if each.name not in _EXPECTED]
            return f"{said}, though the models differ: {told[0]}" if told else said
        return f"they part in the {_WHERE[self.first.direction]}: {self.first}"

    def text(self, *, lines: int = _MOST_LINES) -> str:
        """The result for a terminal: what was found, and a table of the tensors around it.

        Args:
            lines: How many tensors the table has at most.
        """
        title = self.summary()
        more = [f"{_SAID[each]}: {found}" for each, found in self.differences.items()][1:]
        return self._grid(title, [*more, *self._remarks()], lines).text()

    def _repr_html_(self) -> str:
        return self._grid(self.summary(), self._remarks(), _MOST_LINES).html()

    def __str__(self) -> str:
        return self.text()

    def _remarks(self) -> list[str]:
        effect = "within noise" if self._tolerance is None else "within the tolerance"
        effect = effect if self.first is None else "the models differ"
        said = [f"{effect}: {each}" for each in self.changes[:_MOST_CHANGES]]
        left = len(self.changes) - _MOST_CHANGES
        said += [f"{plural(left, 'more change')} in comparison.changes"] if left > 0 else []
        said += self.notes
        for side, layers in (("a", self.only_a), ("b", self.only_b)):
            if layers:
                said.append(f"{plural(len(layers), 'layer')} only in {side}: {listed(layers, 6)}")
        return said

    def _grid(self, title: str, notes: Sequence[str], lines: int) -> Grid:
        pairs = self._shown(lines)
        left = len(self.pairs) - len(pairs)
        notes = [*notes, f"{left:,} more tensors are in comparison.pairs"] if left else notes
        columns = [
            Column("pass", [pair.direction for pair in pairs], 1, right=False),
            Column("difference", [spread_text(pair.worst) for pair in pairs], 5),
            Column("a itself", [spread_text(pair.spread_a) for pair in pairs], 3),
            Column("b itself", [spread_text(pair.spread_b) for pair in pairs], 2),
            Column("allowed", [spread_text(pair.threshold) for pair in pairs], 4),
            Column("", ["differs" if pair.differs else "" for pair in pairs], 6, right=False),
        ]
        names = [_name(pair) for pair in pairs]
        bold = frozenset(index for index, pair in enumerate(pairs) if pair.differs)
        return Grid(
            title=title,
            heading="tensor",
            names=names or ["nothing was compared"],
            columns=columns if pairs else [],
            notes=notes,
            emphasised=bold,
        )

    def _shown(self, lines: int) -> list[Pair]:
        """The pairs around the first difference of each direction; evenly spread where none is."""
        if len(self.pairs) <= lines:
            return self.pairs
        firsts = [index for index, pair in enumerate(self.pairs) if pair.differs]
        if firsts:
            start = max(0, firsts[0] - lines // 2)
            return self.pairs[start : start + lines]
        step = math.ceil(len(self.pairs) / lines)
        return self.pairs[::step]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON: numbers that are not finite are None."""
        found = {
            "agree": self.agree,
            "first": None if self.first is None else self.first.to_dict(),
            "differences": {name: each.to_dict() for name, each in self.differences.items()},
            "tensors": [
                {
                    "direction": pair.direction,
                    **pair.place._asdict(),
                    "partner": None if pair.partner is None else pair.partner.layer,
                    "difference": pair.worst,
                    "spread_a": pair.spread_a,
                    "spread_b": pair.spread_b,
                    "allowed": pair.threshold,
                    "differs": pair.differs,
                    "reason": pair.reason,
                    "nonfinite": pair.nonfinite,
                }
                for pair in self.pairs
            ],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "changes": [each._asdict() for each in self.changes],
            "notes": self.notes,
        }
        return dict(finite(found))

    def plot(
        self, direction: str = FORWARD, *, row: int | None = None, ax: Axes | None = None
    ) -> Axes:
        """Layers down, tokens across: the difference in units of the noise, the first one marked.

        Args:
            direction: forward or backward.
            row: Which row of the batch; by default that of the first difference.
            ax: Where to draw.

        Raises:
            InspectionError: There are no tokens to draw in that direction.
        """
        return pictures.plot_difference(self, direction, row, ax)

    def plot_depth(self, direction: str = FORWARD, *, ax: Axes | None = None) -> Axes:
        """The difference and both sides' own spread from layer to layer: how rounding grows.

        Args:
            direction: forward, backward or parameters (their gradients).
            ax: Where to draw.

        Raises:
            InspectionError: Nothing was compared in that direction.
        """
        return pictures.plot_depth(self.pairs, direction, ax)

    def draw(self, path: str | PathLike[str] | None = None) -> Figure:
        """Both pictures in one figure, of the direction in which the two part first.

        Where only gradients of parameters differ there are no tokens, and it is the second alone.

        Args:
            path: Where to write it, if anywhere.
        """
        return pictures.draw_comparison(self, path)


def nonfinite_note(pairs: Sequence[Pair]) -> str:
    """Say from which layer on both sides have values that are not finite.

    Args:
        pairs: The pairs with such values of one kind, in order.
    """
    return (
        f"both sides have {pairs[0].nonfinite} values from {_name(pairs[0])!r} "
        f"({pairs[0].direction}) on, in {plural(len(pairs), 'tensor')}"
    )


def _name(pair: Pair) -> str:
    name = pair.place.layer or "the model"
    name += f" [{pair.place.element}]" if pair.place.element else ""
    name = "the loss" if name == "the model [loss]" else name
    return f"{name} call {pair.place.call}" if pair.place.call else name
