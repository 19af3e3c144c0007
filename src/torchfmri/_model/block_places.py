"""The places in one block of a transformer: for each name, where it is in this architecture.

`places` (for models) and `place_table` (for stored scans) look names up in the two tables at the
end of the file. For another architecture, change how a place is found and add a case to
tests/_model/test_places.py. The names are those of TransformerLens and Llama and stand in stored
scans: they stay. What is not known raises, because a guessed place gives wrong numbers without an
error. A place that can be read but not edited says why in `read_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchfmri._model.blocks import MIDDLE_NORMS, MLP, PROJECTIONS, Block, Ranges, width_in
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True)
class Place:
    """A place in a model: a layer, its input or output, and the units of it that are meant.

    Attributes:
        name: What it was called, without wildcards.
        layer: The name of the layer.
        what: "inputs" (the first argument of its call), "activations" (its output, or element 0 of
            it), or "attention" (the pattern inside, which is neither).
        units: Runs of units of the last axis, first and last + 1; None for all of them.
        heads: The units of every head there, in order; None if there are no heads.
        head: The head that is meant; None for all of them.
        block: The number of the block; None if it is in none.
        read_only: Why the place can be read and not be edited; "" if it can.
    """

    name: str
    layer: str
    what: str = "activations"
    units: Ranges | None = None
    heads: tuple[Ranges, ...] | None = None
    head: int | None = None
    block: int | None = None
    read_only: str = ""

    def units_of(self, value: Tensor) -> Tensor:
        """Return the units of this place in the value of its layer."""
        if self.units is None:
            return value
        return torch.cat([value[..., first:end] for first, end in self.units], -1)

    def of_head(self, head: int) -> Place:
        """Return one head of this place.

        Raises:
            InspectionError: The place has no heads, or fewer than that.
        """
        if self.heads is None:
            raise InspectionError(f"{self.name!r} (layer {self.layer!r}) has no heads.")
        if not 0 <= head < len(self.heads):
            raise InspectionError(
                f"Head {head} of {self.name!r}: layer {self.layer!r} has {len(self.heads)} heads, "
                f"0 to {len(self.heads) - 1}."
            )
        units = None if self.what == "attention" else self.heads[head]
        return replace(self, head=head, units=units)


def _at(block: Block, inner: str = "", **rest: Any) -> Place:
    """Return the place at a layer inside the block, or at the block itself; named by the caller."""
    return Place(name="", layer=block.full(inner), **rest)


def _between(block: Block) -> Place:
    """Return the stream between attention and MLP."""
    if block.find(("layer",)) and "layer.0" in block.inside:  # T5: sub-blocks add to the stream
        return _at(block, "layer.0")
    after = "attention.output.LayerNorm"
    norm = after if after in block.inside else _middle_reader(block)
    if block.is_parallel or norm is None:
        reason = "attention and MLP read the same stream" if block.is_parallel else "no known norm"
        raise InspectionError(
            f"Block {block.name!r} ({block.kind}) has no hook_resid_mid: {reason}. Use "
            "hook_resid_pre, hook_attn_out, hook_mlp_out or hook_resid_post."
        )
    if norm == after:  # the norm's output is the stream from there on
        return _at(block, norm, what="inputs")
    return _at(
        block,
        norm,
        what="inputs",
        read_only=(
            "the stream goes past this layer, so that an edit of its input would reach the MLP "
            "alone; edit hook_attn_out or hook_resid_post"
        ),
    )


def _middle_reader(block: Block) -> str | None:
    """Return what reads the stream between attention and MLP; None if nothing known does."""
    if "post_feedforward_layernorm" in block.inside and MIDDLE_NORMS[0] not in block.inside:
        return block.find(MLP)  # OLMo 2: both norms stand after what they norm
    return block.find(MIDDLE_NORMS)


def _after(block: Block) -> Place:
    if "output.LayerNorm" in block.inside:  # BERT: the block ends with a norm of the sum
        return _at(block, "output.LayerNorm", what="inputs")
    return _at(block)


def _attention_output(block: Block, cross: bool = False) -> Place:
    if not cross:
        normed = ["attention.output.dense", "post_self_attn_layernorm"]
        if "post_feedforward_layernorm" in block.inside:  # Gemma: normed before it is added
            normed.append("post_attention_layernorm")
        for each in normed:
            if each in block.inside:
                return _at(block, each)
    attention = block.attention(cross)
    if _adds_inside(block, attention):
        return _at(block, block.output_projection(cross))
    return _at(block, attention)


def _mlp_output(block: Block) -> Place:
    for norm in ("post_feedforward_layernorm", "post_mlp_layernorm", "output.dense"):
        if norm in block.inside:
            return _at(block, norm)
    found = next((each for each in MLP if each in block.inside), None) or block.find(MLP)
    if found is None or _adds_inside(block, found):
        found = _mlp_layer(block, "down")
    return _at(block, found)


def _adds_inside(block: Block, layer: str) -> bool:
    """Whether a layer returns the stream with its own output added, which others leave out."""
    return type(block.inside[layer]).__name__ in ("BloomAttention", "BloomMLP", "MptMLP")


def _mlp_layer(block: Block, which: str) -> str:
    """Return the gate, up or down projection of the MLP."""
    bert = {"up": "intermediate.dense", "down": "output.dense"}.get(which)
    if bert in block.inside:
        return str(bert)
    parent = next((each for each in MLP if each in block.inside), None) or block.find(MLP) or ""
    attention = block.find(("self_attn", "attn", "attention", "self_attention")) or "-"
    for name in PROJECTIONS[which]:
        for each in block.inside:
            inside = each.startswith(f"{parent}.") if parent else not each.startswith(attention)
            if inside and each.rpartition(".")[2] == name:
                return each
    raise InspectionError(
        f"Block {block.name!r} ({block.kind}) has no MLP with a {which} projection of a known "
        f"name: {', '.join(PROJECTIONS[which])}."
    )


def _mlp_part(block: Block, which: str, what: str = "activations") -> Place:
    return _at(block, _mlp_layer(block, which), what=what)


def _mlp_before_activation(block: Block) -> Place:
    """Return the input of the activation function: of a gated MLP, the gate."""
    try:
        return _mlp_part(block, "gate")
    except InspectionError:
        return _mlp_part(block, "up")


def _mixed(block: Block, cross: bool = False) -> Place:
    """Return the heads' outputs side by side: the input of the output projection."""
    projection = block.output_projection(cross)
    heads, width = block.heads(cross), width_in(block.inside[projection])
    if width is None or width % heads:
        raise InspectionError(
            f"The input of {block.full(projection)!r} has {width} units, which {heads} heads "
            "do not divide: its heads cannot be told apart."
        )
    size = width // heads
    units = tuple(((at, at + size),) for at in range(0, width, size))
    return _at(block, projection, what="inputs", heads=units)


