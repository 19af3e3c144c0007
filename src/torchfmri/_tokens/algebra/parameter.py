"""`ParameterInfo`: a watched parameter's names, and which of its axes are units and voxels.

`calls/plan.py` calls `describe` for each parameter of a plan, and scans and edits use it so that
all have the same voxels: heads in attention projections, experts where experts are rows, else
`VOXEL` neighbours. Layers are known by the names of their classes, so that nothing has to be
imported; a layer with its units on other axes needs a line in `_sides`. Stored scans hold this
division: if it changes, new sequences can no longer be added to an old scan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

VOXEL = 64  # neighbouring units, where no head or expert says otherwise


@dataclass(frozen=True, slots=True)
class ParameterSide:
    """One side of a parameter: the axes from `first` up to `last`, exclusive."""

    first: int
    last: int

    def steps(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many entries a step before these axes spans, and one along the last of them."""
        return math.prod(shape[self.first :]), math.prod(shape[self.last :])

    def length(self, shape: tuple[int, ...]) -> int:
        """How many units there are on this side."""
        return math.prod(shape[self.first : self.last])


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter that is watched.

    Attributes:
        name: Its first dotted name.
        layer: The layer that owns it, and `key`, its name there.
        shape: Of the parameter.
        dtype: Of the parameter.
        output: The side of the output units; `input` that of the input units, if it has one.
        voxel: How many neighbouring output units are one voxel.
    """

    name: str
    layer: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    output: ParameterSide
    input: ParameterSide | None
    voxel: int


def describe(
    name: str,
    module: nn.Module,
    parameter: nn.Parameter,
    head: int | None = None,
    units: int = VOXEL,
) -> ParameterInfo:
    """What is known of a parameter from its module.

    Args:
        name: Its dotted name.
        module: The module that owns it.
        parameter: The parameter.
        head: The size of an attention head, if it is known (`head_size`).
        units: How many neighbouring units are one voxel where no head or expert is.
    """
    classes = type(module).__mro__
    return _described(name, classes, tuple(parameter.shape), parameter.dtype, head, units)


@lru_cache(maxsize=8192)  # a training loop asks for the same ones at every step
def _described(
    name: str,
    classes: tuple[type, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    head: int | None,
    units: int,
) -> ParameterInfo:
    layer, _, key = name.rpartition(".")
    output, inputs = _sides(classes, shape)
    voxel = _voxel(layer, shape, output, head, units)
    return ParameterInfo(
        name=name,
        layer=layer,
        key=key,
        shape=shape,
        dtype=dtype,
        output=output,
        input=inputs,
        voxel=voxel,
    )


def _sides(
    classes: tuple[type, ...], shape: tuple[int, ...]
) -> tuple[ParameterSide, ParameterSide | None]:
    """Which axes are output units and which are input units."""
    if len(shape) < 2:
        return ParameterSide(0, len(shape)), None
    kinds = {each.__name__ for each in classes}
    if kinds & {"Embedding", "EmbeddingBag"} or (kinds & {"Conv1D"} and len(shape) == 2):
        return ParameterSide(1, 2), ParameterSide(0, 1)
    if kinds & {"_ConvTransposeNd"}:
        return ParameterSide(1, 2), ParameterSide(0, 1)
    if kinds & {"Linear", "_ConvNd", "RNNBase", "RNNCellBase", "MultiheadAttention", "Bilinear"}:
        return ParameterSide(0, 1), ParameterSide(1, 2)
    if len(shape) == 3 and min(shape) > 1:  # fused experts: (expert, unit, unit)
        return ParameterSide(0, 2), ParameterSide(2, 3)
    return ParameterSide(len(shape) - 1, len(shape)), None


def _voxel(
    layer: str, shape: tuple[int, ...], output: ParameterSide, head: int | None, size: int
) -> int:
    """Heads in attention projections, experts where experts are rows, else neighbours."""
    units = output.length(shape)
    if output.last - output.first == 2:
        return shape[output.last - 1]
    projection = layer.rpartition(".")[2].lower()
    queries = projection in ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v")
    if head and queries and units % head == 0:
        return head
    return min(size, max(1, units))


def head_size(config: Any) -> int | None:
    """The size of an attention head, as the configuration of a model (transformers) has it."""
    if config is None:
        return None
    try:
        for name in ("head_dim", "d_kv", "attention_head_size"):
            size = getattr(config, name, None)
            if isinstance(size, int):
                return size
        width = getattr(config, "hidden_size", None)
        count = getattr(config, "num_attention_heads", None)
    except RuntimeError:  # its layers have heads of different sizes, so it names none (Gemma 4)
        return None
    if isinstance(width, int) and isinstance(count, int) and count and width % count == 0:
        return width // count
    return None
