"""The hooks of a check-up: on every layer and parameter of a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfmri._checkup.activations import function_behind, function_of_module
from torchfmri._checkup.copies import Lost
from torchfmri._checkup.operations import OperationWatch
from torchfmri._checkup.unit_log import UnitLog
from torchfmri._checkup.weights import growth_in_time
from torchfmri._diagnosis.notes import Notes
from torchfmri._diagnosis.structure import MATRIX_LAYERS, NORM_LAYERS, Structure, parameters_of
from torchfmri._elements import flatten
from torchfmri._layers import named_layers
from torchfmri._torch_private import is_transformed

_SAMPLE = 4096
_MOST_NODES = 4
_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


class Watcher:
    """Follows the steps of a run on a copy of the model and notes what statistics cannot tell.

    Args:
        model: The copy.
        optimizers: Those that train it.
        structure: What it is made of.
        notes: Takes down what fails in here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        structure: Structure,
        notes: Notes,
    ) -> None:
        self._notes = notes
        self._model, self._optimizers, self._structure = model, optimizers, structure
        self._layers = named_layers(model)
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self.step = 0
        self.detailed: OperationWatch | None = None
        self.inputs: dict[int, Tensor] = {}
        self.called: dict[str, None] = {}
        self.without_graph: set[str] = set()
        self.reader: tuple[str, bool] | None = None
        self.units: dict[tuple[str, str], UnitLog] = {}
        self.loads: dict[str, list[list[float]]] = {}
        self.spread: dict[str, float] = {}
        self.growth: dict[str, float] = {}
        self.gradients: dict[str, str] = {}
        self.half: dict[str, tuple[int, int]] = {}
        self.flushed: set[str] = set()
        self.output: Any = None
        self.samples: list[Tensor] = []
        self._nodes: dict[Any, str] = {}
        self._raw: dict[int, float] = {}
        self._used: set[int] = set()
        self._tainted: set[int] = set()
        self._reset_step()

    def _reset_step(self) -> None:
        self.clip = self.norm = math.nan
        self.stale = self.stepped = self.cleared = False

    # -- attaching ---------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[Watcher]:
        """With the hooks on."""
        try:
            seen: set[int] = set()
            for name, module in self._layers.items():
                if id(module) not in seen:
                    seen.add(id(module))
                    self._hook_module(name, module)
            for name, parameter in parameters_of(self._model).items():
                if parameter.requires_grad:
                    self._hook_parameter(name, parameter)
            for optimizer in self._optimizers:
                self._handles.append(optimizer.register_step_pre_hook(self._before_update))
                self._handles.append(optimizer.register_step_post_hook(self._after_update))
            yield self
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    @contextmanager
    def observing(self, step: int, detailed: bool, batch: Any) -> Iterator[None]:
        """Around one step."""
        self.step = step
        self._reset_step()
        self._nodes.clear()
        self._stack.clear()
        self.inputs = {
            each.tensor.untyped_storage().data_ptr(): each.tensor
            for each in flatten(batch)
            if each.tensor.layout == torch.strided and not each.tensor.is_nested
        }
        if not detailed:
            yield
            return
        self.detailed = OperationWatch(self.here, step, self._notes)
        try:
            with self.detailed:
                yield
        finally:
            self.last_detailed, self.detailed = self.detailed, None

    last_detailed: OperationWatch | None = None

    def here(self) -> str:
        """The innermost layer that is running; "" outside of the model."""
        return self._stack[-1] if self._stack else ""

    def _hook_module(self, name: str, module: nn.Module) -> None:
        guard = self._notes.guard(f"Layer {name!r}" if name else "The model")

        def enter(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._stack.append(name)
            if torch.is_grad_enabled() or module.training:
                self.called.setdefault(name)
            with guard:
                self._enter(name, module, arguments)

        def leave(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
            with guard:
                self._leave(name, module, arguments, output)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    # -- forward -----------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return
        if is_transformed(first):  # inside vmap there are no values to read
            return
        is_leaf = not any(True for _ in module.children())
        reads = isinstance(module, (*MATRIX_LAYERS, *NORM_LAYERS)) or bool(module._parameters)
        is_input = first.untyped_storage().data_ptr() in self.inputs
        if self.reader is None and is_leaf and reads and is_input:
            self.reader = (name, isinstance(module, NORM_LAYERS))
        if not isinstance(module, MATRIX_LAYERS) or not first.requires_grad:
            return
        function, before = function_behind(first)
        source = self._maker(before)
        made_by = self._nodes.get(first.grad_fn, "")
        if function and not function_of_module(self._layers.get(made_by, module)):
            self._log(name, source, function, module).add(self.step, None, first)
        if self.detailed is not None and first.ndim >= 2:
            self.spread[name] = _spread(first)

    def _leave(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        elements = flatten(output)
        tensor = elements[0].tensor if elements else None
        if name == "":
            self.output = output
            if self.detailed is not None:
                self.detailed.in_loss = True
        if tensor is None or not tensor.is_floating_point() or is_transformed(tensor):
            return
        own = [each for each in module._parameters.values() if each is not None]
        if any(each.requires_grad for each in own) and not tensor.requires_grad:
            self.without_graph.add(name)
        if tensor.grad_fn is not None and name:
            self._nodes.setdefault(tensor.grad_fn, name)
        if self.detailed is not None and own:
            self.detailed.made(name, tensor)
        if tensor.dtype == torch.float16 and tensor.requires_grad and name:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._look_at_half(name, gradient)
            )
        if isinstance(module, nn.RNNBase) and self.detailed is not None and tensor.ndim == 3:
            self.growth.setdefault(name, growth_in_time(tensor, module.batch_first))
        function = function_of_module(module)
        if function:
            x = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
            source = self._nodes.get(None if x is None else x.grad_fn, "")
            self._log(name, source, function, self._layers.get(source)).add(self.step, x, tensor)
        if name in self._structure.experts and tensor.ndim >= 2:
            count = len(self._structure.experts[name])
            choices = tensor.detach().flatten(0, -2).argmax(-1)
            load = torch.bincount(choices, minlength=count).float() / max(1, choices.numel())
            self.loads.setdefault(name, []).append(load.tolist())

    def _maker(self, node: Any) -> str:
        """The layer that made what a node reads, seen through shifts and scales."""
        for _ in range(_MOST_NODES):
            if node is None or node in self._nodes:
                break
            before = [each for each, _ in node.next_functions if each is not None]
            node = before[0] if len(before) == 1 else None
        return self._nodes.get(node, "")

    def _log(self, name: str, source: str, function: str, near: nn.Module | None) -> UnitLog:
        key = (name, function)
        if key not in self.units:
            fed_by = self._layers.get(source, near)
            channels = isinstance(fed_by, _CONVOLUTIONS) or isinstance(near, _CONVOLUTIONS)
            self.units[key] = UnitLog(name, source, function, channels)
        return self.units[key]

    # -- backward ----------------------------------------------------------------------------

    def _hook_parameter(self, name: str, parameter: Tensor) -> None:
        guard = self._notes.guard(f"The gradient of {name!r}")
        self.gradients[name] = "none"

        def arrives(gradient: Tensor) -> None:
            with guard:
                self._arrives(name, parameter, gradient)

        def arrived(_: Tensor) -> None:
            with guard:
                self._arrived(name, parameter)

        register = parameter.register_hook, parameter.register_post_accumulate_grad_hook
        self._handles += [register[0](arrives), register[1](arrived)]  # type: ignore[no-untyped-call]

    def _arrives(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        identity = id(parameter)
        if identity in self._used:  # the optimizer has had what is there
            self._used.discard(identity)
            left = parameter.grad
            if left is not None and bool((left != 0).any()):
                self._tainted.add(identity)
            else:
                self._tainted.discard(identity)
        elif parameter.grad is None:
            self._tainted.discard(identity)
        if gradient.dtype == torch.float16:
            self._look_at_half(name, gradient)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        norm = self._raw[id(parameter)] = _norm(gradient)
        if norm != 0:
            self.gradients[name] = "some"
        elif self.gradients[name] == "none":
            self.gradients[name] = "zero"

    def _look_at_half(self, name: str, gradient: Tensor) -> None:
        values = gradient.detach().abs()
        small = int(((values > 0) & (values < torch.finfo(torch.float16).tiny)).sum())
        some = int((values > 0).sum())
        before = self.half.get(name, (0, 0))
        self.half[name] = (before[0] + small, before[1] + some)
        if some == 0:
            self.flushed.add(name)
        else:
            self.flushed.discard(name)

    # -- the optimizer -----------------------------------------------------------------------

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        with self._notes.guard("What the optimizer gets"):
            self._look_at_update(optimizer)

    def _look_at_update(self, optimizer: Optimizer) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        found = [each for each in trained if each.grad is not None]
        if not all(_is_finite(parameter.grad) for parameter in found):
            raise Lost
        now = [_norm(parameter.grad) for parameter in found]
        if any(id(parameter) in self._tainted for parameter in found):
            self.stale = True
        raw = [self._raw.get(id(parameter), math.nan) for parameter in found]
        before = math.sqrt(sum(each**2 for each in raw if math.isfinite(each)))
        self.norm = before
        after = math.sqrt(sum(each**2 for each in now))
        arrived = any(self._raw.get(id(each), 0.0) > 0 for each in trained)
        self.cleared = self.cleared or (arrived and after == 0)
        self.clip = _clip_factor(before, after)
        self._sample(found)

    def _sample(self, parameters: list[Tensor]) -> None:
        """Keep evenly spaced values of the gradient, to tell its noise from its mean."""
        share = max(1, sum(each.numel() for each in parameters) // _SAMPLE)
        parts = [
            _real(each.grad.detach()).flatten()[::share].float()
            for each in parameters
            if each.grad is not None and not each.grad.is_sparse
        ]
        if parts and len(self.samples) < 25:
            self.samples.append(torch.cat(parts))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepped = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._raw.pop(id(parameter), None)
                self._used.add(id(parameter))


def _norm(gradient: Tensor | None) -> float:
    # In float64: the squares of large gradients overflow float32.
    values = _dense(gradient)
    wide = torch.complex128 if values.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(values, dtype=wide).real)


def _is_finite(gradient: Tensor | None) -> bool:
    return bool(torch.isfinite(_dense(gradient)).all())


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


def _clip_factor(before: float, after: float) -> float:
    """By what the gradients were multiplied; 1 where that is the unscaling of a GradScaler."""
    if before <= 0 or after <= 0:
        return math.nan
    factor = after / before
    power = math.log2(factor)
    if abs(power) >= 4 and abs(power - round(power)) < 1e-4:
        return 1.0
    return factor


def _spread(values: Tensor) -> float:
    """How much rows (samples) differ from each other, relative to their size."""
    rows = values.detach().float().flatten(1) if values.ndim == 2 else values.detach().float()
    if rows.shape[0] < 4:
        return math.nan
    size = float(rows.square().mean())
    apart = float((rows - rows.mean(0)).square().mean())
    return math.sqrt(apart / size) if size > 0 else 0.0
