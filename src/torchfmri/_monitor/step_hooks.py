"""The hooks of a watched step: on the layers, on the model itself, on the loss module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torchfmri._capture import Taps, Target
from torchfmri._model import compiled_code_as_eager
from torchfmri._monitor.compiled_calls import CompiledCalls
from torchfmri._monitor.plan import WatchPlan
from torchfmri._monitor.watched_step import StepSink
from torchfmri._torch import Hook, is_compiled_in_place

_EAGER = "watched steps ran eagerly: "
_COMPILED = "watched steps ran compiled, with the statistics inside the graph"


class StepHooks:
    """Everything that is put on a model for a watched step, and taken off again.

    Args:
        model: The model as it is trained.
        loss: The loss module, or None.
        plan: What to watch.
        sink: What receives it.
        entered: Called when the model is about to run.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None,
        plan: WatchPlan,
        sink: StepSink,
        entered: Callable[[], None],
    ) -> None:
        self._model, self._loss, self._sink, self._entered = model, loss, sink, entered
        self._attached: ExitStack | None = None
        self._is_eager = False
        self._compiled: CompiledCalls | None = None
        of_calls = plan.what & {"activations", "gradients"}
        first: dict[int, tuple[str, nn.Module]] = {}
        for name, module in plan.modules.items() if of_calls else ():
            first.setdefault(id(module), (name, module))
        targets = [Target(name, module, of_calls) for name, module in first.values()]
        if type(model).__name__ == "OptimizedModule" or is_compiled_in_place(model):
            self._compiled = self._inside_the_graph(targets, plan)
        short = None
        if of_calls == {"activations", "gradients"}:
            short = sink.short_way([each for each in targets if not _is_scripted(each)])
            targets = [each for each in targets if _is_scripted(each)]
        self._taps = Taps(targets, sink, sink.wants_call, short)
        self._padding = sink.follow_padding(model.modules() if of_calls else ())

    def _inside_the_graph(self, targets: list[Target], plan: WatchPlan) -> CompiledCalls | None:
        """The layers of a compiled model watched inside its graph; None where they cannot be."""
        reason = "histograms are not taken inside a compiled graph" if plan.histogram else ""
        if not reason:
            found = CompiledCalls(
                model=self._model,
                targets=targets,
                sink=self._sink,
                enter=self._enter_model,
                leave=self._left,
                fall_back=self._run_eagerly,
            )
            reason = found.reason
        self._sink.noted("", _EAGER + reason if reason else _COMPILED)
        return None if reason else found

    def _run_eagerly(self) -> None:
        """From now on: what could not be compiled is watched by hooks that compiled code skips."""
        assert self._compiled is not None
        reason = self._compiled.reason
        self.detach()
        self._compiled = None
        self._sink.unnoted(_COMPILED)
        self._sink.noted("", _EAGER + reason)
        self.attach()

    def attach(self) -> None:
        """Put the hooks on, unless they are still there from the last step."""
        if self._compiled is not None:
            self._attach_compiled(self._compiled)
            return
        if self._attached is None:
            self._attached = ExitStack()
            self._attached.callback(self._sink.forget_calls)
            self._attached.enter_context(self._taps)
            self._attached.callback(self._padding.detach)
            self._padding.attach()
            model, loss = self._model, self._loss
            self._add(model.register_forward_pre_hook, self._enter_model, model)
            self._add(model.register_forward_hook, self._leave_model, model, always_call=True)
            if loss is not None:
                self._add(loss.register_forward_hook, self._leave_loss, loss)
        # Something may be compiled for the first time while the hooks stay on.
        if not self._is_eager and "torch._dynamo" in sys.modules:
            self._is_eager = True
            self._attached.enter_context(compiled_code_as_eager())

    def _attach_compiled(self, compiled: CompiledCalls) -> None:
        if compiled.reason:
            self._run_eagerly()
        elif self._attached is None:
            self._attached = ExitStack()
            self._attached.callback(self._sink.forget_calls)
            self._attached.callback(compiled.detach)
            compiled.attach()
            if self._loss is not None:
                self._add(self._loss.register_forward_hook, self._leave_loss, self._loss)

    def detach(self) -> None:
        """Take the hooks off; safe to call twice."""
        attached, self._attached = self._attached, None
        self._is_eager = False
        if attached is not None:
            attached.close()

    def next_step(self) -> None:
        """Forget the graph of the step that is over."""
        if self._compiled is not None:
            self._compiled.collect_gradients()
        self._taps.next_step()

    def _add(
        self,
        register: Callable[..., Any],
        act: Callable[..., None],
        owner: nn.Module,
        **options: Any,
    ) -> None:
        assert self._attached is not None

        def guarded(*arguments: Any) -> None:
            try:
                act(*arguments)
            except Exception as error:
                self._sink.stop(error)

        handle = register(Hook(guarded, owner), with_kwargs=True, **options)
        self._attached.callback(handle.remove)

    def _enter_model(self, *_: object) -> None:
        self._sink.enter_model()
        self._entered()

    def _leave_model(self, _: object, __: object, keywords: Mapping[str, Any], output: Any) -> None:
        self._left(keywords, output)

    def _left(self, keywords: Mapping[str, Any], output: Any) -> None:
        step = self._sink.step
        if self._loss is None and step is not None and self._sink.wants_call():
            # Hugging Face's Trainer has the loss divided by the items of all micro-batches.
            step.saw_loss(own_loss(output), keywords.get("num_items_in_batch") is not None)
        self._sink.leave_model()

    def _leave_loss(self, _: object, __: object, ___: object, output: Any) -> None:
        if self._sink.step is not None and self._sink.wants_call():
            self._sink.step.saw_loss(output)


def own_loss(output: Any) -> Any:
    """The loss in what a model returned; None where there is none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _is_scripted(target: Target) -> bool:
    """Whether a module takes no hooks."""
    return isinstance(target.module, torch.jit.ScriptModule)
