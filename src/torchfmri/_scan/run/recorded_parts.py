"""A model of which only parts are compiled, block by block, recorded while it generates.

People compile the blocks of a large model one by one, because that takes less time than compiling
the whole (regional compilation). While a scan runs, a call of ours stands where each compiled
module keeps its compiled code. In a step of one token it runs that module compiled once more, with
hooks in its graph, and hands the outputs to the recording, which takes those of all other layers
from ordinary hooks. In any other pass it runs the module eagerly, where the ordinary hooks fire.

`recorded_inside` enters `RecordedParts` around `generate`. The user's compiled code is put back
when the block ends, also after an error; it is neither called nor changed in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._scan.run.compiled_step import make_part, recording_hooks
from torchfmri._scan.run.live import LiveRecording
from torchfmri._scan.run.model_call import like_parameters
from torchfmri._scan.run.subject import ScannedLayer
from torchfmri._torch import (
    Attached,
    CompiledForward,
    compiled_graphs,
    is_compiler_error,
    uncompiled_call,
)

_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Callable[..., Any]]]
_known = weakref.WeakKeyDictionary()
"""By module: what was compiled for the first scan serves the later ones."""


class RecordedParts(Attached):
    """The compiled modules of a model that generates, as a context manager.

    Args:
        recording: Takes what the layers did; its hooks are on the model.
        compiled: The modules.

    Attributes:
        ran: Whether any of them ran compiled.
        reasons: Why one that could have been was run eagerly, each reason once.
    """

    def __init__(self, recording: LiveRecording, compiled: Iterable[CompiledForward]) -> None:
        self.recording = recording
        self.ran = False
        self.reasons: dict[str, None] = {}
        self._parts = [_Part(self, each) for each in compiled]
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self._apart: set[Hashable] = set()

    def _attach(self, stack: ExitStack) -> None:
        for part in self._parts:
            stack.enter_context(part.compiled.replaced(part))
            if not part.is_eager:
                stack.enter_context(recording_hooks(part.layers))

    def close(self) -> None:
        """Let the modules be: a graph of the whole model is about to be made."""
        self.__exit__()

    def function_of(self, kind: Hashable) -> tuple[Callable[..., Any], bool]:
        """The function that modules of a kind are compiled in, and whether another one has it too.

        They share it, as the user's blocks share what is compiled for the first of them. Torch
        keeps eight graphs of a function at most, so where a second module was not served by the
        graph of the first (transformers number their layers), the others get functions of their
        own.
        """
        shared = self._functions.get(kind)
        if shared is not None and kind not in self._apart:
            return shared, True
        self._functions[kind] = make_part()
        return self._functions[kind], False

    def keep_apart(self, kind: Hashable) -> None:
        """Have the other modules of this kind compiled by themselves."""
        self._apart.add(kind)

    def ran_eagerly(self, reason: str) -> None:
        """Note why a part was not run compiled."""
        self.reasons.setdefault(reason)


class _Part:
    """What the calls of one compiled module run during a scan.

    Args:
        owner: Of all parts.
        compiled: The module.

    Attributes:
        compiled: As given.
        layers: The layers in it, in the order of their places in the graph.
        is_eager: Whether it has to run eagerly.
    """

    def __init__(self, owner: RecordedParts, compiled: CompiledForward) -> None:
        self._owner, self.compiled = owner, compiled
        self._outputs = owner.recording.outputs
        inside = {id(each) for each in compiled.inner.modules()}
        scanned = [each for each in owner.recording.subject.layers if id(each.module) in inside]
        slots = {each.index: place for place, each in enumerate(self._outputs.layout.layers)}
        self.layers: Sequence[ScannedLayer] = [each for each in scanned if each.index in slots]
        self._slots = [slots[each.index] for each in self.layers]
        self._run: Callable[..., Any] | None = None
        self.is_eager = False
        again = [each.name for each in scanned if each.axis is not None and each.calls > 1]
        if again:
            self._give_up(f"{again[0]} is called several times in a pass")
        if any(each.of_input for each in scanned):
            self._give_up("what heads wrote is not read inside a compiled graph")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.is_eager or not self._outputs.is_single_step:
            return uncompiled_call(self.compiled.inner)(*arguments, **keywords)
        if self._run is not None:
            return self._record(self._run, arguments, keywords)
        return self._record_first(arguments, keywords)

    def _record_first(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run it for the first time in this scan, which compiles it in the first scan of all."""
        owner, recording = self._owner, self._owner.recording
        inner, like = self.compiled.inner, like_parameters(recording.subject.model)
        copies = tuple(each.is_written for each in self.layers)
        key = (copies, recording.rows, like.dtype, like.device)
        # A weak reference: the code that the user compiled holds the module.
        own = (*key, tuple(each.name for each in self.layers), weakref.ref(self.compiled.call))
        known = _known.setdefault(inner, {})
        if own in known:
            self._run = known[own]
            return self._record(self._run, arguments, keywords)
        kind = (type(inner), *key)
        function, is_shared = owner.function_of(kind)
        run, graphs = self.compiled.compile(function), compiled_graphs()
        try:
            output = self._record(run, arguments, keywords)
        except RuntimeError as error:
            if not is_compiler_error(error):
                raise
            self._give_up(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return uncompiled_call(inner)(*arguments, **keywords)
        if is_shared and (graphs is None or compiled_graphs() != graphs):
            owner.keep_apart(kind)
        self._run = known[own] = run
        return output

    def _record(
        self, run: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        with torch.compiler.set_stance("default"):
            output, places, found = run(self.compiled.inner, arguments, dict(keywords))
        self._owner.ran = True
        for place, tensor in zip(places, found, strict=True):
            self._outputs.put(self._slots[place], _own(tensor))
        return output

    def _give_up(self, reason: str) -> None:
        self.is_eager = True
        self._owner.ran_eagerly(reason)


def _own(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: where a graph is replayed, another call may write there."""
    return tensor.clone() if tensor.is_cuda else tensor
