"""What a batch norm was given to take its statistics from, call by call."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchfmri._diagnosis import NormFacts


@dataclass
class NormLog:
    """One batch norm of a copy, while it is trained.

    Attributes:
        layer: Where it is.
        module: The norm itself.
    """

    layer: str
    module: _BatchNorm
    _calls: Counter[tuple[bool, int, int]] = field(default_factory=Counter)

    def add(self, values: Tensor) -> None:
        """Take in the input of one call: (samples, channels, ...)."""
        channels = values.shape[1] if values.ndim > 1 else 1
        per_channel = values.numel() // max(1, channels)
        self._calls[self.module.training, values.shape[0], per_channel] += 1

    def facts(self) -> NormFacts:
        """What most of its calls were like, and what it will use in evaluation."""
        training, samples, values = self._calls.most_common(1)[0][0]
        mean, variance = self.module.running_mean, self.module.running_var
        untouched = (
            mean is not None
            and variance is not None
            and bool((mean == 0).all())
            and bool((variance == 1).all())
        )
        momentum = self.module.momentum
        return NormFacts(
            layer=self.layer,
            training=training,
            samples=samples,
            values=values,
            untouched=untouched,
            momentum=float("nan") if momentum is None else float(momentum),
            calls=self._calls.total(),
        )


def normalises_one(module: nn.Module, values: Tensor) -> bool:
    """Whether a norm layer takes each mean over a single number: it returns its bias, always."""
    if isinstance(module, nn.LayerNorm):
        return math.prod(module.normalized_shape) == 1
    if isinstance(module, nn.GroupNorm) and values.ndim > 1:
        return values.numel() == values.shape[0] * module.num_groups
    return False
