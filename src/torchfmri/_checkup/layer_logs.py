"""What single layers did, call by call: units that were ever on, batches that norms were given.

`Watcher` adds calls, `Checkup` asks for the result. Several calls of a layer in one step are
merged, weighted by their samples. A unit is judged over a window of at least `LEAST_SAMPLES`
samples and `LEAST_STEPS` steps; with fewer, chance switches units off. Both limits belong to the
cuts of dead units: change them only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchfmri._checkup.activations import flat_values
from torchfmri._diagnosis import NormFacts, UnitActivity

LEAST_SAMPLES = 256
LEAST_STEPS = 10
_SUBSTANTIAL = 0.1


@dataclass
class UnitLog:
    """What the units behind one nonlinearity did so far.

    Attributes:
        layer: Where it is.
        source: The layer that feeds it.
        reader: The layer that reads the result, if a function and not a layer made it.
        function: Its name.
        channels_first: Whether units are axis 1, as after a convolution.
    """

    layer: str
    source: str
    function: str
    channels_first: bool
    is_last: bool = False
    reader: str = ""
    _on: dict[int, np.ndarray] = field(default_factory=dict)
    _samples: dict[int, int] = field(default_factory=dict)
    _flat: dict[int, float] = field(default_factory=dict)

    def add(self, step: int, x: Tensor | None, y: Tensor) -> None:
        """Take in the values of one call."""
        y = y.detach()
        if y.ndim < 2 or not y.numel():
            return
        flat = flat_values(self.function, None if x is None else x.detach(), y)
        if flat is None:
            return
        axis = 1 if self.channels_first else y.ndim - 1
        others = [each for each in range(y.ndim) if each != axis]
        on = (
            (~flat).any(dim=others[0])
            if len(others) == 1
            else (~flat).movedim(axis, 0).flatten(1).any(1)
        )
        active = on.cpu().numpy()
        samples = y.numel() // y.shape[axis]
        share = float(flat.to(torch.float32).mean())
        if step in self._on and len(self._on[step]) == len(active):
            before = self._samples[step]
            self._on[step] = self._on[step] | active
            self._flat[step] = (self._flat[step] * before + share * samples) / (before + samples)
            self._samples[step] = before + samples
        else:
            self._on[step], self._flat[step], self._samples[step] = active, share, samples

    def activity(self) -> UnitActivity | None:
        """Return what the units did over the run; None if nothing was seen."""
        steps = sorted(self._on)
        if not steps:
            return None
        units = len(self._on[steps[-1]])
        steps = [step for step in steps if len(self._on[step]) == units]
        window = self._window(steps)
        silent = ~np.logical_or.reduce([self._on[step] for step in window])
        return UnitActivity(
            layer=self.layer,
            source=self.source,
            function=self.function,
            units=units,
            samples=sum(self._samples[step] for step in window),
            steps=len(window),
            silent=int(silent.sum()),
            first_silent=self._first_silent(steps, silent),
            flat=dict(self._flat),
            is_last=self.is_last,
            reader=self.reader,
        )

    def _window(self, steps: list[int]) -> list[int]:
        """Return the last steps that make enough samples."""
        samples = 0
        for count, step in enumerate(reversed(steps), 1):
            samples += self._samples[step]
            if samples >= LEAST_SAMPLES and count >= LEAST_STEPS:
                return steps[-count:]
        return steps

    def _first_silent(self, steps: list[int], silent: np.ndarray) -> int | None:
        """Return the step since which (nearly) all units that are silent now have been silent."""
        if not silent.any():
            return None
        first = steps[-1]
        for step in reversed(steps):
            if self._on[step][silent].mean() > _SUBSTANTIAL:
                break
            first = step
        return first


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
        """Return what most of its calls were like, and what it will use in evaluation."""
        training, samples, values = self._calls.most_common(1)[0][0]
        mean, variance = self.module.running_mean, self.module.running_var
        untouched = False
        if mean is not None and variance is not None:
            untouched = bool((mean == 0).all() & (variance == 1).all())
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
    """Whether a norm layer takes each mean over a single number, and so always returns its bias."""
    if isinstance(module, nn.LayerNorm):
        return math.prod(module.normalized_shape) == 1
    if isinstance(module, nn.GroupNorm) and values.ndim > 1:
        return values.numel() == values.shape[0] * module.num_groups
    return False
