"""What others say about the same cases: anomaly mode, HF's debugger, SageMaker's public rules.

SageMaker's rules run in its cloud only. They are written again here from the public list of
Debugger's built-in rules (docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html),
with the thresholds that are named there, over the same tensors: weights, gradients, outputs and
losses of every step. They were never compared with the service itself. `Overfit` and
`Overtraining` need a validation loss and are left out, as are the rules for trees and images.

A peer has named a fault if what it says stands for it (`MEANING`) and, where it stops the run, if
it stops at the right step. Anything that it says about a healthy model is a false alarm.
"""

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._cases import Case

MEANING: dict[str, frozenset[str]] = {
    "anomaly_mode": frozenset({"nonfinite_backward", "nonfinite_loss"}),
    "hf_debug": frozenset({"nonfinite_forward", "nonfinite_data"}),
    "VanishingGradient": frozenset(
        {"vanishing_gradients", "half_underflow", "signal_shrinks", "clipping_too_strong"}
    ),
    "ExplodingTensor": frozenset({"nonfinite_forward", "nonfinite_update", "nonfinite_data"}),
    "DeadRelu": frozenset({"dead_units"}),
    "SaturatedActivation": frozenset({"saturated_units"}),
    "PoorWeightInitialization": frozenset(
        {"init_too_large", "symmetric_init", "signal_shrinks"}
    ),
    "UnchangedTensor": frozenset(
        {"learning_rate_zero", "updates_lost", "missing_from_optimizer", "frozen_layer",
         "stopped_training", "optimizer_never_steps", "graph_cut", "unused_layer",
         "cleared_gradients", "step_before_backward", "updates_undone", "clipping_too_strong"}
    ),
    "WeightUpdateRatio": frozenset(
        {"learning_rate_too_high", "learning_rate_too_low", "learning_rate_zero"}
    ),
    "AllZero": frozenset({"dead_units", "symmetric_init"}),
    "LossNotDecreasing": frozenset({"diverging_loss"}),
}  # fmt: skip
"""Who says it -> the problems it stands for."""


class Said(dict[str, int]):
    """What a peer said -> the step at which it did."""


def anomaly_mode(case: Case, steps: int) -> Said:
    """`torch.autograd.set_detect_anomaly`: raises at the backward function that returns NaN."""
    with torch.autograd.set_detect_anomaly(True), _quiet():
        for number in _train(case, steps):
            if isinstance(number, Exception):
                return Said(anomaly_mode=number.args[1])
    return Said()


def hf_debug(case: Case, steps: int) -> Said:
    """Transformers' DebugUnderflowOverflow: raises at the first layer with NaN or infinity."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with _quiet():
        model, optimizers, loss = copy.deepcopy((case.model, case.optimizer, case.loss))
        DebugUnderflowOverflow(model)
        copied = Case(model, case.batches, loss, optimizers, case.step)
        for number in _train(copied, steps, copies=False):
            if isinstance(number, Exception):
                return Said(hf_debug=number.args[1])
    return Said()


def sagemaker_rules(case: Case, steps: int) -> Said:
    """The rules with their default thresholds, on every step."""
    said = Said()
    model, optimizers, loss = copy.deepcopy((case.model, case.optimizer, case.loss))
    record = _Record(model)
    copied = Case(model, case.batches, loss, optimizers, case.step)
    with _quiet():
        for number in _train(copied, steps, copies=False, record=record):
            at = number.args[1] if isinstance(number, Exception) else number
            record.after_step()
            for name, rule in RULES.items():
                if name not in said and rule(record):
                    said[name] = at
            if isinstance(number, Exception):
                break
    return said


class _Record:
    """Weights, gradients, outputs and losses of the steps so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.losses: list[float] = []
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.kinds = {name: type(module) for name, module in model.named_modules()}
        self.weights: list[dict[str, Tensor]] = [self._weights()]
        self.gradients: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.outputs[name] = output.detach()
            if arguments and isinstance(arguments[0], Tensor):
                self.inputs[name] = arguments[0].detach()

        return keep

    def _weights(self) -> dict[str, Tensor]:
        return {name: each.detach().clone().float() for name, each in self.model.named_parameters()}

    def after_step(self) -> None:
        self.weights = [*self.weights[-3:], self._weights()]
        self.gradients = {
            name: each.grad.detach().float()
            for name, each in self.model.named_parameters()
            if each.grad is not None
        }

    def matrices(self, of: dict[str, Tensor]) -> list[Tensor]:
        return [each for name, each in of.items() if each.ndim >= 2 and name.endswith("weight")]


def _vanishing_gradient(record: _Record) -> bool:
    return any(float(each.abs().mean()) < 1e-7 for each in record.gradients.values())


def _exploding_tensor(record: _Record) -> bool:
    tensors = [*record.weights[-1].values(), *record.gradients.values(), *record.outputs.values()]
    return any(not bool(torch.isfinite(each).all()) for each in tensors)


