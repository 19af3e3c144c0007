"""`cost`: FLOPs, bytes and seconds of every layer, forward and backward.

It is public; arguments and notes are documented in `docs/cost.md`. The step runs once before it is
counted, because the first run loads libraries and takes workspaces. Everything a parameter or
storage costs counts once, for the first layer that has it, so the layers add up to the total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from torch import nn

from torchfmri._arguments import check_number
from torchfmri._capture import BACKWARD, FORWARD, LOSS
from torchfmri._cost.counted_step import CountedStep, count_step
from torchfmri._cost.growth import Growth, fit_growth
from torchfmri._cost.laws import Sample
from torchfmri._cost.layer_cost import Cost, LayerCost, add_costs
from torchfmri._cost.layer_times import LayerTimes, time_layers
from torchfmri._cost.live_memory import Place, Storages
from torchfmri._cost.measured_step import MeasuredStep
from torchfmri._cost.resizing import Size, check_sizes, data_of_size, size_of
from torchfmri._model import Loss, first_names, named_layers, refuse_scripted, unwrap
from torchfmri._text import bytes_text, seconds_text


def cost(
    model: nn.Module,
    data: Any,
    loss: Loss = None,
    *,
    target: Any = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    rounds: int = 5,
) -> Cost:
    """Measure what each layer of a model costs on its data; the model is left as it was.

    After a warm-up pass, one pass is counted (FLOPs, bytes) and `rounds` passes are timed. FLOPs
    and bytes are exact and the same in every run. Times are those of the fastest round, without
    the cost of measuring them.

    Args:
        model: Any `nn.Module`; it runs in its current mode.
        data: A tensor, a tuple of positional arguments, or a dict of keyword arguments; with
            `sizes` also a function `data(batch=..., length=...)` that makes one of these.
        loss: A loss module or function of the output (and the target), or `"sum"`; by default the
            output's own loss, or, with a note, the sum of the output.
        target: Passed to the loss.
        sizes: Further sizes to measure, such as `{"batch": (1, 2, 4), "length": (64, 128, 256)}`;
            `cost.growth` fits laws to them. Data is cut or repeated along its axes 0 and 1.
        rounds: How often to measure time; 0 means not at all.

    Raises:
        InspectionError: The data is empty or cannot be resized, `sizes` is malformed, or a layer is
            TorchScript.
    """
    check_number("rounds", rounds, 0, "give the times that time is measured, 0 for not at all")
    given = data_of_size(data, target, sizes)
    step = MeasuredStep(model, given.data, loss, given.target)
    refuse_scripted(model)
    count_step(step)  # the first run loads libraries, chooses kernels and takes workspaces
    counted = count_step(step)
    times = time_layers(step, rounds) if rounds else None
    growth = _measure_growth(step, data, target, sizes) if sizes else None
    return _result(step, counted, times, growth)


def _measure_growth(
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


def _result(
    step: MeasuredStep, counted: CountedStep, times: LayerTimes | None, growth: Growth | None
) -> Cost:
    own, kind = _own_costs(step.model, counted, times), type(unwrap(step.model)).__name__
    total = add_costs(list(own.values()), "", kind, 1)
    buffers = Storages(step.model.buffers()).existing_bytes
    return Cost(
        model=kind,
        device=str(step.device),
        layers={name: _with_inside(name, own) for name in own},
        total=total,
        buffer_bytes=buffers,
        data_bytes=counted.existing_bytes - buffers - total.parameter_bytes,
        retained_bytes=counted.retained_bytes,
        peak_bytes=counted.peak_bytes,
        peak_place=counted.peak_place,
        plain_seconds=math.nan if times is None else times.plain_seconds,
        growth=growth,
        notes=tuple(_notes(step, counted, total, times)),
    )


def _own_costs(
    model: nn.Module, counted: CountedStep, times: LayerTimes | None
) -> dict[str, LayerCost]:
    """Return each layer's own cost; a module with several names counts under the first."""
    result: dict[str, LayerCost] = {}
    known: set[int] = set()

    def seconds(place: Place) -> float:
        return math.nan if times is None else times.seconds.get(place, 0.0)

    for name, module in {**named_layers(model), LOSS: None}.items():
        if module is not None and id(module) in known:
            result[name] = LayerCost(name, type(module).__name__)
            continue
        known.add(id(module))
        parameters = [] if module is None else [*module._parameters.values()]
        fresh = [each for each in parameters if each is not None and id(each) not in known]
        known.update(map(id, fresh))
        result[name] = LayerCost(
            layer=name,
            kind="" if module is None else type(module).__name__,
            calls=counted.calls[name],
            forward_flops=counted.flops.get((FORWARD, name), 0),
            backward_flops=counted.flops.get((BACKWARD, name), 0),
            parameter_bytes=sum(each.numel() * each.element_size() for each in fresh),
            activation_bytes=counted.activation_bytes[name],
            gradient_bytes=counted.gradient_bytes[name],
            saved_bytes=counted.saved_bytes[name],
            forward_seconds=seconds((FORWARD, name)),
            backward_seconds=seconds((BACKWARD, name)),
        )
    return result


def _with_inside(name: str, own: dict[str, LayerCost]) -> LayerCost:
    """Return the cost of a layer together with the layers inside it."""
    prefix = f"{name}." if name else ""
    others = [other for other in own if other not in (name, LOSS) and other.startswith(prefix)]
    mine, inside = own[name], [own[other] for other in others]
    if not inside or name == LOSS:
        return mine
    return replace(add_costs([mine, *inside], name, mine.kind, mine.calls), own=mine)


def _notes(
    step: MeasuredStep, counted: CountedStep, total: LayerCost, times: LayerTimes | None
) -> list[str]:
    notes = list(step.notes)
    for name, first in first_names(named_layers(step.model)).items():
        if first != name:
            notes.append(f"{name} is the same module as {first}: counted there")
    beyond = counted.retained_bytes - total.saved_bytes
    if beyond > 0 and total.backward_flops:
        notes.append(
            f"{bytes_text(beyond)} more than what is saved stay alive between forward and "
            "backward: a cache, offloading, or tensors that a checkpoint or a Function holds"
        )
    for name, count in counted.uncounted.items():
        notes.append(
            f"{name} ran {count} times and has no FLOP formula; torch.utils.flop_counter."
            "register_flop_formula adds one"
        )
    if times is not None:
        marking = max(times.marked_seconds - times.plain_seconds, 0.0)
        notes.append(
            f"time: fastest of {times.rounds} rounds; {times.marks} marks cost "
            f"{seconds_text(marking)}, which is taken off"
        )
    return notes
