"""Names of places in a transformer that people already use, resolved to layers of the model.

`L9H6` is head 6 of block 9 (its output before the heads are mixed, TransformerLens' `hook_z`),
`L9` the block, `L9.attn` and `L9.mlp` what they add to the stream, `L9H6.q` its queries.
`blocks.9.attn.hook_z` and the other names of TransformerLens mean what they mean there, and
`layers.9.self_attn` is block 9's attention, whatever the model calls it. A `*` in the place of a
number stands for all. Before the block may stand a name that tells stacks apart: `encoder.L3H1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from torchfmri._model.blocks import (
    MIDDLE_NORMS,
    MLP,
    PROJECTIONS,
    Block,
    Ranges,
    find_stacks,
    width_in,
)
from torchfmri._model.patterns import match_names, nearest_names
from torchfmri.exceptions import InspectionError, LayerNotFoundError


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
        """One head of this place.

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


class _Name(NamedTuple):
    """A name, taken apart."""

    stack: str
    block: str
    part: str
    head: str | None = None
    is_plain: bool = False


_SHORT = re.compile(
    r"(?:(?P<stack>[\w.]+)\.)?L(?P<block>\d+|\*)(?:H(?P<head>\d+|\*))?(?:\.(?P<part>\w+))?"
)
_LENS = re.compile(
    r"(?:(?P<stack>[\w.]+)\.)?(?P<list>blocks|encoder|decoder)\.(?P<block>\d+|\*)\."
    r"(?P<part>(?:\w+\.)?hook_\w+)"
)
_PLAIN = re.compile(
    r"(?:(?P<stack>[\w.]+)\.)?(?:layers|layer|blocks|block|h)\.(?P<block>\d+|\*)(?:\.(?P<part>.+))?"
)
_SHORT_PARTS = {
    "": "block",
    "attn": "hook_attn_out",
    "mlp": "hook_mlp_out",
    "z": "attn.hook_z",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "pattern": "attn.hook_pattern",
}
_ELSEWHERE = {
    "attn.hook_result": "the outputs of single heads are never computed: edit attn.hook_z instead",
    "attn.hook_attn_scores": "scores before the softmax never stand between two layers",
    "attn.hook_rot_q": "rotated queries never stand between two layers: use attn.hook_q",
    "attn.hook_rot_k": "rotated keys never stand between two layers: use attn.hook_k",
}
"""Names of TransformerLens for what no layer takes or returns -> why."""


def resolve_places(layers: Mapping[str, nn.Module], name: str) -> list[Place] | None:
    """The places that a name stands for; None where it has none of the forms known here.

    A name of the model itself comes before all others and is not looked at here.

    Args:
        layers: All layers of the model, as `named_layers` gives them.
        name: What the user wrote.

    Raises:
        LayerNotFoundError: The model has no such stack or block.
        InspectionError: The place is not there, or not known in this architecture.
    """
    parsed = _parse(name)
    if parsed is None:
        return None
    stacks = find_stacks(layers)
    if parsed.is_plain and not _has_plain(stacks, parsed):
        return None
    blocks = _choose_stack(stacks, parsed.stack, name)
    numbers = range(len(blocks)) if parsed.block == "*" else [int(parsed.block)]
    if numbers[-1] >= len(blocks):
        raise InspectionError(
            f"{name!r}: the model has {len(blocks)} blocks, 0 to {len(blocks) - 1}."
        )
    if parsed.block != "*":
        return _places_in(blocks[numbers[0]], parsed, name)
    found: list[Place] = []
    reasons: list[InspectionError] = []
    for number in numbers:  # of hybrid models, some blocks have no attention
        try:
            found += _places_in(blocks[number], parsed, name)
        except InspectionError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def _has_plain(stacks: Mapping[str, list[Block]], parsed: _Name) -> bool:
    """Whether any block has the part that a plain name means; others are simply no layers."""
    fitting = [name for name in stacks if f".{parsed.stack}." in f".{name}." or not parsed.stack]
    blocks = [each for name in fitting for each in stacks[name]]
    if parsed.block != "*":
        blocks = [each for each in blocks if each.index == int(parsed.block)]
    return any(parsed.part in each.inside or parsed.part in _PLAIN_PARTS for each in blocks)


def _parse(name: str) -> _Name | None:
    if match := _SHORT.fullmatch(name):
        part, head = match["part"] or "", match["head"]
        if head is not None and part == "":
            part = "z"
        if part not in _SHORT_PARTS:
            known = ", ".join(each for each in _SHORT_PARTS if each)
            raise InspectionError(f"{name!r}: {part!r} is no part of a block; there are {known}.")
        return _Name(match["stack"] or "", match["block"], _SHORT_PARTS[part], head)
    if match := _LENS.fullmatch(name):
        inner = "" if match["list"] == "blocks" else match["list"]
        stack = ".".join(each for each in (match["stack"], inner) if each)
        return _Name(stack, match["block"], match["part"])
    if match := _PLAIN.fullmatch(name):
        return _Name(match["stack"] or "", match["block"], match["part"] or "", is_plain=True)
    return None


