"""The layers of a compiled model, read inside its graph, so that it stays compiled.

Compiled code calls no hooks that were added after it. While a step is watched, the model is
compiled once more, with the settings that it was compiled with: hooks that are traced into the
graph write the numbers of each output into slots, and an identity function, which is in that graph
and nowhere else, those of its gradient. The user's own compiled code is neither used nor touched.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._capture import Target, TokenMask, masked_modules
from torchfmri._kernels import summaries
from torchfmri._model import StepCalls
from torchfmri._monitor.watched_step import StepSink, WatchedStep
from torchfmri._records import Series
from torchfmri._torch import (
    CompiledForward,
    HookSet,
    current_backward,
    flatten,
    is_compiled_in_place,
    is_compiler_error,
    uncompiled,
)

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_SEVERAL = "was called several times in a compiled pass; watched eagerly from the next step"
_tracing: list[Tensor | None] = []
"""While a step of ours runs or is traced: its mask. One list for all hooks, not one that each of
them refers to: torch would make sure before every call that it is the same one for all."""


class _Watched(torch.autograd.Function):
    """Its input, whose gradient is read on the way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor | None, slot: Tensor, number: int) -> Tensor:
        ctx.mask, ctx.slot, ctx.number = mask, slot, number
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _summarise(gradient, ctx.mask, ctx.slot, ctx.number)
        return gradient, None, None, None


def _summarise(values: Tensor, mask: Tensor | None, slot: Tensor, number: int) -> None:
    aligned = None if mask is None else TokenMask(mask != 0).align(values)
    if aligned is None:
        summaries.summarise(values, None, slot, number)
    else:
        summaries.summarise(*aligned, slot, number)


