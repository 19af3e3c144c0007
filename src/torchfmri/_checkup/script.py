"""Diagnosis of a training script as it is: run it, and watch the model that it trains."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from torchfmri._diagnosis import Diagnosis
from torchfmri._model import unwrap, whole_restorations
from torchfmri._monitor import Monitor
from torchfmri.exceptions import InspectionError


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
        raise InspectionError(f"There is no file {str(path)!r} here.")
    monitors: list[Monitor] = []
    stack = ExitStack()

    def enough(*_: Any) -> None:
        if len(monitors[0].history) >= steps:
            raise _Enough

    def entered(module: nn.Module, _: object) -> None:
        trained = any(each.requires_grad for each in module.parameters())
        if not monitors and torch.is_grad_enabled() and module.training and trained:
            monitors.append(Monitor(module, on_nonfinite="continue").attach())
            stack.callback(monitors[0].detach)

    started = time.perf_counter()
    with whole_restorations(), _as_program(path), stack:
        for hook in (entered, lambda *_: enough() if monitors else None):
            stack.callback(register_module_forward_pre_hook(hook).remove)
        with suppress(_Enough):
            runpy.run_path(str(path), run_name="__main__")
    if not monitors:
        raise InspectionError(f"{path.name} has trained no model: no layer ran in training mode.")
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
