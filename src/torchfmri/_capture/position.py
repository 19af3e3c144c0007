"""Which layer is running, forward and backward, at any moment of one pass.

Forward: hooks on the modules. Backward: every node of the autograd graph carries the number it got
when it was made, so the layer that made it is known; a hook before each node says when it runs.
Nodes belong to the graph of this pass and go with it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchfmri._model import each_once
from torchfmri._torch import (
    Attached,
    Hook,
    flatten,
    node_sequence_number,
    nodes_behind,
    sequence_number,
)

LOSS = "(loss)"
"""The loss, and whatever else runs outside the model."""
FORWARD, BACKWARD = "forward", "backward"
PAUSED = "paused"
"""We are at work ourselves, not the model."""


class Position(Attached):
    """The `layer` and the `phase` that one pass is in now; a context manager.

    Args:
        layers: Name -> module; a module with several names goes by the first.
        moved: Called after each change of `layer`.
        returned: Called with a layer and its output, innermost layers first, in the forward pass.
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
        for name, module in self._layers.items():
            before = Hook(partial(self._before, name), module)
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            after = Hook(partial(self._after, name), module)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
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
        """Let each node behind these, made in this thread, say when it runs."""
        numbers, layers = self._made.get(threading.get_ident(), ([0], [LOSS]))
        # Nodes are not kept: a custom Function's node holds what its forward put on `ctx`.
        for node in nodes_behind(nodes):
            if hasattr(node, "variable"):  # a leaf: autograd only collects there
                continue
            place = bisect_right(numbers, node_sequence_number(node)) - 1
            owner = layers[place] if place >= 0 else LOSS
            node.register_prehook(Hook(partial(self._move, owner)))
