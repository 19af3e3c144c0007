"""Hooks on modules that hand what they see to a sink, and that are always removed.

Inspections, Monitors, token gradients, scans and routing capture with it. Three kinds of hook, all
chosen because they leave the numerics of the model bit-identical: forward hooks on modules (inputs,
activations), tensor hooks on outputs and parameters (dL/d output, dL/d parameter) and node hooks on
the autograd graph (dL/d input through one call). No backward hook of a module is used: it raises
beside in-place operations.

A tap knows nothing of statistics or storage: it calls a `Sink`. Calls and gradients are paired by
`CallKey`, never by the order in which they come. `_ShortHook` and `after` run at every call of a
watched layer: they are long for the sake of speed, so measure before you tidy them.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchfmri._capture.gradient_listeners import (
    BaseOfView,
    InputGradient,
    OutputGradient,
    ParameterGradient,
    ReturnedInputGradient,
)
from torchfmri._torch import (
    NO_BACKWARD,
    Aside,
    Attached,
    Backwards,
    Element,
    Hook,
    HookSet,
    InputEdge,
    OutputHooks,
    consumers,
    current_backward,
    flatten,
    flatten_arguments,
    is_transformed,
    node_sequence_number,
    sequence_number,
)
from torchfmri.exceptions import InspectionError

_COMPILED = (
    "gradients cannot be told apart: compiled autograd was enabled after the forward pass. Enable "
    "it before the model is called."
)


class CallKey(NamedTuple):
    """One execution of a module: its layer and how many calls came before."""

    layer: str
    number: int


class Target(NamedTuple):
    """A module to tap, under its first name, and what to capture there."""

    layer: str
    module: nn.Module
    what: frozenset[str]


Arguments: TypeAlias = tuple[object, ...]
Keywords: TypeAlias = Mapping[str, object]
Called: TypeAlias = Callable[[CallKey, Arguments, Keywords, object], None]


class Short(NamedTuple):
    """A fast path for layers whose calls return one tensor of their own, as most do.

    Attributes:
        modules: The layers.
        owners: Id of a module -> what `take` and `target` get for it.
        take: Takes an owner, arguments, keywords and output; returns what `arrived` is told of the
            call, or None if it has to go the long way, on which `wanted` is asked.
        arrived: Takes that, and the gradient of the output; None if autograd knows that it is
            zero. It may not raise.
        target: The target of an owner, for the long way.
    """

    modules: Sequence[nn.Module]
    owners: Mapping[int, Any]
    take: Callable[[Any, Arguments, Keywords, Tensor], Any]
    arrived: Callable[[Any, Tensor | None], None]
    target: Callable[[Any], Target]


class Sink(Protocol):
    """The receiver of captured tensors. They are live: read or copy them at once.

    A subclass inherits methods that do nothing for what it does not ask its taps for; what was
    missed and what failed it must take.
    """

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Take the inputs or activations of a call, even if only their gradients are wanted."""

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        """Take dL/d of an element that `values` got under this path; None withdraws one."""
        return

    def parameter(self, layer: str, what: str, name: str, tensor: Tensor, backward: int) -> None:
        """Take a parameter, or the gradient that one backward pass brought to it."""
        return

    @abstractmethod
    def missed(self, layer: str, what: str, reason: str) -> None:
        """Take note of what was asked for and could not be captured."""

    def noted(self, layer: str, text: str) -> None:
        """Take note of a reservation about what was captured."""
        return

    @abstractmethod
    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """Take an error of the sink or the tap; raise it again only outside of a backward pass."""


