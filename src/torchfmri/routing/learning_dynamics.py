"""One backward pass for two streams, computation by the main loss and routing by Goodness.

Users put a `LearningDynamics` around their training loop, as the experiment does. It runs the
user's backward pass, reads the signals of every call (`capture`), and adds the gradients of a meta
loss to prototypes and gates. Those two kinds of parameters must be reached by nothing else in
mode="strict", and the meta loss must reach no other parameter: `test_routing_steps.py` checks both.
With a scaler, accumulation or DDP the result is that of one plain step.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfmri._arguments import (
    check_callable,
    check_module,
    check_number,
    check_scalar,
    check_scaler,
    require,
)
from torchfmri._capture import CallKey
from torchfmri._model import compiled_code_as_eager, spared_grad, unwrap, watched
from torchfmri._records import History
from torchfmri._torch import Attached, gradient_scale
from torchfmri.exceptions import InspectionError
from torchfmri.routing.capture import Captured, RoutingCapture
from torchfmri.routing.meta_loss import Divergence, MetaLoss
from torchfmri.routing.routing_history import measure_routing
from torchfmri.routing.signals import AGGREGATE, Signals, read_signals, require_signal
from torchfmri.routing.sparse_proto_linear import Routing, SparseProtoLinear

MODES = ("strict", "joint")


class StepResult(NamedTuple):
    """The result of one pass.

    Attributes:
        loss: The main loss.
        meta_loss: The sum of the calls' meta losses, detached; 0 without a meta loss.
        applied: Whether the optimizers took a step. A scaler skips those with Inf or NaN.
    """

    loss: Tensor
    meta_loss: Tensor
    applied: bool


class LearningDynamics(Attached):
    """Trains a model of SparseProtoLinear layers: a context manager around its training loop.

    The main loss trains everything but the routing (prototypes and gates). The routing learns from
    a meta loss on signals of the same backward pass: `mode="strict"` from it alone,
    `mode="joint"` from it and the main loss. A call's input is held constant there: its meta loss
    reaches prototypes (also inherited ones) and gates, and nothing else.

    Args:
        model: The model, wrapped by DDP or not.
        optimizer: Of everything but the routing; see `computation_parameters`.
        meta_optimizer: Of prototypes and gates; see `routing_parameters`.
        meta_loss: A function of (routing, signals) of a call; None: routing learns from the main
            loss only, which takes mode="joint".
        signal: Whose learning cost: "token" or "aggregate".
        mode: "strict" or "joint".
        accumulation_steps: Passes per step of the optimizers; both losses are divided by it.
        history_every: Steps between two entries of `history`; 0 keeps none.
        scaler: A `torch.amp.GradScaler`, for float16: it scales the loss, and takes the steps.
        keep_signals: Keep those of the last pass in `signals`.

    Attributes:
        history: A `History` with the series "activation_rate" of every layer, over its units.
        signals: The signals of the last pass by layer and call, with `keep_signals`.
        step: How many steps were taken.
        ready: Whether the gradients of a step are complete, and wait for `apply_gradients`.

    Examples:
        >>> import torch
        >>> from torchfmri.routing import RoutingConfig, RoutingLanguageModel
        >>> model = RoutingLanguageModel(RoutingConfig(20, hidden_size=16, blocks=2, heads=2))
        >>> optimizer = torch.optim.AdamW(computation_parameters(model), lr=1e-3)
        >>> meta_optimizer = torch.optim.AdamW(routing_parameters(model), lr=1e-3)
        >>> ids = torch.randint(20, (2, 5))
        >>> with LearningDynamics(model, optimizer, meta_optimizer) as dynamics:
        ...     loss = model(ids, labels=ids).loss
        ...     result = dynamics.compute_and_apply_gradients(loss)
        >>> result.applied
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        meta_optimizer: torch.optim.Optimizer,
        *,
        meta_loss: MetaLoss | None = Divergence(),  # noqa: B008 - frozen
        signal: Literal["token", "aggregate"] = "token",
        mode: Literal["strict", "joint"] = "strict",
        accumulation_steps: int = 1,
        history_every: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        keep_signals: bool = False,
    ) -> None:
        if mode not in MODES:
            raise InspectionError(f"mode={mode!r}: choose 'strict' or 'joint'.")
        if meta_loss is None and mode == "strict":
            raise InspectionError(
                "mode='strict' without a meta loss trains no routing; write mode='joint'."
            )
        check_module("model", model)
        check_callable("meta_loss", meta_loss, "give a function of routing and signals, or None")
        check_number("accumulation_steps", accumulation_steps, 1, "give at least 1")
        check_scaler(scaler)
        check_number("history_every", history_every, 0, "give a number of steps, 0 for no history")
        self._model = model
        self._optimizer, self._meta_optimizer = optimizer, meta_optimizer
        self._capture = RoutingCapture(model, with_totals=signal == AGGREGATE)
        self._routing = routing_parameters(model)
        _check_optimizers(optimizer, meta_optimizer, self._routing)
        self._meta_loss, self._signal, self._mode = meta_loss, require_signal(signal), mode
        self._passes, self._every = accumulation_steps, history_every
        self._keep_signals = keep_signals
        self._scaler = scaler
        self._pass = 0
        self.history = History()
        self.signals: dict[CallKey, Signals] = {}
        self.step = 0
        self.ready = False

    # -- attaching -----------------------------------------------------------------------------

    def _attach(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(watched(self._model))
        stack.enter_context(compiled_code_as_eager())
        stack.enter_context(self._capture)

    # -- a step --------------------------------------------------------------------------------

    def compute_and_apply_gradients(self, loss: Tensor) -> StepResult:
        """Run one backward pass of `loss` for both streams, and take a step of each optimizer.

        Raises:
            InspectionError: The forward pass did not run inside the `with` block, or `loss` is not
                a single number.
        """
        result = self.compute_gradients(loss)
        return result._replace(applied=self.apply_gradients()) if self.ready else result

    def compute_gradients(self, loss: Tensor) -> StepResult:
        """Run the first half of `compute_and_apply_gradients`: gradients, but no step.

        Once `ready`, `.grad` of all parameters is what the optimizers will be given, without the
        factor of a scaler: clip it or look at it, then call `apply_gradients`.

        Raises:
            InspectionError: As `compute_and_apply_gradients`, or gradients are waiting already.
        """
        if self._stack is None:
            raise InspectionError(
                "LearningDynamics is not attached: run forward passes and "
                "compute_and_apply_gradients inside `with LearningDynamics(...) as dynamics:`."
            )
        if self.ready:
            raise InspectionError(
                "The gradients of a step are complete and were not applied. Call "
                "dynamics.apply_gradients() before the next pass."
            )
        loss = check_scalar(loss)
        # In strict mode, what the main loss asks of the routing is dropped.
        with spared_grad(self._routing if self._mode == "strict" else ()):
            scaled = self._scaled(loss)
            torch.autograd.backward(scaled / self._passes if self._passes > 1 else scaled)
        calls = self._capture.take()
        if not calls:
            raise InspectionError(
                "No gradient came back to a SparseProtoLinear: the loss was not computed inside "
                "the `with` block, or by reentrant checkpointing (use_reentrant=False works)."
            )
        if self._scaler is not None:
            calls = [_unscaled(each, gradient_scale(self._scaler)) for each in calls]
        meta = self._add_meta_gradients(calls, loss)
        self._pass += 1
        self.ready = self._pass % self._passes == 0
        if self.ready and self._scaler is not None:
            for optimizer in (self._optimizer, self._meta_optimizer):
                self._scaler.unscale_(optimizer)
        return StepResult(loss.detach(), meta, applied=False)

    def apply_gradients(self) -> bool:
        """Take a step of both optimizers, and say whether it was taken.

        Raises:
            InspectionError: There is no complete gradient; see `ready`.
        """
        if not self.ready:
            raise InspectionError(
                "There are no gradients to apply: call dynamics.compute_gradients(loss) first, "
                f"{self._passes} times for each step (accumulation_steps={self._passes})."
            )
        applied = self._take_steps()
        self._optimizer.zero_grad()
        self._meta_optimizer.zero_grad()
        self.step += applied
        self.ready = False
        return applied

    def _take_steps(self) -> bool:
        if self._scaler is None:
            self._optimizer.step()
            self._meta_optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.step(self._meta_optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= before)  # it falls where a step was skipped

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _add_meta_gradients(self, calls: list[Captured], loss: Tensor) -> Tensor:
        if self._signal == AGGREGATE:
            calls = _summed_over_processes(calls, _process_group(self._model))
        records: bool = self._every > 0 and self.step % self._every == 0
        wanted = self._meta_loss is not None or records or self._keep_signals
        if not wanted:
            return loss.new_zeros(())
        parts, found = [], {}
        for each in calls:
            routing = None if self._meta_loss is None else _route_again(each)
            route = partial(_weights, each, routing)
            signals = read_signals(each.call, each.factors, each.mask, self._signal, route)
            if routing is not None and self._meta_loss is not None:
                parts.append(self._meta_loss(routing, signals))
            if records or self._keep_signals:
                found[each.call] = signals
        if records and self._pass % self._passes == 0:
            measure_routing(self.history, self.step, float(loss.detach()), found)
        self.signals = found if self._keep_signals else {}
        if not parts:
            return loss.new_zeros(())
        total = torch.stack(parts).sum()
        scaled = self._scaled(total / self._passes)
        gradients = torch.autograd.grad(scaled, self._routing, allow_unused=True)
        group = _process_group(self._model)
        _accumulate(self._routing, _averaged_over_processes(gradients, group))
        return total.detach()


def routing_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return prototypes and gates, each once: what the meta optimizer trains."""
    check_module("model", model)
    found = (
        parameter
        for module in unwrap(model).modules()
        if isinstance(module, SparseProtoLinear)
        for parameter in (module.prototypes, module.gate)
    )
    return list(dict.fromkeys(found))


def computation_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all other parameters, each once: what the main loss trains."""
    routing = set(map(id, routing_parameters(model)))
    return [each for each in unwrap(model).parameters() if id(each) not in routing]


def _check_optimizers(
    optimizer: torch.optim.Optimizer,
    meta_optimizer: torch.optim.Optimizer,
    routing: list[nn.Parameter],
) -> None:
    """Refuse optimizers that would both train a parameter, or the wrong ones."""
    for name, value in (("optimizer", optimizer), ("meta_optimizer", meta_optimizer)):
        meaning = "give a torch.optim.Optimizer, such as torch.optim.AdamW(parameters)"
        require(isinstance(value, torch.optim.Optimizer), name, value, meaning)
    ours = set(map(id, routing))
    if any(id(each) in ours for group in optimizer.param_groups for each in group["params"]):
        raise InspectionError(
            "The main optimizer holds prototypes or gates, which are the meta optimizer's; give "
            "it torchfmri.routing.computation_parameters(model)."
        )
    held = {id(each) for group in meta_optimizer.param_groups for each in group["params"]}
    if held != ours:
        raise InspectionError(
            f"The meta optimizer holds {len(held & ours)} of {len(ours)} prototypes and gates and "
            f"{len(held - ours)} other parameters; give it "
            "torchfmri.routing.routing_parameters(model)."
        )


def _unscaled(each: Captured, scale: Tensor | float) -> Captured:
    """Return the call without the factor that a scaler gave to the loss, in float32 or wider."""
    g, total = each.factors.g, each.factors.total
    wide = torch.promote_types(g.dtype, torch.float32)
    total = None if total is None else total / scale
    return each._replace(factors=replace(each.factors, g=g.to(wide) / scale, total=total))


def _route_again(each: Captured) -> Routing:
    """Return the routing of a call as a function of prototypes and gates alone.

    Inherited prototypes are sums of parameters; their graph outlives the backward pass because a
    sum keeps nothing.
    """
    x = each.factors.x.to(each.module.prototypes.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return each.module.route(x, each.inherited)


def _process_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of DDP; None for a model that trains alone."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    group: dist.ProcessGroup = model.process_group
    return group


def _weights(each: Captured, routing: Routing | None) -> Tensor:
    if routing is None:
        with torch.no_grad():
            routing = _route_again(each)
    return routing.weights.detach()


def _summed_over_processes(
    calls: list[Captured], group: dist.ProcessGroup | None
) -> list[Captured]:
    """Return the calls with the weights' gradients of all processes added up."""
    if group is None:
        return calls
    sums: dict[str, Tensor] = {}
    for each in calls:
        if each.factors.total is not None and each.call.layer not in sums:
            sums[each.call.layer] = each.factors.total.clone()
            dist.all_reduce(sums[each.call.layer], group=group)
    return [
        each._replace(factors=replace(each.factors, total=sums.get(each.call.layer)))
        for each in calls
    ]


def _averaged_over_processes(
    gradients: tuple[Tensor | None, ...], group: dist.ProcessGroup | None
) -> list[Tensor | None]:
    """Return the mean gradients over the processes, as DDP computes those of the main loss."""
    if group is None:
        return list(gradients)
    known = [each for each in gradients if each is not None]
    joined = torch.cat([each.flatten() for each in known])
    dist.all_reduce(joined, group=group)
    joined /= dist.get_world_size(group)
    parts = iter(torch.split(joined, [each.numel() for each in known]))
    return [None if each is None else next(parts).view_as(each) for each in gradients]


def _accumulate(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            kept = parameter.grad
            parameter.grad = gradient if kept is None else kept + gradient
