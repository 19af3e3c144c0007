"""The hooks of a watched step on the layers of the model, and the loss that a call brings.

`Monitor` makes one `StepHooks`, and attaches it before a watched step and detaches it after. It
hears of the calls of the model itself from `StepCalls`, as the guard does. A compiled model gets
`CompiledCalls` instead of hooks on its layers; every other compiled code runs eagerly while hooks
are on, because it calls no hooks that were added after it. After `detach`, also one that an error
caused, nothing of ours may be left on the model: the user's next step would run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torchfmri._capture import Taps, Target
from torchfmri._model import CallListener, StepCalls, compiled_code_as_eager, own_loss
from torchfmri._monitor.compiled_calls import CompiledCalls
from torchfmri._monitor.plan import WatchPlan
from torchfmri._monitor.watched_step import StepSink
from torchfmri._torch import CompiledForward, compiled_parts, is_compiled_in_place

_EAGER = "watched steps ran eagerly: "
_COMPILED = "watched steps ran compiled, with the statistics inside the graph"


class StepHooks(CallListener):
    """Everything that is put on a model for a watched step, and taken off again.

    Args:
        calls: Of the model as it is trained, and of its loss module.
        plan: What to watch.
        sink: What receives it.
        left_out: Called when the GradScaler went on without the optimizer.
    """

    def __init__(
        self,
        calls: StepCalls,
        plan: WatchPlan,
        sink: StepSink,
        left_out: Callable[[], None],
    ) -> None:
        self._calls, self._sink = calls, sink
        self.left_out, self.failed = left_out, sink.stop
        model = calls.model
        self._attached: ExitStack | None = None
        self._is_eager = False
        self._compiled: CompiledCalls | None = None
        of_calls = plan.what & {"activations", "gradients"}
        first: dict[int, tuple[str, nn.Module]] = {}
        for name, module in plan.modules.items() if of_calls else ():
            first.setdefault(id(module), (name, module))
        targets = [Target(name, module, of_calls) for name, module in first.values()]
        is_compiled = type(model).__name__ == "OptimizedModule" or is_compiled_in_place(model)
        if is_compiled or CompiledForward(model).known:
            self._compiled = self._inside_the_graph(targets, plan)
        elif of_calls and (parts := compiled_parts(model)):
            names = {id(module): name for name, module in model.named_modules()}
            first_part = names[id(parts[0].module)]
            sink.noted("", f"{_EAGER}only parts of the model are compiled, such as {first_part}")
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
                calls=self._calls,
                targets=targets,
                sink=self._sink,
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
        compiled = self._compiled
        if compiled is not None and compiled.reason:
            self._run_eagerly()
            return
        if self._attached is None:
            self._attached = ExitStack()
            if compiled is None:
                self._attached.enter_context(self._taps)
                self._attached.callback(self._padding.detach)
                self._padding.attach()
            else:
                self._attached.callback(compiled.detach)
                compiled.attach()
            self._attached.callback(self._calls.detach, self)
            self._calls.attach(self, hooks_model=compiled is None or not compiled.is_in_place)
        # Something may be compiled for the first time while the hooks stay on.
        if compiled is None and not self._is_eager and "torch._dynamo" in sys.modules:
            self._is_eager = True
            self._attached.enter_context(compiled_code_as_eager())

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

    # -- the calls of the step ---------------------------------------------------------------

    def left(self, keywords: Mapping[str, Any], output: Any) -> None:
        """The model has run, and may have returned a loss."""
        if self._calls.loss is None and self._sink.step is not None:
            # Hugging Face's Trainer has the loss divided by the items of all micro-batches.
            is_share = keywords.get("num_items_in_batch") is not None
            self._sink.step.saw_loss(own_loss(output), is_share)

    def left_loss(self, arguments: object, output: Any) -> None:
        """The loss module has run."""
        if self._sink.step is not None:
            self._sink.step.saw_loss(output)


def _is_scripted(target: Target) -> bool:
    """Whether a module takes no hooks."""
    return isinstance(target.module, torch.jit.ScriptModule)
