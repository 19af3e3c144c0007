"""Clues about a failed backward pass that its message does not give, read from the graph.

The table in `backward_failures` names the functions `by_*`. Each takes a `Crash` and the match of a
failure's pattern, reads graph, layers and byte code, and runs nothing. It may fail: the explanation
then says so and goes on. A guess says probably.

The frames of the traceback keep the loss and with it the graph, so both can be read afterwards:
which saved tensor was overwritten, whose parameters an operation uses. Nodes are sorted by sequence
number, in the order in which backward runs them; do not change that order, because `reached` reads
from it how far the pass came.
"""

from __future__ import annotations

import dis
import inspect
import math
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._explain.crash import Crash, SourceLine, is_of_torch
from torchfmri._explain.failure import Clues
from torchfmri._text import few, layer_label
from torchfmri._torch import (
    checkpointed_function,
    function_of,
    node_sequence_number,
    nodes_before,
    nodes_behind,
    saved_count,
    saved_tensor_errors,
)

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
    for each in nodes_before(node):
        below = each
        while is_view(type(below).__name__):
            deeper = nodes_before(below)
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
    return [each for each in nodes if any(below is node for below in nodes_before(each))]


def producers(node: Any) -> list[str]:
    """Return the names of the operations whose results `node` takes."""
    return [operation_name(each) for each in nodes_before(node) if not _is_leaf(each)]


def is_view(name: str) -> bool:
    """Return whether the operation of this name only returns a view of its input."""
    return _VIEWS.fullmatch(name) is not None


def _owners(crash: Crash, node: Any) -> list[tuple[str, str]]:
    used = [id(each) for each in used_leaves(node)]
    return [crash.parameters[each] for each in used if each in crash.parameters]


def _without_hint(message: str) -> str:
    return message.partition("Hint:")[0]


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def by_written_tensor(crash: Crash, match: re.Match[str]) -> Clues:
    """Find which operation needed the overwritten tensor, and probably what wrote it."""
    nodes = nodes_of(crash)
    found = written_tensor(crash, nodes)
    now = re.sub(r"Backward\d*$", "", match["operation"] or "")
    if found is None:
        return _by_name(crash, match, [node for node in nodes if operation_name(node) == now])
    node, saved = found
    name = operation_name(node)
    facts = [f"The operation {name} had kept this tensor ({saved}) and cannot go back without it."]
    cure: tuple[str, ...] = ()
    after = consumers(nodes, node) if saved == "result" else []
    leaves = [each for each in used_leaves(node) if _is_told(each, match)]
    if leaves and (not now or is_view(now)):
        named = _parameter_name(crash, leaves[0])
        facts.append(f"Probably it is {named}, changed by optimizer.step() or by hand.")
        cure = ("Call optimizer.step() after the last backward pass that needs the old values.",)
    elif now and now in producers(node):
        facts.append(f"Probably the output of {now} was written under no_grad, or by a view of it.")
    elif now and now != name and not is_view(now):
        facts.append(f"It is now the output of {now}: that operation was done in place.")
    elif len(after) == 1:
        line = forward_line(after[0])
        at = f" ({Path(line.file).name}:{line.number}: {line.code})" if line else ""
        facts.append(f"Probably the next operation, {operation_name(after[0])}, was in place{at}.")
    return _at(crash, node, *facts, cure=cure)


