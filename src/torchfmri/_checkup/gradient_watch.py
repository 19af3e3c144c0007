"""Hooks on parameters and optimizers: which gradients arrive, and what becomes of them.

`Watcher` attaches it to the copy. It compares norms when backward leaves a gradient, before a
GradScaler unscales it, and when the optimizer takes it: the ratios show clipping, clearing and
stale gradients. Squares of large gradients overflow float32, so `norm_of` scales them first. A
non-finite gradient raises `Lost` before the weights are touched, so that the step can be run again
from the same weights. What is noted may grow; a hook must not change a gradient, because the step
goes on with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchfmri._checkup.users_step import Lost
from torchfmri._checkup.weights import dense, real
from torchfmri._diagnosis import Notes
from torchfmri._incidents import is_finite
from torchfmri._torch import widest_dtype

_SAMPLE = 4096  # about how many values of a gradient are kept per step
_MOST_SAMPLES = 25


class GradientWatch:
    """Follows gradients from backward to the optimizer.

    Args:
        notes: Takes down what fails in here.

    Attributes:
        clip: Norm of the gradients as the optimizer finds them / as backward left them.
        norm: Norm of the gradients as backward left them, without the scale of a GradScaler.
        stale: Whether gradients of the step before were still there when backward began.
        stepped: Whether the optimizer stepped.
        cleared: Whether gradients arrived and were gone when the optimizer stepped.
        passes: How many backward passes the last update was made of.
        steps: How often each optimizer stepped, by its id.
        early: Whether it stepped with no gradient at all, before backward.
        kinds: Parameter -> whether a gradient ever arrived: "none", "zero" or "some".
        half: Layer or parameter -> how many float16 gradients are subnormal, and not 0.
        flushed: The layers whose float16 gradient was 0 when last seen.
        samples: Evenly spaced values of the gradient, step by step.
        scaled_clip: By what gradients were multiplied between backward and the unscaling of a
            GradScaler, at the last step that was looked at in detail; nan if there is none.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.kinds: dict[str, str] = {}
        self.half: dict[str, tuple[int, int]] = {}
        self.flushed: set[str] = set()
        self.samples: list[Tensor] = []
        self._raw: dict[int, float] = {}
        self._used: set[int] = set()
        self._tainted: set[int] = set()
        self._arrivals: Counter[int] = Counter()
        self.passes = 0
        self.scaled_clip = math.nan
        self._unscaling = 1.0
        self.steps: Counter[int] = Counter()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what belongs to the step before."""
        self.clip = self.norm = math.nan
        self.stale = self.stepped = self.cleared = self.early = False
        self._arrived_now = False
        self._had_nothing: set[int] = set()

    def attach(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
    ) -> Iterator[RemovableHandle]:
        """Register the hooks, and yield the handle of each."""
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                yield from self._hook(name, parameter)
        for optimizer in optimizers:
            yield optimizer.register_step_pre_hook(self._before_update)
            yield optimizer.register_step_post_hook(self._after_update)

    def _hook(self, name: str, parameter: Tensor) -> Iterator[RemovableHandle]:
        part = f"The gradient of {name!r}"
        self.kinds[name] = "none"

        def arrives(gradient: Tensor) -> None:
            with self._notes.guard(part):
                self._arrives(name, parameter, gradient)

        def arrived(_: Tensor) -> None:
            with self._notes.guard(part):
                self._arrived(name, parameter)

        yield parameter.register_hook(arrives)  # type: ignore[no-untyped-call]
        yield parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    # -- backward ----------------------------------------------------------------------------

    def _arrives(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        identity = id(parameter)
        if identity in self._used:  # the optimizer has already used this gradient
            self._used.discard(identity)
            left = parameter.grad
            is_left = left is not None and bool((left != 0).any())
            (self._tainted.add if is_left else self._tainted.discard)(identity)
        elif parameter.grad is None:
            self._tainted.discard(identity)
        if gradient.dtype == torch.float16:
            self.look_at_half(name, gradient)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self._arrived_now = True
        self._arrivals[id(parameter)] += 1
        self.early = self.early or id(parameter) in self._had_nothing
        norm = self._raw[id(parameter)] = norm_of(gradient)
        if norm != 0:
            self.kinds[name] = "some"
        elif self.kinds[name] == "none":
            self.kinds[name] = "zero"

    def look_at_half(self, name: str, gradient: Tensor) -> None:
        """Count what float16 cannot hold well of a gradient."""
        values = gradient.detach().abs()
        small = int(((values > 0) & (values < torch.finfo(torch.float16).tiny)).sum())
        some = int((values > 0).sum())
        before = self.half.get(name, (0, 0))
        self.half[name] = (before[0] + small, before[1] + some)
        (self.flushed.discard if some else self.flushed.add)(name)

    # -- the optimizer -----------------------------------------------------------------------

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        with self._notes.guard("What the optimizer gets"):
            self._look_at_update(optimizer)

    def _look_at_update(self, optimizer: Optimizer) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        found = [each for each in trained if each.grad is not None]
        gradients = [each.grad for each in trained if each.grad is not None]
        if not all(map(is_finite, gradients)):
            raise Lost
        now = list(map(norm_of, gradients))
        if any(id(parameter) in self._tainted for parameter in found):
            self.stale = True
        raw = [self._raw.get(id(parameter), math.nan) for parameter in found]
        before = math.sqrt(sum(each**2 for each in raw if math.isfinite(each))) * self._unscaling
        self.norm = before
        after = math.sqrt(sum(each**2 for each in now))
        arrived = any(self._raw.get(id(each), 0.0) > 0 for each in trained)
        self.cleared = self.cleared or (arrived and after == 0)
        if after == 0 and not self._arrived_now:
            self._had_nothing |= {id(each) for each in trained}
        self.clip = _clip_factor(before, after)
        self.passes = max((self._arrivals[id(each)] for each in found), default=0)
        self._sample(found)

    def is_unscaled(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        """Take in that a GradScaler is about to multiply these by a factor, 1 / its scale."""
        self._unscaling = float(factor)
        after = math.sqrt(sum(norm_of(each) ** 2 for each in gradients))
        before = math.sqrt(sum(each**2 for each in self._raw.values()))
        self.scaled_clip = after / before if before > 0 else math.nan

    def _sample(self, parameters: list[Tensor]) -> None:
        """Keep evenly spaced values of the gradient, to tell its noise from its mean."""
        share = max(1, sum(each.numel() for each in parameters) // _SAMPLE)
        parts = [
            real(each.grad.detach()).flatten()[::share].float()
            for each in parameters
            if each.grad is not None and not each.grad.is_sparse
        ]
        if parts and len(self.samples) < _MOST_SAMPLES:
            self.samples.append(torch.cat(parts))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepped = True
        self.steps[id(optimizer)] += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._raw.pop(id(parameter), None)
                self._arrivals.pop(id(parameter), None)
                self._used.add(id(parameter))


def norm_of(gradient: Tensor) -> float:
    """Return the norm of a gradient, divided by its largest value before it is squared."""
    values = real(dense(gradient))
    largest = float(values.abs().amax()) if values.numel() else 0.0
    if not 0 < largest < math.inf:
        return largest
    wide = widest_dtype(values.device)
    return largest * float(torch.linalg.vector_norm(values / largest, dtype=wide))


def _clip_factor(before: float, after: float) -> float:
    """Return the factor on the gradients; 1 if a GradScaler only unscaled them."""
    if before <= 0 or after <= 0:
        return math.nan
    factor = after / before
    power = math.log2(factor)
    if abs(power) >= 4 and abs(power - round(power)) < 1e-4:
        return 1.0
    return factor
