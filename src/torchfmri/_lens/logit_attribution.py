"""Direct logit attribution: how much each head and MLP adds to a logit, with what is left over.

`torchfmri.attribute_logit` calls `attribute`; the record is public. The final norm's scale is held
at the token and its weight is folded into the head's row, so that the logit is a sum over parts.
`residual` is what the parts miss and is always printed. A model whose logits are not such a sum is
refused by name. The table and its number of rows may change freely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchfmri._lens.block_parts import BlockPart, block_parts, wanted_layers
from torchfmri._lens.frozen_norm import FrozenNorm, freeze_norm
from torchfmri._lens.stream import Stream, only_stack, run_stream
from torchfmri._lens.unembedding import Unembedding, find_unembedding
from torchfmri._model import unwrap
from torchfmri._text import Column, Grid
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import plot_logit_attribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def title_of(token: str, against: str | None, position: int) -> str:
    """Return in words which logit, or difference of two, was attributed."""
    less = "" if against is None else f" less that of {against!r}"
    return f"logit of {token!r}{less} at position {position}"


def refuse_unknown_tokens(count: int, *tokens: int | None) -> None:
    """Raise for a token without a logit, of a head that has `count` of them."""
    for each in tokens:
        if each is not None and not 0 <= each < count:
            raise InspectionError(
                f"Token id {each} is not in the vocabulary of the head. Give one of 0 to "
                f"{count - 1}."
            )


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """What the parts of a model add to one logit, or to the difference of two.

    The final norm's scale is held at what it was at that token and its weight is folded in, so
    that the parts add up; `residual` is what they miss.

    Attributes:
        token: The text of the token whose logit it is.
        against: The text of the other token, where it is a difference; else None.
        position: The position whose stream was read, counted from 0.
        names: The parts: "embedding", "L3H2", "L3.attn.bias", "L3.mlp", "bias" (of norm and head).
        kinds: What each is: embedding, head, attention, mlp, block, or bias.
        values: (part,) what each adds.
        logit: What the model computed, before its softcap if it has one.
        notes: What could not be told apart, and other reservations.
        heads: (block, head) what each head adds; nan if heads could not be told apart.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> found = torchfmri.attribute_logit(model, tokenizer, "Once upon a time")
        >>> bool(abs(found.residual) <= 1e-5 * abs(found.logit))
        True
    """

    token: str
    against: str | None
    position: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    values: NDArray[np.float64]
    logit: float
    notes: tuple[str, ...]
    heads: NDArray[np.float64]

    @property
    def total(self) -> float:
        """What all parts add up to."""
        return float(self.values.sum())

    @property
    def residual(self) -> float:
        """The logit less all parts: rounding, if everything was told apart."""
        return self.logit - self.total

    def __getitem__(self, name: str) -> float:
        """Return what the part of this name adds; `L3.attn` is the sum of its heads and bias."""
        if name in self.names:
            return float(self.values[self.names.index(name)])
        block = name.removesuffix(".attn")
        inside = [
            index
            for index, each in enumerate(self.names)
            if each.startswith((f"{block}H", f"{block}.attn"))
        ]
        if name.endswith(".attn") and inside:
            return float(self.values[inside].sum())
        raise InspectionError(
            f"There is no part {name!r}: parts are {', '.join(self.names[:4])} ... "
            f"{self.names[-1]}. All are in .names."
        )

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the parts that add or take most, the largest first."""
        order = np.argsort(-np.abs(self.values), kind="stable")[:count]
        return [(self.names[index], float(self.values[index])) for index in order]

    @property
    def title(self) -> str:
        """What was attributed."""
        return title_of(self.token, self.against, self.position)

    def table(self, count: int = 12) -> str:
        """Return the parts that matter most, their sum, the logit and what is left over."""
        rows = [(name, f"{value:+.4f}") for name, value in self.top(count)]
        largest = {name for name, _ in self.top(count)}
        others = [v for n, v in zip(self.names, self.values, strict=True) if n not in largest]
        if others:
            rows.append((f"{len(others)} other parts", f"{sum(others):+.4f}"))
        rows += [("sum of all parts", f"{self.total:+.4f}"), ("the model", f"{self.logit:+.4f}")]
        relative = abs(self.residual) / max(abs(self.logit), 1e-30)
        rows.append(("residual", f"{self.residual:+.1e} ({relative:.1e} of it)"))
        names, cells = zip(*rows, strict=True)
        adds = Column("adds", list(cells), importance=1, right=False)
        return Grid(self.title, "part", names, [adds], self.notes).text()

    def __repr__(self) -> str:
        parts = len(self.names)
        return f"<LogitAttribution: {self.title}; {parts} parts, residual {self.residual:.1e}>"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw heads and MLPs of each block, red if they add and blue if they take away."""
        mlps = np.full(len(self.heads), np.nan)
        for index, name in enumerate(self.names):
            if self.kinds[index] in ("mlp", "block"):
                mlps[int(name.removesuffix(".mlp")[1:])] = self.values[index]
        return plot_logit_attribution(self.heads, mlps, title=self.title, ax=ax)


def attribute(
    model: nn.Module,
    call: Callable[[], Any],
    logits_of: Callable[[Any], Tensor | None],
    *,
    position: int,
    token: int | None,
    against: int | None,
    heads: bool,
    spell: Callable[[int], str],
) -> LogitAttribution:
    """Run a model once on one sequence and attribute a logit to what was added to the stream.

    Args:
        model: The model.
        call: Runs it, and returns what it returned.
        logits_of: Finds the logits in that.
        position: Whose stream to read.
        token: Whose logit; None for the likeliest.
        against: Whose logit is taken off; None for none.
        heads: Whether attention is given head by head.
        spell: Token id -> text.

    Raises:
        InspectionError: The stream, or what reads it, cannot be resolved for this model.
    """
    with torch.no_grad():
        inputs, outputs = wanted_layers(only_stack(model))
        stream = run_stream(model, call, inputs=inputs, outputs=outputs)
        logits = logits_of(stream.output)
        unembedding = find_unembedding(model, stream, logits)
        assert logits is not None
        own = logits[0, position - stream.states[0].shape[1]]
        token = int(own.argmax()) if token is None else token
        frozen = _freeze(model, stream, unembedding, position)
        direction, offset = _direction(model, unembedding, token, against)
        parts, notes = _parts(stream, position, heads)
        vectors = [frozen(each.vector) if frozen else each.vector for each in parts]
        values = [float(direction @ vector) for vector in vectors]
        constant = offset + (float(direction @ frozen.bias) if frozen else 0.0)
        if unembedding.softcap is None:
            raw = own.double()
        else:
            notes.append(f"it is the logit before the softcap of {unembedding.softcap:g}")
            raw = replace(unembedding, softcap=None).logits(stream.states[-1][0, position]).double()
    logit = float(raw[token]) - (0.0 if against is None else float(raw[against]))
    names = [each.name for each in parts]
    if constant:
        names.append("bias")
        values.append(constant)
    return LogitAttribution(
        token=spell(token),
        against=None if against is None else spell(against),
        position=position,
        names=tuple(names),
        kinds=tuple([each.kind for each in parts] + ["bias"] * (len(names) - len(parts))),
        values=np.array(values),
        logit=logit,
        notes=tuple(dict.fromkeys(notes)),
        heads=_head_matrix(stream, parts, values),
    )


def _parts(stream: Stream, position: int, heads: bool) -> tuple[list[BlockPart], list[str]]:
    parts = [BlockPart("embedding", "embedding", None, stream.states[0][0, position].double())]
    notes: list[str] = []
    for block in stream.blocks:
        found, reasons = block_parts(stream, block, position, heads)
        parts += found
        notes += reasons
    return parts, notes


def _freeze(
    model: nn.Module, stream: Stream, unembedding: Unembedding, position: int
) -> FrozenNorm | None:
    """Return the final norm at this position; None if the model has none."""
    layers = list(unembedding.layers.items())
    if len(layers) > 2:
        raise InspectionError(
            f"{type(unwrap(model)).__name__} has more than a norm before its head "
            f"({' -> '.join(name for name, _ in layers)}), so its logits are not a sum of parts."
        )
    if len(layers) == 1:
        return None
    name, module = layers[0]
    return freeze_norm(name, module, stream.states[-1][0, position])


def _direction(
    model: nn.Module, unembedding: Unembedding, token: int, against: int | None
) -> tuple[Tensor, float]:
    """Return what the normed stream is multiplied with for this logit, and what is added."""
    name, head = list(unembedding.layers.items())[-1]
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(head, nn.Linear) or not isinstance(weight, Tensor):
        raise InspectionError(
            f"The head {name!r} of {type(unwrap(model)).__name__} is a {type(head).__name__} and "
            "not an nn.Linear, so its logits are not a sum of parts."
        )
    refuse_unknown_tokens(len(weight), token, against)
    direction = weight[token].double()
    offset = 0.0 if bias is None else float(bias[token])
    if against is not None:
        direction = direction - weight[against].double()
        offset -= 0.0 if bias is None else float(bias[against])
    return unembedding.scale * direction, unembedding.scale * offset


def _head_matrix(
    stream: Stream, parts: list[BlockPart], values: list[float]
) -> NDArray[np.float64]:
    count = max((each.head + 1 for each in parts if each.head is not None), default=0)
    matrix = np.full((len(stream.blocks), count), np.nan)
    for part, value in zip(parts, values, strict=False):
        if part.head is not None:
            matrix[part.block, part.head] = value
    return matrix
