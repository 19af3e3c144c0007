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
from torchfmri._padding import TokenMask
from torchfmri._tokens.axes import model_grid
from torchfmri._tokens.broadcasts import Broadcasts
from torchfmri._torch_private import NO_BACKWARD, current_backward


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

    def module_begins(
        self, layer: str, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """A container is called: the outermost one begins a pass."""
        if layer in self._running:  # an interrupt ended a call without its forward hook
            del self._running[self._running.index(layer) :]
        if not self._running:
            if not self.number or layer in self._outermost or self.has_gone_back:
                self.begin()
            self._outermost.add(layer)
            self._grids.setdefault("", model_grid(arguments, keywords))
        self._running.append(layer)

    def module_ends(self, layer: str) -> None:
        """The call of a container is over."""
        if layer in self._running:
            del self._running[self._running.index(layer) :]

    # -- hooks -------------------------------------------------------------------------------

    def model_is_called(
        self, module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """The model begins a pass."""
        if current_backward() == NO_BACKWARD:
            self.module_begins("", arguments, keywords)

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
