"""The plans of models, kept between blocks: a training loop makes the same one every step.

A plan that is kept refers to its model weakly, and holds for as long as the model looks as it did:
the same modules with the same code under the same names, the same parameters, as trainable as
before. In a model of 311 parameters whose step is mostly Python, that saves 11 to 14 hundredths of
the plain step (`python -m benchmarks token_gradients --without kept_plans`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter, methodcaller
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchfmri._capture import masked_modules
from torchfmri._model import Pattern, named_layers, unwrap
from torchfmri._tokens.algebra.parameter import ParameterInfo, head_size
from torchfmri._tokens.calls.account import homes_of
from torchfmri._tokens.calls.checks import alike_of
from torchfmri._tokens.calls.plan import (
    Stacks,
    describe_all,
    find_parameters,
    holds_functions,
    is_function,
    scripted_parameters,
    watched_modules,
)
from torchfmri._tokens.calls.token_map import TokenMap
from torchfmri._tokens.rules.record import Watched
from torchfmri.exceptions import InspectionError


class CapturePlan(NamedTuple):
    """What a block watches.

    Attributes:
        model: The model, without what wraps it.
        stacks: Its encoder and decoder, by name; nothing where it is not made of these.
        parameters: Those that are watched, by their first names.
        aliases: All of their names -> the first.
        infos: What is known of each; `alike` are their names, those together that are read alike.
        watched: The layers whose calls are captured; `by_module` are the same by the id of the
            module.
        called: The modules among them that have a rule; `parts`, those that only call others, but
            for the model itself.
        owners: Those of the layers that are run again.
        homes: The layers in which a parameter lives.
        masked: The modules that are handed a mask.
        scripted: Parameters of modules that no hook can be on -> their layers.
        maps: The tokens of the calls of a pass, for arguments of each shape that was seen.
    """

    model: nn.Module
    stacks: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    aliases: Mapping[str, str]
    infos: Mapping[str, ParameterInfo]
    alike: list[list[str]]
    watched: Mapping[str, Watched]
    by_module: Mapping[int, Watched]
    called: list[nn.Module]
    parts: list[nn.Module]
    owners: list[Watched]
    homes: Mapping[str, list[str]]
    masked: list[nn.Module]
    scripted: Mapping[str, str]
    maps: dict[object, TokenMap]


def plan_of(model: nn.Module, pattern: Pattern, voxel: int) -> CapturePlan:
    """The plan for a pattern of parameters; `voxel` is how many units are one by default.

    Raises:
        LayerNotFoundError: The pattern matches nothing.
        InspectionError: It matches frozen parameters alone, or one that has no shape yet, or is no
            pattern.
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
    _check_shapes(parameters)
    stacks = Stacks(layers)
    watched = watched_modules(layers, parameters, aliases, stacks)
    infos = describe_all(parameters, layers, head, voxel)
    plan = CapturePlan(
        model=root,
        stacks={name: layers[name] for name in (stacks.encoder, stacks.decoder) if name},
        parameters=parameters,
        aliases=aliases,
        infos=infos,
        alike=alike_of(infos),
        watched=watched,
        by_module={id(each.module): each for each in watched.values()},
        called=[each.module for each in watched.values() if each.rule is not None],
        parts=[each.module for each in watched.values() if each.only_calls and each.layer],
        owners=[each for each in watched.values() if each.rule is None and not each.only_calls],
        homes=homes_of(watched),
        masked=masked_modules(layers.values()),
        scripted=scripted_parameters(layers, aliases),
        maps={},
    )
    seen = look_at(root, len(layers))
    if seen is not None and _can_be_kept(layers, seen):
        _keep(asked, plan, seen)
    return plan


