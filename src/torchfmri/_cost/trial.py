"""One arrangement of a training step on copies: its gradients, memory and time.

`advice_run` makes a `Trial` of each arrangement. It runs on copies only, so it may write to them.
Gradients of two arrangements are compared from the same weights and random state. Times are ratios
within a round, both steps in turns, because a busy machine slows both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._cost.layer_times import make_clock
from torchfmri._cost.live_memory import LiveMemory
from torchfmri._cost.measured_step import resting_collector
from torchfmri._cost.resizing import size_of
from torchfmri._cost.techniques import Setup, Technique, parts_of
from torchfmri._model import (
    Loss,
    RandomState,
    arguments_for,
    copy_of_data,
    copy_training,
    device_of,
    loss_of,
    needs_closure,
)
from torchfmri._torch import flatten, widest_dtype
from torchfmri.exceptions import InspectionError


def copy_setup(model: nn.Module, optimizer: Any, data: Any, target: Any, loss: Loss) -> Setup:
    """Return a setup on copies; the copied optimizer works on the copied model.

    Raises:
        InspectionError: The model or the optimizer cannot be copied.
    """
    twin, optimizers, twin_loss = copy_training(model, optimizer, loss)
    if len(optimizers) > 1:
        raise InspectionError(
            f"{len(optimizers)} optimizers were given, and `advise` works with one. Give one "
            "of them, or leave the optimizers out."
        )
    own = optimizers[0] if optimizers else None
    if own is not None and needs_closure(own):
        raise InspectionError(
            f"{type(own).__name__} asks for a closure in each step, which `advise` does not "
            "support; leave the optimizer out."
        )
    arguments, keywords = arguments_for(model, data)
    copied = copy_of_data(dict(keywords)) if keywords else copy_of_data(arguments)
    return Setup(twin, own, copied, copy_of_data(target), twin_loss)


class Trial:
    """A setup with techniques applied, ready to run.

    Args:
        setup: A setup on copies of its own.
        techniques: The techniques to apply.
        average: Whether the losses of parts are averaged (else added up).
    """

    def __init__(
        self, setup: Setup, techniques: Sequence[Technique] = (), average: bool = True
    ) -> None:
        for technique in techniques:
            technique.apply(setup)
        self.setup = setup
        self.device = device_of(setup.model)
        self.summed = False  # whether the sum of the output stood in for a loss
        self._average = average

    def losses(self) -> list[Tensor]:
        """Run each part of the batch forward and backward, and return the losses."""
        setup = self.setup
        batch = size_of(setup.data).batch if setup.pieces > 1 else 1
        data = parts_of(setup.data, setup.pieces, batch)
        targets = parts_of(setup.target, setup.pieces, batch)
        kind, dtype = self.device.type, setup.autocast
        losses = []
        for part, target in zip(data, targets, strict=True):
            with nullcontext() if dtype is None else torch.autocast(kind, dtype):
                loss = self._loss(part, target)
            if not loss.requires_grad:
                raise InspectionError(
                    "No parameter gets a gradient: the model has none that require grad, or the "
                    "loss does not depend on them in a differentiable way."
                )
            scale = 1 / setup.pieces if self._average else 1.0
            torch.autograd.backward(loss * scale if scale != 1 else loss)
            losses.append(loss.detach())
        return losses

    def _loss(self, data: Any, target: Any) -> Tensor:
        model = self.setup.model
        output = model(**data) if isinstance(data, dict) else model(*data)
        value = loss_of(output, target, self.setup.loss)
        if value is None:
            self.summed = True
            value = loss_of(output, target, "sum")
        assert value is not None
        return value

    def step(self) -> None:
        """Run one training step: forward, backward, and the optimizer if there is one."""
        self.losses()
        if self.setup.optimizer is not None:
            self.setup.optimizer.step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for each in (self.setup.model, self.setup.loss):
            if isinstance(each, nn.Module):
                each.zero_grad(set_to_none=True)

    def gradients(self, state: RandomState) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and the gradients of the parameters, from a given random state."""
        state.restore()
        losses = self.losses()
        value = sum(float(loss) for loss in losses)
        gradients = {
            name: parameter.grad.detach().to_dense()
            for name, parameter in self.setup.model.named_parameters()
            if parameter.grad is not None
        }
        self._drop_gradients()
        return (value / len(losses) if self._average else value), gradients

    def peak_bytes(self) -> int:
        """Return the most bytes alive in one step, optimizer state included; run a step first."""
        existing = [*self.setup.model.parameters(), *self.setup.model.buffers()]
        existing += [each.tensor for each in flatten((self.setup.data, self.setup.target))]
        if self.setup.optimizer is not None:
            for state in self.setup.optimizer.state.values():
                existing += [each.tensor for each in flatten(state)]
        memory = LiveMemory(None, existing, self.device)
        with resting_collector(), memory:
            self.step()
        return memory.existing_bytes + memory.peak


def time_side_by_side(plain: Trial, other: Trial, rounds: int) -> tuple[float, Ratio]:
    """Return the seconds of a plain step (median), and how many times that the other takes.

    Both run in turns: the ratio within a round is right even if the machine is busy.
    """
    clock = make_clock(plain.device)
    seconds, ratios = [], []
    for _ in range(rounds):
        lengths = []
        for trial in (plain, other):
            with resting_collector():
                start = clock.mark()
                trial.step()
                end = clock.mark()
            lengths.append(clock.lengths([start, end])[0])
        seconds.append(lengths[0])
        ratios.append(lengths[1] / lengths[0])
    return statistics.median(seconds), summarise(ratios)


class Ratio(NamedTuple):
    """A median over rounds, with half the range of the middle half of them."""

    median: float
    spread: float


def summarise(ratios: Sequence[float]) -> Ratio:
    """Return median and spread.

    >>> summarise([1.0, 1.5, 1.2, 1.1, 9.0])
    Ratio(median=1.2, spread=0.2)
    """
    ordered = sorted(ratios)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return Ratio(statistics.median(ordered), round((middle[-1] - middle[0]) / 2, 6))


def deviation(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return |g - reference| / |reference| over all parameters (L2); missing ones count as 0."""
    apart = size = 0.0
    for name, expected in reference.items():
        wide = widest_dtype(expected.device)
        expected, found = expected.to(wide), gradients.get(name)
        difference = expected if found is None else found.to(wide) - expected
        apart += float((difference * difference).sum())
        size += float((expected * expected).sum())
    if not size:
        return 0.0 if not apart else float("inf")
    return float((apart / size) ** 0.5)
