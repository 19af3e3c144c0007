"""Outputs without a batch axis that are added to data with one (position embeddings).

Their own gradient arrives summed over the batch. The addition that reads them is found when the
next module is called, and its gradient, before that sum, is kept for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook

from torchfmri._torch import Hook, flatten, flatten_arguments

_FAR, _EVERYTHING = 64, 1 << 16  # how many nodes back the addition is looked for


class Broadcasts:
    """Looks for the additions that read some outputs, from the next module call on."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._waiting: list[tuple[Any, int, Callable[[Tensor], None]]] = []
        self._handle: Any = None
        self._nodes: list[Any] = []
        self._failed = failed

    def watch(self, output: Tensor, arrived: Callable[[Tensor], None]) -> None:
        """Have the gradient of the addition that reads `output` handed to `arrived`."""
        edge = get_gradient_edge(output)
        self._waiting.append((edge.node, edge.output_nr, arrived))
        if self._handle is None:
            hook = Hook(self._called, failed=self._failed)
            self._handle = register_module_forward_pre_hook(hook)

    def model_returned(self, *call: Any) -> None:
        """Look through the whole graph of the model's output, if something is still waiting."""
        for _, tensor in flatten(call[-1]) if self._waiting else ():
            if tensor.grad_fn is not None:
                self._search(tensor.grad_fn, _EVERYTHING)
        self.stop()

    def stop(self) -> None:
        """Look no further."""
        self._waiting.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def detach(self) -> None:
        """Remove every hook."""
        self.stop()
        while self._nodes:
            self._nodes.pop().remove()

    def _called(self, module: nn.Module, arguments: Any) -> None:
        for _, tensor in flatten_arguments(arguments, {}):
            if tensor.grad_fn is not None:
                self._search(tensor.grad_fn)
        if not self._waiting:
            self.stop()

    def _search(self, start: Any, far: int = _FAR) -> None:
        ends = {(node, slot): arrived for node, slot, arrived in self._waiting}
        waiting: list[Any] = [start]
        seen: set[Any] = set()
        while waiting and ends and len(seen) < far:
            node = waiting.pop(0)
            if node is None or node in seen:
                continue
            seen.add(node)
            for target, slot in node.next_functions:
                arrived = ends.pop((target, slot), None)
                if arrived is None:
                    waiting.append(target)
                    continue
                self._waiting = [each for each in self._waiting if each[2] is not arrived]
                if node.name().startswith("AddBackward"):
                    hook = Hook(
                        lambda gradients, act=arrived: act(gradients[0]), failed=self._failed
                    )
                    self._nodes.append(node.register_prehook(hook))
