"""Notices the steps of a model's optimizers, without leaving anything on them.

The Monitor is its only `Listener`. The hooks are torch's global ones: a hook on one optimizer is
lost if a wrapper (accelerate's) steps the one that it wraps. With a closure the gradients are there
only after its first run, so the closure is wrapped for that step. Our own errors go to `failed`;
only an error that is meant for the user stops the optimizer. What else a listener is told may grow
freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchfmri._arguments import shown
from torchfmri.exceptions import MEANT_FOR_THE_USER, InspectionError

Concerns = Callable[[Tensor], bool]
"""Whether to look at a parameter when this optimizer steps."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """Receives what happens in a step of an optimizer, in this order."""

    def before_update(self, concerns: Concerns) -> None:
        """Take note that the optimizer is about to step; a closure may still compute gradients."""

    def has_gradients(self, concerns: Concerns, optimizer: Optimizer) -> None:
        """Look at the gradients that the optimizer finds; NonFiniteError keeps it from stepping."""

    def after_update(self, is_last: bool) -> None:
        """Take note that the weights have changed; `is_last`: by the last of the optimizers."""

    def failed(self, error: Exception) -> None:
        """Take an error of ours, by which the step could not be followed."""


class OptimizerSteps:
    """Hooks on the optimizers that were given, or on any that steps the model's parameters."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], listener: Listener
    ) -> None:
        self._model, self._optimizers, self._listener = model, list(optimizers), listener
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin to notice steps."""
        # Hooks on the optimizer itself would be lost if a wrapper steps the one it wraps.
        self._handles += [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Remove the hooks; safe to call twice."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> Arguments | None:
        """Tell the listener; return other arguments for the step if a closure must be followed."""
        try:
            if not self._is_ours(optimizer):
                return None
            concerns = self._concerns(optimizer)
            self._listener.before_update(concerns)
            # `args` begins with the optimizer itself.
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._listener.has_gradients(concerns, optimizer)
                return None
            watched = self._watched(closure, concerns, optimizer)
            if len(args) > 1:
                return (args[0], watched, *args[2:]), kwargs
            return args, {**kwargs, "closure": watched}
        except MEANT_FOR_THE_USER:  # meant for the user: the optimizer is not to step
            raise
        except Exception as error:
            self._listener.failed(error)
            return None

    def _watched(
        self, closure: Callable[..., Any], concerns: Concerns, optimizer: Optimizer
    ) -> Callable[..., Any]:
        """Return the closure, followed by a look at the gradients that its first run computed."""
        ran = False

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            result = closure(*args, **kwargs)
            if not ran:
                ran = True
                self._listener.has_gradients(concerns, optimizer)
            return result

        return watched

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        try:
            if self._is_ours(optimizer):
                self._listener.after_update(self._is_last(optimizer))
        except MEANT_FOR_THE_USER:
            raise
        except Exception as error:
            self._listener.failed(error)

    def _is_last(self, optimizer: Optimizer) -> bool:
        return not self._optimizers or _same(optimizer, self._optimizers[-1])

    def _concerns(self, optimizer: Optimizer) -> Concerns:
        """Return which parameters to look at when an optimizer steps: its own."""
        if len(self._optimizers) < 2:
            return lambda parameter: True
        own = _identities(optimizer)
        others = {
            identity
            for each in self._optimizers
            if not _same(each, optimizer)
            for identity in _identities(each)
        }
        if self._is_last(optimizer):
            return lambda parameter: id(parameter) in own or id(parameter) not in others
        return lambda parameter: id(parameter) in own

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if self._optimizers:
            return any(_same(optimizer, each) for each in self._optimizers)
        ours = {id(parameter) for parameter in self._model.parameters()}
        return not ours.isdisjoint(_identities(optimizer))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step()` cannot be called without an argument, as that of LBFGS."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def check_optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return the optimizers in a list.

    Raises:
        InspectionError: One of them is not an optimizer.
    """
    listed = given is None or isinstance(given, (list, tuple))
    found: list[Any] = list(given or ()) if listed else [given]  # type: ignore[arg-type]
    for each in found:
        if not isinstance(each, Optimizer):
            raise InspectionError(
                f"optimizer={shown(each)} is not a torch.optim.Optimizer. Pass the optimizer "
                "itself, such as torch.optim.Adam(model.parameters())."
            )
    return found


def _identities(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _same(one: Optimizer, other: Optimizer) -> bool:
    """Whether two optimizers are one, also if one of them only wraps the other."""
    return one is other or one.param_groups is other.param_groups
