"""The sink of the taps: the calls of every layer with parameters, and what they read.

A layer with a rule leaves a `TokenRecord` per call, to which a gradient comes back (`arrivals.py`).
A layer without one, or one that uses the weights of modules below it without calling them, is an
owner (`owners.py`) and run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchfmri._capture import CallKey, Padding, Short, Target
from torchfmri._tokens.calls.account import Account
from torchfmri._tokens.calls.arrivals import Arrivals, is_cast
from torchfmri._tokens.calls.checks import Checks
from torchfmri._tokens.calls.owners import Owners
from torchfmri._tokens.calls.passes import TokenPasses
from torchfmri._tokens.calls.plans import CapturePlan
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.record import TokenRecord, Watched
from torchfmri._tokens.rules.rerun import OwnerCall
from torchfmri._torch import (
    NO_BACKWARD,
    Element,
    current_backward,
    flatten,
    flatten_arguments,
    may_autocast,
    runs_checkpoint,
    saved_tensor_hooks,
)
from torchfmri.exceptions import UnsupportedLayerError

_GRADIENTS = frozenset({"gradients"})
_SCRIPTED = (
    "it runs as TorchScript, which calls no hooks. Use the module that was scripted, or "
    "per='token_loss'."
)


class Capture:
    """Receives what the taps bring.

    Attributes:
        account: What came of each parameter.
        passes: Which pass of the model runs.
        owners: The layers that are run again.
        arrivals: What came back, and the parts per parameter that it was turned into.
    """

    def __init__(
        self,
        plan: CapturePlan,
        padding: Padding,
        keep: str,
        max_bytes: int,
        channels: str | None,
    ) -> None:
        parameters, watched = plan.parameters, plan.watched
        self._parameters, self._watched, self._padding = parameters, watched, padding
        self._running = padding.running
        self._keeps_factors = keep == "factors"
        self.account = Account(Checks(plan.infos, plan.alike), plan.homes)
        account = self.account
        for name, layer in plan.scripted.items():
            account.refuse([name], UnsupportedLayerError(name, layer, _SCRIPTED))
        self.passes = TokenPasses(
            maps=plan.maps,
            model=plan.model,
            refuse=partial(_refuse_layer, account, watched),
            failed=lambda error: account.noted("", f"positions: {error}"),
            note=account.noted,
            channels=channels,
        )
        self.owners = Owners(
            watched=watched,
            parameters=parameters,
            passes=self.passes,
            padding=padding,
            account=self.account,
            keeps_factors=self._keeps_factors,
        )
        self.arrivals = Arrivals(
            watched=watched,
            parameters=parameters,
            passes=self.passes,
            account=self.account,
            owners=self.owners,
            keep=keep,
            max_bytes=max_bytes,
        )
        self._by_call: dict[CallKey, TokenRecord | OwnerCall] = {}
        self._last: tuple[weakref.ref[Tensor], Tensor, int | None] | None = None

    def listen(self, at_end: Callable[[Callable[[int], None]], None]) -> None:
        """Begin to take in gradients; `at_end` asks to be called when a backward pass is over."""
        self.arrivals.at_end = at_end
        self.passes.follow(self.arrivals.records)
        self.account.checks.on_backward = self.arrivals.expect_end

    # -- forward -----------------------------------------------------------------------------

    def wants(self, layer: str) -> bool:
        """Whether a call has to be looked at."""
        watched = self._watched[layer]
        return watched.rule is not None or self.owners.wants(watched)

    def short_way(self, plan: CapturePlan) -> Short:
        """What takes in the common calls of the layers that have a rule."""
        arrived = self.arrivals.arrived
        return Short(plan.called, plan.by_module, self._take, arrived, target_of)

    def _take(
        self,
        watched: Watched,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: Tensor,
    ) -> TokenRecord | None:
        """Take in a call the short way."""
        if keywords or len(arguments) != 1:
            return None
        x: Any = arguments[0]
        passes = self.passes
        if (
            watched.is_plain
            and passes.running
            and not self._running.is_padded
            and not may_autocast()
            and saved_tensor_hooks(False) is None
        ):
            record = TokenRecord(watched, passes.current, passes.grids.get(""))
            record.x, record.version = x, _version(x)
            if x.ndim == 4:
                record.strides = x.stride()
            passes.records.append(record)
        else:
            record = self._new_record(watched)
            self._keep_input(record, x)
        model = record.model  # (b, s)
        is_constant = watched.layer in passes.constants
        if passes.tracing is not None:
            is_constant = passes.tracing.call(record, output)
        if model is not None and model[0] != 1:
            shape = output.shape
            if is_constant or (shape and shape[0] != model[0]):
                self._watch_broadcast(record, output, is_constant)
        return record

    def called(
        self,
        call: CallKey,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
    ) -> None:
        """Take in a call with its arguments; again when a reentrant checkpoint runs it again."""
        watched, earlier = self._watched[call.layer], self._by_call.get(call)
        outputs = flatten(output)
        found: TokenRecord | OwnerCall | None
        if watched.rule is None:
            again = earlier if isinstance(earlier, OwnerCall) else None
            found = self.owners.called(watched, arguments, keywords, output, again)
        else:
            tensors = tuple(each.tensor for each in flatten_arguments(arguments, keywords))
            x = tensors if watched.rule is rules.bilinear else tensors[0]
            if isinstance(earlier, TokenRecord):
                self._keep_inputs(earlier, x)
                return
            found = self._new_record(watched)
            self._keep_inputs(found, x)
        if found is not None:
            self._by_call[call] = found
            is_constant = False
            if isinstance(found, TokenRecord) and self.passes.tracing is not None and outputs:
                is_constant = self.passes.tracing.call(found, outputs[0].tensor)
            elif isinstance(found, TokenRecord):
                is_constant = call.layer in self.passes.constants
            if len(outputs) == 1:
                self._watch_broadcast(found, outputs[0].tensor, is_constant)

    def _watch_broadcast(
        self, target: TokenRecord | OwnerCall, output: Tensor, is_constant: bool
    ) -> None:
        """Look for the addition that spreads an output over a batch that it does not have."""
        model = self.passes.grid_of(target.stack)
        if model is None or model[0] == 1 or not output.requires_grad:
            return
        without = (
            output.shape[0] == 1
            if output.ndim == 3
            else (output.ndim == 2 and output.shape[0] not in (model[0], model[0] * model[1]))
        )
        without |= is_constant and output.ndim in (1, 2)
        if without and current_backward() == NO_BACKWARD:
            self.passes.broadcasts.watch(output, target.spread)

    def _new_record(self, watched: Watched) -> TokenRecord:
        passes, stack = self.passes, watched.stack
        passes.call_begins(watched.layer)
        record = TokenRecord(watched, passes.current, passes.grid_of(stack))
        record.mask, record.stack = self._padding.current(), stack
        passes.records.append(record)
        if watched.rule in rules.STATEFUL:
            record.settings = rules.settings_of(watched.module)
        return record

    def _keep_inputs(self, record: TokenRecord, x: Any) -> None:
        """Keep what a call on the long way reads; layers with two inputs have both."""
        if not torch.is_grad_enabled():  # a checkpoint's first pass, or nothing will come back
            self._find_stack(record, x)
        elif isinstance(x, tuple):
            record.x, record.version = x, x[0]._version
        else:
            self._keep_input(record, x)

    def _find_stack(self, record: TokenRecord, x: Any) -> None:
        """A decoder's layer that reads what the encoder returned has the encoder's tokens."""
        passes = self.passes
        if record.stack == "encoder":
            passes.encoder_mask = record.mask
        elif any(each() is x for each in passes.memories):
            record.stack, record.mask = "encoder", passes.encoder_mask

    def _keep_input(self, record: TokenRecord, x: Any) -> None:
        """Keep what a call reads, by reference: autograd itself keeps it for the weight."""
        if record.stack:
            self._find_stack(record, x)
        if not self._keeps_factors and runs_checkpoint() and current_backward() == NO_BACKWARD:
            record.is_replayed = True  # it is computed again: nothing of it has to be kept
            self.arrivals.await_replay(record.watched)
            return
        if x.ndim == 4:
            record.strides = x.stride()
        version = _version(x)
        if not (may_autocast() and is_cast(record.watched.rule, x)):
            record.x, record.version = x, version
            return
        last = self._last
        if last is None or last[0]() is not x or last[2] != version:
            copy = x.detach().to(torch.get_autocast_dtype(x.device.type))
            last = self._last = (weakref.ref(x), copy, version)
        record.x = last[1]  # nobody else can write into it; q, k and v share it

    # -- the sink's other half -----------------------------------------------------------------

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Nothing: outputs are not kept."""

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        """Take in the gradient of an output that came the long way."""
        found = self._by_call.get(call)
        if isinstance(found, TokenRecord):
            if gradient is not None:
                self.arrivals.call_came_back(found, gradient, backward)
        elif isinstance(found, OwnerCall):
            self.owners.gradient(found, path, gradient)
            self.arrivals.owner_came_back()
        self.passes.has_gone_back = True
        self.arrivals.expect_end()

    def parameter(self, layer: str, what: str, name: str, tensor: Tensor, backward: int) -> None:
        """Never called: parameters have hooks of their own."""

    def missed(self, layer: str, what: str, reason: str) -> None:
        """Note why the parameters of a layer have no token gradients."""
        for name in self._watched[layer].parameters.values():
            self.account.refuse([name], UnsupportedLayerError(name, layer, reason))

    def noted(self, layer: str, text: str) -> None:
        """Note a reservation about a layer."""
        self.account.noted(layer, text)

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """A failure of ours never ends the user's pass: the parameters say why they are missing."""
        watched = self._watched.get(layer)
        names = self._parameters if watched is None else watched.parameters.values()
        self.account.refuse(names, error)

    def forget(self) -> None:
        """Let go of everything that only the passes themselves need."""
        self._by_call.clear()
        self._last = None
        self.passes.stop_tracing()
        self.passes.memories.clear()
        self.arrivals.forget()
        self.owners.forget()
        self.passes.follow([])
        try:
            self.account.checks.detach()
        except Exception as error:  # of ours, while the block may be ending with the user's own
            self.account.refuse(self._parameters, error)


def _refuse_layer(
    account: Account, watched: Mapping[str, Watched], layer: str | None, reason: str
) -> None:
    """Refuse the parameters of a layer, or of all."""
    for each in watched.values() if layer is None else (watched[layer],):
        for name in each.parameters.values():
            account.refuse([name], UnsupportedLayerError(name, each.layer, reason))


def target_of(watched: Watched) -> Target:
    """What the taps are told of a layer."""
    return Target(watched.layer, watched.module, _GRADIENTS)


def _version(x: Tensor) -> int | None:
    """How often a tensor was written into; None for one of inference mode, which does not count."""
    try:
        return x._version
    except RuntimeError:
        return None