class Taps(Attached):
    """The hooks of one recording, as a context manager: attached on entry, gone on exit.

    Args:
        targets: The modules to tap that have no short way.
        sink: What receives the tensors.
        wanted: Asked at each call of a layer; where it answers False nothing of that call is
            captured.
        short: The short way of others.
        called: Handed each call on the long way with its arguments, before its activations; a call
            that a reentrant checkpoint runs again is handed over again.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        sink: Sink,
        wanted: Callable[[str], bool] | None = None,
        short: Short | None = None,
        called: Called | None = None,
    ) -> None:
        self._backwards = Backwards(partial(sink.failed, "", backward=True))
        self._hooks = HookSet()
        self._targets, self._short = list(targets), short
        self._outputs: list[OutputHooks] = []
        self._sink, self._wanted, self._called = sink, wanted, called
        self._taps: dict[str, _Tap] = {}  # where there is a short way, of the layers that need one

    def _attach(self, stack: ExitStack) -> None:
        stack.callback(self.detach)
        for target in self._targets:
            self.tap(target).attach(self._hooks)
        if self._short is not None:
            hook = _ShortHook(self._short, self.tap, self._lost)
            self._outputs = [hook.outputs, hook.views]
            self._hooks.after(self._short.modules, hook)

    def _lost(self) -> None:
        self._sink.failed("", InspectionError(_COMPILED), backward=True)

    def tap(self, target: Target) -> _Tap:
        """Return the tap of a layer, which handles every kind of call."""
        tap = self._taps.get(target.layer)
        if tap is None:
            tap = _Tap(target, self._sink, self._backwards, self._wanted, self._called)
            self._taps[target.layer] = tap
        return tap

    def detach(self) -> None:
        """Remove every hook; safe to call twice."""
        self._hooks.remove()
        while self._outputs:
            self._outputs.pop().remove()
        for tap in self._taps.values():
            tap.detach()
        self._backwards.forget()

    def at_end_of_backward(self, act: Callable[[int], None]) -> None:
        """Have `act(backward)` called when the running backward pass is over, once."""
        self._backwards.at_end(self._backwards.current(), act)

    def next_step(self) -> None:
        """Forget the graph of the step that is over, and number calls from 0 again."""
        for tap in self._taps.values():
            tap.next_step()
        for outputs in self._outputs:
            outputs.forget()
        self._backwards.forget()


@dataclass(slots=True)
class _Frame:
    """What the pre-hook of a call leaves for its forward hook."""

    call: CallKey | None  # None: a replay of a checkpointed call
    start: int = 0
    edges: Sequence[InputEdge] = ()


@dataclass(slots=True)
class _Unrecorded:
    """A call that ran without autograd: its gradients may come from a checkpoint's replay."""

    call: CallKey
    fingerprint: float
    replayed_in: int = NO_BACKWARD


_LOCK = threading.Lock()


