"""The places in one block of a transformer: for each name, where it is in this architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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
        heads: The units of every head there, in order; None where there are no heads.
        head: The head that is meant; None for all of them.
        block: The number of the block; None where it is in none.
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

    def of_head(self, head: int) -> Place:
        """Return one head of this place.

        Raises:
            InspectionError: It has no heads, or not so many.
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


def _whole(block: Block) -> Place:
    return Place(name="", layer=block.name)


def _before(block: Block) -> Place:
    return Place(name="", layer=block.name, what="inputs")


def _between(block: Block) -> Place:
    """Return the stream between attention and MLP."""
    if block.find(("layer",)) and "layer.0" in block.inside:  # T5: sub-blocks add to the stream
        return Place(name="", layer=block.full("layer.0"))
    after = "attention.output.LayerNorm"
    norm = after if after in block.inside else _middle_reader(block)
    if block.is_parallel or norm is None:
        reason = "attention and MLP read the same stream" if block.is_parallel else "no known norm"
        raise InspectionError(
            f"Block {block.name!r} ({block.kind}) has no hook_resid_mid: {reason}. Use "
            "hook_resid_pre, hook_attn_out, hook_mlp_out or hook_resid_post."
        )
    if norm == after:  # the norm's output is the stream from there on
        return Place(name="", layer=block.full(norm), what="inputs")
    return Place(
        name="",
        layer=block.full(norm),
        what="inputs",
        read_only=(
            "the stream goes past this layer, so that an edit of its input would reach the MLP "
            "alone; edit hook_attn_out or hook_resid_post"
        ),
    )


def _middle_reader(block: Block) -> str | None:
    """Return what reads the stream between attention and MLP; None where nothing known does."""
    if "post_feedforward_layernorm" in block.inside and MIDDLE_NORMS[0] not in block.inside:
        return block.find(MLP)  # OLMo 2: both norms stand after what they norm
    return block.find(MIDDLE_NORMS)


def _after(block: Block) -> Place:
    if "output.LayerNorm" in block.inside:  # BERT: the block ends with a norm of the sum
        return Place(name="", layer=block.full("output.LayerNorm"), what="inputs")
    return Place(name="", layer=block.name)


def _attention_output(block: Block, cross: bool = False) -> Place:
    if not cross:
        normed = ["attention.output.dense", "post_self_attn_layernorm"]
        if "post_feedforward_layernorm" in block.inside:  # Gemma: normed before it is added
            normed.append("post_attention_layernorm")
        for each in normed:
            if each in block.inside:
                return Place(name="", layer=block.full(each))
    attention = block.attention(cross)
    if _adds_inside(block, attention):
        return Place(name="", layer=block.full(block.output_projection(cross)))
    return Place(name="", layer=block.full(attention))


def _mlp_output(block: Block) -> Place:
    for norm in ("post_feedforward_layernorm", "post_mlp_layernorm", "output.dense"):
        if norm in block.inside:
            return Place(name="", layer=block.full(norm))
    found = next((each for each in MLP if each in block.inside), None) or block.find(MLP)
    if found is None or _adds_inside(block, found):
        found = _mlp_layer(block, "down")
    return Place(name="", layer=block.full(found))


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


def _mlp_part(which: str, what: str) -> Callable[[Block], Place]:
    def find(block: Block) -> Place:
        return Place(name="", layer=block.full(_mlp_layer(block, which)), what=what)

    return find


def _mlp_before_activation(block: Block) -> Place:
    """Return the input of the activation function: of a gated MLP, the gate."""
    try:
        return _mlp_part("gate", "activations")(block)
    except InspectionError:
        return _mlp_part("up", "activations")(block)


def _mixed(cross: bool = False) -> Callable[[Block], Place]:
    """Return the heads' outputs side by side: the input of the output projection."""

    def find(block: Block) -> Place:
        projection = block.output_projection(cross)
        heads, width = block.heads(cross), width_in(block.inside[projection])
        if width is None or width % heads:
            raise InspectionError(
                f"The input of {block.full(projection)!r} has {width} units, which {heads} heads "
                "do not divide: its heads cannot be told apart."
            )
        size = width // heads
        units = tuple(((at, at + size),) for at in range(0, width, size))
        return Place(name="", layer=block.full(projection), what="inputs", heads=units)

    return find


def _projected(which: str, cross: bool = False) -> Callable[[Block], Place]:
    def find(block: Block) -> Place:
        layer, width, heads = block.projection(which, cross)
        joined = tuple(each for ranges in heads for each in ranges)
        whole = sum(stop - start for start, stop in joined) == width
        return Place(
            name="",
            layer=block.full(layer),
            units=None if whole else joined,
            heads=tuple(heads),
        )

    return find


def _pattern(cross: bool = False) -> Callable[[Block], Place]:
    def find(block: Block) -> Place:
        none: Ranges = ()
        return Place(
            name="",
            layer=block.full(block.attention(cross)),
            what="attention",
            heads=(none,) * block.heads(cross),
            read_only=(
                "a pattern is computed inside the attention and handed to no layer; edit "
                "attn.hook_z, attn.hook_q, attn.hook_k or attn.hook_v"
            ),
        )

    return find


def _attention_part(which: str) -> Callable[[Block], Place]:
    def find(block: Block) -> Place:
        if which == "o":
            return Place(name="", layer=block.full(block.output_projection()))
        return _projected(which)(block)

    return find


def _attention_layer(block: Block) -> Place:
    return Place(name="", layer=block.full(block.attention()))


def _mlp_whole(block: Block) -> Place:
    found = block.find(MLP)
    return _mlp_output(block) if found is None else Place(name="", layer=block.full(found))


LENS_PLACES: Mapping[str, Callable[[Block], Place]] = {
    "block": _whole,
    "hook_resid_pre": _before,
    "hook_resid_mid": _between,
    "hook_resid_post": _after,
    "hook_attn_out": _attention_output,
    "hook_mlp_out": _mlp_output,
    "attn.hook_z": _mixed(),
    "attn.hook_q": _projected("q"),
    "attn.hook_k": _projected("k"),
    "attn.hook_v": _projected("v"),
    "attn.hook_pattern": _pattern(),
    "cross_attn.hook_z": _mixed(cross=True),
    "cross_attn.hook_q": _projected("q", cross=True),
    "cross_attn.hook_k": _projected("k", cross=True),
    "cross_attn.hook_v": _projected("v", cross=True),
    "cross_attn.hook_pattern": _pattern(cross=True),
    "hook_cross_attn_out": lambda block: _attention_output(block, cross=True),
    "mlp.hook_pre": _mlp_before_activation,
    "mlp.hook_pre_linear": _mlp_part("up", "activations"),
    "mlp.hook_post": _mlp_part("down", "inputs"),
}
"""Names of TransformerLens inside a block -> how the place is found."""

PLAIN_PLACES: Mapping[str, Callable[[Block], Place]] = {
    "": _whole,
    **dict.fromkeys(("self_attn", "attn", "attention"), _attention_layer),
    **{
        f"{attention}.{each}_proj": _attention_part(each)
        for attention in ("self_attn", "attn", "attention")
        for each in "qkvo"
    },
    "mlp": _mlp_whole,
    **{f"mlp.{each}_proj": _mlp_part(each, "activations") for each in ("gate", "up", "down")},
}
"""Names of Llama inside a block, which most people know -> how the place is found elsewhere."""
