"""What layers put out in code that runs compiled, recorded inside its graph.

Compiled code calls no hooks that were added after it, so what is recorded is compiled once more,
with hooks that are traced into the graph. Each hands over its output. The code is a function of our
own, so that what the user compiled is neither used nor touched.

`recorded_generation` uses `CompiledStep` for a model that is compiled as a whole, `recorded_parts`
uses `make_part` for compiled modules inside a model that is not. Two things must stay as they are,
or torch compiles again at every scan: the hooks are the same function objects for everybody
(`_make_hook` keeps them), and no hook refers to a list or a module of its own.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._scan.run.flat_layout import FlatLayout
from torchfmri._scan.run.subject import ScannedLayer
from torchfmri._scan.run.token_axis import first_tensor
from torchfmri._torch import HookSet, uncompiled_call

_steps: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], CompiledStep]]
_steps = weakref.WeakKeyDictionary()
"""By model: compiling takes a minute, so it is done for the first scan alone."""
Outputs: TypeAlias = list[tuple[int, Tensor]]
_outputs: Outputs = []
"""The outputs of the step that is traced, each with its place. One list for all hooks, not one that
each of them refers to: torch would make sure before every step that it is the same one for all."""


# The schema is written out: torch 2.6 does not read it from `list[Tensor]`.
@torch.library.custom_op("torchfmri::join", mutates_args=(), schema="(Tensor[] parts) -> Tensor")
def _join(parts: list[Tensor]) -> Tensor:
    """(b, 1, w) of each layer -> (b, 1, width).

    An operation of its own, which the compiler does not look into: it would copy hundreds of
    outputs by a kernel each, where `torch.cat` takes a hundred at a time.
    """
    return torch.cat(parts, -1)


@_join.register_fake
def _(parts: list[Tensor]) -> Tensor:
    first = parts[0]
    return first.new_empty((first.shape[0], 1, sum(each.shape[-1] for each in parts)))


class StepCompiler(NamedTuple):
    """How steps are compiled, and what tells that from other settings."""

    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    settings: Hashable


class CompiledStep:
    """A model's step of one token, compiled with our hooks in it.

    Nothing in it holds the model, which is handed over in each call.

    Args:
        layout: The layers to record.
        b: Rows of the batch.
        compiler: Compiles a function as the user would have it.
    """

    def __init__(self, layout: FlatLayout, b: int, compiler: StepCompiler) -> None:
        self._run = compiler.compile(_make_step(layout, b))

    def __call__(
        self, model: nn.Module, keywords: Mapping[str, Any], again: bool
    ) -> tuple[Any, Tensor | None, Outputs]:
        """The output of the model, and (b, 1, width) of its layers.

        Where one is missing: None, and the outputs of the others.

        Args:
            model: The model.
            keywords: What it is called with.
            again: Whether nothing has changed since the last call but the values of tensors, so
                that the graph is the same: to find that out for hundreds of modules takes torch
                longer than to run them.
        """
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=again):
            output, flat, found = self._run(model, dict(keywords))
        # The next step may write its result to the same place.
        return output, None if flat is None else flat.clone(), found


@contextlib.contextmanager
def recording_hooks(layers: Sequence[ScannedLayer]) -> Iterator[None]:
    """Have hooks on these layers, so that tracing meets them; the place of each is its number."""
    hooks = HookSet()
    try:
        for place, layer in enumerate(layers):
            hooks.after([layer.module], _make_hook(place, layer.is_written))
        yield
    finally:
        hooks.remove()


@cache
def _make_hook(place: int, copies: bool) -> Callable[..., None]:
    """The hook that records an output at a place: the same one for every module and every scan."""

    def record(module: nn.Module, arguments: object, keywords: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            return
        tensor = first_tensor(output)
        if tensor is not None:
            _outputs.append((place, tensor.clone() if copies else tensor))

    return record


def _make_step(layout: FlatLayout, b: int) -> Callable[..., Any]:
    """A function of model and keywords, with a code object of its own."""
    axes = [each.axis for each in layout.layers if each.axis is not None]
    shapes = [(b, 1, each.width) for each in axes]
    # Most outputs are (b, 1, w) as they come; the others need to be viewed so.
    viewed = {
        place: each for place, each in enumerate(axes) if each.expected(b, 1) != shapes[place]
    }

    def step(model: nn.Module, keywords: dict[str, Any]) -> tuple[Any, Tensor | None, Outputs]:
        _outputs.clear()
        # Not `model(...)`, where the user's own compiled code may stand.
        output = uncompiled_call(model)(**keywords)
        ordered: list[Any] = [None] * len(shapes)
        found = list(_outputs)
        _outputs.clear()
        for place, tensor in found:
            axis = viewed.get(place)
            rows = tensor if axis is None else axis.rows(tensor, b, 1)
            if rows is not None and rows.shape == shapes[place]:
                ordered[place] = rows
        for each in ordered:
            if each is None:
                return output, None, found
        return output, _join(ordered), []

    return _with_own_code(step)


def make_part() -> Callable[..., Any]:
    """A function of a module, its arguments and keywords, with a code object of its own."""

    def part(
        module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, list[int], list[Tensor]]:
        _outputs.clear()
        output = uncompiled_call(module)(*arguments, **keywords)
        places, found = [], []
        for place, tensor in _outputs:
            places.append(place)
            found.append(tensor)
        _outputs.clear()
        return output, places, found

    return _with_own_code(part)


def _with_own_code(function: types.FunctionType | Any) -> Callable[..., Any]:
    """Return the function with a code object of its own.

    What torch has compiled is kept, and limited, by code object.
    """
    code, closure = function.__code__.replace(), function.__closure__
    return types.FunctionType(code, function.__globals__, function.__name__, None, closure)


def compiled_step(
    model: nn.Module, layout: FlatLayout, b: int, like: Tensor, compiler: StepCompiler
) -> CompiledStep:
    """The compiled step of a model, made once for the same layers, rows and settings."""
    names = tuple(each.name for each in layout.layers)
    key = (names, b, like.dtype, like.device, compiler.settings)
    known = _steps.setdefault(model, {})
    if key not in known:
        known[key] = CompiledStep(layout, b, compiler)
    return known[key]
