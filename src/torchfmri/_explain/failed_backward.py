"""What the graph of a failed backward pass shows: the operation, and the layer near it.

`backward_clues` and `entry_points` ask it. The frames of the traceback keep the loss and with it
the graph, so both can be read afterwards: which saved tensor was overwritten, whose parameters an
operation uses. This needs no hooks and runs nothing. Nodes are sorted by sequence number, in the
order in which backward runs them; do not change that order, because `reached` reads from it how far
the pass came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from torchfmri._explain.crash import Crash, SourceLine, is_of_torch
from torchfmri._text import layer_label
from torchfmri._torch import node_sequence_number, nodes_behind, saved_tensor_errors

_MOST_NODES = 200_000
_VIEWS = re.compile(
    r"(T|AsStrided|Unsafe\w*|\w*View|Transpose|Permute|Reshape\w*|ToCopy)(Backward\d*)?"
)
_FRAME = re.compile(
    r'File "(?P<file>.+)", line (?P<number>\d+), in (?P<function>.+)\n *(?P<code>.*)'
)


class CodePlace(NamedTuple):
    """The layer to which an operation of the backward pass belongs.

    Attributes:
        layer: The layer whose parameters the operation uses.
        near: The layer whose parameters come last before it, if it uses none.
    """

    layer: str | None = None
    near: str | None = None


def nodes_of(crash: Crash) -> list[Any]:
    """Return the operations of the failed backward pass, in the order it runs them."""
    found = islice(nodes_behind(root.grad_fn for root in crash.roots()), _MOST_NODES)
    operations = [node for node in found if not _is_leaf(node)]
    return sorted(operations, key=node_sequence_number, reverse=True)


def written_tensor(crash: Crash, nodes: list[Any]) -> tuple[Any, str] | None:
    """Return the operation whose saved tensor was overwritten, and the tensor's name there.

    This is exact if PyTorch lets saved tensors be read: reading it fails with the same message.
    """
    for node in nodes:
        for name, reason in saved_tensor_errors(node).items():
            if reason and _without_hint(reason) == _without_hint(crash.message):
                return node, name
    return None


def reached(crash: Crash) -> str:
    """Describe how far the backward pass came, by what it has freed; empty if unclear."""
    kept = [(node, saved_tensor_errors(node)) for node in nodes_of(crash)]
    freed = [
        (node, any("second time" in each for each in errors.values()))
        for node, errors in kept
        if errors
    ]
    flags = [each for _, each in freed]
    count = flags.index(False) if False in flags else 0
    if not count or any(flags[count:]):  # an earlier pass freed some
        return ""
    node = freed[count][0]
    place = place_of(crash, node)
    at = "of" if place.layer is not None else "after"
    layer = place.layer if place.layer is not None else place.near
    where = "" if layer is None else f", {at} layer {layer_label(layer)!r}"
    return f"The backward pass had probably come to the operation {operation_name(node)}{where}."


def place_of(crash: Crash, node: Any) -> CodePlace:
    """Return the layer to which an operation belongs, judged by the parameters it uses."""
    for each in nodes_behind([node]):
        if owners := _owners(crash, each):
            layer = owners[0][0]
            return CodePlace(layer=layer) if each is node else CodePlace(near=layer)
    return CodePlace()


def used_leaves(node: Any) -> list[Tensor]:
    """Return the parameters and other leaves that an operation takes, also cast or transposed."""
    found = []
    for each in _next(node):
        below = each
        while is_view(type(below).__name__):
            deeper = list(_next(below))
            if len(deeper) != 1:
                break
            below = deeper[0]
        variable = getattr(below, "variable", None) if _is_leaf(below) else None
        if variable is not None:
            found.append(variable)
    return found


def forward_line(node: Any) -> SourceLine | None:
    """Return the forward line that made an operation, if anomaly detection recorded it.

    It is the last line outside PyTorch's own files.
    """
    recorded = "".join(node.metadata.get("traceback_", ()))
    lines = [
        SourceLine(each["file"], int(each["number"]), each["function"].strip(), each["code"])
        for each in _FRAME.finditer(recorded)
    ]
    outside = [line for line in lines if not is_of_torch(line.file)]
    return outside[-1] if outside else None


def operation_name(node: Any) -> str:
    """Return the name of a forward operation, such as `Sigmoid`."""
    return re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])


def consumers(nodes: list[Any], node: Any) -> list[Any]:
    """Return the operations that take the result of `node`."""
    return [each for each in nodes if any(below is node for below in _next(each))]


def producers(node: Any) -> list[str]:
    """Return the names of the operations whose results `node` takes."""
    return [operation_name(each) for each in _next(node) if not _is_leaf(each)]


def is_view(name: str) -> bool:
    """Return whether the operation of this name only returns a view of its input."""
    return _VIEWS.fullmatch(name) is not None


def _owners(crash: Crash, node: Any) -> list[tuple[str, str]]:
    used = [id(each) for each in used_leaves(node)]
    return [crash.parameters[each] for each in used if each in crash.parameters]


def _without_hint(message: str) -> str:
    return message.partition("Hint:")[0]


def _next(node: Any) -> Iterator[Any]:
    return (below for below, _ in node.next_functions if below is not None)


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"
