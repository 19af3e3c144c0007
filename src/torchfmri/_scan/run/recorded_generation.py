"""A `generate` that runs compiled, with its steps recorded inside the graph.

`generate` of transformers compiles its steps where the cache is static, keeps the compiled call on
the model and asks for it by its settings. A user may have compiled the model: then its calls run
what was compiled. While a scan runs, a call of ours stands in these places. Of a model that is not
compiled as a whole, compiled parts are recorded by `recorded_parts`.

`BatchRun` enters `recorded_inside` around `generate`. However that ends, the model's attributes are
afterwards what they were: a call of ours that stayed would run in the user's next training step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._model import unwrap
from torchfmri._scan.run.compiled_step import (
    CompiledStep,
    Outputs,
    StepCompiler,
    compiled_step,
    recording_hooks,
)
from torchfmri._scan.run.live import LiveRecording
from torchfmri._scan.run.live_hooks import ids_of
from torchfmri._scan.run.model_call import like_parameters
from torchfmri._scan.run.recorded_parts import RecordedParts
from torchfmri._torch import (
    CompiledForward,
    compiled_graphs,
    compiled_parts,
    is_compiler_error,
    uncompiled_call,
)

_KEPT = ("_cache", "_previous_max_cache_length")
"""What `generate` keeps on the model so that its next call need not compile again."""
_NUMBERS = frozenset((bool, int, float))
_QUIET = frozenset(("torch", "transformers", "peft"))
"""Packages whose modules change nothing but tensors from one step to the next."""
_kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class RecordedCall:
    """What is called in place of a compiled model, or of a compiled step of `generate`.

    Args:
        recording: Takes what the layers did.
        compiler: Compiles its steps.
        parts: Compiled modules of the model, which are part of its graph where it has one.
        may_change: Whether code of the user's runs between steps, which may change the model.

    Attributes:
        ran: Whether a step ran compiled.
        reason: Why steps run eagerly although `generate` asks for compiled ones; "" if they do not.
    """

    def __init__(
        self,
        recording: LiveRecording,
        compiler: StepCompiler,
        parts: RecordedParts,
        may_change: bool,
    ) -> None:
        self._may_change = may_change
        self._recording, self._compiler, self._parts = recording, compiler, parts
        subject = recording.subject
        self._model = unwrap(subject.model)
        self._attached = contextlib.ExitStack()
        self._step: CompiledStep | None = None
        self.ran = self._is_settled = False
        self._form: Any = None
        again = [each.name for each in subject.layers if each.axis is not None and each.calls > 1]
        self.reason = f"{again[0]} is called several times in a pass" if again else ""
        if any(each.of_input for each in subject.layers):
            self.reason = "what heads wrote is not read inside a compiled graph"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # Not `model(...)`, where this object may stand.
        run_eagerly = uncompiled_call(self._model)
        if self.reason or arguments or ids_of((), keywords).shape[1] != 1:
            return run_eagerly(*arguments, **keywords)
        try:
            return self._run(ids_of((), keywords), keywords)
        except RuntimeError as error:
            if self.ran or not is_compiler_error(error):
                raise
            self.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return run_eagerly(**keywords)

    def _run(self, ids: torch.Tensor, keywords: Mapping[str, Any]) -> Any:
        recording = self._recording
        layout = recording.outputs.layout
        if self._step is None:
            like = like_parameters(self._model)
            self._parts.close()
            self._may_change = self._may_change or _has_unknown_code(self._model)
            self._step = compiled_step(self._model, layout, len(ids), like, self._compiler)
            self._attached.enter_context(recording_hooks(layout.layers))
        passes = recording.passes
        recording.begin_pass(ids, keywords)
        output, flat, found = self._call_step(self._step, keywords)
        if recording.passes > passes:
            # The hooks on the model have taken everything in.
            self.reason = "torch compiled them too often, and then no more"
            return output
        self.ran = True
        if flat is None:
            self.reason = "not every layer could be followed into the compiled graph"
            recording.take_outputs(found)
        elif recording.outputs.is_step:
            recording.take_flat(flat)
        recording.end_pass(output)
        return output

    def _call_step(
        self, step: CompiledStep, keywords: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None, Outputs]:
        """Run a step; torch looks at everything again until two steps in a row were alike.

        And always, where something may change of which nothing is seen here.
        """
        if self._may_change:
            return step(self._model, keywords, again=False)
        form, graphs = _form_of(keywords), compiled_graphs()
        found = step(self._model, keywords, again=self._is_settled and form == self._form)
        same = graphs is not None and compiled_graphs() == graphs
        self._is_settled, self._form = same and form == self._form, form
        return found

    def close(self) -> None:
        """Take the hooks off."""
        self._attached.close()


def _has_unknown_code(model: nn.Module) -> bool:
    """Whether somebody else's code runs inside a model: it may count its calls, for example."""
    return any(
        type(each).__module__.partition(".")[0] not in _QUIET
        or "forward" in vars(each)
        or not all(
            map(_is_ours, (*each._forward_hooks.values(), *each._forward_pre_hooks.values()))
        )
        for each in model.modules()
    )


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torchfmri"