class _Tap:
    """The hooks on one module."""

    def __init__(
        self,
        target: Target,
        sink: Sink,
        backwards: Backwards,
        wanted: Callable[[str], bool] | None = None,
        called: Called | None = None,
    ) -> None:
        self._layer, self._what = target.layer, target.what
        self._wanted, self._called = wanted, called
        self._module = weakref.ref(target.module)
        self._sink = sink
        self._backwards = backwards
        self._wants_gradients = "gradients" in self._what
        self._wants_input_gradients = "input_gradients" in self._what
        self._count = 0
        self._frames: dict[int, list[_Frame]] = {}
        self._unrecorded: list[_Unrecorded] = []
        self._handles: list[Any] = []  # on the module's parameters
        self._shards: dict[str, nn.Parameter] = {}  # those that FSDP will put whole ones in for
        self._passing: list[Any] = []  # on tensors and nodes of the graph of this step

    def failed(self, error: Exception) -> None:
        """Tell the sink of an error in the forward pass."""
        self._sink.failed(self._layer, error, backward=False)

    def _failed_backward(self, error: Exception) -> None:
        self._sink.failed(self._layer, error, backward=True)

    # -- attaching ---------------------------------------------------------------------------

    def attach(self, hooks: HookSet) -> None:
        """Put on the hooks that the wanted tensors need, and no other."""
        module = self._module()
        assert module is not None
        if isinstance(module, torch.jit.ScriptModule):
            reason = "a scripted module takes no hooks: inspect the eager module it was made from"
            self._sink.missed(self._layer, "", reason)
            return
        self._attach_parameters(module)
        if "parameter_gradients" in self._what:
            for act in (self._backwards.notice, self._listen_to_gathered):
                self._handles.append(module.register_forward_pre_hook(Hook(act, module)))
        if not self._what - {"parameters", "parameter_gradients"}:
            return
        framed = bool(self._what & {"inputs", "input_gradients"})
        if framed:
            hooks.before((module,), Hook(self._before, module, self.failed))
        # Always: after an exception that somebody catches, what was begun must end too.
        hooks.after((module,), Hook(self.after, module, self.failed), always=True)

    def detach(self) -> None:
        self.next_step()
        while self._handles:
            self._handles.pop().remove()
        self._shards.clear()

    def next_step(self) -> None:
        while self._passing:
            self._passing.pop().remove()
        self._frames.clear()
        self._unrecorded.clear()
        self._count = 0

    def _attach_parameters(self, module: nn.Module) -> None:
        watched = self._what & {"parameters", "parameter_gradients"}
        if not watched:
            return
        own = {name: each for name, each in module._parameters.items() if each is not None}
        if not own:
            below = any(True for _ in module.parameters())
            hint = ": watch the layers below it" if below else ""
            for what in sorted(watched):
                self._sink.missed(self._layer, what, f"has no parameters of its own{hint}")
        for name, parameter in own.items():
            lazy = bool(is_lazy(parameter))
            if lazy:
                for what in sorted(watched):
                    self._sink.missed(self._layer, what, f"{name} has no values yet: it is lazy")
                continue
            if "parameters" in watched:
                self._read_parameter(name, parameter)
            if "parameter_gradients" in watched and parameter.requires_grad:
                self._listen_to_parameter(name, parameter)

    def _listen_to_parameter(self, name: str, parameter: nn.Parameter) -> None:
        listener = ParameterGradient(self._backwards, partial(self._emit_parameter, name))
        hook = Hook(listener.arrived, failed=self._failed_backward)
        self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        if hasattr(parameter, "to_local"):
            self._shards[name] = parameter

    def _listen_to_gathered(self, module: nn.Module, arguments: object) -> None:
        """Listen to what FSDP (`fully_shard`) puts in the place of its shards for a forward pass.

        The graph ends there, so that no gradient arrives at the shard while it runs.
        """
        for name, shard in list(self._shards.items()):
            parameter = module._parameters.get(name)
            if parameter is not None and parameter is not shard and parameter.requires_grad:
                del self._shards[name]  # FSDP keeps this tensor, and gathers into it again
                self._listen_to_parameter(name, parameter)
                self._sink.noted(
                    self._layer,
                    "is sharded: its parameter gradients are whole, and those of this process, "
                    "before they are averaged",
                )

    def _read_parameter(self, name: str, parameter: nn.Parameter) -> None:
        try:
            self._sink.parameter(self._layer, "parameters", name, parameter.detach(), NO_BACKWARD)
        except Exception as error:
            self.failed(error)

    def _listen(self, tensor_or_node: Any, act: Callable[..., None]) -> None:
        hook = Hook(act, failed=self._failed_backward)
        self._passing.append(tensor_or_node.register_hook(hook))

    # -- forward -----------------------------------------------------------------------------

    def _new_frame(self) -> _Frame:
        if current_backward() != NO_BACKWARD:
            return _Frame(None)
        with _LOCK:
            self._count += 1
            return _Frame(CallKey(self._layer, self._count - 1))

    def _before(
        self, module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        if self._wanted is not None and not self._wanted(self._layer):
            return
        frame = self._new_frame()
        frame.start = sequence_number()
        self._frames.setdefault(threading.get_ident(), []).append(frame)
        elements = self._readable("inputs", flatten_arguments(arguments, keywords))
        if self._wants_input_gradients and torch.is_grad_enabled():
            frame.edges = [InputEdge(*each) for each in elements if each.tensor.requires_grad]
        if frame.call is not None:
            self._sink.values(frame.call, "inputs", elements)

    def after(
        self,
        module: nn.Module,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
    ) -> None:
        """Take in a call that is over."""
        if self._wanted is not None and not self._wanted(self._layer):
            return
        frames = self._frames.get(threading.get_ident()) if self._frames else None
        frame = frames.pop() if frames else self._new_frame()
        elements = self._readable("activations", flatten(output))
        if not elements:
            if output is not None and frame.call is not None and frame.call.number == 0:
                reason = f"returned a {type(output).__name__} that holds no tensor"
                self._sink.missed(self._layer, "activations", reason)
            return
        call = frame.call
        if call is not None:
            if self._called is not None:
                self._called(call, arguments, keywords, output)
            self._sink.values(call, "activations", elements)
        if not self._wants_gradients and not self._wants_input_gradients:
            return
        if call is None:  # a replay: not a call of its own, but it may carry the gradients of one
            call = self._replayed_call(elements)
            if call is None:
                return
            if self._called is not None:
                self._called(call, arguments, keywords, output)
        elif self._backwards.is_checkpointed():
            self._unrecorded.append(_Unrecorded(call, _fingerprint(elements)))
        if self._wants_gradients:
            self._tap_outputs(module, call, elements, arguments, keywords)
        if frame.edges:
            inputs = flatten_arguments(arguments, keywords)
            self._tap_inputs(module, call, frame, elements, inputs)

    def _readable(self, what: str, elements: list[Element]) -> list[Element]:
        """Return the elements that can be read afterwards; the others are reported."""
        for element in elements:
            if is_transformed(element.tensor):
                reason = "ran inside torch.func (vmap, grad): its tensors end with it"
                self._sink.missed(self._layer, what, reason)
                return [each for each in elements if not is_transformed(each.tensor)]
        return elements

    def _replayed_call(self, elements: list[Element]) -> CallKey | None:
        """Return the earlier call that a checkpoint recomputes, if it ran without autograd."""
        if not torch.is_grad_enabled():
            return None
        backward = self._backwards.current()
        waiting = [each for each in self._unrecorded if each.replayed_in != backward]
        if len(waiting) > 1:
            fingerprint = _fingerprint(elements)
            equal = [each for each in waiting if each.fingerprint == fingerprint]
            if not equal:
                self._note(
                    "reentrant checkpointing recomputed other values than the first pass: "
                    "gradients are matched to calls by order"
                )
            waiting = equal or waiting
        if not waiting:
            return None
        waiting[-1].replayed_in = backward  # segments are recomputed last first
        return waiting[-1].call

    # -- gradients ---------------------------------------------------------------------------

    def _tap_outputs(
        self,
        module: nn.Module,
        call: CallKey,
        elements: list[Element],
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> None:
        """Listen for the gradients of what a call returned."""
        for path, tensor in elements:
            if not tensor.requires_grad:
                continue
            base = tensor._base
            watched = None
            if base is not None:
                tensor.grad_fn  # noqa: B018  read first: hooking a stale view crashes (pytorch #196459)
            if base is not None and not base.is_leaf:
                inputs = flatten_arguments(arguments, keywords)
                watched = self._base_of(module, tensor, "gradients", [*inputs, *elements])
            where = (self._sink, call, "gradients", path)
            listener = OutputGradient(*where, self._backwards, self._failed_backward, watched)
            self._passing.append(tensor.register_hook(listener))  # type: ignore[no-untyped-call]
            if watched is not None:
                self._listen(base, listener.arrived_at_base)
            if _is_among(tensor, arguments, keywords) and not getattr(module, "inplace", False):
                self._note("returns its input: other readers of that tensor are included")
            several = call.number == 0 and len(elements) > 1
            if several and _is_read_by_others(path, tensor, elements):
                self._note("reads what it returns: gradients include the readers inside the module")

    def _base_of(
        self, module: nn.Module, view: Tensor, what: str, seen: list[Element]
    ) -> BaseOfView:
        """Return a watch on the base of a view, and whether others read that base, too."""
        base = view._base
        sharing = {id(each) for _, each in seen if each is base or each._base is base}
        plain = type(module).__module__.startswith("torch.nn.modules")
        repeated = sum(each is view for _, each in seen) > 1  # among the inputs and the outputs
        return BaseOfView(
            view,
            shared=len(sharing) > 1 or not plain,
            is_read_through_memory=repeated and bool(getattr(module, "inplace", False)),
            note=self._note,
            missed=partial(self._sink.missed, self._layer, what),
        )

    def _tap_inputs(
        self,
        module: nn.Module,
        call: CallKey,
        frame: _Frame,
        outputs: list[Element],
        inputs: list[Element],
    ) -> None:
        """Listen for the gradient of each input, through this call only.

        An input that is returned as it is has no node of this call: its gradient is that of the
        output, less what readers before the call sent. Any other has one node per reader here.
        """
        if len({edge.key for edge in frame.edges}) < len(frame.edges):
            self._note("takes one tensor as several inputs: each has the gradient of all of them")
        ends = _nodes([*outputs, *_kept_by(module)])
        for edge in frame.edges:
            emit = partial(self._emit, call, "input_gradients", edge.path)
            returned = [each.tensor for each in outputs if edge.is_of(each.tensor)]
            if returned:  # what arrives at the output arrives at the input
                passed = ReturnedInputGradient(self._backwards, emit)
                earlier = consumers(edge, _nodes(inputs), edge.created, frame.start)
                for node, slots in earlier.items():
                    self._listen(node, passed.listener(slots))
                self._listen(returned[0], passed.arrived)
                whole = returned[0]._base
                if whole is not None and not whole.is_leaf:
                    seen = [*inputs, *outputs]
                    base = self._base_of(module, returned[0], "input_gradients", seen)
                    self._listen(whole, passed.returned_view(base))
                continue
            found = consumers(edge, ends, frame.start)
            expected = sum(len(slots) for slots in found.values())
            listener = InputGradient(edge.geometry, expected, self._backwards, emit)
            for node, slots in found.items():
                self._listen(node, listener.listener(slots))
            views = [each.tensor for each in outputs if edge.lies_in(each.tensor._base)]
            if expected == 1 and len(views) == 1:
                base = self._base_of(module, views[0], "input_gradients", [*inputs, *outputs])
                self._listen(views[0]._base, listener.returned_view(base))

    def _emit(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        found = None if gradient is None else gradient.detach()
        self._sink.gradient(call, what, path, found, backward)

    def _emit_parameter(self, name: str, gradient: Tensor, backward: int) -> None:
        what = "parameter_gradients"
        self._sink.parameter(self._layer, what, name, gradient.detach(), backward)

    def _note(self, text: str) -> None:
        self._sink.noted(self._layer, text)


class _ShortHook(Hook):
    """The forward hook of all layers that have a fast path.

    Everything is written out here: this runs at every call, and never in warm caches.

    Attributes:
        outputs: The hooks on outputs.
        views: The hooks on the bases of outputs that are views.
    """

    __slots__ = ("_owners", "_short", "_take", "_tap", "outputs", "views")

    def __init__(
        self, short: Short, tap: Callable[[Target], _Tap], lost: Callable[[], None]
    ) -> None:
        super().__init__(None)
        self._short, self._tap = short, tap
        self._owners, self._take = short.owners, short.take
        self.outputs = OutputHooks(short.arrived, lost)
        self.views = OutputHooks(partial(_reshaped, short.arrived), lost)

    def __call__(
        self, module: nn.Module, arguments: Arguments, keywords: Keywords, output: object
    ) -> None:
        owner = self._owners.get(id(module))
        if owner is None:  # a copy of a module
            return
        try:
            if (
                type(output) is Tensor
                and (node := output.grad_fn) is not None
                and ((base := output._base) is None or _is_own_view(module, output, base))
                and not (arguments and arguments[0] is output)
                and current_backward() == NO_BACKWARD
                and not is_transformed(output)
            ):
                with Aside():
                    call = self._take(owner, arguments, keywords, output)
                if call is not None:
                    if base is None:
                        self.outputs.add(output, node, call)
                    else:  # once somebody writes into the view, its own node is bypassed
                        self.views.add(base, base.grad_fn, (call, output.shape))
                    return
            with Aside():
                self._tap(self._short.target(owner)).after(module, arguments, keywords, output)
        except Exception as error:
            self._tap(self._short.target(owner)).failed(error)


def _is_own_view(module: nn.Module, view: Tensor, base: Tensor) -> bool:
    """Whether the module made the view: all of its base in the same order.

    A hook of the user's may return another one.
    """
    return (
        _makes_view(type(module))  # type: ignore[arg-type]
        and view.numel() == base.numel()
        and view.is_contiguous()
        and base.is_contiguous()
        and view.storage_offset() == base.storage_offset()
    )


@lru_cache(maxsize=4096)
def _makes_view(kind: Any) -> bool:
    """Whether a module returns what it computed as a view of another shape, if it returns a view.

    A Linear with a bias computes a matrix, and returns it with the axes of its input.
    """
    if kind.forward is nn.Linear.forward:
        return True
    forward = kind.forward
    return (forward.__module__, forward.__qualname__) == (
        "transformers.pytorch_utils",
        "Conv1D.forward",
    )


def _reshaped(
    arrived: Callable[[Any, Tensor | None], None],
    call: tuple[Any, torch.Size],
    gradient: Tensor | None,
) -> None:
    arrived(call[0], None if gradient is None else gradient.reshape(call[1]))


def _nodes(elements: list[Element]) -> list[Any]:
    """Return the nodes that made these tensors."""
    nodes = [each.tensor.grad_fn for each in elements if each.tensor.requires_grad]
    return [node for node in nodes if node is not None]


def _is_among(
    tensor: Tensor, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> bool:
    """Whether a tensor is one of the arguments of the call, not inside a container."""
    for argument in arguments:  # no generators: this runs at every call
        if argument is tensor:
            return True
    return any(tensor is each for each in keywords.values()) if keywords else False


def _is_read_by_others(path: str, tensor: Tensor, outputs: list[Element]) -> bool:
    """Whether another output of the same call was computed from this one."""
    others = _nodes([each for each in outputs if each.tensor is not tensor])
    nodes = [node for node in others if node is not tensor.grad_fn]
    if tensor.grad_fn is None or not nodes:
        return False
    # Whatever reads a tensor was created after what made it.
    return bool(consumers(InputEdge(path, tensor), nodes, node_sequence_number(tensor.grad_fn)))


def _kept_by(module: nn.Module) -> list[Element]:
    """Return the tensors that a module and those below it keep as attributes (auxiliary losses)."""
    return [
        element
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, (Tensor, tuple, list, dict)) and not name.startswith("_")
        for element in flatten(value)
        if element.tensor.requires_grad
    ]


def _fingerprint(elements: list[Element]) -> float:
    """Return a number that tells calls with different outputs apart."""
    tensor = elements[0].tensor.detach()
    if tensor.is_nested or tensor.layout != torch.strided or not tensor.numel():
        return 0.0
    return float(tensor.abs().sum(dtype=torch.float64))
