"""`PositionGrid`: which positions of a batch are tokens, and in which order its rows come.

`run` and `sources` make grids from data, masks or shapes; `recording` uses them to turn tensors
into tables with one row per token. Thanks to `order` and `kept`, a reversed batch or one padded on
the other side gives the same rows, which every comparison token by token relies on. All tensors
here are on the CPU, and padding is never a row. The names of arguments that are taken for masks or
embeddings may be extended at the top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchfmri._capture import TokenMask
from torchfmri._records import Inspection
from torchfmri._torch import flatten

_MASKS = ("attention_mask", "decoder_attention_mask")
_EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")


@dataclass(frozen=True, eq=False)
class PositionGrid:
    """The tokens of a batch: row by row, those that are not padding.

    Attributes:
        kept: (b, s) True where a position is a token.
        order: Row i of the reference is row `order[i]` of this batch.
        ids: (b, s) the token numbers; None where the batch has none.
        channels_first: Whether (b, w, s) has its positions last, as convolutions return them.
    """

    kept: Tensor
    order: tuple[int, ...]
    ids: Tensor | None = None
    channels_first: bool = False

    def __len__(self) -> int:
        return int(self.kept.sum())

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The (row, position) of each token, counted from 0 without padding, rows in order."""
        counts = [int(self.kept[row].sum()) for row in self.order]
        return [(row, position) for row, count in enumerate(counts) for position in range(count)]

    @cached_property
    def token_ids(self) -> list[int]:
        """The number of each token, in the order of `places`; empty where there are none."""
        if self.ids is None:
            return []
        return [int(each) for row in self.order for each in self.ids[row][self.kept[row]]]

    def rows(self, tensor: Tensor, *, padded: bool = False) -> Tensor | None:
        """The values at the tokens (or at the padded positions), (token, units).

        None for a tensor without a token axis.
        """
        values = self.aligned(tensor)
        if values is None:
            return None
        chosen = ~self.kept if padded else self.kept
        parts = [values[row][chosen[row]] for row in self.order]
        return torch.cat(parts).flatten(1)

    def aligned(self, tensor: Tensor) -> Tensor | None:
        """The tensor as (b, s, ...); None for one without a token axis."""
        b, s = self.kept.shape
        if tensor.is_nested:
            return None
        if self.channels_first and tensor.ndim == 3 and tensor.shape[::2] == (b, s):
            tensor = tensor.mT
        if tensor.ndim >= 3 and tuple(tensor.shape[:2]) == (1, s) and b > 1:
            tensor = tensor.expand(b, *tensor.shape[1:])  # one for all rows, such as rotations
        aligned = TokenMask(self.kept).align(tensor)
        if aligned is None:
            return None
        values, mask = aligned
        values = values if mask.ndim == 2 else values.reshape(b, s, -1)
        return values.unsqueeze(-1) if values.ndim == 2 else values


def grids_of(data: Any) -> list[PositionGrid]:
    """Return the grids of a batch: one for each length, such as the encoder's and the decoder's."""
    elements = flatten(data)
    by_name = {element.path.rpartition(".")[2]: element.tensor for element in elements}
    masks = [by_name[name] for name in _MASKS if name in by_name and by_name[name].ndim == 2]
    found: dict[tuple[int, ...], PositionGrid] = {}
    for path, tensor in elements:
        name = path.rpartition(".")[2]
        whole = tensor.ndim == 2 and not tensor.is_floating_point() and name not in _MASKS
        embedded = tensor.ndim == 3 and name in _EMBEDDED
        shape = tuple(tensor.shape[:2])
        if not (whole or embedded) or shape in found:
            continue
        mask = next((each for each in masks if tuple(each.shape) == shape), None)
        kept = (
            torch.ones(shape, dtype=torch.bool, device="cpu") if mask is None else mask.cpu() != 0
        )
        ids = tensor.cpu() if whole else None
        found[shape] = PositionGrid(kept=kept, order=tuple(range(shape[0])), ids=ids)
    return list(found.values())


def grids_seen(
    inspection: Inspection, rows: int, known: Sequence[PositionGrid]
) -> list[PositionGrid]:
    """Return the grid that most outputs have of those of another length than the known ones.

    A model may read no token ids, or have an encoder of images or sounds beside them. Outputs are
    (b, s, w), or (b, w, s) where a convolution returns that shape.
    """
    calls = inspection.calls()
    if known and any(call.index for call in calls):  # generation has outputs of many lengths
        return []
    outputs = [
        (_channels_first(inspection[call.layer].kind), value.shape)
        for call in calls
        for value in call.values("activations")
        if value is not None and len(value.shape) == 3 and value.shape[0] == rows
    ]
    turned = {shape for first, shape in outputs if first}
    counts = Counter((shape[2 if shape in turned else 1], shape in turned) for _, shape in outputs)
    lengths = {1, *(grid.kept.shape[1] for grid in known)} if known else set()
    return [
        PositionGrid(
            kept=torch.ones(rows, length, dtype=torch.bool, device="cpu"),
            order=tuple(range(rows)),
            channels_first=first,
        )
        for (length, first), _ in counts.most_common()
        if length not in lengths
    ][:1]


def _channels_first(kind: str) -> bool:
    """Whether modules of this class take their second axis for channels."""
    return kind.startswith(("Conv", "BatchNorm", "InstanceNorm", "GroupNorm"))
