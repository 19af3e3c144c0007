"""CAPTURE: the sink of the taps that keeps x and dL/dy of every call of a layer with parameters.

A layer with a rule leaves a `Record` per call. A layer without one, or one that uses the weights of
modules below it without calling them, is an owner: its arguments and the gradients of its outputs
are kept, and it is run again by itself when the backward pass is over (`rerun.py`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._backwards import runs_checkpoint
from torchfmri._elements import Element, flatten, flatten_arguments
from torchfmri._hooks import Hook
from torchfmri._padding import Padding, TokenMask
from torchfmri._taps import CallKey
from torchfmri._tokens import rules
from torchfmri._tokens.axes import model_grid
from torchfmri._tokens.broadcasts import Broadcasts
from torchfmri._tokens.checks import Checks, without_autocast
from torchfmri._tokens.factors import device_of, dtype_of, probe
from torchfmri._tokens.norms import REDUCERS, XNumbers, reduced_terms, terms
from torchfmri._tokens.parameter import ParameterInfo
from torchfmri._tokens.record import Axis, Part, Record, Watched
from torchfmri._tokens.rerun import OwnerCall, RunState
from torchfmri._torch_private import NO_BACKWARD, current_backward
from torchfmri.exceptions import InspectionError, MemoryLimitError, UnsupportedLayerError

_LESS = "Select fewer parameters, keep norms alone (keep='norms'), or allow more (max_bytes=...)."
_Modules: TypeAlias = dict[int, dict[str, str]]


class Capture:
    """Receives what the taps bring, and turns it into parts per parameter.

    Attributes:
        reasons: Parameters whose token gradients cannot be had, with the error that says why.
        notes: Reservations, with the layers they concern.
        at_end: Asks to be called when the running backward pass is over.
    """

    def __init__(
        self,
        infos: Mapping[str, ParameterInfo],
        parameters: Mapping[str, nn.Parameter],
        watched: Mapping[str, Watched],
        padding: Padding,
        keep: str,
        max_bytes: int,
    ) -> None:
        self._infos, self._parameters = infos, parameters
        self._watched, self._padding = watched, padding
        self._keeps_factors, self._max_bytes = keep == "factors", max_bytes
        self.checks = Checks(infos)
        self.checks.on_backward = lambda: self.at_end(self._backward_is_over)
        self._homes: dict[str, list[str]] = defaultdict(list)  # where a tied parameter lives
        for layer, each in watched.items():
            for name in each.parameters.values():
                self._homes[name].append(layer)
        self.reasons: dict[str, Exception] = {}
        self.notes: dict[str, list[str]] = {}
        self.bytes = 0
        self.at_end: Callable[[Callable[[int], None]], None] = lambda act: None
        self._parts: dict[str, list[Part]] = defaultdict(list)
        self._records: list[Record] = []
        self._records_of: dict[str, list[Record]] = defaultdict(list)
        self._run = 0
        self._grids: dict[str, tuple[int, int] | None] = {}
        self._running: list[str] = []
        self._outermost: set[str] = set()
        self._has_gone_back = False
        self._encoder_mask: TokenMask | None = None
        self._calls: dict[str, int] = defaultdict(int)  # in this pass of the model
        self._by_call: dict[CallKey, Record | OwnerCall] = {}
        self._owners: list[OwnerCall] = []
        self._states: dict[str, RunState] = {}
        self._replayed_owners: dict[str, list[Any]] = defaultdict(list)
        self._parked: list[Record] = []
        self._received: set[str] = set()
        self.narrow: set[str] = set()
        self.versions: dict[str, int] = {}
        self._devices = frozenset(each.device for each in parameters.values())
        self._memories: list[weakref.ref[Tensor]] = []
        self._replayed: dict[str, list[Tensor]] = defaultdict(list)
        self._last: tuple[weakref.ref[Tensor], Tensor, int] | None = None
        self._watching_replays: set[str] = set()
        self.handles: list[Any] = []
        self._x_numbers = XNumbers(self.checks)
        self._stored: set[int] = set()
        self.broadcasts = Broadcasts(lambda error: self.noted("", f"positions: {error}"))

    # -- forward -----------------------------------------------------------------------------

    def module_begins(
        self, layer: str, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """Follow which module is the outermost one, and begin a pass when it is called again.

        The tokens of another pass are other tokens. Where the model is used by its parts, a part
        that is called again, or after a backward pass, begins one too.
        """
        if layer in self._running:  # an interrupt ended a call without its forward hook
            del self._running[self._running.index(layer) :]
        if not self._running:
            if not self._run or layer in self._outermost or self._has_gone_back:
                self._new_pass()
            self._outermost.add(layer)
            self._grids.setdefault("", model_grid(arguments, keywords))
        self._running.append(layer)

    def _new_pass(self) -> None:
        self.broadcasts.stop()
        self._run += 1
        self._has_gone_back = False
        self._calls.clear()
        self._memories.clear()
        self._outermost.clear()
        self._grids.clear()

    def module_ends(self, layer: str) -> None:
        """The call of a container is over."""
        if layer in self._running:
            del self._running[self._running.index(layer) :]

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

    def _grid_of(self, stack: str) -> tuple[int, int] | None:
        """Batch and positions of what the model, or this stack of it, was handed."""
        return self._grids.get(stack) or self._grids.get("")

    def encoder_has_run(self, module: nn.Module, arguments: object, output: object) -> None:
        """Remember what the encoder returned: a decoder's layer that reads it has its tokens."""
        self._memories += [weakref.ref(each.tensor) for each in flatten(output)]

    def owner_begins(self, layer: str, *call: Any) -> None:
        """Keep the state that a call of an owner starts from, and in a replay its arguments."""
        if current_backward() == NO_BACKWARD:
            if layer:
                self.module_begins(layer, call[1], call[2])
            self._states[layer] = RunState.now(self._devices)
        elif torch.is_grad_enabled() and not self._keeps_factors:
            _, arguments, keywords = call
            self._replayed_owners[layer].append(
                (arguments, dict(keywords), RunState.now(self._devices))
            )

    def wants(self, layer: str) -> bool:
        """Whether a call has to be looked at: not that of a container whose layers were called."""
        watched = self._watched[layer]
        if watched.rule is not None:
            return True
        if layer:
            self.module_ends(layer)
        if watched.parameters:
            return True
        return any(map(bool, self._unaccounted(watched)))

    def _unaccounted(self, watched: Watched) -> tuple[_Modules, _Modules]:
        """The modules whose weights a call used itself, and those called that it may use beside."""
        modules: _Modules = {id(watched.module): watched.parameters} if watched.parameters else {}
        suspects: _Modules = {}
        for layer, below in watched.below.items():
            if self._calls[layer]:
                if watched.reads_weights and below.rule is not None:
                    suspects[id(below.module)] = below.parameters
            elif not any(
                self._calls[each]
                for name in below.parameters.values()
                for each in self._homes[name]
            ):
                modules[id(below.module)] = below.parameters
        return modules, suspects

    def take_light(
        self,
        layer: str,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: Tensor,
    ) -> Record | None:
        """Take in a call the short way; returns what listens for the gradient of its output."""
        watched = self._watched[layer]
        if watched.rule is None or keywords or len(arguments) != 1:
            return None
        record = self._new_record(watched, arguments[0])
        self._watch_broadcast(record, output)
        return record

    def _watch_broadcast(self, target: Record | OwnerCall, output: Tensor) -> None:
        """Look for the addition that spreads an output over a batch that it does not have."""
        model = self._grid_of(target.stack)
        if model is None or model[0] == 1 or not output.requires_grad:
            return
        without = (
            output.shape[0] == 1
            if output.ndim == 3
            else (output.ndim == 2 and output.shape[0] not in (model[0], model[0] * model[1]))
        )
        if without and current_backward() == NO_BACKWARD:
            self.broadcasts.watch(output, target.spread)

    def called(
        self,
        call: CallKey,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
    ) -> None:
        """Take in a call with its arguments; again when a reentrant checkpoint runs it again."""
        watched, earlier = self._watched[call.layer], self._by_call.get(call)
        if watched.rule is None:
            self._owner_called(watched, call, arguments, keywords, output)
            return
        tensors = tuple(each.tensor for each in flatten_arguments(arguments, keywords))
        x = tensors if watched.rule is rules.bilinear else tensors[0]
        if isinstance(earlier, Record):
            self._keep_input(earlier, x)
        else:
            record = self._by_call[call] = self._new_record(watched, x)
            self._watch_broadcast(record, flatten(output)[0].tensor)

    def _owner_called(
        self,
        watched: Watched,
        call: CallKey,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
    ) -> None:
        if not flatten_arguments(arguments, keywords):
            return  # it makes something of its parameters alone, which the module above uses
        earlier = self._by_call.get(call)
        if earlier is None:
            self._calls[call.layer] += 1
        modules, suspects = self._unaccounted(watched)
        if not modules and not suspects:
            return
        run = earlier.axis.run if isinstance(earlier, OwnerCall) else self._run
        recorded = torch.is_grad_enabled()
        outputs = flatten(output)
        if recorded and self._waits_for_replay():
            recorded = False
        if not recorded:
            output = ()
        self._by_call[call] = OwnerCall(
            watched.layer,
            watched.module,
            modules,
            arguments if recorded else (),
            keywords if recorded else {},
            output,
            self._states.get(call.layer),
            Axis(run, watched.stack, (0, 0)),
            self._grid_of(watched.stack),
            self._padding.current(),
            self._memories if watched.stack == "decoder" else (),
            suspects,
        )
        if len(outputs) == 1:
            self._watch_broadcast(self._by_call[call], outputs[0].tensor)

    def _new_record(self, watched: Watched, x: Any) -> Record:
        if not self._running and (self._calls[watched.layer] or self._has_gone_back):
            self._new_pass()  # called by itself, outside of any module
        mask = self._padding.current()
        record = Record(watched, self._run, self._grid_of(watched.stack), mask, self.arrived)
        if watched.rule in rules.STATEFUL:
            record.settings = rules.settings_of(watched.module)
        self._calls[watched.layer] += 1
        self._records.append(record)
        for name in watched.parameters.values():
            self._records_of[name].append(record)
        self._keep_input(record, x)
        if watched.stack == "encoder":
            self._encoder_mask = mask
        elif watched.stack and any(each() is x for each in self._memories):
            record.stack, record.mask = "encoder", self._encoder_mask
        return record

    def _keep_input(self, record: Record, x: Any) -> None:
        """Keep what a call reads, by reference: autograd itself keeps it for the weight."""
        if not torch.is_grad_enabled():  # a checkpoint's first pass, or nothing will come back
            return
        if isinstance(x, tuple):
            record.x, record.version = tuple(each.detach() for each in x), x[0]._version
            return
        if self._waits_for_replay():
            record.is_replayed = True
            self._watch_replay(record.watched)
            return
        if self._is_last(x):
            assert self._last is not None
            record.x, record.version = self._last[1], self._last[1]._version  # q, k and v share it
            record.strides = x.stride() if x.ndim == 4 else ()
            return
        kept: Tensor = x.detach() if x.requires_grad else x
        if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
            kept = self._as_multiplied(record.watched.rule, kept)
        record.x, record.strides = kept, x.stride() if x.ndim == 4 else ()
        if not x.is_inference():
            record.version = kept._version
            if kept.dtype == x.dtype or record.watched.rule in rules.AUTOCAST:
                self._last = (weakref.ref(x), kept, x._version)

    def _is_last(self, x: Tensor) -> bool:
        """Whether the call before read the same tensor."""
        last = self._last
        return last is not None and last[0]() is x and last[2] == x._version

    def _watch_replay(self, watched: Watched) -> None:
        """Have a module's calls noticed that a checkpoint makes again in the backward pass."""
        if watched.layer not in self._watching_replays:
            self._watching_replays.add(watched.layer)
            hook = Hook(partial(self.replayed, watched.layer))
            handle = watched.module.register_forward_pre_hook(hook, with_kwargs=True)
            self.handles.append(handle)

    def _waits_for_replay(self) -> bool:
        """Whether a checkpoint will compute this call again: nothing of it has to be kept."""
        return not self._keeps_factors and current_backward() == NO_BACKWARD and runs_checkpoint()

    def _as_multiplied(self, rule: object, x: Tensor) -> Tensor:
        """The input in the dtype in which autocast lets a layer multiply it."""
        return x.to(torch.get_autocast_dtype(x.device.type)) if rule in rules.AUTOCAST else x

    def replayed(self, layer: str, *call: Any) -> None:
        """Keep an input that a checkpoint computes again, until its gradient comes: last first."""
        if current_backward() != NO_BACKWARD and torch.is_grad_enabled():
            x = flatten_arguments(call[1], call[2])[0].tensor
            if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
                x = self._as_multiplied(self._watched[layer].rule, x)
            self._replayed[layer].append(x.detach())

    # -- backward ----------------------------------------------------------------------------

    def arrived(self, record: Record, gradient: Tensor, backward: int) -> None:
        """Keep or reduce the gradient of a call's output; nothing raised here may pass."""
        try:
            if (
                record.is_replayed
                or self._parked
                or torch.is_autocast_enabled(gradient.device.type)
            ):
                self._arrived(record, gradient, backward)
            else:
                self._take_in(record, gradient, backward)
        except Exception as error:
            self.failed(record.watched.layer, error, backward=True)

    def _backward_is_over(self, backward: int) -> None:
        """Read the gradients as the backward pass left them: they may be changed later."""
        self.checks.backward_is_over()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.versions[name] = parameter.grad._version

    def received(self, name: str) -> bool:
        """Whether a gradient came to a parameter, or to a layer that it belongs to."""
        return self.checks.received(name) or any(
            layer in self._received for layer in self._homes[name]
        )

    def is_narrow(self, name: str) -> bool:
        """Whether its gradients came in 16 bits."""
        return any(layer in self.narrow for layer in self._homes[name])

    def _arrived(self, record: Record, gradient: Tensor, backward: int) -> None:
        with without_autocast(gradient):
            if self._parked:
                self._unpark()
            if record.is_replayed and record.x is None and not self._take_replayed(record):
                self._parked.append(record)  # the last layer's gradient comes before the replay
                record.g, record.backward = gradient.detach(), backward
                self.at_end(self._finish)
                return
            self._take_in(record, gradient, backward)

    def _take_replayed(self, record: Record) -> bool:
        """Give a record the input that a checkpoint computed again; the last one comes first."""
        waiting = self._replayed[record.watched.layer]
        if not waiting:
            return False
        record.x = waiting.pop()
        record.version = record.x._version
        if record.x.ndim == 4:
            record.strides = record.x.stride()
        return True

    def _unpark(self) -> None:
        """Finish the records whose replay is over: another gradient has come since."""
        parked, self._parked = self._parked, []
        for record in parked:
            if not self._take_replayed(record):
                self._parked.append(record)
                continue
            gradient, record.g = record.g, None
            assert gradient is not None
            self._take_in(record, gradient, record.backward)

    def _take_in(self, record: Record, gradient: Tensor, backward: int) -> None:
        if gradient.requires_grad:
            gradient = gradient.detach()
        layer = record.watched.layer
        self._received.add(layer)
        self._has_gone_back = True
        if gradient.itemsize < 4:
            self.narrow.add(layer)
        if record.is_spread:
            gradient = record.before_broadcast(gradient)
        if record.watched.rule is rules.convolution:
            gradient = record.without_tail(gradient)
        if record.g is not None and record.backward != backward:
            gradient = record.g + gradient
        elif record.shape and record.g is None:
            raise InspectionError(
                f"A second backward pass went through the same call of {layer!r}, and of the "
                "first only norms were kept. Write token_gradients(..., keep='factors')."
            )
        record.g, record.shape, record.backward = gradient, tuple(gradient.shape), backward
        if self._keeps_factors:
            self._count(record)
        elif record.watched.is_shared or self._calls[layer] > 1:
            self.at_end(self._finish)
        else:
            record.check_input()
            reduce = REDUCERS.get(record.watched.rule, terms)  # type: ignore[arg-type]
            record.numbers = reduce(record, gradient, self.checks, self._x_numbers)
            record.x = record.g = None

    def _count(self, record: Record) -> None:
        """Add what a record keeps to the bill; beyond the limit it is let go."""
        before = self.bytes
        for tensor in (record.g, *(record.x if isinstance(record.x, tuple) else (record.x,))):
            if tensor is not None and tensor.untyped_storage().data_ptr() not in self._stored:
                self._stored.add(tensor.untyped_storage().data_ptr())
                self.bytes += tensor.untyped_storage().nbytes()
        if self.bytes > self._max_bytes:
            layer = record.watched.layer
            needed = self.bytes - before
            error = MemoryLimitError(layer, needed, before, self._max_bytes, _LESS)
            for name in record.watched.parameters.values():
                self.reasons.setdefault(name, error)
            record.x = record.g = None

    def _finish(self, backward: int) -> None:
        """At the end of a backward pass: run owners again, and reduce what had to wait."""
        self._unpark()
        self.checks.backward_is_over()
        parts: dict[str, list[Part]] = defaultdict(list)
        for record in self._records if not self._keeps_factors else ():
            if record.g is None:
                continue
            try:
                for key, part in record.parts().items():
                    parts[record.watched.parameters[key]].append(part)
            except Exception as error:  # these parameters say why they are missing, no others
                self.failed(record.watched.layer, error, backward=True)
            record.x = record.g = None
        self._run_owners_again(parts)
        if self._keeps_factors:
            for name, several in parts.items():
                self._parts[name] += several
        else:
            self._reduce(parts)

    def _run_owners_again(self, parts: dict[str, list[Part]]) -> None:
        owners, self._owners = self._owners, []
        for owner in owners:
            self._run_again(owner, owner.names, parts)
        # A module that is called may be read beside that (a head tied by hand): the innermost
        # module whose code mentions its weight accounts for what the calls do not.
        for owner in sorted(owners, key=lambda each: -each.layer.count(".")):
            for name in owner.suspects:
                if self._is_incomplete(name, parts.get(name, ())):
                    self._run_again(owner, {name}, parts, beside_calls=True)

    def _run_again(
        self,
        owner: OwnerCall,
        names: set[str],
        parts: dict[str, list[Part]],
        beside_calls: bool = False,
    ) -> None:
        wanted = {
            name: self._parameters[name]
            for name in names
            if self.received(name) and name not in self.reasons
        }
        if not wanted:
            return
        replays = self._replayed_owners.get(owner.layer)
        if replays and owner.has_no_arguments:
            owner.take_arguments(*replays.pop())
        try:
            found = owner.parts(wanted, beside_calls)
        except Exception as error:  # not the user's fault: these parameters say why
            reason = f"running it again failed: {error}"
            if not isinstance(error, UnsupportedLayerError):
                error = UnsupportedLayerError(next(iter(wanted)), owner.layer, reason)
            if beside_calls:  # its calls are counted; what else it is used for is not
                self.noted(owner.layer, str(error))
            else:
                self.reasons.update(dict.fromkeys(wanted, error))
            return
        self.reasons.update(found.unsupported)
        for name, several in found.parts.items():
            parts[name] += several
            if any(dtype_of(term).itemsize < 4 for part in several for term in part.terms or ()):
                self.narrow.update(self._homes[name])

    def _is_incomplete(self, name: str, waiting: Sequence[Part]) -> bool:
        """Whether the calls of a parameter's modules do not account for its gradient."""
        brought = self.checks.brought(name)
        if brought is None:
            return False
        found = [*waiting, *self.parts(name)]
        probes = [self._probes(name, part) for part in found]
        if not probes:
            return True
        total = sum((each.double().sum() for each in probes), start=torch.zeros_like(brought))
        scale = max(float(brought.abs()), *(float(each.double().norm()) for each in probes))
        return float((total - brought).abs()) > 1e-2 * scale

    def _probes(self, name: str, part: Part) -> Tensor:
        if part.probes is not None:
            return part.probes()
        assert part.terms is not None
        like = torch.empty(0, dtype=dtype_of(part.terms[0]), device=device_of(part.terms[0]))
        return probe(part.terms, self._infos[name].shape, self.checks.vectors(name, like))

    def _reduce(self, parts: Mapping[str, Sequence[Part]]) -> None:
        for name, several in parts.items():
            axes: dict[Axis, list[Part]] = defaultdict(list)
            for part in several:
                axes[part.axis].append(part)
            for axis, same in axes.items():
                found = [term for part in same for term in part.terms or ()]
                rule = " + ".join(dict.fromkeys(part.rule for part in same))
                numbers = reduced_terms(found, name, self.checks)
                self._parts[name].append(Part(axis, rule, same[0].mask, None, *numbers))

    # -- the sink's other half -----------------------------------------------------------------

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Nothing: outputs are not kept."""

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        """Take in the gradient of an output that came the long way."""
        found = self._by_call.get(call)
        if isinstance(found, Record):
            if gradient is not None:
                self._arrived(found, gradient, backward)
        elif isinstance(found, OwnerCall):
            found.gradients[path] = gradient
            for name in found.names:
                if hasattr(self._parameters[name], "to_local"):  # no hook fires on a shard
                    self._received.update(self._homes[name])
            if found not in self._owners:
                self._owners.append(found)
            self.at_end(self._finish)

    def parameter(self, layer: str, what: str, name: str, tensor: Tensor, backward: int) -> None:
        """Never called: parameters have hooks of their own."""

    def missed(self, layer: str, what: str, reason: str) -> None:
        """Note why the parameters of a layer have no token gradients."""
        for name in self._watched[layer].parameters.values():
            self.reasons.setdefault(name, UnsupportedLayerError(name, layer, reason))

    def noted(self, layer: str, text: str) -> None:
        """Note a reservation about a layer."""
        layers = self.notes.setdefault(text, [])
        if layer and layer not in layers:
            layers.append(layer)

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """A failure of ours never ends the user's pass: the parameters say why they are missing."""
        watched = self._watched.get(layer)
        names = list(watched.parameters.values()) if watched is not None else list(self._infos)
        for name in names:
            self.reasons.setdefault(name, error)

    # -- the result --------------------------------------------------------------------------

    def parts(self, name: str) -> list[Part]:
        """All parts of a parameter."""
        found = list(self._parts.get(name, ()))
        for record in self._records_of.get(name, ()):
            keys = [key for key, each in record.watched.parameters.items() if each == name]
            parts = record.reduced_parts()
            if parts is None and record.g is not None:
                parts = record.parts()
            found += [parts[key] for key in keys if key in parts] if parts else []
        return found

    def forget(self) -> None:
        """Let go of everything that only the passes themselves need."""
        self._by_call.clear()
        self._replayed.clear()
        self._replayed_owners.clear()
        self._states.clear()
        self._memories.clear()
        self._last = None
        self._x_numbers.forget()