def _projected(block: Block, which: str, cross: bool = False) -> Place:
    layer, width, heads = block.projection(which, cross)
    joined = tuple(each for ranges in heads for each in ranges)
    whole = sum(stop - start for start, stop in joined) == width
    return _at(block, layer, units=None if whole else joined, heads=tuple(heads))


def _pattern(block: Block, cross: bool = False) -> Place:
    none: Ranges = ()
    return _at(
        block,
        block.attention(cross),
        what="attention",
        heads=(none,) * block.heads(cross),
        read_only=(
            "a pattern is computed inside the attention and handed to no layer; edit "
            "attn.hook_z, attn.hook_q, attn.hook_k or attn.hook_v"
        ),
    )


def _mlp_whole(block: Block) -> Place:
    found = block.find(MLP)
    return _mlp_output(block) if found is None else _at(block, found)


LENS_PLACES: Mapping[str, Callable[[Block], Place]] = {
    "block": _at,
    "hook_resid_pre": partial(_at, what="inputs"),
    "hook_resid_mid": _between,
    "hook_resid_post": _after,
    "hook_attn_out": _attention_output,
    "hook_mlp_out": _mlp_output,
    "attn.hook_z": _mixed,
    "attn.hook_q": partial(_projected, which="q"),
    "attn.hook_k": partial(_projected, which="k"),
    "attn.hook_v": partial(_projected, which="v"),
    "attn.hook_pattern": _pattern,
    "cross_attn.hook_z": partial(_mixed, cross=True),
    "cross_attn.hook_q": partial(_projected, which="q", cross=True),
    "cross_attn.hook_k": partial(_projected, which="k", cross=True),
    "cross_attn.hook_v": partial(_projected, which="v", cross=True),
    "cross_attn.hook_pattern": partial(_pattern, cross=True),
    "hook_cross_attn_out": partial(_attention_output, cross=True),
    "mlp.hook_pre": _mlp_before_activation,
    "mlp.hook_pre_linear": partial(_mlp_part, which="up"),
    "mlp.hook_post": partial(_mlp_part, which="down", what="inputs"),
}
"""Names of TransformerLens inside a block -> how the place is found."""

_PARTS_OF_ATTENTION: Mapping[str, Callable[[Block], Place]] = {
    "": lambda block: _at(block, block.attention()),
    ".o_proj": lambda block: _at(block, block.output_projection()),
    **{f".{each}_proj": partial(_projected, which=each) for each in "qkv"},
}
PLAIN_PLACES: Mapping[str, Callable[[Block], Place]] = {
    "": _at,
    **{
        f"{attention}{part}": find
        for attention in ("self_attn", "attn", "attention")
        for part, find in _PARTS_OF_ATTENTION.items()
    },
    "mlp": _mlp_whole,
    **{f"mlp.{each}_proj": partial(_mlp_part, which=each) for each in ("gate", "up", "down")},
}
"""Names of Llama inside a block, which most people know -> how the place is found elsewhere."""
