"""Patterns over layers and names of places, taken apart and resolved to places of one model.

Edits, lenses, lesions and scans call `places_of`; `layers` falls back on it if no layer has the
name; `place_table` uses the parts, and readouts of scans `names_in_block`. A layer's own name comes
first, so that adding a name of a place never changes what an old pattern means. Names of Llama that
no block has are simply no layers; names of TransformerLens raise with the reason.

`L9H6` is head 6 of block 9 (its output before the heads are mixed, TransformerLens' `hook_z`), `L9`
the block, `L9.attn` and `L9.mlp` what they add to the stream, `L9H6.q` its queries.
`blocks.9.attn.hook_z` and the other names of TransformerLens mean what they mean there, and
`layers.9.self_attn` is block 9's attention, whatever the model calls it. A `*` in the place of a
number stands for all. Before the block may stand a name that tells stacks apart: `encoder.L3H1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from torchfmri._model.block_places import LENS_PLACES, PLAIN_PLACES, Place
from torchfmri._model.blocks import Block, find_stacks
from torchfmri._model.patterns import match_names, nearest_names
from torchfmri.exceptions import InspectionError, LayerNotFoundError


class PlaceName(NamedTuple):
    """A name, taken apart.

    Attributes:
        stack: A part of the name of the list of blocks; "" if none is given.
        block: The number of the block, or "*".
        part: The part of the block that is meant, in the words of TransformerLens or of Llama.
        head: The number of the head, or "*"; None for all heads.
        is_plain: Whether it is a name of Llama's.
    """

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


def parse_place(name: str) -> PlaceName | None:
    """Return the parts of a name; None if it has none of the forms known here.

    Raises:
        InspectionError: It names a part that no block has.
    """
    if match := _SHORT.fullmatch(name):
        part, head = match["part"] or "", match["head"]
        if head is not None and part == "":
            part = "z"
        if part not in _SHORT_PARTS:
            known = ", ".join(each for each in _SHORT_PARTS if each)
            raise InspectionError(
                f"{name!r}: {part!r} is not a part of a block; there are {known}."
            )
        return PlaceName(match["stack"] or "", match["block"], _SHORT_PARTS[part], head)
    if match := _LENS.fullmatch(name):
        inner = "" if match["list"] == "blocks" else match["list"]
        stack = ".".join(each for each in (match["stack"], inner) if each)
        return PlaceName(stack, match["block"], match["part"])
    if match := _PLAIN.fullmatch(name):
        return PlaceName(match["stack"] or "", match["block"], match["part"] or "", is_plain=True)
    return None


def names_in_block(names: Iterable[str], place: PlaceName) -> list[str]:
    """Return the names of the layers inside the block of a place, without the block itself."""
    number = r"\d+" if place.block == "*" else place.block
    block = re.compile(rf"(?:layers|layer|blocks|block|h)\.{number}\.")
    return [
        name
        for name in names
        if block.search(name) and (not place.stack or f".{place.stack}." in f".{name}.")
    ]


NOWHERE = {
    "attn.hook_result": "the outputs of single heads are never computed: edit attn.hook_z instead",
    "attn.hook_attn_scores": "scores before the softmax never stand between two layers",
    "attn.hook_rot_q": "rotated queries never stand between two layers: use attn.hook_q",
    "attn.hook_rot_k": "rotated keys never stand between two layers: use attn.hook_k",
}
"""Names of TransformerLens for what no layer takes or returns -> why."""


def places_of(layers: Mapping[str, nn.Module], pattern: str) -> list[Place]:
    """Return the places that a pattern over layers or one of the names above stands for.

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
    """Return the layers whose whole outputs a name stands for; none if it is not such a name.

    Raises:
        InspectionError: It stands for an input, an attention pattern, or a part of a layer.
    """
    found = resolve_places(layers, name) or []
    for place in found:
        if place.units is not None:
            spans = ", ".join(f"{first} to {last - 1}" for first, last in place.units[:3])
            raise InspectionError(
                f"{name!r} is a part of the {place.what} of layer {place.layer!r}, units {spans}, "
                f"and layers are taken whole here. Name the layer and read these units of it; of "
                f"inputs: Inspector.watch({place.layer!r}, 'inputs')."
            )
        if place.what != "activations":
            raise InspectionError(
                f"{name!r} is not a layer's output but the {place.what} of layer {place.layer!r}. "
                f"Watch it with Inspector.watch({name!r}), or name the layer."
            )
    return [place.layer for place in found]


