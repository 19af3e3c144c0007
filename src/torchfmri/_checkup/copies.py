"""Copies of a model, its optimizers and its loss; and the originals, kept from the user's step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfmri._arguments import check_scalar
from torchfmri._checkup.weights import memory_of
from torchfmri._diagnosis import Notes
from torchfmri._model import (
    TARGET_NAMES,
    check_optimizers,
    needs_closure,
    needs_target,
    own_loss,
    runnable,
)
from torchfmri._torch import users_of_memory
from torchfmri.exceptions import InspectionError

OwnStep: TypeAlias = "Callable[[nn.Module, Any, Any], Any]"


@dataclass(frozen=True)
class Copies:
    """What a run works on; nothing of it is the user's.

    Attributes:
        model: A copy of the model.
        optimizers: Copies that train the copy, with their state.
        loss: A copy of the loss module, or the user's function, or None.
        own_step: The user's own training step, or None.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss: Any
    own_step: OwnStep | None = None


class Lost(BaseException):
    """Ends a step whose loss or gradients are not finite, before the weights are touched.

    No error: it never leaves the package, and no `except Exception` of a user's step holds it up.
    """


def copy_all(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[..., Optimizer],
    loss: Any,
    own_step: OwnStep | None,
) -> Copies:
    """Return copies of everything; the copied optimizers train the copied model.

    Raises:
        InspectionError: The model or an optimizer cannot be copied.
    """
    made = None
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        made, optimizer = optimizer, ()
    given = check_optimizers(optimizer)
    own_loss = loss if isinstance(loss, nn.Module) else None
    memory: dict[int, Any] = {}
    try:
        twin, optimizers, twin_loss = copy.deepcopy((runnable(model), given, own_loss), memory)
    except Exception as error:
        raise InspectionError(
            f"{type(model).__name__} cannot be copied ({error}), and a diagnosis runs on copies "
            "only. Follow your own loop with torchfmri.Monitor and read monitor.findings instead."
        ) from error
    _share_memory(memory)
    for original, twin_optimizer in zip(given, optimizers, strict=True):
        _complete(original, twin_optimizer, memory)
    for parameter in twin.parameters():
        parameter.grad = None
    if made is not None:
        optimizers = [made(twin.parameters())]
    if not optimizers:
        raise InspectionError("A diagnosis needs the optimizer (or a list of them).")
    for each in optimizers if own_step is None else ():
        if needs_closure(each):
            raise InspectionError(
                f"{type(each).__name__}.step() needs a closure that computes the loss again. Hand "
                "over your own step: diagnose(..., step=step), with optimizer.step(closure) in it."
            )
    return Copies(twin, optimizers, loss if own_loss is None else twin_loss, own_step)


