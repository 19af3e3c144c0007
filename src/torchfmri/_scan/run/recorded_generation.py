"""A `generate` that runs compiled, with its steps recorded inside the graph.

`generate` of transformers compiles its steps where the cache is static, keeps the compiled call on
the model and asks for it by its settings. While a scan runs, ours stands there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import unwrap
from torchfmri._scan.run.compiled_step import CompiledStep, compiled_step
from torchfmri._scan.run.live import LiveRecording
from torchfmri._scan.run.live_hooks import ids_of
from torchfmri._scan.run.model_call import like_parameters
from torchfmri._torch import compiled_graphs, is_compiler_error

_KEPT = ("_cache", "_previous_max_cache_length")
"""What `generate` keeps on the model so that its next call need not compile again."""
_NUMBERS = frozenset((bool, int, float))
_kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class RecordedCall:
    """What `generate` calls in place of its compiled step.

    Args:
        recording: Takes what the layers did.
        options: Of `torch.compile`.

    Attributes:
        ran: Whether a step ran compiled.
        reason: Why steps run eagerly although `generate` asks for compiled ones; "" if they do not.
    """

    def __init__(self, recording: LiveRecording, options: Mapping[str, Any]) -> None:
        self._recording, self._options = recording, options
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

    def __call__(self, **keywords: Any) -> Any:
        ids = ids_of((), keywords)
        if self.reason or ids.shape[1] != 1:
            return self._model(**keywords)
        try:
            return self._run(ids, keywords)
        except RuntimeError as error:
            if self.ran or not is_compiler_error(error):
                raise
            self.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return self._model(**keywords)

    def _run(self, ids: torch.Tensor, keywords: Mapping[str, Any]) -> Any:
        recording = self._recording
        layout = recording.outputs.layout
        if self._step is None:
            like = like_parameters(self._model)
            self._step = compiled_step(self._model, layout, len(ids), like, self._options)
            self._attached.enter_context(self._step.attached(layout))
        recording.begin_pass(ids, keywords)
        output, flat = self._call_step(self._step, keywords)
        self.ran = True
        if flat is None:
            self.reason = "not every layer could be followed into the compiled graph"
        elif recording.outputs.is_step:
            recording.take_flat(flat)
        recording.end_pass(output)
        return output

    def _call_step(
        self, step: CompiledStep, keywords: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None]:
        """Run a step; torch looks at everything again until two steps in a row were alike."""
        form, graphs = _form_of(keywords), compiled_graphs()
        found = step(self._model, keywords, again=self._is_settled and form == self._form)
        same = graphs is not None and compiled_graphs() == graphs
        self._is_settled, self._form = same and form == self._form, form
        return found

    def close(self) -> None:
        """Take the hooks off."""
        self._attached.close()


def _form_of(value: Any) -> Any:
    """Everything about the arguments of a call that code may depend on, but not tensors' values."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((key, _form_of(each)) for key, each in value.items())
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):  # a cache; some kinds count in Python
        numbers = (each for layer in layers for each in vars(layer).values())
        return (id(value), [each for each in numbers if type(each) in _NUMBERS])
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


@contextlib.contextmanager
def recorded_inside(recording: LiveRecording, config: Any) -> Iterator[RecordedCall | None]:
    """Let the compiled steps of `generate` be recorded, where it has any.

    Args:
        recording: Takes what the layers did.
        config: The CompileConfig that `generate` is given; None for its default.
    """
    model = unwrap(recording.subject.model)
    if not hasattr(model, "get_compiled_call"):
        yield None
        return
    if config is None:
        from transformers import CompileConfig

        default = getattr(model, "_default_compile_config", CompileConfig)
        config = default()
    call = RecordedCall(recording, config.to_dict())
    attributes = model.__dict__
    names = ("_compiled_call", "_last_compile_config", *_KEPT)
    before = {name: attributes[name] for name in names if name in attributes}
    try:
        attributes |= {"_compiled_call": call, "_last_compile_config": config}
        for name, value in _kept.get(model, {}).items():
            attributes.setdefault(name, value)
        yield call
    finally:
        call.close()
        if call.ran:
            _kept[model] = {name: attributes[name] for name in _KEPT if name in attributes}
        for name in names:
            attributes.pop(name, None)
        attributes |= before
