"""The hooks of a check-up on every layer of a copy, and the log of its steps.

`Checkup` attaches a `Watcher` and reads its attributes afterwards. Hooks run inside guards and only
look. Values inside vmap (`is_transformed`) cannot be read and are skipped. A layer's output is
known by its autograd node, which a view or a bias addition replaces; `makes` and `_maker` look a
few nodes back, and further back would name the wrong layer. What is recorded may grow freely; a
hook must never change or keep what the model computes, beyond the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchfmri._capture import RunningLayers
from torchfmri._checkup.activations import function_behind, function_of_module
from torchfmri._checkup.gradient_watch import GradientWatch
from torchfmri._checkup.layer_logs import NormLog, UnitLog, normalises_one
from torchfmri._checkup.operations import OperationWatch
from torchfmri._checkup.weights import growth_in_time, noise_scale, relative_spread, rms, spread
from torchfmri._diagnosis import (
    MATRIX_LAYERS,
    NORM_LAYERS,
    Notes,
    StepFacts,
    Structure,
    parameters_of,
)
from torchfmri._model import each_once, named_layers
from torchfmri._torch import flatten, hooked, is_transformed, nodes_before

_MOST_NODES = 4
_SUMS = ("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0")
_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


class Watcher:
    """Follows the steps of a run on a copy of the model and records what statistics cannot show.

    Args:
        model: The copy.
        optimizers: The optimizers that train it.
        structure: The layers and parameters of the copy.
        notes: Collects errors that are raised in the hooks.
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
        self._running = RunningLayers(model, lambda _: None)
        self.step = 0
        self.detailed: OperationWatch | None = None
        self.inputs: dict[int, Tensor] = {}
        self.called: dict[str, None] = {}
        self.without_graph: set[str] = set()
        self.reader: tuple[str, bool] | None = None
        self.units: dict[tuple[str, str, str], UnitLog] = {}
        self.loads: dict[str, list[list[float]]] = {}
        self.spread: dict[str, float] = {}
        self.growth: dict[str, float] = {}
        self.signal: dict[str, float] = {}
        self.norms: dict[str, NormLog] = {}
        self.constants: dict[str, str] = {}
        self.given: dict[str, float] = {}
        # If every parameter is trained, a tensor without a graph can only come from the data.
        self._all_is_trained = all(each.trainable for each in structure.parameters.values())
        self.linear_pairs: dict[tuple[str, str], None] = {}
        self.trains: bool | None = None
        self.output: Any = None
        self.gradients = GradientWatch(notes)
        self._nodes: dict[Any, str] = {}

    # -- attaching ---------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[Watcher]:
        """Keep the hooks on while the block runs."""
        with self._running, hooked(self._put_on()):  # in this order: `here` is known in hooks
            yield self

    def _put_on(self) -> Iterator[RemovableHandle]:
        """Register the hooks, and yield the handle of each."""
        for name, module in each_once(self._layers).items():
            yield from self._hook_module(name, module)
        yield from self.gradients.attach(parameters_of(self._model), self._optimizers)

    @contextmanager
    def observing(self, step: int, detailed: bool, batch: Any) -> Iterator[None]:
        """Observe one step, which the block runs."""
        self.step = step
        self.gradients.begin_step()
        self.trains = None
        self._nodes.clear()
        self._running.stack.clear()
        self.inputs = {
            each.tensor.untyped_storage().data_ptr(): each.tensor
            for each in flatten(batch)
            if each.tensor.layout == torch.strided and not each.tensor.is_nested
        }
        if not detailed:
            yield
            return
        self.detailed = OperationWatch(
            self.here, step, self._notes, _samples(batch), self.gradients.is_unscaled
        )
        try:
            with self.detailed:
                yield
        finally:
            self.last_detailed, self.detailed = self.detailed, None

    last_detailed: OperationWatch | None = None
    last_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def idle_parameters(self) -> tuple[str, ...]:
        """Return the parameters of the optimizers that never stepped."""
        names = {id(each): name for name, each in parameters_of(self._model).items()}
        return tuple(
            names[id(each)]
            for optimizer in self._optimizers
            if not self.gradients.steps[id(optimizer)]
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in names
        )

    def here(self) -> str:
        """Return the innermost layer that is running; "" outside the model."""
        return self._running.stack[-1] if self._running.stack else ""

    def _hook_module(self, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        part = f"Layer {name!r}" if name else "The model"

        def enter(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if torch.is_grad_enabled() or module.training:
                self.called.setdefault(name)
            if name == "" and torch.is_grad_enabled():
                self.last_call = arguments, keywords
            with self._notes.guard(part):
                self._enter(name, module, arguments)

        def leave(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            with self._notes.guard(part):
                self._leave(name, module, arguments, output)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave)

    # -- forward -----------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if name in self._structure.modes and torch.is_grad_enabled():
            self.trains = bool(self.trains) or module.training or self._model.training
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
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and torch.is_grad_enabled():
            self.norms.setdefault(name, NormLog(name, module)).add(first)
        if self.step == 0 and normalises_one(module, first):
            self.constants.setdefault(name, type(module).__name__)
        if not isinstance(module, MATRIX_LAYERS):
            return
        if not first.requires_grad:
            if self.step == 0 and torch.is_grad_enabled() and self._all_is_trained:
                self.given.setdefault(name, rms(first))
            return
        if self.step == 0 and first.ndim >= 2:
            self.signal.setdefault(name, spread(first))
        function, before = function_behind(first)
        source = self._maker(before)
        made_by = self._nodes.get(first.grad_fn, "")
        maker = self._layers.get(made_by)
        if _is_redundant(maker, module):
            self.linear_pairs.setdefault((made_by, name))
        if function and not function_of_module(self._layers.get(made_by, module)):
            self._log(source, "", function, module, name).add(self.step, None, first)
        if self.detailed is not None and first.ndim >= 2:
            self.spread[name] = relative_spread(first)

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
                lambda gradient: self.gradients.look_at_half(name, gradient)
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

    def makes(self, layer: str, output: Tensor) -> bool:
        """Whether a layer made a tensor, ignoring bias additions and reshapes."""
        node = output.grad_fn
        for _ in range(_MOST_NODES):
            if node is None:
                return False
            if self._nodes.get(node) == layer:
                return True
            node = next(iter(nodes_before(node)), None)
        return False

    def _maker(self, node: Any) -> str:
        """Return the layer whose output a node reads, looking through shifts, scales and sums."""
        nodes = [node]
        for _ in range(_MOST_NODES):
            found = [each for each in nodes if each in self._nodes]
            if found:
                return self._nodes[found[0]]
            nodes = [before for each in nodes if each is not None for before in _fed_by(each)]
        return ""

    def _log(
        self, name: str, source: str, function: str, near: nn.Module | None, reader: str = ""
    ) -> UnitLog:
        key = (name, function, reader)
        if key not in self.units:
            fed_by = self._layers.get(source or name if reader else source, near)
            channels = isinstance(fed_by, _CONVOLUTIONS) or isinstance(near, _CONVOLUTIONS)
            self.units[key] = UnitLog(name, source, function, channels, reader=reader)
        return self.units[key]


class StepLog:
    """Collects what each step of a run did between backward and its end."""

    def __init__(self) -> None:
        self._numbers: list[tuple[float, float]] = []
        self._flags: list[tuple[bool, bool, bool, bool, bool]] = []
        self._rates: list[Sequence[float]] = []
        self._passes: list[int] = []

    def __len__(self) -> int:
        return len(self._rates)

    def add(self, seen: GradientWatch, rates: Sequence[float], trains: bool | None) -> None:
        """Take in a step: what its gradients did, each group's rate, and the mode it ran in."""
        self._numbers.append((seen.clip, seen.norm))
        self._flags.append((seen.stale, seen.stepped, seen.cleared, seen.early, trains is False))
        self._rates.append(rates)
        if seen.stepped:
            self._passes.append(seen.passes)

    def facts(self, watcher: Watcher, samples: int) -> StepFacts:
        """Return the facts about all steps.

        Args:
            watcher: The watcher of the run's layers.
            samples: How many samples all batches had.
        """
        gradients = watcher.gradients
        half = {name: small / some for name, (small, some) in gradients.half.items() if some}
        clip, norm = np.array(self._numbers, np.float64).reshape(-1, 2).T
        stale, stepped, cleared, early, evaluated = np.array(self._flags, bool).reshape(-1, 5).T
        groups = max((len(each) for each in self._rates), default=0)
        rates = np.full((len(self), groups), math.nan)
        for row, each in zip(rates, self._rates, strict=True):
            row[: len(each)] = each
        largest = np.array([max(each, default=math.nan) for each in self._rates])
        return StepFacts(
            clip=clip,
            norm=norm,
            stale=stale,
            learning_rate=largest,
            stepped=stepped,
            half_gradients=half,
            flushed=tuple(gradients.flushed) if any(half.values()) or gradients.flushed else (),
            spread=dict(watcher.spread),
            noise_scale=noise_scale(gradients.samples, samples / max(1, len(self))),
            cleared=cleared,
            growth=dict(watcher.growth),
            rates=rates,
            early=early,
            evaluated=evaluated,
            signal=dict(watcher.signal),
            passes=int(np.median(self._passes)) if self._passes else 0,
            idle=watcher.idle_parameters(),
            scaled_clip=gradients.scaled_clip,
        )


def _fed_by(node: Any) -> list[Any]:
    """Return a node's inputs if it keeps a layer's output recognisable, else an empty list."""
    before = nodes_before(node)
    return before if len(before) == 1 or node.name() in _SUMS else []


def _samples(batch: Any) -> int:
    """Return how many samples a batch has; 0 if another axis is as long or it is unknown."""
    shapes = [tuple(each.tensor.shape) for each in flatten(batch)]
    if not shapes or not shapes[0] or shapes[0][0] < 2:
        return 0
    count = shapes[0][0]
    if any(not shape or shape[0] != count or count in shape[1:] for shape in shapes):
        return 0
    return count


def _is_redundant(maker: nn.Module | None, reader: nn.Module) -> bool:
    """Whether two Linear layers in a row collapse into one: nothing between, no bottleneck."""
    if not isinstance(maker, nn.Linear) or not isinstance(reader, nn.Linear) or maker is reader:
        return False
    return maker.out_features >= min(maker.in_features, reader.out_features)
