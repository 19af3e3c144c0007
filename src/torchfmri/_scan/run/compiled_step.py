"""CAPTURE: the outputs of all layers in a step that runs compiled, recorded inside its graph.

Compiled code calls no hooks that were added after it, so the step is compiled once more, with hooks
that are traced into the graph. Each hands over its output; at the end of the graph all outputs are
joined into one buffer with a fixed address, which CUDA graphs can write. The code is a function of
our own, so that what the user compiled is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._scan.run.flat_layout import FlatLayout
from torchfmri._scan.run.subject import ScannedLayer
from torchfmri._scan.run.token_axis import first_tensor
from torchfmri._torch import keep_address

_steps: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], CompiledStep]]
_steps = weakref.WeakKeyDictionary()
"""By model: compiling takes a minute, so it is done for the first scan alone."""


class _Buffer(nn.Module):
    """What the graph writes into; CUDA graphs take buffers of modules for inputs that stay."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)


class CompiledStep:
    """A model's step of one token, compiled with our hooks in it.

    Nothing in it holds the model, which is handed over in each call.

    Args:
        layout: The layers to record.
        b: Rows of the batch.
        like: Where, and in what dtype, outputs are.
        options: Of `torch.compile`.
    """

    def __init__(
        self, layout: FlatLayout, b: int, like: Tensor, options: Mapping[str, Any]
    ) -> None:
        self._count = len(layout.layers)
        self._parts: list[tuple[int, Tensor]] = []
        self._recorded = {"layers": 0}
        shape = (b, 1, layout.width)
        self._buffer = _Buffer(torch.zeros(shape, dtype=like.dtype, device=like.device))
        keep_address(self._buffer.values)
        self.hooks = [self._make_hook(place, each, b) for place, each in enumerate(layout.layers)]
        self._run = torch.compile(self._make_step(), **options)

    def _make_hook(self, place: int, layer: ScannedLayer, b: int) -> Callable[..., None]:
        assert layer.axis is not None
        parts, axis, copies = self._parts, layer.axis, layer.is_written

        def record(module: nn.Module, arguments: object, output: object) -> None:
            if not torch.compiler.is_compiling():
                return
            tensor = first_tensor(output)
            rows = None if tensor is None else axis.rows(tensor, b, 1)
            if rows is not None:
                parts.append((place, rows.clone() if copies else rows))

        return record

    def _make_step(self) -> Callable[..., Any]:
        parts, recorded, buffer = self._parts, self._recorded, self._buffer
        count = self._count

        def step(model: nn.Module, keywords: dict[str, Any]) -> Any:
            parts.clear()
            output = model(**keywords)
            recorded["layers"] = len(parts)
            if len(parts) == count:
                ordered: list[Any] = [None] * count
                for place, tensor in parts:
                    ordered[place] = tensor
                buffer.values.copy_(torch.cat(ordered, -1))
            parts.clear()
            return output

        # A code object of its own: what torch has compiled is kept, and limited, by code object.
        return types.FunctionType(
            step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__
        )

    @property
    def is_complete(self) -> bool:
        """Whether the last call recorded all layers."""
        return self._recorded["layers"] == self._count

    def __call__(
        self, model: nn.Module, keywords: Mapping[str, Any], again: bool
    ) -> tuple[Any, Tensor]:
        """The output of the model, and (b, 1, width) of its layers.

        Args:
            model: The model.
            keywords: What it is called with.
            again: Whether nothing has changed since the last call but the values of tensors, so
                that the graph is the same: to find that out for hundreds of modules takes torch
                longer than to run them.
        """
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=again):
            output = self._run(model, dict(keywords))
        return output, self._buffer.values.clone()

    @contextlib.contextmanager
    def attached(self, layout: FlatLayout) -> Iterator[None]:
        """Have the hooks on these layers, so that tracing meets them."""
        handles: list[Any] = []
        try:
            for layer, hook in zip(layout.layers, self.hooks, strict=True):
                handles.append(layer.module.register_forward_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()


def compiled_step(
    model: nn.Module, layout: FlatLayout, b: int, like: Tensor, options: Mapping[str, Any]
) -> CompiledStep:
    """The compiled step of a model, made once for the same layers, rows and options."""
    names = tuple(each.name for each in layout.layers)
    key = (names, b, like.dtype, like.device, repr(sorted(options.items())))
    known = _steps.setdefault(model, {})
    if key not in known:
        known[key] = CompiledStep(layout, b, like, options)
    return known[key]
