"""The result of a verification: what is right, what is wrong, what could not be judged.

`verify_gradients` returns a `Verification`. Both classes are public: attributes and `to_dict` must
stay, the table may be changed freely. Wrong gradients are always listed one by one, and never
folded into a line with others. A folded line could hide the one layer that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from torchfmri._text import (
    Column,
    Grid,
    encodable,
    layer_label,
    line_width,
    number_text,
    paragraph,
    plural,
    say_note,
    say_reasons,
    star,
)
from torchfmri._verify.comparison import RIGHT, UNDECIDED, WRONG

EXPECTED = "expected"
_LISTED = 10
_WIDEST_LIST = 40
_ORDER = {WRONG: 0, UNDECIDED: 1, EXPECTED: 2, RIGHT: 3}


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """One gradient that was verified: of one layer, for one input or parameter.

    Attributes:
        layer: The layer; `""` is the model itself, `(loss)` the loss.
        kind: The class of its module.
        of: What the gradient belongs to: `input x`, `weight`, `parameters of its layers`, or
            `backward pass` if that raises.
        status: `right`, `wrong`, `expected` (deviates as you said with `expected=`), or `undecided`
            (the numerical derivative is too inexact to tell).
        deviation: The difference from the numerical derivative, relative to the gradient's size.
        allowed: The largest relative deviation that counts as right here.
        reason: How a wrong gradient differs, in words.
        call: The number of the layer's call, from 0.
        order: 1 for the derivative, 2 for the second derivative.

    Examples:
        >>> import torch, torchfmri
        >>> verification = torchfmri.verify_gradients(torch.nn.Linear(3, 2), torch.randn(4, 3))
        >>> for check in verification.checks:
        ...     print(check.of, check.status)
        input right
        weight right
        bias right
    """

    layer: str
    kind: str
    of: str
    status: str
    deviation: float
    allowed: float
    reason: str = ""
    call: int = 0
    order: int = 1

    def __str__(self) -> str:
        which = f", call {self.call}" if self.call else ""
        derivative = "second derivative, " if self.order == 2 else ""
        reason = f": {self.reason}" if self.reason else ""
        place = f"{layer_label(self.layer)} ({self.kind}{which})"
        return f"{place}, {derivative}{self.of}{reason}"


@dataclass(frozen=True)
class Verification:
    """The result of `verify_gradients`, layer by layer; print it to read it.

    Attributes:
        model: The class of the model.
        checks: Every gradient that was verified, in the order in which layers end: a layer comes
            before those that contain it.
        missing: Layer -> why it was not verified.
        notes: Reservation -> the layers that it concerns.
        seconds: How long the verification took.

    Examples:
        >>> import torch, torchfmri
        >>> from torch import nn
        >>> class Doubled(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         return g
        >>> class Double(nn.Module):
        ...     def forward(self, x):
        ...         return Doubled.apply(x)
        >>> model = nn.Sequential(nn.Linear(3, 4), Double(), nn.Linear(4, 1))
        >>> verification = torchfmri.verify_gradients(model, torch.randn(5, 3))
        >>> verification.ok
        False
        >>> print(verification.first_wrong)
        1 (Double), input x: 0.5 times the derivative: a wrong factor
    """

    model: str
    checks: Sequence[GradientCheck]
    missing: Mapping[str, str]
    notes: Mapping[str, Sequence[str]]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no gradient is wrong; `missing` lists what could not be judged."""
        return not self.findings

    @property
    def findings(self) -> list[GradientCheck]:
        """The wrong gradients."""
        return [check for check in self.checks if check.status == WRONG]

    @property
    def first_wrong(self) -> GradientCheck | None:
        """The first wrong gradient in execution order, of the innermost layer; or None."""
        return next(iter(self.findings), None)

    @property
    def layers(self) -> list[str]:
        """The layers that were verified."""
        return list(dict.fromkeys(check.layer for check in self.checks))

    def __repr__(self) -> str:
        return f"<Verification of {self.model}: {self._verdict()}>"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        listed = "".join(f"<li>{escape(text)}</li>" for text in self._wrong_in_words())
        return (f"<b>wrong</b><ul>{listed}</ul>" if listed else "") + self._grid().html()

    def table(self, width: int | None = None) -> str:
        """Return the verdict and a line per layer, wrong ones first; similar layers share one.

        Args:
            width: The width in characters; by default the width of the terminal.
        """
        width = line_width(width)
        title, *rest = self._grid().text(width).split("\n\n", 1)
        listed = [encodable(paragraph(text, width)) for text in self._wrong_in_words()]
        return "\n\n".join([title, *(["\n".join(["wrong", *listed])] if listed else []), *rest])

    def _wrong_in_words(self) -> list[str]:
        """Return the wrong gradients, first to last."""
        words = [str(check) for check in self.findings]
        more = [f"and {len(words) - _LISTED} more: see verification.findings"]
        return words[:_LISTED] + (more if len(words) > _LISTED else [])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        first = self.first_wrong
        return {
            "model": self.model,
            "ok": self.ok,
            "first_wrong": None if first is None else asdict(first),
            "checks": [asdict(check) for check in self.checks],
            "missing": dict(self.missing),
            "notes": {text: list(layers) for text, layers in self.notes.items()},
            "seconds": self.seconds,
        }

    def _verdict(self) -> str:
        wrong = len({check.layer for check in self.findings})
        text = f"{plural(len(self.layers), 'layer')} verified, "
        text += f"{wrong or 'none'} wrong"
        for status in (UNDECIDED, EXPECTED):
            count = len({check.layer for check in self.checks if check.status == status})
            text += f", {count} {status}" if count else ""
        return text + (f", {len(self.missing)} not verified" if self.missing else "")

    def _grid(self) -> Grid:
        lines = _lines(self.checks)
        title = f"{self.model}: {self._verdict()} ({self.seconds:.1f} s)"
        columns = [
            Column("verdict", [line.status for line in lines], 9, right=False),
            Column("type", [line.kind for line in lines], 2, right=False),
            Column("gradient of", [line.of for line in lines], 6, right=False),
            Column("deviation", [_number(line.deviation) for line in lines], 7),
            Column("allowed", [_number(line.allowed) for line in lines], 5),
        ]
        wrong = frozenset(k for k, line in enumerate(lines) if line.status == WRONG)
        names = [line.layer for line in lines]
        return Grid(
            title=title,
            heading="layer",
            names=names,
            columns=columns,
            notes=self._remarks(),
            emphasised=wrong,
        )

    def _remarks(self) -> list[str]:
        said = [f"not verified: {each}" for each in say_reasons(self.missing)]
        for text, layers in self.notes.items():
            folded = star if len(layers) > 3 else str
            named = dict.fromkeys(layer_label(folded(layer)) for layer in layers)
            said.append(say_note(text, list(named), str))
        return said


def _lines(checks: Sequence[GradientCheck]) -> list[GradientCheck]:
    """Return wrong gradients first, one by one; then layers, with their largest deviation.

    Similar layers share a line, whose `layer` stands for all of them.
    """
    groups: dict[tuple[Any, ...], list[GradientCheck]] = {}
    for check in checks:
        alone = check.status in (WRONG, UNDECIDED)
        key = (check.layer, check.of, check.order) if alone else (star(check.layer), check.kind)
        groups.setdefault((check.status, *key), []).append(check)
    lines = []
    for (status, *_), members in groups.items():
        first = members[0]
        layers = list(dict.fromkeys(check.layer for check in members))
        name = first.layer if len(layers) == 1 else star(first.layer)
        count = f" ({len(layers)} layers)" if len(layers) > 1 else ""
        worst = max(members, key=lambda check: check.deviation)
        lines.append(
            GradientCheck(
                layer=layer_label(name) + count,
                status=status,
                kind=first.kind,
                of=_listed(members),
                deviation=worst.deviation,
                allowed=max(check.allowed for check in members),
            )
        )
    return sorted(lines, key=lambda line: _ORDER[line.status])


def _listed(members: Sequence[GradientCheck]) -> str:
    """Name what the gradients of one line belong to; what has no room becomes an ellipsis."""
    named = list(dict.fromkeys(check.of for check in members if check.order == 1))
    if not named:
        return f"{members[0].of} (second)"
    text = named[0]
    for each in named[1:]:
        if len(text) + len(each) > _WIDEST_LIST:
            text += ", ..."
            break
        text += f", {each}"
    return text + ("; second" if any(check.order == 2 for check in members) else "")


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else number_text(value)