def _check_shapes(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, each in parameters.items():
        if is_lazy(each):
            raise InspectionError(
                f"{name!r} has no shape yet: its layer is lazy and has not run. Run the model once "
                "before the block, or select other parameters."
            )


# -- keeping -------------------------------------------------------------------------------------

_MOST = 4  # plans of one model, for different patterns
_Asked: TypeAlias = tuple[object, ...]


class _KeptPlans:
    """The plans of one model, as it looked when they were made.

    Attributes:
        of: The model.
    """

    def __init__(self, model: nn.Module, seen: SeenModel) -> None:
        key = id(model)

        def forget(_: object) -> None:
            _KEPT.pop(key, None)

        self.of = weakref.ref(model, forget)
        # Modules are known by their ids, which are theirs for as long as they live.
        self._modules = [weakref.ref(each, forget) for each in seen.modules]
        self._looks = seen.looks
        self._plans: dict[_Asked, _WeakPlan] = {}

    def plan(self, asked: _Asked) -> CapturePlan | None:
        """The plan that was asked for, if the model still looks as it did."""
        model = self.of()
        try:
            found = self._plans.get(asked)
        except TypeError:  # a pattern that is no pattern
            return None
        if found is None or model is None:
            return None
        seen = look_at(model, len(self._modules))
        return found.plan(seen) if seen is not None and seen.looks == self._looks else None

    def add(self, asked: _Asked, plan: CapturePlan, seen: SeenModel) -> bool:
        """Keep a plan, unless the model does not look as it did."""
        if seen.looks != self._looks:
            return False
        while len(self._plans) >= _MOST:
            del self._plans[next(iter(self._plans))]
        self._plans[asked] = _WeakPlan(plan, seen)
        return True


class _WeakPlan:
    """A plan without its modules and parameters: their places among those of the model instead."""

    def __init__(self, plan: CapturePlan, seen: SeenModel) -> None:
        places = {id(module): place for place, module in enumerate(seen.modules)}
        self._stacks = {name: places[id(each)] for name, each in plan.stacks.items()}
        self._called = [places[id(each)] for each in plan.called]
        self._parts = [places[id(each)] for each in plan.parts]
        self._masked = [places[id(each)] for each in plan.masked]
        places = {id(parameter): place for place, parameter in enumerate(seen.parameters)}
        self._parameters = {name: places[id(each)] for name, each in plan.parameters.items()}
        nothing: Any = None
        self._rest = plan._replace(
            model=nothing, stacks={}, parameters={}, called=[], parts=[], masked=[]
        )

    def plan(self, seen: SeenModel) -> CapturePlan:
        """The plan with what is there to see."""
        modules, parameters = seen.modules, seen.parameters
        return self._rest._replace(
            model=modules[0],
            stacks={name: modules[place] for name, place in self._stacks.items()},
            parameters={name: parameters[place] for name, place in self._parameters.items()},
            called=[modules[place] for place in self._called],
            parts=[modules[place] for place in self._parts],
            masked=[modules[place] for place in self._masked],
        )


_KEPT: dict[int, _KeptPlans] = {}


def _keep(asked: _Asked, plan: CapturePlan, seen: SeenModel) -> None:
    model = plan.model
    kept = _KEPT.get(id(model))
    if kept is None or kept.of() is not model or not kept.add(asked, plan, seen):
        kept = _KEPT[id(model)] = _KeptPlans(model, seen)
        kept.add(asked, plan, seen)


def _can_be_kept(layers: Mapping[str, nn.Module], seen: SeenModel) -> bool:
    """Whether the layers are all there is to a model: nothing wrapped, scripted or patched."""
    known = {id(each) for each in layers.values()}
    if len(seen.modules) != len(layers):  # one is inside itself
        return False
    for module in layers.values():
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            return False
        if any(each is not None and id(each) not in known for each in module._modules.values()):
            return False
    return True


class SeenModel(NamedTuple):
    """What there is to see of a model.

    Attributes:
        modules: All of them, by how deep they are; those with two names twice.
        parameters: Theirs, in that order.
        looks: Everything about both that a plan depends on, to be compared.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    looks: tuple[object, ...]


_CHILDREN, _PARAMETERS = itemgetter("_modules"), itemgetter("_parameters")
_VALUES = methodcaller("values")
_FORWARD, _TRAINS, _DTYPE = map(attrgetter, ("forward", "requires_grad", "dtype"))


def look_at(model: nn.Module, most: int) -> SeenModel | None:
    """Look at a model, and no further than at so many modules and those below them.

    Every block begins with this, so it takes no line of Python per module. None: one is scripted,
    and there is nothing to see.
    """
    modules, level = [model], [model]
    while level and len(modules) <= most:
        if not all(map(contains, map(vars, level), repeat("_modules"))):
            return None
        below = chain.from_iterable(map(_VALUES, map(_CHILDREN, map(vars, level))))
        level = [each for each in below if each is not None]
        modules += level
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in set(map(type, modules))):
        return None
    kinds, states = [*map(type, modules)], [*map(vars, modules)]
    children, tables = [*map(_CHILDREN, states)], [*map(_PARAMETERS, states)]
    values = [*chain.from_iterable(map(_VALUES, tables))]
    parameters = [each for each in values if each is not None]
    looks = (
        kinds,
        [*map(_FORWARD, kinds)],
        [*map(contains, states, repeat("forward"))],
        [*map(len, children)],
        [*chain.from_iterable(children)],
        [*map(id, chain.from_iterable(map(_VALUES, children)))],
        _holding_functions([each for each, below in zip(modules, children, strict=True) if below]),
        [*map(len, tables)],
        [*chain.from_iterable(tables)],
        [*map(id, values)],
        [*map(type, parameters)],
        [*map(_TRAINS, parameters)],
        [*map(_DTYPE, parameters)],
        [None if is_lazy(each) else each.shape for each in parameters],
    )
    return SeenModel(modules, parameters, looks)


def _holding_functions(modules: list[nn.Module]) -> list[bool]:
    """Which of them have functions as attributes; nothing where none has."""
    kinds = set(map(type, chain.from_iterable(map(_VALUES, map(vars, modules)))))
    return [*map(holds_functions, modules)] if any(map(is_function, kinds)) else []
