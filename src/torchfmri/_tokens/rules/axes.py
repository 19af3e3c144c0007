"""Which axes of a layer's tensors are tokens.

A token is a batch element and a position, (b, s). Layers with features last see (b, s, i),
(b * s, i), (b, i), or further axes inside a token, (b, s, heads, i) and (b, heads, s, i); where the
model was handed (b, s) ids or embeddings, that tells them apart. Convolutions and their norms have
the features second, (b, i, *positions), and every position is a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from torchfmri._torch import flatten_arguments

TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "hidden_states", "attention_mask")


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """The tokens of one call.

    Attributes:
        b: Batch elements.
        s: Positions.
        order: The leading axes in the order batch, positions, inside a token.
    """

    b: int
    s: int
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.b, self.s

    @property
    def leading(self) -> int:
        """How many axes come before the features."""
        return len(self.order)

    def rows_of(self, tensor: Tensor, features: int = 1) -> Tensor:
        """A tensor with its features last as (t, r, n)."""
        lead = tensor.ndim - features
        if self.order != tuple(range(lead)):
            tensor = tensor.permute(*self.order, *range(lead, tensor.ndim))
        inside = math.prod(tensor.shape[lead:])
        tokens = self.b * self.s
        rows = math.prod(tensor.shape[:lead]) // tokens if tokens else 1
        return tensor.reshape(tokens, rows, inside)

    def numbers_of(self, tensor: Tensor) -> Tensor:
        """A tensor without features, such as ids, as (t, r)."""
        return self.rows_of(tensor[..., None])[..., 0]

    def channels_of(self, tensor: Tensor) -> Tensor:
        """A tensor with its features second, (b, n, *positions), as (t, 1, n)."""
        if tensor.ndim == len(self.order):  # a single sample, without a batch axis
            tensor = tensor[None]
        if tensor.ndim == 2:
            return tensor[:, None]
        return tensor.flatten(2).mT.reshape(self.b * self.s, 1, tensor.shape[1])


@lru_cache(maxsize=1024)
def features_last(
    lead: tuple[int, ...], model: tuple[int, int] | None, strides: tuple[int, ...] = ()
) -> TokenGrid:
    """The tokens of a call whose tensors have the features last.

    Args:
        lead: The sizes of the axes before the features.
        model: Batch and positions of what the model was handed, if that is known.
        strides: Of the input. Where heads are as many as positions, (b, heads, s, i) is told from
            (b, s, heads, i) by them: projections have the heads inside the positions.
    """
    if not lead:
        return TokenGrid(1, 1, ())
    if len(lead) == 1:
        if model is not None and model[1] > 1 and lead[0] == math.prod(model):
            return TokenGrid(*model, (0,))
        return TokenGrid(lead[0], 1, (0,))
    if len(lead) == 2:
        return TokenGrid(*lead, (0, 1))
    if model is not None and lead[0] == model[0] and model[1] in lead[1:]:
        fitting = [axis for axis in range(1, len(lead)) if lead[axis] == model[1]]
        position = max(fitting, key=lambda axis: strides[axis]) if strides else fitting[0]
        others = tuple(axis for axis in range(1, len(lead)) if axis != position)
        return TokenGrid(*model, (0, position, *others))
    return TokenGrid(lead[0], math.prod(lead[1:]), tuple(range(len(lead))))


def features_second(shape: tuple[int, ...], spatial: int | None) -> TokenGrid:
    """The tokens of a call whose tensors are (b, i, *positions).

    Args:
        shape: Of the output.
        spatial: How many axes of positions there are; None where it follows from the shape.
    """
    if spatial is not None and len(shape) == spatial + 1:
        return TokenGrid(1, math.prod(shape[1:]), tuple(range(len(shape))))
    return TokenGrid(shape[0], math.prod(shape[2:]), tuple(range(len(shape) - 1)))


def model_grid(
    arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[int, int] | None:
    """(b, s) of what a model was handed: ids, embeddings or a mask; None for anything else."""
    named = [keywords.get(name) for name in TOKENS]
    for value in [*named, *(each.tensor for each in flatten_arguments(arguments, keywords))]:
        if not isinstance(value, Tensor):
            continue
        whole = not value.is_floating_point()
        if (whole and value.ndim == 2) or (value.is_floating_point() and value.ndim == 3):
            return value.shape[0], value.shape[1]
        return None
    return None
