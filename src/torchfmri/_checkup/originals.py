"""The user's own model and optimizers, kept from a step that reaches past its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getclosurevars, isfunction
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfmri._diagnosis import Notes
from torchfmri.exceptions import InspectionError


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
            notes.add(
                "step= changed settings of your own optimizer (the learning rate, by a scheduler "
                "that belongs to it?) and not of the copy that it was given. They were put back, "
                "and this run had no schedule: make the scheduler of the optimizer that "
                "step(model, batch, optimizer) gets, at its first call."
            )
        elif not changed():
            schedulers, optimizers = [], []
        for own, state in zip(optimizers, states, strict=False):
            own.load_state_dict(state)
        for scheduler, state in schedulers:
            scheduler.load_state_dict(state)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups say, apart from their parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _schedulers(step: Any) -> list[LRScheduler]:
    """The schedulers that a function refers to."""
    if not isfunction(step):
        return []
    found = getclosurevars(step)
    names = {**found.globals, **found.nonlocals}
    return [each for each in names.values() if isinstance(each, LRScheduler)]
