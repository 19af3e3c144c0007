"""One watched step of training: what the hooks bring, and what becomes of it.

`StepSink` stays for the whole run and receives what the hooks see; `Monitor` gives it a new
`WatchedStep` for each step. `_take` and `_arrived` run at every call of every layer and its
gradient, so each operation there is paid hundreds of times in a step. `_arrived` runs inside the
backward pass and may not raise: an exception there would leave `.grad` half filled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfmri._capture import CallKey, Padding, Short, Sink, Target, TokenMask, masked_modules
from torchfmri._model import Concerns, StepCalls
from torchfmri._monitor.collector import Collector
from torchfmri._monitor.plan import WatchPlan
from torchfmri._monitor.updates import Moved, Updates, is_sampled
from torchfmri._records import History, Series, Step
from torchfmri._torch import (
    Deferred,
    Element,
    gradient_scale,
    local_part,
)
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics

_UNSCALED = "gradients are divided by the loss scale of the GradScaler"
_SHARDED = "is sharded: this process describes its own shard"
_SAMPLED = "update ratio estimated from a sample of its weights"


class _Layer(NamedTuple):
    """A layer with a short way, and what is kept of it."""

    target: Target
    activations: Series
    gradients: Series


class StepSink(Sink):
    """Hands what the taps see to the step that is being watched, if there is one."""

    def __init__(
        self,
        plan: WatchPlan,
        history: History,
        calls: StepCalls,
        stop: Callable[[Exception], None],
    ) -> None:
        self.step: WatchedStep | None = None
        self.stop = stop
        self.note_scale, self._counts = calls.note_scale, calls.counts
        self._plan, self._history = plan, history
        self._padding = Padding(())
        self._first_path: dict[str, str] = {}

    def follow_padding(self, modules: Iterable[nn.Module]) -> Padding:
        """Leave the padding out that these modules are told of; it is for the caller to attach."""
        self._padding = Padding(masked_modules(modules), self.stop)
        return self._padding

    def wants_call(self, layer: str = "") -> bool:
        """Whether the call that runs now is part of a watched step."""
        return self.step is not None and self._counts()

    # -- the sink ----------------------------------------------------------------------------

    def short_way(self, targets: list[Target]) -> Short:
        """The short way of some layers."""
        owners = {
            id(each.module): _Layer(
                each, Series(each.layer, "activations"), Series(each.layer, "gradients")
            )
            for each in targets
        }
        modules = [each.module for each in targets]
        return Short(modules, owners, self._take, self._arrived, lambda layer: layer.target)

    def _take(
        self, layer: _Layer, arguments: object, keywords: object, output: Tensor
    ) -> _Layer | None:
        """Take in an output; without padding the calls of a layer need not be told apart."""
        if self.step is None or not self._counts() or self._padding.current() is not None:
            return None
        self.step.collector.add(layer.activations, output.detach())
        return layer

    def _arrived(self, layer: _Layer, gradient: Tensor | None) -> None:
        """Take in the gradient of such an output."""
        step = self.step
        if step is None or gradient is None:  # autograd knows that it is zero
            return
        try:
            step.read_scale()
            step.collector.add(
                layer.gradients, gradient.detach() if gradient.requires_grad else gradient
            )
        except Exception as error:
            self.failed(layer.target.layer, error, backward=True)

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Take in the first tensor of an output."""
        if self.step is None or not elements:
            return
        path, tensor = elements[0]
        self._first_path[call.layer] = path
        mask = self._padding.current()
        if mask is not None:
            self.step.padding_of[call] = mask
        if what in self._plan.what:
            self.step.collector.add(Series(call.layer, what), tensor.detach(), mask)

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        """Take in the gradient of the first tensor of an output."""
        step = self.step
        if step is not None and gradient is not None and path == self._first_path.get(call.layer):
            step.read_scale()
            step.collector.add(Series(call.layer, what), gradient, step.padding_of.get(call))

    def missed(self, layer: str, what: str, reason: str) -> None:
        """Note why something is not there."""
        text = f"{what}: {reason}" if what else reason
        self._history.missing.setdefault(layer, text)

    def noted(self, layer: str, text: str) -> None:
        """Note a reservation about a layer."""
        layers = self._history.notes.setdefault(text, [])
        if layer and layer not in layers:
            layers.append(layer)

    def unnoted(self, text: str) -> None:
        """Take a reservation back."""
        self._history.notes.pop(text, None)

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """A tensor that cannot be reduced is noted; any other failure ends the Monitor."""
        if isinstance(error, InspectionError):
            self.missed(layer, "", str(error))
        else:
            self.stop(error)


