"""`torchfmri.diagnose`, and the same for a whole training script.

`diagnose` is public; its arguments and errors must stay. It runs copies inside `unchanged` and
`spared_grad`, so the model, `.grad` and random state come back also after an error.
`diagnose_script` serves the command line: the script runs as the user wrote it, on its own model,
with a Monitor on the first model that trains. `_Enough` ends it and is a BaseException, so that an
`except Exception` in the script does not catch it. The facts of the last line of a report may
change freely.
"""

from __future__ import annotations

import math
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from torchfmri._arguments import check_callable, check_module, check_number, require
from torchfmri._checkup.run import Checkup
from torchfmri._checkup.users_step import OwnStep, check_steps, untouched
from torchfmri._diagnosis import Diagnosis, Notes, Observation, find, median, update_ratios
from torchfmri._model import (
    copy_training,
    refuse_scripted,
    shared_outside,
    spared_grad,
    switched_off,
    unchanged,
    unwrap,
    whole_restorations,
)
from torchfmri._monitor import Monitor
from torchfmri._text import listed
from torchfmri._torch import hooked
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
            are too few: (x, y), (x1, x2, y), a dict of keyword arguments, or a tensor. The
            batches of an iterator are used up.
        loss: A function of output and target, or of the output alone; None if the model returns
            its loss.
        optimizer: The optimizer, several, or a function of the parameters that makes one.
        steps: How many steps at most; units that are never on are judged from 10 steps on.
        step: Your own training step, `step(model, batch, optimizer)`, which may clip, scale or
            accumulate; it runs on copies, and returns the loss or nothing. With several
            optimizers it gets the list.
        show: Whether to print the report.

    Raises:
        InspectionError: There is no optimizer or batch, the model cannot be copied, a layer is
            TorchScript, or `step` trains the model itself instead of the copy that it is given.

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
    check_module("model", model)
    if optimizer is None:
        raise InspectionError(
            "diagnose needs the optimizer that trains the model. Give optimizer=, or a function of "
            "the parameters that makes one."
        )
    check_number("steps", steps, 1, "give the number of training steps to look at")
    check_callable("loss", loss, "give a loss module or function of output and target")
    check_callable("step", step, "give a function of model, batch and optimizer")
    meaning = "give batches to train on, such as a DataLoader or a list"
    runs = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    require(runs, "batches", batches, meaning)
    refuse_scripted(model)
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
        copies = copy_training(model, optimizer, loss)
        check_steps(copies.optimizers, step)
        run = Checkup(model, copies, step, steps, notes)
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
            raise InspectionError(
                "There are no batches to diagnose with: the iterable is empty. Give a DataLoader "
                "or a list of batches."
            )
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


class _Enough(BaseException):
    """Ends the script when it has trained for long enough."""


def diagnose_script(path: Path, steps: int) -> Diagnosis:
    """Return the findings of a Monitor on the first model that a script trains.

    The script runs as `python path` would run it, in this process and with its own optimizer:
    what it writes, it writes.

    Raises:
        InspectionError: There is no such file, or it trains nothing.
    """
    if not path.is_file():
        raise InspectionError(
            f"There is no file {str(path)!r} here. Give the path of a training script, or "
            "file.py:function."
        )
    monitors: list[Monitor] = []
    stack = ExitStack()

    def enough(*_: Any) -> None:
        if monitors and len(monitors[0].history) >= steps:
            raise _Enough

    def entered(module: nn.Module, _: object) -> None:
        trained = any(each.requires_grad for each in module.parameters())
        if not monitors and torch.is_grad_enabled() and module.training and trained:
            monitors.append(Monitor(module, on_nonfinite="continue").attach())
            stack.callback(monitors[0].detach)

    started = time.perf_counter()
    hooks = (register_module_forward_pre_hook(each) for each in (entered, enough))
    with whole_restorations(), _as_program(path), stack, hooked(hooks), suppress(_Enough):
        runpy.run_path(str(path), run_name="__main__")
    if not monitors:
        raise InspectionError(
            f"{path.name} has trained no model: no layer ran in training mode with gradients. Call "
            "model.train() in it, or diagnose a function that makes model, batches, loss and "
            "optimizer."
        )
    monitor = monitors[0]
    return Diagnosis(
        model=type(unwrap(monitor.model)).__name__,
        findings=tuple(monitor.findings),
        steps=len(monitor.history),
        facts={},
        seconds=time.perf_counter() - started,
        history=monitor.history,
    )


@contextmanager
def _as_program(path: Path) -> Iterator[None]:
    """Let `sys.argv` and `sys.path` be those of a script that Python was started with."""
    arguments, folders = sys.argv, list(sys.path)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, folders
