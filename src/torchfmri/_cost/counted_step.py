"""One step counted: FLOPs, bytes, and where the peak is.

`cost_run` and the growth laws call `count_step`. Counts are exact and the same in every run:
nothing here may depend on time or on the allocator. Garbage collection rests while it counts, and
runs once after the forward pass only if more is alive than was saved, since cycles would count as
memory that the step needs. Further counts may be added freely.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from torchfmri._capture import Position
from torchfmri._cost.live_memory import LiveMemory, Place, SavedBytes, Storages
from torchfmri._cost.measured_step import MeasuredStep, resting_collector
from torchfmri._model import each_once, named_layers, named_parameters
from torchfmri._torch import Hook, flatten, hooked, storage_of


@dataclass
class CountedStep:
    """The FLOPs and bytes of one step, and where its peak is.

    Attributes:
        flops: (phase, layer) -> FLOPs.
        activation_bytes: Layer -> bytes of its outputs; a storage counts for its first layer.
        gradient_bytes: Layer -> bytes of the gradients of its own parameters.
        saved_bytes: Layer -> bytes kept for the backward pass.
        calls: Layer -> how often it was called.
        existing_bytes: Bytes of parameters, buffers and data.
        retained_bytes: All bytes alive after the forward pass, beyond what existed.
        peak_bytes: The most bytes alive at once, existing ones included.
        peak_place: Phase and layer of the peak.
        steps: Bytes alive at each step of the program, beyond what existed.
        uncounted: Operations that may hide FLOPs.
    """

    flops: dict[Place, int] = field(default_factory=dict)
    activation_bytes: Counter[str] = field(default_factory=Counter)
    gradient_bytes: Counter[str] = field(default_factory=Counter)
    saved_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    existing_bytes: int = 0
    retained_bytes: int = 0
    peak_bytes: int = 0
    peak_place: Place = ("", "")
    steps: list[int] = field(default_factory=list)
    uncounted: dict[str, int] = field(default_factory=dict)


def count_step(step: MeasuredStep) -> CountedStep:
    """Run a step once, and return its counts.

    Args:
        step: The step to run.
    """
    counted = CountedStep()
    with step.prepared() as one_pass:
        existing = [*step.existing(), *one_pass.tensors()]
        layers = named_layers(step.model)
        outputs = Storages(existing)

        def returned(layer: str, output: object) -> None:
            for element in flatten(output):
                counted.activation_bytes[layer] += outputs.add(element.tensor, layer)

        position = Position(layers, returned=returned)
        memory = LiveMemory(position, existing, step.device)
        saved = SavedBytes(position, existing)
        with _listening_to_parameters(layers, counted), position, resting_collector(), memory:
            with saved:
                loss = one_pass.forward()
            counted.saved_bytes = saved.by_layer()
            if loss is not None:
                own = storage_of(loss)
                kept = 0 if own is None else own.nbytes()
                if memory.live > counted.saved_bytes.total() + kept:  # perhaps only garbage
                    gc.collect()
                counted.retained_bytes = memory.live - kept
                run_backward = one_pass.backward_of(loss)
                with position.backward(loss):
                    run_backward()
    counted.flops, counted.uncounted = memory.flops, memory.uncounted
    counted.calls = position.calls
    counted.existing_bytes = memory.existing_bytes
    counted.peak_bytes = memory.existing_bytes + memory.peak
    counted.peak_place, counted.steps = memory.peak_place, memory.steps
    return counted


def _listening_to_parameters(
    layers: dict[str, nn.Module], counted: CountedStep
) -> AbstractContextManager[None]:
    """Record, by hooks, how large the gradients are that really arrive."""

    def arrived(layer: str, gradient: Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        counted.gradient_bytes[layer] += values.numel() * values.element_size()

    return hooked(
        parameter.register_hook(Hook(partial(arrived, name.rpartition(".")[0])))  # type: ignore[no-untyped-call]
        for name, parameter in each_once(named_parameters(layers)).items()
        if parameter.requires_grad
    )
