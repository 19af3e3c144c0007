"""The user's step of training: its batch in parts, its loss, and the originals kept from it.

`run` splits batches with `split_batch`; `entry_point` checks the optimizers and wraps the run in
`untouched`. The run trains copies (`_model.copy_training`), but a user's own step may train the
original through a closure: `untouched` finds that by version counters, undoes it and refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfmri._diagnosis import Notes
from torchfmri._model import (
    TARGET_NAMES,
    loss_of,
    needs_closure,
    needs_target,
)
from torchfmri.exceptions import InspectionError

OwnStep: TypeAlias = "Callable[[nn.Module, Any, Any], Any]"


class Lost(BaseException):
    """Ends a step whose loss or gradients are not finite, before the weights are touched.

    No error: it never leaves the package, and no `except Exception` of a user's step holds it up.
    """


def check_steps(optimizers: Sequence[Optimizer], own_step: OwnStep | None) -> None:
    """Raise unless there are optimizers, and a step of their own for those that need a closure."""
    if not optimizers:
        raise InspectionError(
            "A diagnosis needs the optimizer (or a list of them). Give optimizer=optimizer."
        )
    for each in optimizers if own_step is None else ():
        if needs_closure(each):
            raise InspectionError(
                f"{type(each).__name__}.step() needs a closure that computes the loss again. Hand "
                "over your own step: diagnose(..., step=step), with optimizer.step(closure) in it."
            )


@dataclass(frozen=True)
class Split:
    """A batch in its parts.

    Attributes:
        arguments: Positional arguments of the model.
        keywords: Keyword arguments of the model.
        target: What the loss compares the output with; None if there is nothing.
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
                f"The batch has {', '.join(map(repr, keywords))}, but none of "
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


def loss_in_step(output: Any, split: Split, loss: Any) -> Tensor:
    """Return the loss of a batch.

    Raises:
        InspectionError: There is no loss, it is not one number, or the batch has no target for it.
    """
    if loss is not None and split.target is None and needs_target(loss):
        raise InspectionError(
            "The loss compares the output with a target, and the batch has none. Let each batch be "
            "(x, y), or use step= for your own step."
        )
    value = loss_of(output, split.target, loss)
    if value is None:
        raise InspectionError(
            "There is no loss: the output has no .loss and is not a scalar. Give loss=, a function "
            "of the output and the target."
        )
    return value


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
    was made outside the step), they are put back at the end, with a note.
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
