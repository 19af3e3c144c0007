"""The door: `torchfmri.diagnose`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchfmri._arguments import check_callable, check_number, require
from torchfmri._checkup.copies import OwnStep, copy_all, shared_outside, untouched
from torchfmri._checkup.run import Checkup
from torchfmri._diagnosis import Diagnosis, Notes, Observation, find, median, update_ratios
from torchfmri._model import spared_grad, switched_off, unchanged, unwrap
from torchfmri._text import listed
from torchfmri.exceptions import InspectionError


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Any = None,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[..., Optimizer] | None = None,
    steps: int = 25,
    *,
    step: OwnStep | None = None,
    show: bool = True,
) -> Diagnosis:
    """Find what is wrong with a training setup, by training copies of it for some steps.

    The model, the optimizer and its state, gradients, random state and data stay as they are.
    Training stops early where numbers stop being finite, and that step is traced back to the
    sample, layer or operation.

    Args:
        model: The model, in the mode in which it is trained.
        batches: A DataLoader or any iterable of batches, taken from the start and again if there
            are too few: (x, y), (x1, x2, y), a dict of keyword arguments, or a tensor. Of an
            iterator the batches are used up.
        loss: A function of output and target, or of the output alone; None if the model returns
            its loss.
        optimizer: The optimizer, several, or a function of the parameters that makes one.
        steps: How many steps at most; units that are never on are judged from 10 steps on.
        step: Your own training step, `step(model, batch, optimizer)`, which may clip, scale or
            accumulate; it runs on copies, and returns the loss or nothing. With several
            optimizers it gets the list.
        show: Whether to print the report.

    Raises:
        InspectionError: There is no optimizer or batch, the model cannot be copied, or `step`
            trains the model itself instead of the copy that it is given.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1))
        >>> batches = [(torch.randn(32, 4), torch.randint(3, (32,))) for _ in range(5)]
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> diagnosis = diagnose(model, batches, nn.CrossEntropyLoss(), optimizer, 5, show=False)
        >>> for finding in diagnosis:
        ...     print(finding.problem)
        probabilities_as_logits
    """
    if not isinstance(model, nn.Module):
        raise InspectionError(f"diagnose takes an nn.Module, not {type(model).__name__}.")
    if optimizer is None:
        raise InspectionError("diagnose needs the optimizer that trains the model.")
    check_number("steps", steps, 1, "give the number of training steps to look at")
    check_callable("loss", loss, "give a loss module or function of output and target")
    check_callable("step", step, "give a function of model, batch and optimizer")
    meaning = "give batches to train on, such as a DataLoader or a list"
    runs = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    require(runs, "batches", batches, meaning)
    started = time.perf_counter()
    name = type(unwrap(model)).__name__
    if switched_off():
        return Diagnosis(name, ())
    notes = Notes()
    if outside := shared_outside(model):
        notes.add(
            f"The memory of {listed(outside)} is also that of a tensor which is not in the model. "
            "The run trains copies, which that tensor does not follow."
        )
    with (
        unchanged(model),
        spared_grad(model.parameters()),  # a loss may refer to the model itself
        untouched(model, optimizer, step, notes) as check,
    ):
        copies = copy_all(model, optimizer, loss, step)
        run = Checkup(model, copies, steps, notes)
        seen = run.observe(_endless(batches), check)
    diagnosis = Diagnosis(
        model=name,
        findings=tuple(find(seen, notes=notes)),
        steps=run.steps_taken,
        facts=_facts(seen),
        seconds=time.perf_counter() - started,
        history=run.history,
        observation=seen,
        notes=notes.all,
    )
    if show:
        print(diagnosis)
    return diagnosis


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, and start over when they end, if they can be iterated again."""
    found = False
    while True:
        again = False
        for batch in batches:
            found = again = True
            yield batch
        if not found:
            raise InspectionError("There are no batches to diagnose with.")
        if not again:
            return


def _facts(seen: Observation) -> dict[str, float]:
    loss = seen.trace.loss
    facts = {}
    if len(loss):
        facts["loss at first"] = float(loss[0])
        facts["at last"] = float(loss[-1])
    ratio = median(update_ratios(seen))
    if math.isfinite(ratio):
        facts["update / weight"] = ratio
    if seen.steps is not None and math.isfinite(seen.steps.noise_scale):
        facts["gradient noise scale in samples"] = seen.steps.noise_scale
    return {name: value for name, value in facts.items() if math.isfinite(value)}