class CompiledCalls:
    """The watched calls of a compiled model.

    Args:
        calls: Of the model as the user calls it.
        targets: The layers.
        sink: Has the step that is watched.
        fall_back: Called where it cannot be compiled with the hooks in it; the model is then run
            as it was, with whatever is attached by then.

    Attributes:
        is_in_place: Whether the calls of the model were compiled: hooks on it would be traced.
        reason: Why this cannot be, or not go on after this step; "" as long as it can.
    """

    def __init__(
        self,
        calls: StepCalls,
        targets: Sequence[Target],
        sink: StepSink,
        fall_back: Callable[[], None],
    ) -> None:
        self._forward = CompiledForward(calls.model)
        self._inner = self._forward.inner
        self.is_in_place = self._inner is calls.model and is_compiled_in_place(calls.model)
        self._calls, self._targets, self._sink = calls, list(targets), sink
        self._fall_back = fall_back
        self._hooks: HookSet | None = None
        self._run: Callable[..., Any] | None = None
        self._ran = False
        self._labels: dict[str, list[summaries.Label | None]] = {}
        self._pending: WatchedStep | None = None  # whose gradients come
        self._backward: tuple[int, int] | None = None  # the pass, and the call that it came to
        self._number = 0  # of calls
        self.reason = self._find_reason()
        if not self.reason:
            device = next(self._inner.parameters()).device
            self._outputs = summaries.make_slots(len(self._targets), device)
            self._gradients = summaries.make_slots(len(self._targets), device)
            self._layer_hooks = [
                _make_hook(*slots) for slots in zip(self._outputs, self._gradients, strict=True)
            ]

    def _find_reason(self) -> str:
        devices = {each.device for each in self._inner.parameters()}
        takes_mask = masked_modules([self._inner])
        if not self._forward.known:
            return "how it was compiled is not known"
        if type(self._inner).__name__ in _WRAPPERS or hasattr(self._inner, "reshard"):
            return f"it is wrapped in {type(self._inner).__name__}"
        if len(devices) != 1 or not summaries.summarisable(next(iter(devices))):
            return "its parameters are on several devices, or on one without a kernel for it"
        if takes_mask and "decoder_input_ids" in _names(self._inner):
            return "it has two sequences, each with padding of its own"
        if not takes_mask and masked_modules(self._inner.modules()):
            return "a module inside it is handed the padding, and not the model"
        return ""

    # -- on and off --------------------------------------------------------------------------

    def attach(self) -> None:
        """Have the model's calls run our code."""
        if self._hooks is None:
            self._add_hooks()
            self._forward.put(self._call)

    def detach(self) -> None:
        """Have them run the user's compiled code again; safe to call twice."""
        if self._hooks is not None:
            self._forward.put_back()
            self._remove_hooks()
            if self._pending is not None:  # a step that is given up
                self._pending = None
                summaries.empty(self._gradients)

    def _add_hooks(self) -> None:
        self._hooks = HookSet()
        for target, hook in zip(self._targets, self._layer_hooks, strict=True):
            self._hooks.after([target.module], hook)

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    # -- a call ------------------------------------------------------------------------------

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        if not self._sink.wants_call():
            return self._call_unwatched(arguments, keywords)
        if not self.is_in_place:
            return self._call_watched(arguments, keywords)
        self._calls.enter(self._inner, arguments, keywords)
        output = None
        try:
            output = self._call_watched(arguments, keywords)
        finally:
            self._calls.leave(self._inner, arguments, keywords, output)
        return output

    def _call_unwatched(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run the user's code, which may be compiled just now: without our hooks on the layers."""
        self._remove_hooks()
        try:
            return self._forward.call(*arguments, **keywords)
        finally:
            self._add_hooks()

    def _call_watched(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if self._run is None:
            self._run = self._forward.compile(_make_step())
        mask = self._mask(arguments, keywords)
        try:
            output = self._run(self._forward.function, mask, arguments, keywords)
        except BaseException as error:
            summaries.empty(self._outputs)
            if self._ran or not is_compiler_error(error):
                raise
            self.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self._fall_back()
            return self._forward.call(*arguments, **keywords)
        finally:
            _tracing.clear()
        try:
            self._collect(self._outputs, "activations", self._sink.step)
            self._await_backward(output)
        except Exception as error:
            self._sink.failed("", error, backward=False)
        self._ran = True
        return output

    def _mask(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor | None:
        """The padding that the model is told of, (b, s)."""
        mask = keywords.get("attention_mask")
        names = _names(self._inner)
        if mask is None and "attention_mask" in names:
            mask = dict(zip(names, arguments, strict=False)).get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    # -- what it brought ---------------------------------------------------------------------

    def _collect(self, slots: list[summaries.Slot], what: str, step: WatchedStep | None) -> None:
        """Hand the numbers in the slots over, and empty them."""
        labels = summaries.take_labels(slots)
        numbers = summaries.combine(slots)
        if what == "activations" and not self._ran:
            self._find_unmet(labels)
        # A CUDA graph that runs again has the shapes that it had.
        known = self._labels.get(what, labels)
        labels = [new or old for new, old in zip(labels, known, strict=True)]
        self._labels[what] = labels
        series = [Series(each.layer, what) for each in self._targets]
        once = [self._met_once(*each) for each in zip(series, labels, strict=True)]
        if step is not None and step.wants(what):
            step.collector.add_summaries(series, once, numbers)

    def _find_unmet(self, labels: list[summaries.Label | None]) -> None:
        """Find out whether every layer was met."""
        names = [each.layer for each in self._targets]
        unmet = [name for name, label in zip(names, labels, strict=True) if label is None]
        if unmet:
            self.reason = f"{unmet[0]} was not met inside the compiled graph"

    def _met_once(self, series: Series, label: summaries.Label | None) -> summaries.Label | None:
        """Return the label, but None for a slot that was written several times: it has the last."""
        if label is None or label.calls == 1:
            return label
        self.reason = f"{series.layer} is called several times in a pass"
        self._sink.missed(series.layer, series.what, _SEVERAL)
        return None

    def _await_backward(self, output: object) -> None:
        """Have the gradients of this call collected before those of another one come.

        Several calls may be part of one backward pass, and each writes into the same slots.
        """
        step, self._number = self._sink.step, self._number + 1
        assert step is not None
        number = self._number

        def begins(_: Tensor) -> None:
            if (current_backward(), number) == self._backward and self._pending is step:
                return
            try:
                self.collect_gradients()
                self._backward, self._pending = (current_backward(), number), step
                step.read_scale()
            except Exception as error:
                self._sink.failed("", error, backward=True)

        for _, tensor in flatten(output):
            if tensor.requires_grad:
                tensor.register_hook(uncompiled(begins))  # type: ignore[no-untyped-call]

    def collect_gradients(self) -> None:
        """Hand over the gradients that the backward pass of a call has brought."""
        step, self._pending = self._pending, None
        if step is not None:
            self._collect(self._gradients, "gradients", step)


def _make_hook(output_slot: summaries.Slot, gradient_slot: summaries.Slot) -> Callable[..., Any]:
    (outputs, first), (gradients, second) = output_slot, gradient_slot

    def read(module: nn.Module, arguments: object, keywords: object, output: Any) -> Any:
        if not torch.compiler.is_compiling() or not _tracing:
            return None
        values = output[0] if type(output) is tuple and output else output
        if not isinstance(values, Tensor) or not summaries.reads(values.dtype, values.device):
            return None
        mask = _tracing[-1]
        _summarise(values.detach(), mask, outputs, first)
        if not values.requires_grad:
            return None
        watched = _Watched.apply(values, mask, gradients, second)  # type: ignore[no-untyped-call]
        return watched if output is values else (watched, *output[1:])

    return read


def _make_step() -> Callable[..., Any]:
    """A function that calls a model, with a code object of its own.

    What torch has compiled is kept, and limited, by code object.
    """

    def step(
        inner: Callable[..., Any],
        mask: Tensor | None,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        _tracing.append(mask)
        output = inner(*arguments, **keywords)
        _tracing.clear()
        return output

    return types.FunctionType(
        step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__
    )


def _names(module: nn.Module) -> list[str]:
    """The parameters of a module's forward."""
    code = getattr(type(module).forward, "__code__", None)
    return [] if code is None else list(code.co_varnames[1 : code.co_argcount])
