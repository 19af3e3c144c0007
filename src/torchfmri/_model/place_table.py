"""The places of a model as plain data, so that a stored scan knows their names too.

`_scan.run.subject` writes the table; readings of scans and contrasts ask `stored_layers`. A scan
has the names of layers and no modules, and which layer `L3.mlp` is differs between architectures
(Gemma adds the output of a norm). So the names are resolved while the model is there, and the
answers are kept: for each list of blocks, part -> [layer inside the block, what, heads]. This is a
stored format: older scans have no table, and a foreign one is checked before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchfmri._files import require_form, require_forms
from torchfmri._model.block_places import LENS_PLACES, PLAIN_PLACES, Place
from torchfmri._model.blocks import Block, find_stacks
from torchfmri._model.places import (
    PlaceName,
    block_numbers,
    choose_stack,
    fitting_stacks,
    is_repeated,
    parse_place,
)
from torchfmri.exceptions import InspectionError

_FORM = {"of": [int], "parts": [{"part": [(str, int)]}]}
_BLOCK = re.compile(r"(?P<stack>.*\b(?:layers|layer|blocks|block|h))\.(?P<number>\d+)")
_ALL: Mapping[str, Callable[[Block], Place]] = {**LENS_PLACES, **PLAIN_PLACES}


class _Stored(NamedTuple):
    """The place of a part: the layer inside its block, what of the layer, and how many heads.

    A part of a layer, such as the queries of a fused projection, has a negative number of heads.
    """

    inner: str
    what: str
    heads: int


def place_table(layers: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the places of all blocks of a model for JSON; blocks that are alike share a table.

    Args:
        layers: All layers of the model, as `named_layers` gives them.
    """
    found: dict[str, Any] = {}
    for stack, blocks in find_stacks(layers).items():
        if is_repeated(blocks):
            continue
        tables = [{part: list(each) for part, each in _parts(block)} for block in blocks]
        unique = [each for index, each in enumerate(tables) if each not in tables[:index]]
        found[stack] = {"of": [unique.index(each) for each in tables], "parts": unique}
    return found


def _parts(block: Block) -> list[tuple[str, _Stored]]:
    found = []
    for part, find in _ALL.items():
        try:
            place = find(block)
        except InspectionError:  # this architecture has no such part, and `stored_layers` says so
            continue
        heads = len(place.heads or ())
        inner = place.layer.removeprefix(block.name).removeprefix(".")
        found.append((part, _Stored(inner, place.what, heads if place.units is None else -heads)))
    return found


def stored_layers(name: object, known: Sequence[str], table: object) -> list[str]:
    """Return the layers of a scan that the name of a place means; none if it is not such a name.

    Args:
        name: What the user wrote, such as `L3.mlp`.
        known: The layers of the scan.
        table: What `place_table` gave when the model was scanned; None for older scans, where the
            names of whole blocks are still understood.

    Raises:
        InspectionError: The model has no such place, the scan does not hold it, or it is a part of
            a layer.
    """
    place = parse_place(name) if isinstance(name, str) else None
    if place is None or not isinstance(name, str):
        return []
    stacks = _checked(table)
    if not stacks:
        return _whole_blocks(place, name, known)
    fitting = fitting_stacks(stacks, place.stack)
    if place.is_plain and len(fitting) != 1:
        return []  # a name of Llama's is perhaps simply no layer of the scan
    stack = fitting[0] if place.is_plain else choose_stack(list(stacks), place.stack, name)
    of, parts = stacks[stack]["of"], stacks[stack]["parts"]
    if place.is_plain:
        numbers: Sequence[int] = [at for at in range(len(of)) if place.block in ("*", str(at))]
    else:
        numbers = block_numbers(place, len(of), name)
    usual = (place.part, "activations", 0) if place.is_plain else None
    found = []
    for number in numbers:
        each = parts[of[number]].get(place.part, usual)
        if each is None:
            continue
        stored, block = _Stored(*each), f"{stack}.{number}".lstrip(".")
        if not place.is_plain or _joined(block, stored.inner) in known:
            found.append(_layer(block, stored, place, name, known))
    if not found and not place.is_plain:
        raise InspectionError(
            f"{name!r}: block {stack}.{numbers[0]} of this model has no known {place.part}; "
            f"it has {', '.join(each for each in parts[of[numbers[0]]] if each)}."
        )
    return found


def _joined(block: str, inner: str) -> str:
    return f"{block}.{inner}" if inner else block


def _layer(block: str, stored: _Stored, place: PlaceName, name: str, known: Sequence[str]) -> str:
    """Return the layer of the scan that one place of one block is.

    Raises:
        InspectionError: It is not a whole layer of the scan.
    """
    layer = _joined(block, stored.inner)
    if stored.what == "attention":
        raise InspectionError(
            f"{name!r} is the attention pattern of layer {layer!r}, which has readouts of its own: "
            "scan(..., attention=True), then scan.attention() and scan.attention_pattern()."
        )
    source = f"{layer}.input" if stored.what == "inputs" else layer
    if place.head is not None or stored.heads < 0:
        which = "a part" if place.head is None else f"head {place.head}"
        raise InspectionError(
            f"{name!r} is {which} of the {stored.what} of layer {layer!r}, and layers are taken "
            f"whole here. Name {source!r} and read its voxels: by='voxel'."
        )
    if source in known:
        return source
    if stored.what == "inputs":
        raise InspectionError(
            f"{name!r} is the input of layer {layer!r}, and this scan holds outputs"
            + (". scan(..., heads=True) also keeps what each head wrote." if stored.heads else ".")
        )
    raise InspectionError(
        f"{name!r} is the output of layer {layer!r}, which is not among the {len(known)} layers "
        "of this scan: see scan.layers."
    )


def _whole_blocks(place: PlaceName, name: str, known: Sequence[str]) -> list[str]:
    """Return the blocks that a name means if no table tells what is inside them."""
    blocks = [match for each in known if (match := _BLOCK.fullmatch(each))]
    wanted = [
        each
        for each in blocks
        if place.block in ("*", each["number"])
        and (not place.stack or f".{place.stack}." in f".{each['stack']}.")
    ]
    is_block = place.part in ("block", "") and place.head is None
    if is_block and len({each["stack"] for each in wanted}) == 1:
        return [each[0] for each in wanted]
    if place.is_plain:
        return []
    raise InspectionError(
        f"{name!r} cannot be resolved: nothing is stored here that says where the parts of a block "
        "are in this model. Name the layer as the model does; scan.layers lists them."
    )


def _checked(table: object) -> dict[str, Any]:
    """Return the table of a file after a look at its form; empty if there is no table.

    Raises:
        InspectionError: It has another form.
    """
    if table is None:
        return {}
    try:
        require_form(table, {"stack": dict}, "the table of places")
        assert isinstance(table, dict)
        for stack in table.values():
            require_forms(stack, _FORM)
            entries = [each for parts in stack["parts"] for each in parts.values()]
            kinds = {tuple(map(type, each)) for each in entries}
            if kinds - {(str, str, int)} or not set(stack["of"]) <= set(range(len(stack["parts"]))):
                raise ValueError("the table of places does not fit together")
    except (KeyError, ValueError) as error:
        raise InspectionError(f"The scan is damaged: {error}.") from error
    return table
