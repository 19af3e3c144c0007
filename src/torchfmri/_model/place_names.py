"""Names of places in a transformer that people already use, taken apart.

`places` and `place_table` look the parts up; readouts of scans use `names_in_block`. `L9H6` is head
6 of block 9 (its output before the heads are mixed, TransformerLens' `hook_z`), `L9` the block,
`L9.attn` and `L9.mlp` what they add to the stream, `L9H6.q` its queries. `blocks.9.attn.hook_z` and
the other names of TransformerLens mean what they mean there, and `layers.9.self_attn` is block 9's
attention, whatever the model calls it. A `*` in the place of a number stands for all. Before the
block may stand a name that tells stacks apart: `encoder.L3H1`. Nothing here knows a model: a name
may have the right form and still not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torchfmri.exceptions import InspectionError


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