def layers_at(layers: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the layers that hold a place, such as the layer whose input holds `L3H2`."""
    return list(dict.fromkeys(place.layer for place in resolve_places(layers, name) or []))


def input_layers(layers: Mapping[str, nn.Module], name: object) -> list[str]:
    """Return the layers whose whole inputs a name stands for, such as `blocks.3.hook_resid_pre`."""
    if not isinstance(name, str) or match_names(name, [each for each in layers if each]):
        return []
    found = resolve_places(layers, name) or []
    whole = all(place.what == "inputs" and place.units is None for place in found)
    return [place.layer for place in found] if whole else []


def resolve_places(layers: Mapping[str, nn.Module], name: str) -> list[Place] | None:
    """Return the places that a name stands for; None if it has none of the forms known here.

    A name of the model itself comes before all others and is not looked at here.

    Args:
        layers: All layers of the model, as `named_layers` gives them.
        name: What the user wrote.

    Raises:
        LayerNotFoundError: The model has no such stack or block.
        InspectionError: The place is not there, or not known in this architecture.
    """
    parsed = parse_place(name)
    if parsed is None:
        return None
    stacks = find_stacks(layers)
    if parsed.is_plain and not _has_plain(stacks, parsed):
        return None
    blocks = stacks[choose_stack(list(stacks), parsed.stack, name)]
    if is_repeated(blocks):
        count = getattr(blocks[0].config, "num_hidden_layers", None)
        raise InspectionError(
            f"{name!r} cannot be resolved: the model has {len(blocks)} block and calls it {count} "
            "times. Name a layer: they are listed by torchfmri.Inspector(model).layers()."
        )
    numbers = block_numbers(parsed, len(blocks), name)
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


def _has_plain(stacks: Mapping[str, list[Block]], parsed: PlaceName) -> bool:
    """Whether any block has the part that a plain name means; others are simply no layers."""
    blocks = [each for name in fitting_stacks(stacks, parsed.stack) for each in stacks[name]]
    if parsed.block != "*":
        blocks = [each for each in blocks if each.index == int(parsed.block)]
    return any(parsed.part in each.inside or parsed.part in PLAIN_PLACES for each in blocks)


def choose_stack(stacks: Sequence[str], wanted: str, name: str) -> str:
    """Return the list of blocks that a name means, of those that a model has."""
    if not stacks:
        raise InspectionError(
            f"{name!r} names a block, and the model has no list of blocks (nn.ModuleList). Name a "
            "layer: they are listed by torchfmri.Inspector(model).layers()."
        )
    fitting = fitting_stacks(stacks, wanted)
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(map(repr, stacks))
    if not fitting:
        raise InspectionError(
            f"{name!r}: no list of blocks is called {wanted!r}; there is {listed}."
        )
    raise InspectionError(
        f"{name!r} is ambiguous: the model has {len(fitting)} lists of blocks, {listed}. Put a "
        f"part of the list's name before it, such as '{_telling_part(fitting)}.{name}'."
    )


def fitting_stacks(stacks: Iterable[str], wanted: str) -> list[str]:
    """Return the lists of blocks whose names have this part; all lists if no part is given."""
    return [each for each in stacks if not wanted or f".{wanted}." in f".{each}."]


def block_numbers(parsed: PlaceName, count: int, name: str) -> Sequence[int]:
    """Return the numbers of the blocks that a name means, among `count` blocks.

    Raises:
        InspectionError: There is no such block, or its part never stands between two layers.
    """
    numbers = range(count) if parsed.block == "*" else [int(parsed.block)]
    if numbers[-1] >= count:
        raise InspectionError(f"{name!r}: the model has {count} blocks, 0 to {count - 1}.")
    if not parsed.is_plain and parsed.part in NOWHERE:
        raise InspectionError(f"{name!r} cannot be resolved: {NOWHERE[parsed.part]}.")
    return numbers


def is_repeated(blocks: Sequence[Block]) -> bool:
    """Whether one block is called several times: a number then means a call, not a layer."""
    return any(each.find(("albert_layers",)) for each in blocks)


def _telling_part(names: list[str]) -> str:
    """Return a part of the first name that the others do not have."""
    others = {part for name in names[1:] for part in name.split(".")}
    return next((part for part in names[0].split(".") if part not in others), names[0])


def _places_in(block: Block, parsed: PlaceName, name: str) -> list[Place]:
    """Return the place of a name in one block; one for each head if the head is `*`."""
    part = parsed.part
    known = PLAIN_PLACES if parsed.is_plain else LENS_PLACES
    if part not in known and not (parsed.is_plain and part in block.inside):
        nearest = nearest_names(part, list(known)) or list(known)[:3]
        hint = "torchfmri.Inspector(model).layers(), or see the documentation of edits"
        raise LayerNotFoundError(name, nearest, len(known), hint)
    if parsed.is_plain and part in block.inside:
        place = Place(name="", layer=block.full(part))
    else:
        place = known[part](block)
    concrete = name.replace("L*", f"L{block.index}").replace(".*.", f".{block.index}.", 1)
    # A plain name means a layer, which holds its heads side by side, whatever the architecture.
    heads = None if parsed.is_plain else place.heads
    place = replace(place, name=concrete, block=block.index, heads=heads)
    if parsed.head is None:
        return [place]
    if parsed.head == "*":
        numbers: range | list[int] = range(len(place.heads or ()))
    else:
        numbers = [int(parsed.head)]
    return [
        replace(place.of_head(head), name=concrete.replace("H*", f"H{head}")) for head in numbers
    ]
