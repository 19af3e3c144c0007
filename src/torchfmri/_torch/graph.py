"""The autograd graph: where an input enters it, which nodes read it, and which backward pass runs.

Taps use it for dL/d input through one call; `nodes_behind` is the one walk over a graph, for
everybody. Two traps of autograd are handled here. Writing into a view replaces the view's node, so
the node of its base is kept too. And a tensor may have been read before the call: sequence numbers,
which count the nodes of a thread, tell earlier readers apart. A `ViewGeometry` outlives the call
and must hold neither the view nor its base, or activations stay in memory.

Every gradient hook of `_capture.taps` asks `Backwards.current()`, so that no gradient is counted
into the wrong backward pass; token gradients ask `runs_checkpoint` and `runs_grad`. A reentrant
checkpoint runs a backward pass inside another, under a number of its own: it must count as the
outer one, or its parameters seem to get two gradients. Autograd tells nobody when a backward pass
fails, so one that is no longer on the Python stack is taken for over; the comparison of depths in
`current` does this. An exception that leaves `_close` would end the user's backward pass.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import checkpoint

from torchfmri._torch.private import (
    NO_BACKWARD,
    at_end_of_backward,
    current_backward,
    frames,
    node_sequence_number,
    saved_tensor_hooks,
)


class ViewGeometry:
    """How a view lies in its base, kept without holding either of them."""

    __slots__ = ("_base_shape", "_base_stride", "_offset", "_shape", "_stride")

    def __init__(self, view: Tensor, base: Tensor) -> None:
        self._shape, self._stride = tuple(view.shape), view.stride()
        self._base_shape, self._base_stride = tuple(base.shape), base.stride()
        self._offset = view.storage_offset() - base.storage_offset()

    def part_of(self, gradient: Tensor) -> Tensor:
        """Return the part of the base's gradient that belongs to the view."""
        if gradient.stride() != self._base_stride or gradient.storage_offset():
            laid = gradient.new_empty_strided(self._base_shape, self._base_stride)
            gradient = laid.copy_(gradient)
        return gradient.as_strided(self._shape, self._stride, self._offset)

    def placed(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the base: `gradient` at the view's place, zero elsewhere."""
        whole = gradient.new_empty_strided(self._base_shape, self._base_stride).zero_()
        whole.as_strided(self._shape, self._stride, self._offset).copy_(gradient)
        return whole


def view_geometry(tensor: Tensor) -> ViewGeometry | None:
    """Return the geometry of a view; None if it is not a view, or strides do not describe it."""
    base = tensor._base
    if base is None or tensor.layout != torch.strided or tensor.is_nested:
        return None
    if (base.dtype, base.is_conj(), base.is_neg()) != (
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    ):
        return None
    return ViewGeometry(tensor, base)


class InputEdge:
    """The point of the autograd graph where a call reads one of its inputs.

    A call that writes into an input which is a view never reaches the view's own node, only that
    of its base (through a CopySlices node): both are kept.
    """

    __slots__ = ("_base_node", "_memory", "_node", "_slot", "geometry", "path")

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path = path
        edge = get_gradient_edge(tensor)
        self._node: Any = edge.node
        self._slot = edge.output_nr
        self.geometry = view_geometry(tensor)
        base = tensor._base if self.geometry is not None else None
        self._base_node: Any = base.grad_fn if base is not None else None
        self._memory = id(tensor if tensor._base is None else tensor._base)

    def lies_in(self, base: Tensor | None) -> bool:
        """Whether the input is `base`, or a view of it."""
        return base is not None and base.grad_fn is not None and self._memory == id(base)

    @property
    def key(self) -> tuple[int, int]:
        """An id that no edge of another tensor has, while this one exists."""
        return (id(self._node), self._slot)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is where `tensor` itself is in the graph: it is the input, unchanged."""
        if not tensor.requires_grad:
            return False
        edge = get_gradient_edge(tensor)
        return edge.node is self._node and edge.output_nr == self._slot

    @property
    def created(self) -> int:
        """The sequence number of the node that made the input; whatever reads it came later."""
        return node_sequence_number(self._node)

    def slots_of(self, node: Any) -> list[tuple[int, bool]]:
        """Return the gradient slots of `node` that lead here, and whether they lead to the base."""
        slots = []
        for slot, (target, target_slot) in enumerate(node.next_functions):
            if target is None:
                continue
            if target is self._node and target_slot == self._slot:
                slots.append((slot, False))
            elif target is self._base_node and node.name().endswith("CopySlices") and slot == 0:
                slots.append((slot, True))
        return slots


def nodes_before(node: Any) -> list[Any]:
    """Return the nodes that a node reads from; none for None."""
    return [] if node is None else [each for each, _ in node.next_functions if each is not None]


def nodes_behind(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph behind these, nearest first, each once."""
    seen: set[Any] = set()
    waiting = deque(starts)
    while waiting:
        node = waiting.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(below for below, _ in node.next_functions)


def consumers(
    edge: InputEdge, outputs: list[Any], start: int, end: int = 1 << 64
) -> dict[Any, list[tuple[int, bool]]]:
    """Return the nodes behind `outputs` that read the edge, with their slots.

    Only those created since `start` and before `end`, by sequence number.
    """
    found: dict[Any, list[tuple[int, bool]]] = {}
    seen: set[Any] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen or node_sequence_number(node) < start or not node.next_functions:
            continue
        seen.add(node)
        if node_sequence_number(node) < end and (slots := edge.slots_of(node)):
            found[node] = slots
        waiting.extend(target for target, _ in node.next_functions if target is not None)
    return found


class _Running(NamedTuple):
    task: int
    depth: int  # how many backward passes were on the Python stack when it was first seen


class Backwards:
    """The backward passes of one recording; one inside another (reentrant) counts as the outer.

    Attributes:
        expects_nested: A reentrant checkpoint was seen: its backward pass runs inside another,
            and parameters get their gradients in parts.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.expects_nested = False
        self._failed = failed
        self._root: dict[int, int] = {}
        self._open: dict[int, list[_Running]] = defaultdict(list)
        self._at_end: dict[int, dict[object, Callable[[int], None]]] = defaultdict(dict)

    def current(self) -> int:
        """Return the number of the outermost backward pass that runs in this thread."""
        task = current_backward()
        if task == NO_BACKWARD:
            return NO_BACKWARD
        if task not in self._root:
            running = self._open[threading.get_ident()]
            depth = _depth()
            # One that is no longer on the stack has failed: autograd calls nobody back then.
            while running and running[-1].depth >= depth:
                running.pop()
            self._root[task] = self._root[running[-1].task] if running else task
            entry = _Running(task, depth)
            if at_end_of_backward(lambda: self._close(running, entry)):
                running.append(entry)
        return self._root[task]

    def notice(self, *_: object) -> None:
        """Note that a module runs here: a hook for modules of which only gradients are wanted."""
        self.is_checkpointed()
        self.current()

    def is_checkpointed(self) -> bool:
        """Whether the forward pass of a reentrant checkpoint is running."""
        if torch.is_grad_enabled() or not _runs_checkpoint():
            return False
        self.expects_nested = True
        return True

    def at_end(self, backward: int, act: Callable[[int], None]) -> None:
        """Have `act(backward)` called when this backward pass is over, once."""
        self._at_end[backward].setdefault(act, act)

    def forget(self) -> None:
        """Forget backward passes that are over."""
        running = {entry.task for entries in self._open.values() for entry in entries}
        kept = {self._root[task] for task in running}
        self._root = {task: root for task, root in self._root.items() if root in kept}
        self._at_end = defaultdict(
            dict, {task: acts for task, acts in self._at_end.items() if task in kept}
        )

    def _close(self, running: list[_Running], entry: _Running) -> None:
        if entry in running:
            running.remove(entry)
        if self._root.get(entry.task) != entry.task:
            return
        for act in self._at_end.pop(entry.task, {}).values():
            try:
                act(entry.task)
            except Exception as error:  # an exception here would end the user's backward pass
                self._failed(error)


def runs_checkpoint() -> bool:
    """Whether the code that is running stands inside an activation checkpoint, and gradients on."""
    if saved_tensor_hooks(False) is None:
        return False
    return any(frame.f_code in _CHECKPOINTS for frame in frames())


def runs_grad() -> bool:
    """Whether the backward pass of this thread is torch.autograd.grad, which fills no `.grad`."""
    found = (frame.f_code for frame in frames() if frame.f_code in _BACKWARD)
    return next(found, None) is torch.autograd.grad.__code__


_BACKWARD = frozenset({torch.autograd.backward.__code__, torch.autograd.grad.__code__})
_CHECKPOINT = checkpoint.CheckpointFunction.forward.__code__
_CHECKPOINTS = frozenset({inspect.unwrap(checkpoint.checkpoint).__code__})


def _depth() -> int:
    """Return how many backward passes the Python code of this thread is in."""
    return sum(frame.f_code in _BACKWARD for frame in frames())


def _runs_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs its first pass, for gradients that will be wanted."""
    return any(
        frame.f_code is _CHECKPOINT and any(frame.f_locals["ctx"].needs_input_grad)
        for frame in frames()
    )
