"""WIRE: the plans of models, kept between blocks: a training loop makes the same one every step.

A plan that is kept refers to its model weakly, and holds for as long as the model looks as it did:
the same modules with the same code under the same names, the same parameters, as trainable as
before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchfmri._layers import Pattern, named_layers, unwrap
from torchfmri._padding import takes_mask
from torchfmri._tokens.account import homes_of
from torchfmri._tokens.parameter import ParameterInfo, head_size
from torchfmri._tokens.plan import (
    Stacks,
    describe_all,
    find_parameters,
    holds_functions,
    watched_modules,
)
from torchfmri._tokens.record import Watched


class Plan(NamedTuple):
    """What a block watches.

    Attributes:
        layers: All layers of the model, by name; "" is the model.
        parameters: Those that are watched, by their first names.
        aliases: All of their names -> the first.
        infos: What is known of each.
        watched: The layers whose calls are captured.
        homes: The layers in which a parameter lives.
        stacks: Encoder and decoder.
        masked: The modules that are handed a mask.
    """

    layers: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    aliases: Mapping[str, str]
    infos: Mapping[str, ParameterInfo]
    watched: Mapping[str, Watched]
    homes: Mapping[str, list[str]]
    stacks: Stacks
    masked: list[nn.Module]


def plan_of(model: nn.Module, pattern: Pattern, voxel: int) -> Plan:
    """The plan for a pattern of parameters; `voxel` is how many units are one by default.

    Raises:
        LayerNotFoundError: The pattern matches nothing.
        InspectionError: It matches frozen parameters alone, or is no pattern.
    """
    root = unwrap(model)
    head = head_size(getattr(root, "config", None))
    several = isinstance(pattern, (list, tuple, set, frozenset))
    asked = (tuple(pattern) if several else pattern, voxel, head)  # type: ignore[arg-type]
    kept = _KEPT.get(id(root))
    if kept is not None and kept.of() is root:
        plan = kept.plan(asked)
        if plan is not None:
            return plan
    layers = named_layers(model)
    parameters, aliases = find_parameters(layers, pattern)
    watched = watched_modules(layers, parameters, aliases)
    plan = Plan(
        layers,
        parameters,
        aliases,
        describe_all(parameters, layers, head, voxel),
        watched,
        homes_of(watched),
        Stacks(layers),
        [each for each in layers.values() if takes_mask(each)],
    )
    if _can_be_kept(layers):
        _keep(root, asked, plan)
    return plan


# -- keeping -------------------------------------------------------------------------------------

_MOST = 4  # plans of one model, for different patterns
_Asked: TypeAlias = tuple[object, ...]


class _Kept:
    """The plans of one model, as it looked when they were made.

    Attributes:
        of: The model.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        key = id(model)
        self.of = weakref.ref(model, lambda _: _KEPT.pop(key, None))
        self._names = list(layers)
        self._modules = [weakref.ref(each) for each in layers.values()]
        self._looks = _looks_of(layers.values())
        self._plans: dict[_Asked, _WeakPlan] = {}

    def plan(self, asked: _Asked) -> Plan | None:
        """The plan that was asked for, if the model still looks as it did."""
        try:
            found = self._plans.get(asked)
        except TypeError:  # a pattern that is no pattern
            return None
        modules = [module for each in self._modules if (module := each()) is not None]
        if found is None or len(modules) < len(self._names) or _looks_of(modules) != self._looks:
            return None
        return found.with_modules(dict(zip(self._names, modules, strict=True)))

    def add(self, asked: _Asked, plan: Plan) -> bool:
        """Keep a plan, unless the model does not look as it did."""
        if _looks_of(plan.layers.values()) != self._looks:
            return False
        while len(self._plans) >= _MOST:
            del self._plans[next(iter(self._plans))]
        self._plans[asked] = _WeakPlan(plan)
        return True


class _WeakPlan:
    """A plan without its modules and parameters."""

    def __init__(self, plan: Plan) -> None:
        self._parameters = {name: name.rpartition(".")[::2] for name in plan.parameters}
        names = {id(module): name for name, module in plan.layers.items()}
        self._masked = [names[id(each)] for each in plan.masked]
        self._rest = plan._replace(layers={}, parameters={}, masked=[])

    def with_modules(self, layers: dict[str, nn.Module]) -> Plan:
        """The plan for these modules."""
        parameters: dict[str, Any] = {
            name: layers[layer]._parameters[key] for name, (layer, key) in self._parameters.items()
        }
        masked = [layers[name] for name in self._masked]
        return self._rest._replace(layers=layers, parameters=parameters, masked=masked)


_KEPT: dict[int, _Kept] = {}


def _keep(model: nn.Module, asked: _Asked, plan: Plan) -> None:
    kept = _KEPT.get(id(model))
    if kept is None or kept.of() is not model or not kept.add(asked, plan):
        kept = _KEPT[id(model)] = _Kept(model, plan.layers)
        kept.add(asked, plan)


def _can_be_kept(layers: Mapping[str, nn.Module]) -> bool:
    """Whether the layers are all there is to a model: nothing wrapped, scripted or patched."""
    known = {id(each) for each in layers.values()}
    for module in layers.values():
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            return False
        if any(each is not None and id(each) not in known for each in module._modules.values()):
            return False
    return True


def _looks_of(modules: Iterable[nn.Module]) -> list[object]:
    """Everything about modules that a plan depends on, by which they can be compared."""
    looks: list[object] = []
    for module in modules:
        kind, state = type(module), vars(module)
        looks += (kind, kind.forward, "forward" in state)
        children, parameters = state["_modules"], state["_parameters"]
        if children:
            looks += children
            looks += map(id, children.values())
            looks.append(holds_functions(module))
        for key, each in parameters.items():
            looks += (key, id(each))
            if each is not None:
                looks += (each.requires_grad, each.dtype, None if is_lazy(each) else each.shape)
    return looks