def _form_of(value: Any) -> Any:
    """Everything about the arguments of a call that code may depend on, but not tensors' values."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((key, _form_of(each)) for key, each in value.items())
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):  # a cache; some kinds count in Python, others grow
        values = [each for layer in layers for each in vars(layer).values()]
        shapes = [each.shape for each in values if isinstance(each, Tensor)]
        return (id(value), shapes, [each for each in values if type(each) in _NUMBERS])
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


class RecordedGeneration(NamedTuple):
    """What compiled code a scan found while the model generated.

    Attributes:
        call: Stands in place of a compiled model; None where the model has no such place.
        parts: The compiled parts of a model that is not.
    """

    call: RecordedCall | None
    parts: RecordedParts

    @property
    def path(self) -> str:
        """Which way the steps went: "compiled", "compiled parts" or "eager"."""
        if self.call is not None and self.call.ran:
            return "eager" if self.call.reason else "compiled"
        return "compiled parts" if self.parts.ran else "eager"

    @property
    def notes(self) -> list[str]:
        """Why something ran eagerly that could have run compiled."""
        own = [] if self.call is None or not self.call.reason else [self.call.reason]
        return [
            *(f"steps ran eagerly: {each}" for each in own),
            *(f"compiled parts ran eagerly: {each}" for each in self.parts.reasons),
        ]


@contextlib.contextmanager
def recorded_inside(
    recording: LiveRecording, config: Any, may_change: bool
) -> Iterator[RecordedGeneration]:
    """Let compiled steps be recorded, where the model, its `generate` or its modules have any.

    Args:
        recording: Takes what the layers did.
        config: The CompileConfig that `generate` is given; None for its default.
        may_change: Whether code of the user's runs between steps.
    """
    model = unwrap(recording.subject.model)
    own, compiles_itself = CompiledForward(model), hasattr(model, "get_compiled_call")
    parts = RecordedParts(recording, () if own.known else compiled_parts(model))
    if compiles_itself and config is None:
        config = _default_config(model)
    call = None
    with contextlib.ExitStack() as stack:
        if own.known:
            # A weak reference: the code that the user compiled holds the model.
            compiler = StepCompiler(own.compile, weakref.ref(own.call))
            call = RecordedCall(recording, compiler, parts, may_change)
            stack.callback(call.close)
            stack.enter_context(own.replaced(call))
        elif compiles_itself:
            options = config.to_dict()
            compiler = StepCompiler(
                partial(torch.compile, **options), repr(sorted(options.items()))
            )
            call = RecordedCall(recording, compiler, parts, may_change)
            stack.callback(call.close)
        if call is not None and compiles_itself:
            stack.enter_context(_asked_for(model, call, config))
        stack.enter_context(parts)
        yield RecordedGeneration(call, parts)


def _default_config(model: nn.Module) -> Any:
    from transformers import CompileConfig

    return getattr(model, "_default_compile_config", CompileConfig)()


@contextlib.contextmanager
def _asked_for(model: nn.Module, call: RecordedCall, config: Any) -> Iterator[None]:
    """Let `generate` find a call where it keeps what it has compiled with these settings."""
    attributes = model.__dict__
    names = ("_compiled_call", "_last_compile_config", *_KEPT)
    before = {name: attributes[name] for name in names if name in attributes}
    try:
        attributes |= {"_compiled_call": call, "_last_compile_config": config}
        for name, value in _kept.get(model, {}).items():
            attributes.setdefault(name, value)
        yield
    finally:
        if call.ran:
            _kept[model] = {name: attributes[name] for name in _KEPT if name in attributes}
        for name in names:
            attributes.pop(name, None)
        attributes |= before
