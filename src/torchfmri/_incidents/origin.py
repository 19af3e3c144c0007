"""The origin of the first non-finite value of a training step, found by running it again.

`redone_step` and `diagnose` run a bad step through it. The model is run eagerly, inside `unchanged`
and with `.grad` put aside, tens of times slower than plain. `_call` must stay a function of its
own: its code object tells the user's frames from ours. The user's own check may raise because of
the NaN; the latest event then says what it saw. How fast it is may change freely, since it runs on
bad steps only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchfmri._capture import RunningLayers
from torchfmri._incidents.event import Event, is_on_purpose, trace_back
from torchfmri._incidents.report import Context, report
from torchfmri._incidents.trace import OperationTrace
from torchfmri._model import compiled_code_as_eager, loss_in, run_backward, spared_grad, unchanged
from torchfmri._records import Finding
from torchfmri._torch import Hook, flatten, hooked


def find_origin(
    run: Callable[[], Any],
    model: nn.Module,
    batch: Any = None,
    *,
    step: int | None = None,
    after_update: bool = False,
    data: Any = None,
) -> Finding | None:
    """Find what made the first non-finite value in the loss or a gradient; None if none is.

    Runs one step operation by operation (tens of times slower than plain) and follows each
    NaN and infinity back to the operation that made it from finite numbers. Infinities that the
    code puts in on purpose (attention masks) and that harm nothing are not named. The model, its
    `.grad` and the random generators are left as they were; compiled code runs eagerly.

    Args:
        run: Runs forward and loss, and returns the loss: a tensor, or an output that has `.loss`.
            Without a loss the output itself is judged. If it runs the backward pass too, that is
            watched as well; else it is run here, on a loss that requires grad.
        model: The model that `run` calls; layers are named by it.
        batch: What the step is run on, so that a bad sample can be named.
        step: The number of the step, for the finding.
        after_update: Whether the optimizer has stepped before, from finite gradients: non-finite
            weights are then the work of that step (`nonfinite_update`).
        data: All that the step is given, if that is more than the batch (targets).

    Returns:
        A finding whose problem is `nonfinite_data`, `nonfinite_weights`, `nonfinite_update`,
        `nonfinite_forward`, `nonfinite_loss` or `nonfinite_backward`. Its evidence holds
        `operation`, `line` ("train.py:31"), `code`, `value` ("NaN" or "inf"), `nan`, `inf`,
        `count`, `element` (index of the first one) and, if they are known, `rows` (of the
        batch), `parameter`, `dtype`.
    """
    trouble, bad = _trace_step(run, model, batch if data is None else data)
    if trouble is None:
        return None
    return report(trace_back(trouble), Context(batch, step, after_update, tuple(bad)))


def _trace_step(
    run: Callable[[], Any], model: nn.Module, batch: Any
) -> tuple[Event | None, list[str]]:
    """Return the event that reached the loss or a gradient, and the parameters bad before."""
    outputs: list[Tensor] = []

    def returned(output: object) -> None:
        outputs[:] = [element.tensor.detach() for element in flatten(output)]

    with compiled_code_as_eager(), unchanged(model), spared_grad(model.parameters()):
        layers = RunningLayers(model, returned)
        trace = OperationTrace(model, batch, layers, _call.__code__)
        arrived: list[Event] = []
        with layers, _listening(model, trace, arrived):
            try:
                with trace:
                    loss = loss_in(_call(run))
                    trouble = _trouble(trace, loss, outputs)
                    found = trouble is not None or trace.ran_backward
                    if not found and loss is not None and loss.requires_grad:
                        _call(partial(run_backward, loss, model.parameters()))
            except Exception:
                # The user's own check has stopped the step: what it saw is what we look for.
                if trace.latest is None or not trace.latest.content.nan:
                    raise
                trouble = trace.latest
        if trouble is None and arrived:
            trouble = arrived[0]
    return trouble, trace.bad_parameters


def _call(run: Callable[[], Any]) -> Any:
    """Run the user's code; frames beyond this one are not the user's step."""
    return run()


def _trouble(trace: OperationTrace, loss: Tensor | None, outputs: list[Tensor]) -> Event | None:
    """Return the event behind a non-finite loss; without a loss, behind a non-finite output."""
    if loss is not None:
        return trace.event_of(loss)
    for tensor in outputs:
        event = trace.event_of(tensor)
        if event is not None and not is_on_purpose(event):
            return event
    return None


def _listening(
    model: nn.Module, trace: OperationTrace, arrived: list[Event]
) -> AbstractContextManager[None]:
    """Collect the events behind the parameters' gradients, in the order they arrive."""

    def arrive(gradient: Tensor) -> None:
        if not arrived:
            event = trace.event_of(gradient)
            if event is not None:
                arrived.append(event)

    return hooked(
        parameter.register_hook(Hook(arrive))  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    )
