"""Which pass of the model is running, and on which tokens.

The tokens of another pass are other tokens. A pass begins when the outermost module is called
again; where the model is used by its parts, a part that is called again, or after a backward pass,
begins one too.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._capture import TokenMask
from torchfmri._tokens.calls.broadcasts import Broadcasts
from torchfmri._tokens.calls.python_state import modules_of, python_state
from torchfmri._tokens.calls.token_map import (
    MOST,
    TokenMap,
    Tracing,
    assign,
    kinds_of_masks,
    parameters_of_layers,
    signature,
)
from torchfmri._tokens.rules.axes import model_grid
from torchfmri._tokens.rules.owner_tokens import OwnerTokens
from torchfmri._tokens.rules.record import TokenPass, TokenRecord, Watched
from torchfmri._tokens.rules.rerun import OwnerCall, RunState
from torchfmri._tokens.rules.way import Reads, Way
from torchfmri._torch import (
    NO_BACKWARD,
    Hook,
    HookSet,
    calls_itself,
    current_backward,
    flatten,
    leave,
)

_ANOTHER_WAY = (
    "it was called another number of times than when its tokens were followed. Run the block "
    "again: from now on every pass is followed."
)


_OTHER_NUMBERS = (
    "this pass took another way through the model than the one whose tokens were followed, with "
    "the same shapes (a branch on data, a state that the model keeps, or random numbers). Run the "
    "block again: the next passes are followed."
)


class KeptPass(NamedTuple):
    """A call of the outermost module, to be run again by `verify`; by reference.

    Attributes:
        number: Of the pass.
        module: That was called, with these `arguments` and `keywords`.
        state: What it started from.
        tokens: What was found by following it.
    """

    number: int
    module: nn.Module
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    state: RunState
    tokens: TokenMap


class TokenPasses:
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
        constants: Layers that read constants: their outputs have no batch axis.
        tracing: Follows the tokens of the pass that runs; None where they are known already.
        last: The last pass with gradients that is over.
    """

    def __init__(
        self,
        maps: dict[object, TokenMap],
        model: nn.Module,
        refuse: Callable[[str | None, str], None],
        failed: Callable[[Exception], None],
        note: Callable[[str, str], None],
        channels: str | None = None,
    ) -> None:
        self._maps, self._model, self._refuse = maps, weakref.ref(model), refuse
        self._note, self._channels = note, channels
        self.tracing: Tracing | None = None
        self.constants: frozenset[str] = frozenset()
        self._map: TokenMap | None = None
        self._way: Way | None = None
        self._reads: Reads | None = None
        self._state: list[object] | None = None
        self._signature: object = None
        self._owners: dict[str, int] = {}
        self._first = 0  # record of the pass
        self._begun: Callable[[TokenMap], KeptPass] | None = None
        self._outer: tuple[str, OwnerTokens] | None = None  # the call that the pass was
        self._arguments: tuple[str, tuple[object, ...], Mapping[str, object]] | None = None
        self.last: KeptPass | None = None
        self.current = TokenPass(0)
        self.records: list[TokenRecord] = []
        self._counted = 0
        self.has_gone_back = False
        self.memories: list[weakref.ref[Tensor]] = []
        self.encoder_mask: TokenMask | None = None
        self.broadcasts = Broadcasts(failed)
        self.grids: dict[str, tuple[int, int] | None] = {}
        self.running: list[str] = []
        self._outermost: set[str] = set()

    def begin(self) -> None:
        """Another pass begins."""
        self.broadcasts.stop()
        self.current = TokenPass(self.current.number + 1)
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

    def follow(self, records: list[TokenRecord]) -> None:
        """Add calls to this list from now on."""
        self.records, self._counted = records, len(records)

    def grid_of(self, stack: str) -> tuple[int, int] | None:
        """Batch and positions of what the model, or this stack of it, was handed."""
        return self.grids.get(stack) or self.grids.get("")

    @cached_property
    def _devices(self) -> tuple[list[str], list[torch.device]]:
        """The kinds of devices that the parameters are on, and those of them that are CUDA."""
        model = self._model()
        assert model is not None  # it runs
        devices = {each.device for each in model.parameters()}
        kinds = sorted({"cpu", *(each.type for each in devices)} - {"meta"})
        return kinds, [each for each in devices if each.type == "cuda"]

    def state(self) -> RunState:
        """What a call that begins now depends on beside its arguments."""
        return RunState.now(*self._devices)

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
            self._begin_tracing(layer, module, arguments, keywords)
        self.running.append(layer)

    def module_ends(self, layer: str) -> None:
        """The call of a container is over: the last one that began."""
        for index in range(len(self.running) - 1, -1, -1):
            if self.running[index] == layer:
                del self.running[index:]
                break
        if not self.running:
            self.end_tracing()

    # -- tokens ------------------------------------------------------------------------------

    def _begin_tracing(
        self,
        layer: str,
        module: nn.Module,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> None:
        """Look up the tokens of a pass, or begin to follow them."""
        self.stop_tracing()
        self._signature = self._sign(layer, module, arguments, keywords)
        self._first, self._owners = len(self.records), {}
        self._begun = None
        if torch.is_grad_enabled():
            number, state = self.current.number, self.state()
            self._begun = partial(KeptPass, number, module, arguments, dict(keywords), state)
        self._map = self._maps.get(self._signature)
        self._outer = None if self._map is None else (layer, self._map.outer)
        self.constants = frozenset() if self._map is None else self._map.constants
        self._state = python_state(modules_of(module), (*arguments, *keywords.values()))
        if self._map is not None and not self._map.is_dynamic and self._map.state is not None:
            if self._map.is_open or self._map.state != self._state:
                self._way = Way()
                self._way.__enter__()
        else:
            self._map = None
            model = self._model()
            assert model is not None  # it runs
            parameters = model.named_parameters()
            of_layers = parameters_of_layers(model)
            self.tracing = Tracing(parameters, arguments, keywords, self._channels, of_layers)
            self._arguments = layer, arguments, keywords
            self.tracing.trace.__enter__()
            if torch.is_grad_enabled():  # without, some layers of torch take another way in a mode
                self._reads = Reads(self.tracing.trace.note_read)
                self._reads.__enter__()  # type: ignore[no-untyped-call]

    def _sign(
        self,
        layer: str,
        module: nn.Module,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> object:
        """What the tokens of a pass are kept under.

        Transformers leave out a mask that is full. So where a model reads values, passes with a
        full mask are told from others; to look at masks costs a wait for the device otherwise.
        """
        found = (layer, self._channels, *signature(module, arguments, keywords))
        known = self._maps.get(found)
        if known is None or not known.reads_masks:
            return found
        masks = kinds_of_masks(arguments, keywords)
        return found if masks == known.masks else (*found, masks)

    def end_tracing(self) -> None:
        """Give the records of a pass that is over their tokens."""
        tracing, found, begun, way = self.tracing, self._map, self._begun, self._way
        if tracing is not None and self._arguments is not None:
            layer, arguments, keywords = self._arguments
            elements = flatten((arguments, dict(keywords)))
            tracing.owner(layer, elements, is_outer=True)
        given = self._arguments
        self.stop_tracing()
        records = self.records[self._first :]
        counts = Counter([each.watched.layer for each in records])
        if tracing is not None:
            found = tracing.finish(counts)
            if given is not None:
                self._outer = given[0], found.outer
            earlier = self._maps.pop(self._signature, None)
            if earlier is not None:
                found.is_dynamic |= earlier.is_dynamic
                # The first pass may fill a cache: two in a row have to take the same way.
                found.state = self._state if earlier.way == found.way else None
            while len(self._maps) >= MOST:
                del self._maps[next(iter(self._maps))]
            self._maps[self._signature] = found
        if found is None:
            return
        if found.note:
            self._note("", found.note)
        if begun is not None:
            self.last, self._begun = begun(found), None
        if tracing is None and way is not None and way.way != found.way:
            found.state = None
            found.is_dynamic = found.is_open  # data decides: from now on, follow each pass
            self._refuse(None, _OTHER_NUMBERS)
            return
        if tracing is None:
            found.state = self._state
            self._look_up(found, records, counts)
        for layer, several in found.calls.items() if not found.is_usual else ():
            for each in several:
                if each.refused:
                    self._refuse(layer, each.refused)

    def _look_up(
        self, found: TokenMap, records: Sequence[TokenRecord], counts: Mapping[str, int]
    ) -> None:
        """Give records the tokens that an earlier pass of the same shapes has found."""
        if found.counts != counts:  # another way through the model: from now on, follow each pass
            found.is_dynamic = True
            for layer in counts:
                if counts[layer] != found.counts.get(layer):
                    self._refuse(layer, _ANOTHER_WAY)
        elif found.is_usual:
            return
        number: dict[str, int] = defaultdict(int)
        for record in records:
            layer = record.watched.layer
            if counts[layer] == found.counts.get(layer):
                assign(record, found.calls[layer][number[layer]])
                number[layer] += 1

    def stop_tracing(self) -> None:
        """Follow the pass no further."""
        tracing, self.tracing, self._map, self._arguments = self.tracing, None, None, None
        way, self._way = self._way, None
        reads, self._reads = self._reads, None
        if way is not None:
            leave(way)
        if reads is not None:
            leave(reads)
        if tracing is not None:
            leave(tracing.trace)
            tracing.trace.close()

    def owner_called(
        self,
        call: OwnerCall,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
    ) -> None:
        """Tell a call that is run again later which tokens its arguments have."""
        if self.tracing is not None:
            self.tracing.owner_called(call, flatten((arguments, dict(keywords))), output)
        elif self._map is not None:
            number = self._owners.get(call.layer, 0)
            self._owners[call.layer] = number + 1
            known = self._map.owners.get(call.layer, ())
            if number < len(known):
                call.tokens = known[number]
        elif self._outer is not None and self._outer[0] == call.layer:
            call.tokens = self._outer[1]  # its own call was the pass, which is over

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
            self.grids[stack] = model_grid(arguments, keywords)
            if self.tracing is not None:
                self.tracing.begin_stack(stack, arguments, keywords)

    def encoder_has_run(self, module: nn.Module, arguments: object, output: object) -> None:
        """Remember what the encoder returned."""
        self.memories += [weakref.ref(each.tensor) for each in flatten(output)]


class PartHook(Hook):
    """The hook on containers that only call the modules below them.

    A container that is called by itself begins a pass. The hook stays on while the model runs:
    taking it off for that long saves nothing that can be measured.
    """

    __slots__ = ("_depth", "_ends_hooks", "_outermost", "_passes", "_watched")

    def __init__(self, passes: TokenPasses, watched: Mapping[int, Watched]) -> None:
        super().__init__(None)
        self._passes, self._watched = passes, watched
        self._ends_hooks = HookSet()  # on the container that began the last pass
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
            self._ends_hooks.remove()
            self._ends_hooks.after((module,), Hook(self._ends), always=True)

    def remove(self) -> None:
        """Remove what was added on the way; safe to call twice."""
        self._ends_hooks.remove()

    def _ends(self, module: nn.Module, *_: object) -> None:
        if self._outermost != id(module):
            return
        self._depth -= 1
        if not self._depth:
            self._outermost = 0
            self._passes.module_ends(self._watched[id(module)].layer)
