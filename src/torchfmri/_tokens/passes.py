"""CAPTURE: which pass of the model is running, and on which tokens.

The tokens of another pass are other tokens. A pass begins when the outermost module is called
again; where the model is used by its parts, a part that is called again, or after a backward pass,
begins one too.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchfmri._elements import flatten
from torchfmri._hooks import Hook
from torchfmri._padding import TokenMask
from torchfmri._tokens.axes import model_grid
from torchfmri._tokens.broadcasts import Broadcasts
from torchfmri._torch_private import NO_BACKWARD, HookSet, calls_itself, current_backward


class Passes:
    """Follows the calls of the model and of its containers.

    Attributes:
        number: Of the pass that runs, from 1.
        calls: How often each layer was called in this pass.
        has_gone_back: A gradient of this pass has come.
        memories: What the encoder returned in this pass; a decoder's layer that reads one of these
            has the encoder's tokens, and `encoder_mask`.
        broadcasts: Outputs that are spread over the batch.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.number = 0
        self.calls: dict[str, int] = defaultdict(int)
        self.has_gone_back = False
        self.memories: list[weakref.ref[Tensor]] = []
        self.encoder_mask: TokenMask | None = None
        self.broadcasts = Broadcasts(failed)
        self._grids: dict[str, tuple[int, int] | None] = {}
        self._running: list[str] = []
        self._outermost: set[str] = set()

    def begin(self) -> None:
        """Another pass begins."""
        self.broadcasts.stop()
        self.number += 1
        self.has_gone_back = False
        self.calls.clear()
        self.memories.clear()
        self._outermost.clear()
        self._grids.clear()

    def count(self, layer: str) -> None:
        """Count the call of a layer; by itself, outside of any module, it may begin a pass."""
        if not self._running and (self.calls[layer] or self.has_gone_back):
            self.begin()
        self.calls[layer] += 1

    def grid_of(self, stack: str) -> tuple[int, int] | None:
        """Batch and positions of what the model, or this stack of it, was handed."""
        return self._grids.get(stack) or self._grids.get("")

    # -- containers --------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the call of a container has begun and is not over."""
        return bool(self._running)

    def module_begins(
        self,
        layer: str,
        module: nn.Module,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> None:
        """A container is called: the outermost one begins a pass."""
        if layer in self._running and not calls_itself(module):
            # An interrupt ended a call without its forward hook.
            del self._running[self._running.index(layer) :]
        if not self._running:
            if not self.number or layer in self._outermost or self.has_gone_back:
                self.begin()
            self._outermost.add(layer)
            self._grids.setdefault("", model_grid(arguments, keywords))
        self._running.append(layer)

    def module_ends(self, layer: str) -> None:
        """The call of a container is over: the last one that began."""
        for index in range(len(self._running) - 1, -1, -1):
            if self._running[index] == layer:
                del self._running[index:]
                break

    # -- hooks -------------------------------------------------------------------------------

    def model_is_called(
        self, module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """The model begins a pass."""
        if current_backward() == NO_BACKWARD:
            self.module_begins("", module, arguments, keywords)

    def model_returns(self, *call: Any) -> None:
        """The model has run."""
        if current_backward() == NO_BACKWARD:
            self.broadcasts.model_returned(*call)
            self.module_ends("")

    def stack_begins(
        self, stack: str, _: object, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """The encoder or the decoder is handed its tokens."""
        if current_backward() == NO_BACKWARD:
            self._grids[stack] = model_grid(arguments, keywords)

    def encoder_has_run(self, module: nn.Module, arguments: object, output: object) -> None:
        """Remember what the encoder returned."""
        self.memories += [weakref.ref(each.tensor) for each in flatten(output)]


class PartHook(Hook):
    """On a container that only calls the modules below it: called by itself, it begins a pass."""

    __slots__ = ("_depth", "_hooks", "_layer", "_passes")

    def __init__(self, passes: Passes, layer: str, hooks: HookSet) -> None:
        super().__init__(None)
        self._passes, self._layer, self._hooks = passes, layer, hooks
        self._depth = 0  # of calls inside each other, while it is the outermost

    def __call__(self, module: nn.Module, *call: Any) -> None:
        passes = self._passes
        if passes.is_running:
            self._depth += self._depth > 0
        elif current_backward() == NO_BACKWARD:
            passes.module_begins(self._layer, module, *call)
            self._depth = 1
            self._hooks.after(module, Hook(self._ends), always=True)

    def _ends(self, *_: object) -> None:
        self._depth -= self._depth > 0
        if not self._depth:
            self._passes.module_ends(self._layer)
