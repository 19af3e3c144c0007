"""What a loss takes its inputs for, read from its operations.

`OperationWatch` hands it each operation below autograd. It knows losses by the names of ATen
operations; `kl_div` has none and is recognised by its parts, t log t - t x. Operations inside the
model are looked at too if only a loss has them. `release` must be called after the step, since
it holds the step's tensors. A new loss is an entry of the tables at the top, or a method beside
`_look_at_nll`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from torchfmri._checkup.softmaxes import distribution_axes

_COMPARISONS = frozenset(["sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mul"])
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss_forward")
_BACKWARD = {"nll_loss_backward": 4, "nll_loss2d_backward": 4, "mse_loss_backward": 3}
"""Backward of a loss -> which argument is its reduction."""
_MEAN = 1


class LossWatch:
    """Notes what the operations of one step show about the loss.

    Attributes:
        classes: The number of classes of the cross entropy, if there is one.
        cross_entropy: Its mean in nats.
        misread: What the loss expects, and what it gets.
        broadcast: Two shapes that a comparison in the loss blew up, and the result's.
        inner: The value of the last built-in loss.
        ignored: The target that a cross entropy leaves out; None if there is no cross entropy.
        outside: The share of targets of a binary cross entropy that are not probabilities.
        compared: The targets of the first cross entropy by class numbers.
        logit_range: The smallest and the largest logit that a cross entropy was given.
        weights: By what each mean was multiplied on its way to the loss, and over how many samples
            it was taken.
    """

    def __init__(self) -> None:
        self.classes: int | None = None
        self.cross_entropy: float | None = None
        self.misread: tuple[str, str] | None = None
        self.broadcast: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
        self.inner: float | None = None
        self.ignored: int | None = None
        self.outside = 0.0
        self.compared: Tensor | None = None
        self.logit_range: tuple[float, float] | None = None
        self.weights: list[tuple[float, int]] = []
        self._last: deque[tuple[str, tuple[Any, ...], Any]] = deque(maxlen=2)
        self._expanded: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    def release(self) -> None:
        """Let go of the tensors of the step."""
        self._last.clear()
        self._expanded.clear()

    def look(self, name: str, args: tuple[Any, ...], result: Any, in_loss: bool) -> None:
        """Take in an operation; what only a loss does also counts inside a model."""
        if name == "_log_softmax":
            self._look_at_logits(args[0])
        elif name.startswith("nll_loss") and name.endswith("forward"):
            self._look_at_nll(args)
        elif name == "binary_cross_entropy_with_logits":
            self._look_at_binary(args[0], args[1])
        elif name in _BACKWARD:
            self._look_at_weight(args, _BACKWARD[name])
        elif name in ("sub", "mul"):
            self._look_for_divergence(name, args)
        self._last.append((name, args, result))
        if in_loss and name == "expand":
            self._expanded[id(result)] = (result, tuple(args[0].shape))
        if in_loss and name in _COMPARISONS:
            self._look_at_comparison(args)
        if name in _LOSSES:
            value = result[0] if isinstance(result, tuple) else result
            if value.numel() == 1:
                self.inner = float(value.detach())

    def _look_at_logits(self, logits: Tensor) -> None:
        if logits.ndim < 2 or (logits.shape[-1] < 2 and logits.shape[1] < 2):
            return
        if self.logit_range is None and logits.numel():
            smallest, largest = logits.detach().aminmax()
            self.logit_range = float(smallest), float(largest)
        if self.misread is None and _are_probabilities(logits):
            self.misread = ("logits", "probabilities")
        elif self.misread is None and logits.ndim == 2 and _are_probabilities(logits.T):
            self.misread = ("logits", "probabilities over the batch")

    def _look_at_binary(self, logits: Tensor, target: Tensor) -> None:
        values = logits.detach()
        self.outside = float(((target < 0) | (target > 1)).float().mean())
        inside = bool(((values >= 0) & (values <= 1)).all())
        if inside and values.numel() >= 8 and float(values.float().std()) > 0:
            # Logits of a model at its start are of both signs.
            self.misread = self.misread or ("logits", "probabilities")

    def _look_at_nll(self, args: tuple[Any, ...]) -> None:
        log_probabilities, target = args[0].detach().float(), args[1]
        if self.compared is None:
            self.compared = target.detach().clone()
        self.ignored = int(args[4]) if len(args) > 4 else -100
        if log_probabilities.ndim > 2:
            log_probabilities = log_probabilities.movedim(1, -1).flatten(0, -2)
        target = target.reshape(-1)
        counts = target != self.ignored
        if log_probabilities.ndim != 2 or not bool(counts.any()):
            return
        total = log_probabilities.logsumexp(-1)
        if bool(torch.isfinite(total).all()) and float(total.abs().max()) > 1e-2:
            if _are_probabilities(log_probabilities):
                self.misread = self.misread or ("log-probabilities", "probabilities")
            else:
                self.misread = self.misread or ("log-probabilities", "logits")
            return
        chosen = log_probabilities[counts].gather(1, target[counts][:, None])
        self.classes = log_probabilities.shape[-1]
        self.cross_entropy = float(-chosen.mean())

    def _look_at_weight(self, args: tuple[Any, ...], place: int) -> None:
        """Note the factor between a mean and the loss, which is the gradient of the mean."""
        gradient, values = args[0], args[1]
        if gradient.numel() == 1 and len(args) > place and args[place] == _MEAN:
            self.weights.append((float(gradient.detach()), int(values.shape[0])))

    def _look_for_divergence(self, name: str, args: tuple[Any, ...]) -> None:
        """Recognise kl_div by its parts, t log t - t x, or exp(t) (t - x) for targets in logs."""
        if len(args) < 2 or len(self._last) < 2:
            return
        parts = {each[0]: each for each in self._last}
        if name == "sub" and {"xlogy", "mul"} <= set(parts):
            (_, entropy, one), (_, product, other) = parts["xlogy"], parts["mul"]
            if not (_same(args[0], one) and _same(args[1], other)):
                return
            if _same(entropy[0], entropy[1]) and _same(product[0], entropy[0]):
                self._look_at_divergence(product[1], entropy[0], in_logs=False)
        elif name == "mul" and {"exp", "sub"} <= set(parts):
            (_, exponent, one), (_, difference, other) = parts["exp"], parts["sub"]
            if not (_same(args[0], one) and _same(args[1], other)):
                return
            if _same(exponent[0], difference[0]):
                self._look_at_divergence(difference[1], exponent[0], in_logs=True)

    def _look_at_divergence(self, found: Tensor, target: Tensor, in_logs: bool) -> None:
        """Note what a KL divergence takes as log-probabilities and as its target."""
        if found.ndim < 2 or self.misread is not None:
            return
        if in_logs and _are_probabilities(target):
            self.misread = ("log-probabilities of the targets", "probabilities")
            return
        if _are_probabilities(found):
            self.misread = ("log-probabilities", "probabilities")
            return
        values = found.detach().float()
        for axis in distribution_axes(target.detach().float().exp() if in_logs else target):
            total = values.logsumexp(axis)
            if bool(torch.isfinite(total).all()) and float(total.abs().max()) > 1e-2:
                self.misread = ("log-probabilities", "logits")

    def _look_at_comparison(self, args: tuple[Any, ...]) -> None:
        if len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
            return
        one, other = (
            self._expanded[id(each)][1] if id(each) in self._expanded else tuple(each.shape)
            for each in args[:2]
        )
        numbers = math.prod(one)
        if numbers != math.prod(other) or numbers < 2 or len(one) == len(other):
            return
        shape = tuple(torch.broadcast_shapes(one, other))  # type: ignore[no-untyped-call]
        if math.prod(shape) > numbers and self.broadcast is None:
            self.broadcast = (one, other, shape)


def _are_probabilities(values: Tensor) -> bool:
    """Whether each row is a distribution, along the last axis or along that of channels."""
    axes = distribution_axes(values)
    return bool(axes) and (values.ndim - 1 in axes or (values.ndim > 2 and 1 in axes))


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors share the same numbers in memory."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return one.data_ptr() == other.data_ptr()
