"""Watches every operation of one step, and keeps an event for each non-finite result.

`origin` enters an `OperationTrace` around the step. Tensors are told apart by their storage,
because autograd gives views a new object. A storage that was not made by an operation of the step
is a parameter, a buffer, data, or from outside. Memory is used again within a step, so an event is
forgotten when an operation writes finite numbers over all of its storage. Every result is read,
which makes it slow; it runs on bad steps only. Further names of operations may join the tables at
the top.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._capture import RunningLayers
from torchfmri._explain import SourceLine, TracebackStep
from torchfmri._incidents.content import Content, read_content, readable
from torchfmri._incidents.event import Event, EventPlace, Kind, Operand
from torchfmri._model import unwrap
from torchfmri._records import Phase
from torchfmri._torch import (
    NO_BACKWARD,
    DispatchMode,
    current_backward,
    current_node,
    flatten,
    flatten_arguments,
    node_sequence_number,
    sequence_number,
    storage_of,
)

_ENGINE = str(Path("torch", "autograd", "graph.py"))


class Lines(NamedTuple):
    """The lines of code that the program is at.

    Attributes:
        line: The innermost line outside PyTorch and torchfmri.
        caller: The innermost line of the user's own, if `line` is in a library.
    """

    line: SourceLine | None = None
    caller: SourceLine | None = None


def running_lines(entry: CodeType, in_backward: bool = False) -> Lines:
    """Return the lines that lead to here from the function `entry`.

    Args:
        entry: The code of the function of ours that called the user's; frames beyond do not count.
        in_backward: Count frames inside the backward pass only: a backward written in Python, a
            forward pass that a checkpoint runs again.
    """
    line: SourceLine | None = None
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not entry:
        step = TracebackStep(frame, frame.f_lineno, -1)
        if in_backward and step.file.endswith(_ENGINE):
            break
        if not step.of_torch:
            if step.of_user:
                return Lines(step.line) if line is None else Lines(line, step.line)
            line = step.line if line is None and not step.file.startswith("<") else line
        above = frame.f_back
        if above is None:
            break
        frame = above
    return Lines(line)


_EMPTY = (
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided "
    "resize_ resize_as_ set_"
)
_UNINITIALISED = frozenset(_EMPTY.split())
_FRESH = frozenset({"lift", "lift_fresh", "lift_fresh_copy"})
"""What a tensor goes through that the code writes as numbers."""


class _Made(NamedTuple):
    """What is known of a node of the autograd graph: where its operation ran."""

    layer: str | None
    lines: Lines


class OperationTrace(DispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation while it is entered; a context manager.

    Args:
        model: Whose parameters and buffers may be non-finite to begin with.
        batch: The data of the step.
        layers: Tells which layer is running.
        entry: The code of the function that calls the user's; see `running_lines`.

    Attributes:
        ran_backward: Whether operations of a backward pass were seen.
        latest: The newest event.
        bad_parameters: The parameters that were not finite to begin with.
    """

    def __init__(
        self, model: nn.Module, batch: Any, layers: RunningLayers, entry: CodeType
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers, self._entry = layers, entry
        self._count = 0
        self._events: dict[int, Event] = {}  # storage -> the event that made what it holds
        self._makers: dict[int, str] = {}  # storage -> the operation that wrote it last
        self._nodes: dict[int, _Made] = {}  # sequence number -> where its operation ran
        self.ran_backward = False
        self.latest: Event | None = None
        self.bad_parameters: list[str] = []
        inner = unwrap(model)
        for name, parameter in inner.named_parameters():
            if self._enter("parameter", name, parameter):
                self.bad_parameters.append(name)
        for name, buffer in inner.named_buffers():
            self._enter("buffer", name, buffer)
        for path, tensor in flatten(batch):
            self._enter("data", path, tensor)

    def event_of(self, tensor: Tensor) -> Event | None:
        """Return the event behind the non-finite values of a tensor; None if it is finite."""
        content = read_content(tensor)
        if content is None:
            return None
        known = self._events.get(_storage(tensor))
        return known or self._new("outside", "", EventPlace(self._phase()), content)

    # -- operations --------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        inputs = [each.tensor for each in flatten_arguments(args, keywords)]
        self._note_node()
        for tensor in inputs:
            storage = _storage(tensor)
            if name in _FRESH:  # its memory may have belonged to another one
                self._events.pop(storage, None)
                self._enter("constant", "", tensor)
            elif storage not in self._makers:
                self._enter("outside", "", tensor)
        parents = self._parents(inputs)
        operands = None
        if func._schema.is_mutable:  # afterwards the inputs are no longer there
            operands = self._operands(inputs)
        output = func(*args, **keywords)
        given = {_storage(tensor) for tensor in inputs}
        for _, tensor in flatten(output):
            storage = _storage(tensor)
            if storage in given and not func._schema.is_mutable:
                continue  # a view, or the input itself
            self._written(name, tensor, storage, parents, inputs, operands, (args, keywords))
        return output

    def _note_node(self) -> None:
        """Remember where the operation runs that autograd may have made a node for just now."""
        in_backward = current_backward() != NO_BACKWARD
        self.ran_backward = self.ran_backward or in_backward
        number = sequence_number() - 1
        # Operations that need no node follow under the same number.
        if number in self._nodes or (in_backward and not torch.is_grad_enabled()):
            return
        layer = self._layers.stack[-1] if self._layers.stack else None
        self._nodes[number] = _Made(layer, running_lines(self._entry, in_backward))

    def _written(
        self,
        name: str,
        tensor: Tensor,
        storage: int,
        parents: tuple[Event, ...],
        inputs: list[Tensor],
        operands: tuple[Operand, ...] | None,
        arguments: Any,
    ) -> None:
        """Take note of what an operation made."""
        self._makers[storage] = name
        content = None if name in _UNINITIALISED else read_content(tensor)
        if content is None:
            memory = storage_of(tensor)
            if memory is None or tensor.numel() * tensor.itemsize >= memory.nbytes():
                self._events.pop(storage, None)
            return
        place, operation = self._place(name)
        kind: Kind = "operation"
        if not parents and _writes_infinity(arguments):
            kind = "constant"
        found: tuple[Operand, ...] = ()
        if kind == "operation" and not any(parent.content.nan for parent in parents):
            found = self._operands(inputs) if operands is None else operands
        self._events[storage] = self._new(
            kind, operation, place, content, parents=parents, operands=found
        )

    def _parents(self, inputs: Iterable[Tensor]) -> tuple[Event, ...]:
        """Return the events behind those inputs that are not finite; a view may well be."""
        found: dict[int, Event] = {}
        for tensor in inputs:
            event = self._events.get(_storage(tensor))
            if event is not None and read_content(tensor) is not None:
                found[event.number] = event
        return tuple(found.values())

    def _operands(self, inputs: Iterable[Tensor]) -> tuple[Operand, ...]:
        """Return range and zeros of the finite inputs, by which the cause is explained."""
        found = []
        for tensor in inputs:
            values = readable(tensor)
            if values is None or values.is_complex():
                continue
            low, high = torch.aminmax(values)
            if math.isfinite(low) and math.isfinite(high):
                maker = self._makers.get(_storage(tensor), "")
                zeros = int((values == 0).sum())
                dtype = str(tensor.dtype).removeprefix("torch.")
                found.append(Operand(maker, float(low), float(high), zeros, dtype))
        return tuple(found)

    # -- where it is -------------------------------------------------------------------------

    def _phase(self) -> Phase:
        if current_backward() != NO_BACKWARD and not self._layers.stack:
            return "backward"
        if self._layers.stack:
            return "forward"
        return "loss" if self._layers.was_entered else "data"

    def _place(self, name: str) -> tuple[EventPlace, str]:
        """Return where we are, and the operation; in backward, the one differentiated."""
        phase = self._phase()
        layer = self._layers.stack[-1] if self._layers.stack else None
        lines = running_lines(self._entry, current_backward() != NO_BACKWARD)
        if phase != "backward":
            return EventPlace(phase, layer, *lines), name
        node = current_node()
        made = self._nodes.get(node_sequence_number(node)) if node is not None else None
        if made is not None:
            layer = made.layer
        if node is None or lines.line is not None:  # a backward that is written in Python
            return EventPlace(phase, layer, *lines), name
        lines = made.lines if made is not None else lines
        return EventPlace(phase, layer, *lines, derivative=True), _differentiated(node)

    # -- events ------------------------------------------------------------------------------

    def _enter(self, kind: Kind, name: str, tensor: Tensor) -> bool:
        """Take note of a tensor that no operation of the step has made; True if it is bad."""
        storage = _storage(tensor)
        self._makers.setdefault(storage, "")
        content = read_content(tensor)
        if content is None or storage in self._events:
            return content is not None
        place = EventPlace("data") if kind == "data" else EventPlace(self._phase())
        self._events[storage] = self._new(kind, "", place, content, name=name)
        return True

    def _new(
        self, kind: Kind, operation: str, place: EventPlace, content: Content, **rest: Any
    ) -> Event:
        """Return a new event under the next number; `rest` as for `Event`."""
        self.latest = Event(self._count, kind, operation, place, content, **rest)
        self._count += 1
        return self.latest


def _differentiated(node: Any) -> str:
    """Return the name of the operation that a node is the backward of: `sqrt` of SqrtBackward0."""
    forward = str(node.name()).rpartition("::")[2].partition("Backward")[0]
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in forward)[1:]


def _storage(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor; without memory, the object itself."""
    found = storage_of(tensor)  # None if it is sparse, sharded, or of a transform
    return (0 if found is None else found.data_ptr()) or id(tensor)


def _writes_infinity(arguments: Any) -> bool:
    """Whether the code itself gives an infinite number, or NaN, to an operation."""
    args, keywords = arguments
    return any(
        isinstance(each, float) and not math.isfinite(each)
        for each in (*args, *(keywords.values() if isinstance(keywords, Mapping) else ()))
    )
