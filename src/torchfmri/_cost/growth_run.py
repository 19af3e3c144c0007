"""Count one step at several sizes of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from torchfmri._capture import BACKWARD, FORWARD
from torchfmri._cost.counted_step import CountedStep, count_step
from torchfmri._cost.growth import Growth, fit_growth
from torchfmri._cost.laws import Sample
from torchfmri._cost.measured_step import MeasuredStep
from torchfmri._cost.resizing import Size, check_sizes, data_of_size, size_of


def measure_growth(
    step: MeasuredStep, data: Any, target: Any, sizes: Mapping[str, Sequence[int]]
) -> Growth:
    """Count the step at every combination of `sizes`, and fit the laws behind the counts."""
    axes = check_sizes(sizes)
    samples = []
    for values in product(*axes.values()):
        asked = dict(zip(axes, values, strict=True))
        given = data_of_size(data, target, sizes, asked)
        counted = count_step(replace(step, data=given.data, target=given.target))
        own = size_of(given.data)
        size = Size(asked.get("batch", own.batch), asked.get("length", own.length))
        samples.append(_sample(size, counted))
    return fit_growth(samples)


def _sample(size: Size, counted: CountedStep) -> Sample:
    names = {layer for _, layer in counted.flops} | set(counted.saved_bytes)
    order = [*counted.calls, *sorted(names - set(counted.calls))]
    layers = {
        name: (
            counted.flops.get((FORWARD, name), 0),
            counted.flops.get((BACKWARD, name), 0),
            counted.saved_bytes[name],
        )
        for name in order
        if name in names
    }
    steps = np.asarray(counted.steps, dtype=np.float64)
    return Sample(size, counted.existing_bytes, steps, layers)
