"""Sort layers by their names: which kind they are of, which block they are in, what is inside them.

Tables, pictures and delta_sc call these functions. Names are all that is known, since a scan does
not have the model. `kinds_of` decides which layers delta_sc compares with each other, so changing
it changes numbers; `outline_of` only chooses what a picture shows, and may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchfmri._text import star

_FEW = 48
"""Up to so many layers are all shown; of more, those that stand for a block."""


def kinds_of(layers: Sequence[str]) -> dict[str, list[int]]:
    """Return kind -> the columns of its layers: names that differ only in numbers are of one kind.

    Examples:
        >>> kinds_of(["embed", "layers.0.mlp", "layers.1.mlp"])
        {'embed': [0], 'layers.*.mlp': [1, 2]}
    """
    kinds: dict[str, list[int]] = {}
    for column, layer in enumerate(layers):
        kinds.setdefault(star(layer), []).append(column)
    return kinds


def block_of(layer: str) -> str:
    """Return the numbered block that a layer belongs to, up to its first number; else "".

    Examples:
        >>> block_of("model.layers.3.mlp.up_proj"), block_of("lm_head")
        ('model.layers.3', '')
    """
    segments = layer.split(".")
    numbers = [place for place, segment in enumerate(segments) if segment.isdigit()]
    return ".".join(segments[: numbers[0] + 1]) if numbers else ""


def depth_of(layer: str) -> int | None:
    """Return the number of the block that a layer belongs to; None outside of blocks."""
    block = block_of(layer)
    return int(block.rpartition(".")[2]) if block else None


def inside_of(layers: Sequence[str]) -> list[list[int]]:
    """Return, for each layer, the columns of the layers beneath it, itself first."""
    column = {layer: index for index, layer in enumerate(layers)}
    found: list[list[int]] = [[index] for index in range(len(layers))]
    for index, layer in enumerate(layers):
        segments = layer.split(".")
        parents = {".".join(segments[:length]) for length in range(len(segments))}
        for parent in parents - {layer}:
            if parent in column:
                found[column[parent]].append(index)
    return found


def outline_of(layers: Sequence[str]) -> list[int]:
    """Return the columns of the layers that give an overview, in model order.

    Of a model with many layers: its numbered blocks, the parts of a block that have parts
    themselves (attention, MLP), and what is outside of blocks and has no parts (the embedding, the
    last norm, the head). Of a small one: all of them.

    Examples:
        >>> block = ["", ".attn", ".attn.q", ".norm", ".mlp", ".mlp.up"]
        >>> names = ["embed", *(f"h.{n}{part}" for n in range(20) for part in block)]
        >>> [names[column] for column in outline_of(names)][:5]
        ['embed', 'h.0', 'h.0.attn', 'h.0.mlp', 'h.1']
    """
    if len(layers) <= _FEW:
        return list(range(len(layers)))
    insides = inside_of(layers)
    chosen = []
    for column, layer in enumerate(layers):
        block = block_of(layer)
        has_parts = len(insides[column]) > 1
        if block:
            beneath = layer.count(".") - block.count(".")
            shown = beneath == 0 or (beneath == 1 and has_parts)
        else:
            shown = not has_parts
        if shown:
            chosen.append(column)
    return chosen or list(range(len(layers)))
