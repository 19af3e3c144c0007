"""CAPTURE: which pass of the model is running, and on which tokens.

The tokens of another pass are other tokens. A pass begins when the outermost module is called
again; where the model is used by its parts, a part that is called again, or after a backward pass,
begins one too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from torchfmri._capture import TokenMask
from torchfmri._tokens.calls.broadcasts import Broadcasts
from torchfmri._tokens.rules.axes import model_grid
from torchfmri._tokens.rules.record import Pass, Record, Watched
from torchfmri._torch import NO_BACKWARD, Hook, HookSet, calls_itself, current_backward, flatten


class Passes:
    """Follows the calls of the model and of its containers.

    Attributes:
        current: The pass that runs.
        records: The calls of all passes, as they came; nothing outside of a block, since a hook of
            ours may live on in somebody's traceback.
        has_gone_back: A gradient of this pass has come.
        grids: Batch and positions of what the model was handed (""), and each of its stacks.
        running: The containers whose calls have begun and are not over, the outermost first.
        memories: What the encoder returned in this pass; a decoder's layer that reads one of these
            has the encoder's tokens, and `encoder_mask`.
        broadcasts: Outputs that are spread over the batch.
        parts: The hooks on containers that begin a pass when they are called by themselves.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.current = Pass(0)
        self.records: list[Record] = []
        self._counted = 0
        self.has_gone_back = False
        self.memories: list[weakref.ref[Tensor]] = []
        self.encoder_mask: TokenMask | None = None
        self.broadcasts = Broadcasts(failed)
        self.parts = Parts()
        self.grids: dict[str, tuple[int, int] | None] = {}
        self.running: list[str] = []
        self._outermost: set[str] = set()

    def begin(self) -> None:
        """Another pass begins."""
        self.broadcasts.stop()
        self.current = Pass(self.current.number + 1)
        self.has_gone_back = False
        self.memories.clear()
        self._outermost.clear()
        self.grids.clear()

    def call_begins(self, layer: str) -> None:
        """A layer is called; by itself, outside of any module, it may begin a pass."""
        if not self.running and (layer in self.calls or self.has_gone_back):
            self.begin()

    @property
    def calls(self) -> dict[str, int]:
        """How often each layer was called in this pass."""
        self.count_calls()
        return self.current.calls

    def count_calls(self) -> None:
        """Count the calls since the last time: not one by one, while the model runs."""
        all_of_them = len(self.records)
        for record in islice(self.records, self._counted, all_of_them):
            record.within.calls[record.watched.layer] += 1
        self._counted = all_of_them  # last: after an interrupt rather twice than never

    def follow(self, records: list[Record]) -> None:
        """Add calls to this list from now on."""
        self.records, self._counted = records, len(records)

    def grid_of(self, stack: str) -> tuple[int, int] | None:
        """Batch and positions of what the model, or this stack of it, was handed."""
        return self.grids.get(stack) or self.grids.get("")

    # -- containers --------------------------------------------------------------------------

    def module_begins(
        self,
        layer: str,
        module: nn.Module,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> None:
        """A container is called: the outermost one begins a pass."""
        if layer in self.running and not calls_itself(module):
            # An interrupt ended a call without its forward hook.
            del self.running[self.running.index(layer) :]
        if not self.running:
            if not self.current.number or layer in self._outermost or self.has_gone_back:
                self.begin()
            self._outermost.add(layer)
            self.grids.setdefault("", model_grid(arguments, keywords))
        self.running.append(layer)

    def module_ends(self, layer: str) -> None:
        """The call of a container is over: the last one that began."""
        for index in range(len(self.running) - 1, -1, -1):
            if self.running[index] == layer:
                del self.running[index:]
                break

    # -- hooks -------------------------------------------------------------------------------

    def model_is_called(
        self, module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """The model begins a pass."""
        if current_backward() == NO_BACKWARD:
            self.parts.detach()
            self.module_begins("", module, arguments, keywords)

    def model_returns(self, *call: Any) -> None:
        """The model has run."""
        if current_backward() == NO_BACKWARD:
            self.broadcasts.model_returned(*call)
            self.module_ends("")
            self.parts.attach()

    def stack_begins(
        self, stack: str, _: object, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """The encoder or the decoder is handed its tokens."""
        if current_backward() == NO_BACKWARD:
            self.grids[stack] = model_grid(arguments, keywords)

    def encoder_has_run(self, module: nn.Module, arguments: object, output: object) -> None:
        """Remember what the encoder returned."""
        self.memories += [weakref.ref(each.tensor) for each in flatten(output)]


class Parts:
    """The hooks on containers that only call modules; while the model runs, they are not there."""

    def __init__(self) -> None:
        self._hooks = HookSet()
        self._modules: Sequence[nn.Module] = ()
        self._hook = Hook(None)

    def watch(
        self, passes: Passes, modules: Sequence[nn.Module], watched: Mapping[int, Watched]
    ) -> None:
        """Attach hooks to these containers; what is watched is known by the ids of modules."""
        self._modules, self._hook = modules, PartHook(passes, watched, self._hooks)
        self.attach()

    def attach(self) -> None:
        self._hooks.before(self._modules, self._hook, first=True)

    def detach(self) -> None:
        self._hooks.remove()

    def forget(self) -> None:
        """Remove the hooks for good."""
        self.detach()
        self._modules = ()
        self._hook = Hook(None)


class PartHook(Hook):
    """On containers that only call the modules below them: called by itself, one begins a pass."""

    __slots__ = ("_depth", "_hooks", "_outermost", "_passes", "_watched")

    def __init__(self, passes: Passes, watched: Mapping[int, Watched], hooks: HookSet) -> None:
        super().__init__(None)
        self._passes, self._watched, self._hooks = passes, watched, hooks
        self._outermost = 0
        self._depth = 0  # of its calls inside each other

    def __call__(self, module: nn.Module, *call: Any) -> None:
        passes, key = self._passes, id(module)
        watched = self._watched.get(key)
        if watched is None:  # a copy of a module
            return
        if passes.running:
            self._depth += self._outermost == key
        elif current_backward() == NO_BACKWARD:
            passes.module_begins(watched.layer, module, *call)
            self._outermost, self._depth = key, 1
            self._hooks.after((module,), Hook(self._ends), always=True)

    def _ends(self, module: nn.Module, *_: object) -> None:
        if self._outermost != id(module):
            return
        self._depth -= 1
        if not self._depth:
            self._outermost = 0
            self._passes.module_ends(self._watched[id(module)].layer)