class WatchedStep:
    """What one step brought, until it is read.

    Attributes:
        scale: What the GradScaler multiplied the loss by; None until gradients arrive.
        has_stepped: Whether an optimizer has stepped.
        is_left_out: Whether the optimizer was kept from it, by us.
    """

    def __init__(self, number: int, plan: WatchPlan, sink: StepSink) -> None:
        self._plan, self._sink = plan, sink
        self.collector = Collector(plan.histogram, plan.max_bytes, plan.immediate, sink.missed)
        self.padding_of: dict[CallKey, TokenMask] = {}
        self._step = Step(number)
        self._started = time.perf_counter()
        self._told: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._shares: list[Tensor] = []
        self.scale: Tensor | None = None
        self._parameter_scale: Tensor | None = None
        self._found_inf: Tensor | None = None
        self.has_stepped = self.is_left_out = False
        self._updates: Updates | None = None
        self._moved: list[Moved] = []
        self._numbers: Deferred | None = None
        self._variances: list[str] = []

    def wants(self, what: str) -> bool:
        """Whether this is watched at all."""
        return what in self._plan.what

    # -- the loss ----------------------------------------------------------------------------

    def was_told_loss(self, loss: Tensor | float) -> None:
        """Take the user's word for the loss, over anything that was seen."""
        self._told.append(
            (loss if isinstance(loss, Tensor) else torch.tensor(loss, device="cpu"))
            .detach()
            .clone()
            .reshape(())
        )

    def saw_loss(self, loss: object, is_share: bool = False) -> None:
        """Take note of a loss that the model or the loss module returned.

        Args:
            loss: Anything; only a tensor with one value and a gradient is a loss.
            is_share: Whether it is this micro-batch's share of the step's loss already.
        """
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            found = self._shares if is_share else self._seen
            found.append(loss.detach().clone().reshape(()))

    # -- the gradient scale ------------------------------------------------------------------

    def read_scale(self) -> None:
        """Read what the loss is multiplied by; to be called while gradients arrive."""
        if self._plan.scaler is None or self.scale is not None:
            return
        self.scale = torch.as_tensor(gradient_scale(self._plan.scaler))
        self._sink.note_scale()
        self._sink.noted("", _UNSCALED)

    # -- the optimizer -----------------------------------------------------------------------

    def before_update(self, concerns: Concerns) -> None:
        """Read the weights before the optimizer changes them."""
        if not self._plan.what & {"parameters", "updates"}:
            return
        parameters = self._concerning(concerns)
        if "parameters" in self._plan.what:
            for name, parameter in parameters.items():
                self._add_parameter(Series(name, "parameters"), parameter)
        if "updates" in self._plan.what:
            trained = {name: each for name, each in parameters.items() if each.requires_grad}
            for name, each in trained.items():
                if is_sampled(each):
                    self._sink.noted(name, _SAMPLED)
            self._updates = Updates(trained)

    def read_gradients(self, concerns: Concerns, optimizer: Optimizer) -> None:
        """Read the parameters' gradients as the optimizer finds them, once per step.

        A fused optimizer divides them by the scale itself, and leaves out itself what overflowed.

        Args:
            concerns: Which parameters to look at.
            optimizer: That is about to step.
        """
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            self._found_inf = found_inf.detach().clone().reshape(())
        scale = getattr(optimizer, "grad_scale", None)
        if "parameter_gradients" not in self._plan.what:
            return
        if isinstance(scale, Tensor):
            self._parameter_scale = scale.detach().clone()
        for name, parameter in self._concerning(concerns).items():
            if parameter.grad is not None:
                self._add_parameter(Series(name, "parameter_gradients"), parameter.grad)

    def after_update(self) -> None:
        """Compare the weights with those before."""
        self.has_stepped = True
        if self._updates is not None:
            self._moved += self._updates.moved()
            self._updates = None

    def _concerning(self, concerns: Concerns) -> dict[str, Tensor]:
        return {name: each for name, each in self._plan.parameters().items() if concerns(each)}

    def _add_parameter(self, series: Series, tensor: Tensor) -> None:
        if hasattr(tensor, "to_local"):
            self._sink.noted(series.layer, _SHARDED)
        self.collector.add(series, local_part(tensor))

    # -- the end -----------------------------------------------------------------------------

    def was_held(self, left_out: bool) -> None:
        """Take note that the step is not finite, and whether the optimizer is to leave it out."""
        self._step.scalars["nonfinite"] = 1.0
        self.is_left_out = left_out
        if left_out:
            self._step.scalars["optimizer_skipped"] = 1.0

    def finish(self, skipped: bool = False) -> None:
        """Start fetching the numbers; waits for nothing."""
        self.padding_of.clear()
        self.collector.flush()
        self._step.seconds = time.perf_counter() - self._started
        if skipped:
            self._step.scalars["optimizer_skipped"] = 1.0
        of_scaler = (self._found_inf, self.scale, self._parameter_scale)
        losses = self._told or self._shares or self._seen
        moved = [each.norms for each in self._moved]
        running = self._plan.running_variances() if self.wants("activations") else {}
        self._variances = list(running)
        variances = [each.detach().amax() for each in running.values()]
        self._numbers = Deferred(
            [*losses, *moved, *variances, *(each for each in of_scaler if each is not None)]
        )

    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self.collector.ready() and self._numbers is not None and self._numbers.ready()

    def read(self) -> tuple[Step, Mapping[Series, Statistics]]:
        """The step and its statistics."""
        assert self._numbers is not None
        numbers = iter(self._numbers.read())
        losses = [next(numbers)[0] for _ in self._told or self._shares or self._seen]
        if losses:
            share = 1 if self._shares and not self._told else len(losses)
            self._step.loss, self._step.has_loss = sum(losses) / share, True
            if not math.isfinite(self._step.loss):
                self._step.scalars["nonfinite"] = 1.0
        for names, _ in self._moved:
            norms = np.array(next(numbers)).reshape(2, -1)
            self._step.parameters += tuple(names)
            self._step.updates = np.concatenate([self._step.updates, norms], axis=1)
        self._step.variances = {layer: next(numbers)[0] for layer in self._variances}
        if self._found_inf is not None and next(numbers)[0] > 0:
            self._step.scalars["optimizer_skipped"] = 1.0
        found = self._plan.in_order(self.collector.read())
        scales = {"gradients": self.scale, "parameter_gradients": self._parameter_scale}
        for what, scale in scales.items():
            if scale is None:
                continue
            factor = next(numbers)[0]
            self._step.scalars["gradient_scale"] = factor
            found = {
                series: each.scaled(1 / factor) if series.what == what else each
                for series, each in found.items()
            }
        return self._step, found