def _share_memory(memory: dict[int, Any]) -> None:
    """Let copies of tensors that share their memory share theirs: deepcopy parts parameters.

    Args:
        memory: The memo of a deepcopy: the originals, and the copy of each by its id.
    """
    copied = [each for each in memory.get(id(memory), ()) if isinstance(each, Tensor)]
    for originals in _by_memory(each for each in copied if id(each) in memory):
        if len(originals) < 2 or not any(isinstance(each, nn.Parameter) for each in originals):
            continue
        shared = originals[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
        for each in originals:
            view = torch.empty(0, dtype=each.dtype, device=each.device)
            view.set_(shared, each.storage_offset(), each.shape, each.stride())
            memory[id(each)].data = view


def shared_outside(model: nn.Module) -> list[str]:
    """Return the parameters whose memory is also that of a tensor which the model does not have."""
    names = {id(each): name for name, each in model.named_parameters()}
    held = _by_memory([*model.parameters(), *model.buffers(), *_attributes(model)])
    return [
        names[id(each)]
        for tensors in held
        if users_of_memory(tensors[0]) > len(tensors)
        for each in tensors
        if id(each) in names
    ]


def _by_memory(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups that share their memory, each once."""
    groups: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for each in tensors:
        if place := memory_of(each):
            groups[place][id(each)] = each
    return [list(group.values()) for group in groups.values()]


def _attributes(model: nn.Module) -> list[Tensor]:
    """Return the tensors that modules hold as plain attributes."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in values if isinstance(value, Tensor)]


def _complete(original: Optimizer, twin: Optimizer, memory: dict[int, Any]) -> None:
    """Give back the plain attributes that an optimizer's copy loses: LBFGS lists its parameters."""
    for name, value in vars(original).items():
        is_plain = value is None or isinstance(value, (bool, int, float, str))
        is_tensors = isinstance(value, list) and all(isinstance(each, Tensor) for each in value)
        if not hasattr(twin, name) and (is_plain or is_tensors):
            setattr(twin, name, copy.deepcopy(value, memory))


@dataclass(frozen=True)
class Split:
    """A batch in its parts.

    Attributes:
        arguments: Positional arguments of the model.
        keywords: Keyword arguments of the model.
        target: What the loss compares the output with; None where there is nothing.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    target: Any = None


def split_batch(batch: Any, loss: Any) -> Split:
    """Decide which part of a batch goes into the model and which into the loss.

    (x, y) and (x1, x2, y) as a DataLoader yields them; a dict for a model that returns its own
    loss, or with its target under "labels", "target" or "y"; a tensor alone, which is its own
    target if the loss takes two arguments.
    """
    pairs = loss is not None and needs_target(loss, unsure=True)
    if isinstance(batch, Mapping):
        keywords = dict(batch)
        if not pairs:
            return Split((), keywords)
        name = next((name for name in TARGET_NAMES if name in keywords), None)
        if name is None:
            raise InspectionError(
                f"The batch has {', '.join(map(repr, keywords))}, and none of "
                f"{', '.join(map(repr, TARGET_NAMES))} for the loss. Use step= for your own step."
            )
        target = keywords.pop(name)
        return Split((), keywords, target)
    if isinstance(batch, (tuple, list)):
        parts = tuple(batch)
        if loss is None or not pairs or len(parts) < 2:
            return Split(parts, {})
        first = parts[0]
        if len(parts) == 2 and isinstance(first, (tuple, list)):
            return Split(tuple(first), {}, parts[1])
        if len(parts) == 2 and isinstance(first, Mapping):
            return Split((), first, parts[1])
        return Split(parts[:-1], {}, parts[-1])
    return Split((batch,), {}, batch if pairs else None)


def loss_of(output: Any, target: Any, loss: Any) -> Tensor:
    """Return the number to differentiate.

    Raises:
        InspectionError: There is none.
    """
    if loss is None:
        own = own_loss(output)
        return check_scalar(output if own is None else own)
    pairs = needs_target(loss, unsure=True)
    return check_scalar(loss(output, target) if pairs else loss(output))


_OWN_SETTINGS = (
    "step= changed settings of your own optimizer (the learning rate, by a scheduler that belongs "
    "to it?) and not of the copy that it was given. They were put back, and this run had no "
    "schedule: make the scheduler of the optimizer that step(model, batch, optimizer) gets, at its "
    "first call."
)


@contextmanager
def untouched(
    model: nn.Module, optimizer: Any, step: Any, notes: Notes
) -> Iterator[Callable[[], None]]:
    """Put weights, optimizers and schedulers back if a user's step changed them.

    Yields a function that raises if weights changed: such a step trains the original, and a run on
    copies says nothing about it. Where only settings of the optimizer changed (by a scheduler that
    was made outside of the step), they are put back at the end, with a note.
    """
    if step is None:
        yield lambda: None
        return
    weights = [(name, each, each._version) for name, each in model.named_parameters()]
    kept = [each.detach().to("cpu", copy=True) for _, each, _ in weights]
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    optimizers = [] if callable(given) else [each for each in given if isinstance(each, Optimizer)]
    states = [copy.deepcopy(each.state_dict()) for each in optimizers]
    schedulers = [(each, copy.deepcopy(each.state_dict())) for each in _schedulers(step)]
    settings = [_settings(each) for each in optimizers]

    def changed() -> list[str]:
        return [name for name, each, version in weights if each._version != version]

    def check() -> None:
        if names := changed():
            raise InspectionError(
                f"step= changed your own model ({names[0]!r}), not the copy that it was given; the "
                "weights were put back. Use the model and the optimizer that step(model, batch, "
                "optimizer) gets as its arguments."
            )

    try:
        yield check
    finally:
        for (_, each, version), before in zip(weights, kept, strict=True):
            if each._version != version:
                with torch.no_grad():
                    each.copy_(before)
        if [_settings(each) for each in optimizers] != settings:
            notes.add(_OWN_SETTINGS)
        elif not changed():
            schedulers, optimizers = [], []
        for own, state in zip(optimizers, states, strict=False):
            own.load_state_dict(state)
        for scheduler, state in schedulers:
            scheduler.load_state_dict(state)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the groups, without their parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _schedulers(step: Any) -> list[LRScheduler]:
    """Return the schedulers that a function refers to."""
    if not isfunction(step):
        return []
    found = getclosurevars(step)
    names = {**found.globals, **found.nonlocals}
    return [each for each in names.values() if isinstance(each, LRScheduler)]
