"""Copies of a model, its optimizers and its loss, which train as the originals would.

`diagnose` and `advise` run on these copies, because nothing of the user's may be written to. All
are copied in one deepcopy, so that each optimizer trains the copied parameters. deepcopy alone has
two faults that are mended here: it gives parameters that share memory separate memory
(`_share_memory`), and it drops plain attributes of an optimizer (`_complete`). What else deepcopy
loses is given back in `_complete`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfmri._arguments import shown
from torchfmri._model.layers import runnable
from torchfmri._model.optimizer_steps import check_optimizers
from torchfmri._torch import users_of_memory
from torchfmri.exceptions import InspectionError


class TrainingCopies(NamedTuple):
    """A copied model with what trains it.

    Attributes:
        model: The copy, without gradients.
        optimizers: Optimizers of the copy, with the state of the originals.
        loss: A copy if the loss is a module, else the loss itself.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    loss: Any


def copy_training(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[..., Optimizer] | None,
    loss: Any,
) -> TrainingCopies:
    """Return copies of everything; a function makes its optimizer from the copied parameters.

    Raises:
        InspectionError: Something cannot be copied, or `optimizer` neither is nor makes one.
    """
    make = optimizer if callable(optimizer) and not isinstance(optimizer, Optimizer) else None
    given = check_optimizers(() if make else optimizer)  # type: ignore[arg-type]
    own_loss = loss if isinstance(loss, nn.Module) else None
    memory: dict[int, Any] = {}
    try:
        twin, optimizers, twin_loss = copy.deepcopy((runnable(model), given, own_loss), memory)
    except Exception as error:
        raise InspectionError(
            f"{type(model).__name__} cannot be copied ({error}), and only copies are trained here. "
            "Make the model, its optimizer and its loss ones that copy.deepcopy takes, or follow "
            "your own loop with torchfmri.Monitor."
        ) from error
    _share_memory(memory)
    for original, twin_optimizer in zip(given, optimizers, strict=True):
        _complete(original, twin_optimizer, memory)
    for parameter in twin.parameters():
        parameter.grad = None
    if make is not None:
        made = make(twin.parameters())
        if not isinstance(made, Optimizer):
            raise InspectionError(
                f"optimizer={shown(optimizer)} is neither an optimizer nor a function of "
                "parameters that returns one. Write optimizer=lambda parameters: "
                "torch.optim.Adam(parameters, lr=1e-3)."
            )
        optimizers = [made]
    return TrainingCopies(twin, optimizers, loss if own_loss is None else twin_loss)


def _share_memory(memory: dict[int, Any]) -> None:
    """Let copies share memory as their originals do: deepcopy separates parameters.

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


def _complete(original: Optimizer, twin: Optimizer, memory: dict[int, Any]) -> None:
    """Give back the plain attributes that an optimizer's copy loses: LBFGS lists its parameters."""
    for name, value in vars(original).items():
        is_plain = value is None or isinstance(value, (bool, int, float, str))
        is_tensors = isinstance(value, list) and all(isinstance(each, Tensor) for each in value)
        if not hasattr(twin, name) and (is_plain or is_tensors):
            setattr(twin, name, copy.deepcopy(value, memory))


def shared_outside(model: nn.Module) -> list[str]:
    """Return the parameters that share their memory with a tensor outside the model."""
    names = {id(each): name for name, each in model.named_parameters()}
    values = [value for module in model.modules() for value in vars(module).values()]
    attributes = [value for value in values if isinstance(value, Tensor)]
    return [
        names[id(each)]
        for tensors in _by_memory([*model.parameters(), *model.buffers(), *attributes])
        if users_of_memory(tensors[0]) > len(tensors)
        for each in tensors
        if id(each) in names
    ]


def _by_memory(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups that share their memory, each once."""
    groups: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for each in tensors:
        if each.layout != torch.strided or each.is_meta or type(each) not in _PLAIN:
            continue
        if place := each.untyped_storage().data_ptr():
            groups[place][id(each)] = each
    return [list(group.values()) for group in groups.values()]


_PLAIN = (Tensor, nn.Parameter)