def _dead_relu(record: _Record) -> bool:
    return any(
        _inactive(each == 0) > 50.0
        for name, each in record.outputs.items()
        if record.kinds[name] is nn.ReLU
    )


def _saturated_activation(record: _Record) -> bool:
    for name, each in record.inputs.items():
        if record.kinds[name] is nn.Tanh and _inactive(each.abs() > 9.4999) > 50.0:
            return True
        outside = (each < -23) | (each > 16.99999)
        if record.kinds[name] is nn.Sigmoid and _inactive(outside) > 50.0:
            return True
    return False


def _inactive(off: Tensor) -> float:
    """The percentage of units (last axis) that are off for all samples."""
    return float(off.flatten(0, -2).all(0).float().mean()) * 100


def _poor_weight_initialization(record: _Record) -> bool:
    if len(record.losses) > 10:
        return False
    variances = [float(each.var()) for each in record.matrices(record.weights[-1])]
    if len(variances) > 1 and max(variances) > 10.0 * max(min(variances), 1e-30):
        return True
    spreads = [
        float(each.flatten()[:100_000].quantile(0.95) - each.flatten()[:100_000].quantile(0.05))
        for each in record.matrices(record.gradients)
    ]
    stuck = len(record.losses) > 5 and min(record.losses[-5:]) >= min(record.losses[:-5])
    return bool(spreads) and min(spreads) < 0.001 and stuck


def _unchanged_tensor(record: _Record) -> bool:
    if len(record.weights) < 4:
        return False
    *before, last = record.weights[-4:]
    return any(
        all(torch.allclose(last[name], each[name], 1e-5, 1e-8) for each in before) for name in last
    )


def _weight_update_ratio(record: _Record) -> bool:
    before, after = record.weights[-2:]
    for name in record.gradients:
        ratio = float((after[name] - before[name]).norm() / (before[name].norm() + 1e-9))
        if ratio > 10.0 or ratio < 1e-8:
            return True
    return False


def _all_zero(record: _Record) -> bool:
    tensors = [*record.weights[-1].values(), *record.gradients.values(), *record.outputs.values()]
    return any(not bool(each.any()) for each in tensors)


def _loss_not_decreasing(record: _Record) -> bool:
    losses = record.losses
    if len(losses) < 11 or not all(map(math.isfinite, losses[-11:])):
        return False
    change = (losses[-11] - losses[-1]) / max(abs(losses[-11]), 1e-12) * 100
    return change < 0.1


RULES: dict[str, Callable[[_Record], bool]] = {
    "VanishingGradient": _vanishing_gradient,
    "ExplodingTensor": _exploding_tensor,
    "DeadRelu": _dead_relu,
    "SaturatedActivation": _saturated_activation,
    "PoorWeightInitialization": _poor_weight_initialization,
    "UnchangedTensor": _unchanged_tensor,
    "WeightUpdateRatio": _weight_update_ratio,
    "AllZero": _all_zero,
    "LossNotDecreasing": _loss_not_decreasing,
}
PEERS: dict[str, Callable[[Case, int], Said]] = {
    "anomaly_mode": anomaly_mode,
    "hf_debug": hf_debug,
    "sagemaker": sagemaker_rules,
}


def is_named(said: Said, problem: str, step: int | None) -> bool:
    """Whether a peer has named a fault, and at its step where it stops the run."""
    for name, at in said.items():
        if problem in MEANING[name] and (name in RULES or at == (step or 0)):
            return True
    return False


def _train(
    case: Case, steps: int, copies: bool = True, record: _Record | None = None
) -> Iterator[int | Exception]:
    """The number of each step when it is over; an exception with its step ends it."""
    model, optimizer, loss = case.model, case.optimizer, case.loss
    if copies:
        model, optimizer, loss = copy.deepcopy((model, optimizer, loss))
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for number in range(steps):
        batch = case.batches[number % len(case.batches)]
        try:
            if case.step is not None:
                value = case.step(model, batch, optimizer)
            else:
                value = _plain_step(model, batch, loss, optimizers)
        except (RuntimeError, ValueError) as error:
            yield RuntimeError(str(error), number)
            return
        if record is not None and isinstance(value, Tensor):
            record.losses.append(float(value.detach()))
        yield number


def _plain_step(model: nn.Module, batch: Any, loss: Any, optimizers: list[Any]) -> Tensor:
    from torchfmri._checkup.users_step import loss_in_step, split_batch

    for each in optimizers:
        each.zero_grad()
    split = split_batch(batch, loss)
    value = loss_in_step(model(*split.arguments, **split.keywords), split, loss)
    if value.requires_grad:
        value.backward()
    for each in optimizers:
        each.step()
    return value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the reports that these tools print."""
    import warnings

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(io.StringIO()), np.errstate(all="ignore"):
            yield
