"""The calls of modules that multiply by a matrix, and where in the graph their output is.

Linear, Transformers' Conv1D and Embedding: the gradient of their weight is made of the call's input
and of dL/d output. The output is kept as a place in the autograd graph, not as a tensor, so that
what is done to it afterwards (an in-place ReLU) does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchfmri._tokens.algebra.block import SharedFactors
from torchfmri._tokens.algebra.factors import Index
from torchfmri._torch import NO_BACKWARD, Hook, current_backward, is_transformed


@dataclass(frozen=True, slots=True)
class MatrixCall:
    """One call of a module that multiplies by a parameter.

    Attributes:
        parameter: Name of the parameter.
        kind: Name of the module's class, as reports show it.
        edge: Where the output entered the graph.
        shape: Of what arrives there, rows times width in the end.
        shared: The input, (r, m), or the token numbers of an embedding.
        axis: On which axis of the parameter the output lies.
        ignored: (r,), rows that get no gradient (padding of an embedding); None without any.
        scale: What the module multiplies its product by (the embeddings of Gemma).
    """

    parameter: str
    kind: str
    edge: GradientEdge
    shape: tuple[int, ...]
    shared: Tensor | Index
    axis: int
    ignored: Tensor | None = None
    scale: float = 1.0

    @property
    def values(self) -> Tensor:
        """The input as it was given: numbers, or token numbers."""
        return self.shared.at if isinstance(self.shared, Index) else self.shared

    @property
    def rows(self) -> int:
        """How many positions the call ran on."""
        return len(self.values)

    def reading(self, values: Tensor) -> MatrixCall:
        """Return the call with a copy of its input."""
        if isinstance(self.shared, Index):
            return replace(self, shared=Index(values, self.shared.size))
        return replace(self, shared=values)

    def is_sound(self) -> bool:
        """Whether the token numbers of an embedding are rows of its weight."""
        if not isinstance(self.shared, Index):
            return True
        return bool(((self.shared.at >= 0) & (self.shared.at < self.shared.size)).all())

    def factors(self, gradients: Tensor) -> SharedFactors:
        """The factors of some tokens' gradients, from dL/d output of each, (t, *shape)."""
        varying = gradients.reshape(len(gradients), self.rows, self.shape[-1])
        if self.ignored is not None:
            varying = varying.masked_fill(self.ignored[:, None], 0)
        if self.scale != 1:
            varying = varying * self.scale
        shared = self.shared
        if isinstance(shared, Tensor) and shared.dtype != varying.dtype:
            shared = shared.to(varying.dtype)  # under autocast: what the product really used
        return SharedFactors(varying, shared, self.axis)


class MatrixCalls:
    """The hooks on these modules, and the calls that they have seen.

    Args:
        model: The model.
        parameters: Name of each parameter that is asked for -> the parameter.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.calls: list[MatrixCall] = []
        self.failures: dict[str, Exception] = {}
        self._is_used_up = False
        self._handles: list[Any] = []
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._modules: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            name = names.get(id(module._parameters.get("weight")))
            if name is not None and _kind(module) is not None:
                self._modules.append((module, name))

    def attach(self) -> None:
        """Add the hooks."""
        for module, name in self._modules:

            def act(
                module: nn.Module, arguments: Any, keywords: Any, output: Any, name: str = name
            ) -> None:
                self._after(name, module, arguments, keywords, output)

            def failed(error: Exception, name: str = name) -> None:
                self.failures[name] = error

            hook = Hook(act, module, failed)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks and let go of the graph; safe to call twice."""
        while self._handles:
            self._handles.pop().remove()
        self.calls = []

    def use_up(self) -> None:
        """The graph was walked: the next call begins a new one, and these are let go then."""
        self._is_used_up = True

    def _after(
        self, name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any
    ) -> None:
        if current_backward() != NO_BACKWARD:  # a checkpoint's replay is not a call
            return
        if not isinstance(output, Tensor) or not output.requires_grad or is_transformed(output):
            return
        given = arguments[0] if arguments else keywords.get("input", keywords.get("x"))
        if not isinstance(given, Tensor) or given.is_nested or output.is_nested:
            return
        if not _fits(module, given, output):  # a subclass that does something else altogether
            return
        if self._is_used_up:
            self.calls, self._is_used_up = [], False
        self.calls.append(_call(name, module, given.detach(), output))


def _call(name: str, module: nn.Module, given: Tensor, output: Tensor) -> MatrixCall:
    kind = _kind(module)
    assert kind is not None
    base = output._base
    # On the CPU a Linear with bias returns a view of what it computed, and an in-place operation
    # replaces the view's place in the graph, but not that of its base.
    if base is not None and not base.is_leaf and _is_reshaped(output, base):
        output = base
    edge = get_gradient_edge(output)
    if kind != "Embedding":
        axis = 1 if kind == "Conv1D" else 0
        rows = given.reshape(-1, given.shape[-1])
        return MatrixCall(
            parameter=name, kind=kind, edge=edge, shape=tuple(output.shape), shared=rows, axis=axis
        )
    at = given.reshape(-1).long()
    padding = getattr(module, "padding_idx", None)
    ignored = None if padding is None else at == padding
    size = module._parameters["weight"].shape[0]  # type: ignore[union-attr]  # it has one
    return MatrixCall(
        parameter=name,
        kind=kind,
        edge=edge,
        shape=tuple(output.shape),
        shared=Index(at, size),
        axis=1,
        ignored=ignored,
    )


def _fits(module: nn.Module, given: Tensor, output: Tensor) -> bool:
    """Whether input and output have the shapes that go with the weight."""
    rows, columns = module._parameters["weight"].shape  # type: ignore[union-attr]  # it has one
    if _kind(module) == "Embedding":
        return not given.is_floating_point() and output.shape == (*given.shape, columns)
    if _kind(module) == "Linear":
        rows, columns = columns, rows
    return given.shape[-1] == rows and output.shape == (*given.shape[:-1], columns)


def _kind(module: nn.Module) -> str | None:
    """Linear, Conv1D or Embedding. Whether a class really does what its name says is tried out."""
    if isinstance(module, nn.Linear):
        return "Linear"
    if isinstance(module, nn.Embedding):
        return "Embedding"
    return "Conv1D" if any(each.__name__ == "Conv1D" for each in type(module).__mro__) else None


def _is_reshaped(view: Tensor, base: Tensor) -> bool:
    """Whether a view has all numbers of its base, in the same order."""
    return (
        view.numel() == base.numel()
        and view.is_contiguous()
        and base.is_contiguous()
        and view.storage_offset() == base.storage_offset()
    )