def _choose_stack(stacks: Mapping[str, list[Block]], wanted: str, name: str) -> list[Block]:
    """The blocks of the stack that a name means."""
    if not stacks:
        raise InspectionError(
            f"{name!r} names a block, and the model has no list of blocks (nn.ModuleList). Name a "
            "layer: they are listed by torchfmri.Inspector(model).layers()."
        )
    fitting = [each for each in stacks if not wanted or f".{wanted}." in f".{each}."]
    if len(fitting) == 1:
        _refuse_repeated(stacks[fitting[0]], name)
        return stacks[fitting[0]]
    listed = ", ".join(map(repr, stacks))
    if not fitting:
        raise InspectionError(
            f"{name!r}: no list of blocks is called {wanted!r}; there is {listed}."
        )
    raise InspectionError(
        f"{name!r} is ambiguous: the model has {len(fitting)} lists of blocks, {listed}. Put a "
        f"part of the list's name before it, such as '{_telling_part(fitting)}.{name}'."
    )


def _refuse_repeated(blocks: list[Block], name: str) -> None:
    """Raise where one block is called several times: a number then means a call, not a layer."""
    count = getattr(blocks[0].config, "num_hidden_layers", None)
    if any(each.find(("albert_layers",)) for each in blocks):
        raise InspectionError(
            f"{name!r} cannot be resolved: the model has {len(blocks)} block and calls it {count} "
            "times. Name a layer: they are listed by torchfmri.Inspector(model).layers()."
        )


def _telling_part(names: list[str]) -> str:
    """A part of the first name that the others do not have."""
    others = {part for name in names[1:] for part in name.split(".")}
    return next((part for part in names[0].split(".") if part not in others), names[0])


def _places_in(block: Block, parsed: _Name, name: str) -> list[Place]:
    part = parsed.part
    known = _PLAIN_PARTS if parsed.is_plain else _PARTS
    if part in _ELSEWHERE:
        raise InspectionError(f"{name!r} cannot be resolved: {_ELSEWHERE[part]}.")
    if part not in known and not (parsed.is_plain and part in block.inside):
        nearest = nearest_names(part, list(known)) or list(known)[:3]
        hint = "torchfmri.Inspector(model).layers(), or see the documentation of edits"
        raise LayerNotFoundError(name, nearest, len(known), hint)
    if parsed.is_plain and part in block.inside:
        place = Place(name="", layer=block.full(part))
    else:
        place = known[part](block)
    concrete = name.replace("L*", f"L{block.index}").replace(".*.", f".{block.index}.", 1)
    place = replace(place, name=concrete, block=block.index)
    if parsed.head is None:
        return [place]
    if parsed.head == "*":
        numbers: range | list[int] = range(len(place.heads or ()))
    else:
        numbers = [int(parsed.head)]
    return [
        replace(place.of_head(head), name=concrete.replace("H*", f"H{head}")) for head in numbers
    ]


# -- the parts of a block ------------------------------------------------------------------------


def _whole(block: Block) -> Place:
    return Place(name="", layer=block.name)


def _before(block: Block) -> Place:
    return Place(name="", layer=block.name, what="inputs")


def _between(block: Block) -> Place:
    """The stream between attention and MLP."""
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
    """What reads the stream between attention and MLP; None where nothing known does."""
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
    """The gate, up or down projection of the MLP."""
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
    """The input of the activation function: of a gated MLP, the gate."""
    try:
        return _mlp_part("gate", "activations")(block)
    except InspectionError:
        return _mlp_part("up", "activations")(block)


def _mixed(cross: bool = False) -> Callable[[Block], Place]:
    """The heads' outputs side by side: the input of the output projection."""

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


_PARTS: Mapping[str, Callable[[Block], Place]] = {
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

_PLAIN_PARTS: Mapping[str, Callable[[Block], Place]] = {
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


def places_of(layers: Mapping[str, nn.Module], pattern: str) -> list[Place]:
    """The places that a pattern over layers or one of the names above stands for.

    A pattern that layers of the model match is about their outputs.

    Raises:
        LayerNotFoundError: Nothing matches.
        InspectionError: The place is not there, or not known in this architecture.
    """
    known = [name for name in layers if name]
    names = [""] if pattern == "" else match_names(pattern, known)
    if names:
        return [Place(name=name, layer=name) for name in names]
    found = resolve_places(layers, pattern)
    if found is None:
        hint = "torchfmri.Inspector(model).layers()"
        raise LayerNotFoundError(pattern, nearest_names(pattern, known), len(known), hint)
    return found


def whole_layers(layers: Mapping[str, nn.Module], name: str) -> list[str]:
    """The layers whose whole outputs a name stands for; none where it is no such name.

    Raises:
        InspectionError: It stands for an input, an attention pattern, or a part of a layer.
    """
    found = resolve_places(layers, name) or []
    for place in found:
        if place.what != "activations":
            raise InspectionError(
                f"{name!r} is no layer's output but the {place.what} of layer {place.layer!r}. "
                f"Watch it with Inspector.watch({name!r}), or name the layer."
            )
        if place.units is not None:
            raise InspectionError(
                f"{name!r} is a part of the output of layer {place.layer!r}, units "
                f"{', '.join(f'{a} to {b - 1}' for a, b in place.units[:3])}. Name the layer."
            )
    return [place.layer for place in found]


def input_layers(layers: Mapping[str, nn.Module], name: object) -> list[str]:
    """The layers whose whole inputs a name stands for, such as `blocks.3.hook_resid_pre`."""
    if not isinstance(name, str) or match_names(name, [each for each in layers if each]):
        return []
    found = resolve_places(layers, name) or []
    whole = all(place.what == "inputs" and place.units is None for place in found)
    return [place.layer for place in found] if whole else []
