"""What each block adds to the stream at one token: its heads, its MLP, or all of it in one.

`logit_attribution` calls it for every block. Which layers add to the stream differs between
architectures and is not looked up: all pairs are tried, and a pair counts only if it adds up to
what the block added. What cannot be told apart becomes one part, with a reason. Everything is in
float64, so that the residual shows the model's rounding and not ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from torchfmri._lens.frozen_norm import freeze_norm, tolerance_of
from torchfmri._lens.stream import Stream
from torchfmri._model import Block
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True, eq=False)
class BlockPart:
    """A vector that was added to the stream.

    Attributes:
        name: "embedding", "L3" (a whole block), "L3.attn", "L3H2", "L3.attn.bias", "L3.mlp".
        kind: "embedding", "block", "attention", "head", "bias" or "mlp".
        block: The number of the block; None for the embedding.
        vector: (width,) in float64.
        head: The number of the head; None if it is none.
    """

    name: str
    kind: str
    block: int | None
    vector: Tensor
    head: int | None = None


def wanted_layers(blocks: list[Block]) -> tuple[list[str], list[str]]:
    """Return the layers whose inputs, and those whose outputs, `block_parts` needs."""
    inputs, outputs = [], []
    for block in blocks:
        outputs += [block.full(inner) for inner in block.inside if inner and "." not in inner]
        try:
            projection = block.full(block.output_projection())
        except InspectionError:  # `block_parts` says so
            continue
        inputs.append(projection)
        outputs.append(projection)
    return inputs, list(dict.fromkeys(outputs))


def block_parts(
    stream: Stream, block: Block, position: int, heads: bool
) -> tuple[list[BlockPart], list[str]]:
    """Return what a block added to the stream at one token, and what could not be told apart.

    Args:
        stream: Run with `wanted_layers`.
        block: The block.
        position: The position of the token.
        heads: Whether attention is given head by head, if that is possible.
    """
    before, after = (
        stream.states[index][0, position].double() for index in (block.index, block.index + 1)
    )
    tolerance = tolerance_of(stream.states[0].dtype)
    added = after - before
    split = _split(stream, block, position, added, tolerance)
    name = f"L{block.index}"
    if split is None:
        reason = f"{name}: no two of its layers add up to what it adds, so it is one part"
        return [BlockPart(name, "block", block.index, added)], [reason]
    (attention, factor), mlp = split
    whole = factor * _row(stream.outputs[attention], stream, position)
    parts = [BlockPart(f"{name}.attn", "attention", block.index, whole)]
    notes: list[str] = []
    if heads:
        try:
            parts = list(_heads(stream, block, position, attention, factor, tolerance))
        except InspectionError as error:
            notes.append(f"{name}.attn is one part: {error}")
    vector = factor * _row(stream.outputs[mlp], stream, position)
    return [*parts, BlockPart(f"{name}.mlp", "mlp", block.index, vector)], notes


def _split(
    stream: Stream, block: Block, position: int, added: Tensor, tolerance: float
) -> tuple[tuple[str, float], str] | None:
    """Return the layers that add up to what the block adds: attention with a factor, and MLP.

    Which they are differs between architectures (Gemma adds the outputs of norms), so all pairs
    are tried; dropout that does nothing makes some pairs equal, and the first of these counts.
    """
    names = [block.full(inner) for inner in block.inside if inner and "." not in inner]
    rows = {
        name: found
        for name in names
        if name in stream.outputs
        and (found := _row(stream.outputs[name], stream, position)).shape == added.shape
    }
    factor = getattr(block.config, "residual_multiplier", 1.0)  # Granite
    factors = {1.0, float(factor)} if isinstance(factor, (int, float)) else {1.0}
    best: tuple[float, tuple[str, str], float] | None = None
    for pair in combinations(rows, 2):
        for factor in factors:
            total = factor * (rows[pair[0]] + rows[pair[1]])
            apart = float((total - added).abs().max() / added.abs().max())
            if apart <= tolerance and (best is None or apart < best[0] / 2):
                best = (apart, pair, factor)
    if best is None:
        return None
    _, (one, other), factor = best
    if "att" not in one.rpartition(".")[2].lower() and "att" in other.rpartition(".")[2].lower():
        one, other = other, one
    return (one, factor), other


def _heads(
    stream: Stream,
    block: Block,
    position: int,
    attention: str,
    factor: float,
    tolerance: float,
) -> Iterator[BlockPart]:
    """Yield what each head adds, and the bias of the output projection if it has one."""
    inner = block.output_projection()
    name, module, heads = block.full(inner), block.inside[inner], block.heads()
    z = _row(stream.inputs[name], stream, position)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or z.numel() % heads:
        raise InspectionError(f"{name!r} has no matrix whose columns {heads} heads divide")
    matrix = weight.detach().double()
    if type(module).__name__ == "Conv1D":  # stores it the other way round
        matrix = matrix.T
    if matrix.shape[1] != z.numel():
        raise InspectionError(f"{name!r} has a matrix of the shape {tuple(weight.shape)}")
    size = z.numel() // heads
    by_head = matrix.reshape(len(matrix), heads, size)
    own = torch.einsum("ohd,hd->ho", by_head, z.reshape(heads, size))
    bias = getattr(module, "bias", None)
    offset = torch.zeros_like(own[0]) if bias is None else bias.detach().double()
    output = _row(stream.outputs[name], stream, position)
    added = _row(stream.outputs[attention], stream, position)
    apart = float((own.sum(0) + offset - output).abs().max() / output.abs().max())
    if not apart <= tolerance:
        raise InspectionError(f"its heads are {apart:.2g} away from the output of {name!r}")
    if not torch.allclose(added, output, atol=tolerance * float(output.abs().max())):
        # A norm behind the projection (Gemma, OLMo 2).
        norm = block.inside[attention.removeprefix(f"{block.name}.")]
        if name.startswith(f"{attention}."):  # the attention itself: no norm can be behind it
            raise InspectionError(
                f"{attention!r} returns something other than its projection {name!r}, such as an "
                "edited value"
            )
        frozen = freeze_norm(attention, norm, stream.outputs[name][0, position])
        own, offset = frozen(own), frozen(offset) + frozen.bias
    index = block.index
    for head, vector in enumerate(own):
        yield BlockPart(f"L{index}H{head}", "head", index, factor * vector, head)
    if bool(offset.any()):
        yield BlockPart(f"L{index}.attn.bias", "bias", index, factor * offset)


def _row(tensor: Tensor, stream: Stream, position: int) -> Tensor:
    """Return the units of one token, in float64; some layers have all tokens in a row."""
    b, s, _ = stream.states[0].shape
    if tensor.ndim >= 3 and tensor.shape[:2] == (b, s):
        return tensor[0, position].flatten().double()
    if tensor.ndim == 2 and len(tensor) == b * s:
        return tensor[position].double()
    return torch.empty(0, dtype=torch.float64, device="cpu")
