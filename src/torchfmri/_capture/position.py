"""Which layer is running, forward and backward, at any moment of one pass.

`RunningLayers` knows it for forward passes, and may be used for several in a row: `_attention`,
check-ups and the search for a NaN in `_incidents` use it. `Position` is for one pass and knows the
backward pass too: `_cost` uses it, and its clock needs `moved` at every change of the phase as
well. The hook before a layer comes first of all its hooks and the one after it last, also if it
raises, so that the stack is always right; keep this. Every node of the autograd graph carries the
number it got when it was made, so the layer that made it is known; a hook before each node says
when it runs. These hooks belong to the graph of the pass and go with it, and no node is kept: a
custom Function's node holds what its forward put on `ctx`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchfmri._model import each_once, named_layers
from torchfmri._torch import (
    NO_BACKWARD,
    Attached,
    Hook,
    current_backward,
    flatten,
    hooked,
    node_sequence_number,
    nodes_behind,
    sequence_number,
)

LOSS = "(loss)"
"""The loss, and whatever else runs outside the model."""
FORWARD, BACKWARD = "forward", "backward"
PAUSED = "paused"
"""We are at work ourselves, not the model."""


def _around(
    layers: Mapping[str, nn.Module], before: Callable[..., None], after: Callable[..., None]
) -> Iterator[RemovableHandle]:
    """Put a hook before and after each layer, both handed its name; yield what takes each off."""
    for name, module in layers.items():
        begin, end = Hook(partial(before, name), module), Hook(partial(after, name), module)
        yield module.register_forward_pre_hook(begin, prepend=True)
        yield module.register_forward_hook(end, always_call=True)


class RunningLayers(Attached):
    """The stack of layers that are running in a forward pass; a context manager.

    Args:
        model: The model.
        returned: Called with the output whenever no layer is running any more. Not called if the
            layer raised or returned None, nor when a checkpoint runs its part again.

    Attributes:
        stack: The layers that run now, the innermost last.
        was_entered: Whether any layer has been called.
        calls: How often each layer was called; not counted when a checkpoint runs its part again.
    """

    def __init__(self, model: nn.Module, returned: Callable[[object], None]) -> None:
        self.stack: list[str] = []
        self.was_entered = False
        self.calls: Counter[str] = Counter()
        self._model, self._returned = model, returned

    def _attach(self, stack: ExitStack) -> None:
        stack.callback(self.stack.clear)
        layers = {
            name: module
            for name, module in each_once(named_layers(self._model)).items()
            if not isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
        }
        stack.enter_context(hooked(_around(layers, self._before, self._after)))

    def _before(self, name: str, *_: object) -> None:
        self.was_entered = True
        if current_backward() == NO_BACKWARD:
            self.calls[name] += 1
        self.stack.append(name)

    def _after(self, _: str, __: nn.Module, ___: object, output: object) -> None:
        if self.stack:
            self.stack.pop()
        # A checkpoint runs inner layers alone, and a layer that raised has None for its output.
        if not self.stack and output is not None and current_backward() == NO_BACKWARD:
            self._returned(output)


class Position(Attached):
    """The `layer` and the `phase` that one pass is in now; a context manager.

    Args:
        layers: Name -> module; a module with several names goes by the first.
        moved: Called after each change of `layer` or `phase`, and when a layer is entered or left.
        returned: Called with a layer and its output, innermost layers first, in the forward pass.

    Attributes:
        layer: The innermost layer that runs now, or that made the node that runs; else `LOSS`.
        phase: `FORWARD`, `BACKWARD` or `PAUSED`.
        calls: How often each layer was called in the forward pass.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        moved: Callable[[], None] | None = None,
        returned: Callable[[str, object], None] | None = None,
    ) -> None:
        self.layer, self.phase = LOSS, FORWARD
        self.calls: Counter[str] = Counter()
        self._moved, self._returned = moved, returned
        self._layers = each_once(layers)
        self._above: list[str] = []
        # Autograd numbers the nodes of each thread apart: thread -> (first numbers, layers).
        self._made: dict[int, tuple[list[int], list[str]]] = {}

    def _attach(self, stack: ExitStack) -> None:
        stack.callback(self._forget)
        stack.enter_context(hooked(_around(self._layers, self._before, self._after)))
        self._note_start()

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Follow the backward pass of `loss` while this block runs it."""
        with self.paused():
            self._hook_nodes([loss.grad_fn])
        self.phase = BACKWARD
        self._move(LOSS)
        try:
            yield
        finally:
            self.phase = FORWARD
            self._move(LOSS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what runs in this block: it is ours and not part of the pass."""
        phase, self.phase = self.phase, PAUSED
        self._move(self.layer)
        try:
            yield
        finally:
            self.phase = phase
            self._move(self.layer)

    def _forget(self) -> None:
        self._above.clear()
        self._made.clear()
        self.layer = LOSS

    def _before(self, name: str, *_: object) -> None:
        self._above.append(self.layer)
        if self.phase == FORWARD:
            self.calls[name] += 1
        self._move(name)
        self._note_start()

    def _after(self, name: str, _: nn.Module, __: object, output: object) -> None:
        if self._returned is not None and self.phase == FORWARD:
            self._returned(name, output)
        if self._above:
            self._move(self._above.pop())
            self._note_start()
        if self.phase == BACKWARD and not self._above:
            # A reentrant checkpoint has recomputed its part: its nodes run next.
            with self.paused():
                self._hook_nodes(each.tensor.grad_fn for each in flatten(output))

    def _move(self, layer: str, *_: object) -> None:
        self.layer = layer
        if self._moved is not None:
            self._moved()

    def _note_start(self) -> None:
        """Note that the next nodes which autograd makes in this thread belong to this layer."""
        numbers, layers = self._made.setdefault(threading.get_ident(), ([], []))
        numbers.append(sequence_number())
        layers.append(self.layer)

    def _hook_nodes(self, nodes: Iterable[Any]) -> None:
        """Hook every node behind these that was made in this thread, to know when it runs."""
        numbers, layers = self._made.get(threading.get_ident(), ([0], [LOSS]))
        # Nodes are not kept: a custom Function's node holds what its forward put on `ctx`.
        for node in nodes_behind(nodes):
            if hasattr(node, "variable"):  # a leaf: autograd only collects there
                continue
            place = bisect_right(numbers, node_sequence_number(node)) - 1
            owner = layers[place] if place >= 0 else LOSS
            node.register_prehook(Hook(partial(self._move, owner)))
