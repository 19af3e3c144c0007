"""What a model and its optimizers are before anything runs: layers, parameters, who is trained.

A check-up, a Monitor and `live` call `describe` once. Parameters are listed once, under their first
full name, and wrappers (DDP, compile) are not part of the names. `kinds`, `parameters` and `modes`
keep model order, because a Monitor takes it for the order of execution. Further facts may be read
here, as long as nothing runs the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfmri._model import each_once, named_layers, named_parameters, unwrap

MATRIX_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase)
_BATCH_NORM = nn.modules.batchnorm._NormBase
NORM_LAYERS = (nn.LayerNorm, nn.GroupNorm, _BATCH_NORM, nn.LocalResponseNorm, nn.RMSNorm)


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter.

    Attributes:
        name: Its full name, such as "layers.0.weight".
        layer: The layer that owns it.
        kind: The class of that layer.
        shape: Its shape.
        trainable: Whether it asks for gradients.
        optimized: Whether an optimizer has it; None if the optimizer is not known.
        fan_in: How many numbers one unit adds up.
    """

    name: str
    layer: str
    kind: str
    shape: tuple[int, ...]
    trainable: bool
    optimized: bool | None
    fan_in: int

    @property
    def is_matrix(self) -> bool:
        """Whether it maps inputs to units; tables of embeddings and norms do not."""
        return len(self.shape) >= 2 and min(self.shape[:2]) > 1 and "Embedding" not in self.kind

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Structure:
    """A model and its optimizers, in model order.

    Attributes:
        kind: The class of the model.
        kinds: Layer -> the class of its module.
        parameters: Parameter name -> facts; one that has two names is listed once.
        aliases: Parameter name -> all layers that own it, if there are several.
        strangers: How many tensors of the optimizers are not part of the model.
        groups: Settings of the optimizers' groups: lr, weight_decay, momentum, maximize, the
            parameters' names, and eps_lost: what its eps is if that rounds to 0, else "".
        modes: Layer -> whether it is in training mode, for dropout and batch norms.
        experts: Router layer -> the expert layers that it chooses from.
        trains: Whether the model itself is in training mode.
        dropouts: Dropout layer -> the share that it sets to 0.
    """

    kind: str
    kinds: Mapping[str, str]
    parameters: Mapping[str, ParameterFacts]
    aliases: Mapping[str, tuple[str, ...]]
    strangers: int
    groups: Sequence[Mapping[str, Any]]
    modes: Mapping[str, bool]
    experts: Mapping[str, tuple[str, ...]]
    trains: bool = True
    dropouts: Mapping[str, float] = field(default_factory=dict)

    @property
    def matrices(self) -> list[ParameterFacts]:
        """The trainable matrices, in model order."""
        return [each for each in self.parameters.values() if each.is_matrix and each.trainable]


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their full names, each once, wrappers left out of the names."""
    return each_once(named_parameters(named_layers(model)))


def describe(model: nn.Module, optimizers: Sequence[Optimizer] | None) -> Structure:
    """Return the structure of a model as it is now."""
    layers = named_layers(model)
    owned: dict[int, list[tuple[str, str, Tensor]]] = {}
    for full, parameter in named_parameters(layers).items():
        owned.setdefault(id(parameter), []).append((full.rpartition(".")[0], full, parameter))
    held = {
        id(parameter)
        for optimizer in optimizers or ()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    facts, aliases = {}, {}
    for identity, places in owned.items():
        layer, full, tensor = places[0]
        facts[full] = ParameterFacts(
            name=full,
            layer=layer,
            kind=type(layers[layer]).__name__,
            shape=tuple(tensor.shape),
            trainable=tensor.requires_grad,
            optimized=None if optimizers is None else identity in held,
            fan_in=_fan_in(layers[layer], tensor),
        )
        owners = tuple(dict.fromkeys(place[0] for place in places))
        if len(owners) > 1:
            aliases[full] = owners
    names = {identity: places[0][1] for identity, places in owned.items()}
    return Structure(
        kind=type(unwrap(model)).__name__,
        kinds={layer: type(module).__name__ for layer, module in layers.items()},
        parameters=facts,
        aliases=aliases,
        strangers=len(held - set(owned)) if optimizers else 0,
        groups=_groups(optimizers or (), names),
        modes={
            layer: module.training
            for layer, module in layers.items()
            if _changes_in_training(module)
        },
        experts=find_experts(layers),
        trains=unwrap(model).training,
        dropouts={
            layer: module.p
            for layer, module in layers.items()
            if isinstance(module, nn.modules.dropout._DropoutNd)
        },
    )


def _groups(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {
            "optimizer": type(optimizer).__name__,
            "lr": float(group.get("lr", math.nan)),
            "weight_decay": float(group.get("weight_decay", 0.0) or 0.0),
            "momentum": float(group.get("momentum", 0.0) or 0.0),
            "maximize": bool(group.get("maximize", False)),
            "eps_lost": _eps_lost(group),
            "parameters": [names[id(each)] for each in group["params"] if id(each) in names],
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _eps_lost(group: Mapping[str, Any]) -> str:
    """Describe an eps that is 0 in the dtype of the group's parameters; "" if it is not."""
    eps = group.get("eps")
    if not isinstance(eps, (int, float)):
        return ""
    if eps == 0:
        return "eps=0"
    for dtype in {each.dtype for each in group["params"] if each.is_floating_point()}:
        if float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
            return f"eps={eps:g}, which is 0 in {str(dtype).removeprefix('torch.')}"
    return ""


def _fan_in(module: nn.Module, parameter: Tensor) -> int:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return 1
    transposed = "Transpose" in type(module).__name__
    first = shape[0] if transposed else shape[1]
    return max(1, first * math.prod(shape[2:]))


def _changes_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats


def find_experts(layers: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return routers: layers with one output for each member of a list beside them."""
    found = {}
    for name, module in layers.items():
        prefix = f"{name}." if name else ""
        for (key, members), (other, child) in permutations(module._modules.items(), 2):
            if not isinstance(members, nn.ModuleList) or not isinstance(child, nn.Linear):
                continue
            are_alike = len(members) >= 2 and len({type(each) for each in members}) == 1
            if are_alike and child.out_features == len(members):
                experts = tuple(f"{prefix}{key}.{number}" for number in range(len(members)))
                found[f"{prefix}{other}"] = experts
    return found