def takes_saved_tensors(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether the failing instruction takes `ctx.saved_tensors` apart.

    This is read from the byte code, which exists even without the source. If only the message is
    known, its words must say it.
    """
    if not crash.steps:
        return "saved_tensors" in crash.message
    last = crash.steps[-1]
    if _failing_function(crash) is None or last.of_torch:
        return False
    done = [
        each for each in dis.get_instructions(last.frame.f_code) if each.offset <= last.instruction
    ]
    names = {"saved_tensors"} | {
        after.argval
        for before, after in pairwise(done)
        if before.argval == "saved_tensors" and after.opname.startswith("STORE_")
    }
    taken = done[-1].opname.startswith(("UNPACK", "BINARY"))  # a, b = ...; ...[2]
    return taken and any(each.argval in names for each in done[-3:-1])


def in_function(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether a custom Function's backward was running (or nothing is known)."""
    return not crash.steps or _failing_function(crash) is not None


def by_saved_tensors(crash: Crash, match: re.Match[str]) -> Clues:
    """Find how many tensors were kept and asked for, by which Function, in which layer."""
    node = _failing_function(crash)
    if node is None:
        return Clues()
    cls, kept = function_of(node), saved_count(node)
    wanted = match.groupdict().get("wanted")
    asked = f", and backward takes {wanted}" if wanted else ""
    facts = [] if kept is None else [f"{cls.__name__}.forward kept {kept} tensors{asked}."]
    facts.append(f"{cls.__name__}.forward is at {_source_of(cls.forward)}.")
    return _at(crash, node, *facts)


def by_checked_inputs(crash: Crash, _: re.Match[str]) -> Clues:
    """Find whether the inputs of gradcheck are too coarse for it."""
    given = crash.local("inputs", "gradcheck")
    given = given if isinstance(given, (list, tuple)) else (given,)
    types = {each.dtype for each in given if isinstance(each, Tensor) and each.requires_grad}
    coarse = [str(each) for each in types if each not in (torch.float64, torch.complex128)]
    if not coarse:
        return Clues()
    told = (
        f"Inputs are {', '.join(sorted(coarse))}, which cannot tell a right backward from a wrong"
    )
    return Clues((f"{told} one.",), ("Check in double precision: gradcheck(f, x.double(), ...).",))


def by_function(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the operation named in the message, in the graph and in the user's code."""
    named = [node for node in nodes_of(crash) if node.name() == match["function"]]
    if not named:
        return Clues()
    facts = []
    cls = function_of(named[0])
    if cls is not None:
        facts.append(f"{cls.__name__}.backward is at {_source_of(cls.backward)}.")
    places = {place_of(crash, node) for node in named}
    if len(places) > 1:
        where = sorted(layer_label(each.layer or each.near or "") for each in places)
        facts.append(f"The graph has {len(named)} of them, in or after: {few(where, 5)}.")
        return Clues(tuple(facts))
    place = places.pop()
    line = forward_line(named[0]) if len(named) == 1 else None
    return Clues(tuple(facts), (), place.layer, place.near, line)


def by_only_function(crash: Crash, _: re.Match[str]) -> Clues:
    """Find the custom Function if the graph has only one; the message does not name it."""
    custom = [node for node in nodes_of(crash) if function_of(node) is not None]
    if len(custom) != 1:
        return Clues((f"The graph has {len(custom)} operations of custom Functions.",))
    told = f"The only custom Function in the graph is {function_of(custom[0]).__name__}."
    return _at(crash, custom[0], told)


def by_checkpoint(crash: Crash, _: re.Match[str]) -> Clues:
    """Find which layer was recomputed, and what came out different."""
    frames = (crash.local("frame", "unpack_hook"), crash.local("frame"))
    function = next(filter(None, map(checkpointed_function, frames)), None)
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    lines = [line.strip() for line in crash.message.splitlines()]
    told = [line for line in lines if re.match(r"Number of|saved metadata|recomputed met", line)]
    facts = tuple(line.rstrip(".") + "." for line in told[:2])
    layer = crash.layer_of(owner) if isinstance(owner, nn.Module) else None
    return Clues(facts, layer=layer)


def by_loss(crash: Crash, _: re.Match[str]) -> Clues:
    """Describe the loss, and whether any parameter requires a gradient."""
    facts: list[str] = []
    for loss in crash.roots()[:1]:
        facts.append(f"The loss has shape {tuple(loss.shape)} and dtype {loss.dtype}.")
        if loss.is_inference():
            facts.append("It was made under torch.inference_mode(), which keeps no graph.")
        elif not loss.is_floating_point() and not loss.is_complex():
            facts.append("Whole numbers have no gradient (argmax, rounding, a count).")
    parameters = list(crash.model.parameters()) if crash.model is not None else []
    if parameters:
        asking = sum(parameter.requires_grad for parameter in parameters)
        facts.append(f"{asking} of {len(parameters)} parameters of the model require a gradient.")
    return Clues(tuple(facts))


def by_unused(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the names of the parameters that got no gradient."""
    if crash.model is None or not match["indices"]:
        return Clues()
    asking = [crash.parameters[id(each)] for each in crash.model.parameters() if each.requires_grad]
    unused = [asking[int(each)] for each in match["indices"].split() if int(each) < len(asking)]
    names = [".".join(filter(None, owner)) for owner in unused]
    if not names:
        return Clues()
    return Clues((f"Without a gradient: {few(names, 5)}.",), layer=unused[0][0])


def _at(crash: Crash, node: Any, *facts: str, cure: tuple[str, ...] = ()) -> Clues:
    """Return clues about an operation of the backward pass, with its place and its forward line."""
    place = place_of(crash, node)
    return Clues(facts, cure, place.layer, place.near, forward_line(node))


def _failing_function(crash: Crash) -> Any:
    """Return the node of the custom Function whose backward was running, or None."""
    node = crash.local("self", "apply")
    return node if function_of(node) is not None else None


def _is_told(tensor: Tensor, match: re.Match[str]) -> bool:
    """Return whether a tensor has the version and element count that the message names."""
    size = math.prod(int(each) for each in re.findall(r"\d+", match["shape"]))
    return tensor._version == int(match["now"]) and tensor.numel() == size


def _parameter_name(crash: Crash, parameter: Tensor) -> str:
    owner = crash.parameters.get(id(parameter))
    return f"the parameter {'.'.join(filter(None, owner))!r}" if owner else "a parameter"


def _by_name(crash: Crash, match: re.Match[str], named: list[Any]) -> Clues:
    """Read the operation's name in the message, if saved tensors cannot be read."""
    facts = _same_parameter(crash, match)
    if len(named) != 1:
        return Clues(facts)
    name = operation_name(named[0])
    place = place_of(crash, named[0])
    told = f"Probably the only {name} of the graph has kept the tensor, or has written it."
    layer = place.layer if place.layer is not None else place.near
    return Clues((told, *facts), near=layer, forward=forward_line(named[0]))


def _same_parameter(crash: Crash, match: re.Match[str]) -> tuple[str, ...]:
    """Return parameters with the size and version of the message, if the graph is silent."""
    parameters = crash.model.parameters() if crash.model is not None else ()
    named = [_parameter_name(crash, each) for each in parameters if _is_told(each, match)]
    if not 0 < len(named) < 4:
        return ()
    return (f"Of this size and version: {', '.join(named)}; it may be the tensor.",)


def _source_of(function: Any) -> str:
    line = inspect.unwrap(function).__code__.co_firstlineno
    return f"{inspect.getsourcefile(function)}:{line}"
