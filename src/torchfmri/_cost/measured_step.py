"""One forward and backward pass of a user's model, run to be measured, and its model restored.

`cost` and `advise` describe their step by a `MeasuredStep`. Every pass runs on a copy of the data
and inside `unchanged`; the backward pass spares `.grad`. Notes collect what readers of the result
must know, such as a missing loss. `resting_collector` keeps garbage collection out of timings and
counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_module, shown
from torchfmri._model import (
    Loss,
    arguments_for,
    compiled_code_as_eager,
    copy_of_data,
    loss_of,
    prepare_backward,
    refuse_list,
    runnable,
    switched_off,
    unchanged,
)
from torchfmri._torch import flatten
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True)
class MeasuredStep:
    """A step to measure: a model, its data, and the loss that is differentiated.

    Attributes:
        model: The model.
        data: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: As for `Inspector.run_inspection`; by default the sum of the output.
        target: Passed to the loss.
        notes: What readers of the result should know; filled while the step runs.
    """

    model: nn.Module
    data: Any
    loss: Loss = None
    target: Any = None
    notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_module("model", self.model)
        refuse_list(self.data)
        tensors = [each.tensor for each in flatten(self.data)]
        if not tensors:
            raise InspectionError(
                f"data={shown(self.data)} holds no tensor. Pass what the model is called with: a "
                "tensor, a tuple of positional arguments or a dict of keyword arguments; NumPy "
                "arrays become tensors with torch.from_numpy."
            )
        if all(each.numel() == 0 for each in tensors):
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors[:3])
            raise InspectionError(f"The data is empty (shape {shapes}): there is nothing to run.")
        if switched_off():
            raise InspectionError("TORCHFMRI=off: nothing is attached, so nothing is measured.")

    @property
    def device(self) -> torch.device:
        """The device of the model, or of the data if the model has no parameters."""
        tensors = [*self.model.parameters(), *(each.tensor for each in flatten(self.data))]
        return tensors[0].device if tensors else torch.device("cpu")

    def existing(self) -> list[Tensor]:
        """Return the parameters and buffers, which exist whether the step runs or not."""
        return [*self.model.parameters(), *self.model.buffers()]

    @contextmanager
    def prepared(self) -> Iterator[MeasuredPass]:
        """Yield one pass on a copy of the data, and restore the model afterwards."""
        arguments, keywords = arguments_for(self.model, self.data)
        with compiled_code_as_eager(), unchanged(self.model, self._note_written):
            yield MeasuredPass(
                self,
                copy_of_data(arguments),
                copy_of_data(dict(keywords)),
                copy_of_data(self.target),
            )

    def _note_written(self, name: str) -> None:
        self.notes[f"the forward pass writes into its parameter {name}: those changes stay"] = None

    def objective(self, output: Any, target: Any) -> Tensor | None:
        """Return the number to differentiate; None, with a note, if there is no backward pass."""
        value = loss_of(output, target, self.loss)
        if value is None:
            if not any(each.tensor.is_floating_point() for each in flatten(output)):
                self.notes["the output is not floating point: forward pass only"] = None
                return None
            self.notes["no loss was given: the sum of the first output was differentiated"] = None
            value = loss_of(output, target, "sum")
        assert value is not None
        if not bool(torch.isfinite(value.detach())):
            self.notes[f"the loss is {float(value.detach())}"] = None
        if not value.requires_grad:
            self.notes[f"forward pass only: {self._reason()}"] = None
            return None
        return value

    def _reason(self) -> str:
        if not torch.is_grad_enabled():
            return "grad mode is off here"
        if not any(True for _ in self.model.parameters()):
            return "the model has no parameters"
        if not any(each.requires_grad for each in self.model.parameters()):
            return "all parameters are frozen"
        return "the loss does not depend on the parameters in a differentiable way"


@dataclass
class MeasuredPass:
    """One run of a step, on its own copy of the data."""

    step: MeasuredStep
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Any

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the data and the target."""
        values = (self.arguments, self.keywords, self.target)
        return [each.tensor for each in flatten(values)]

    def forward(self) -> Tensor | None:
        """Run the model and the loss, and keep only the loss."""
        output = runnable(self.step.model)(*self.arguments, **self.keywords)
        return self.step.objective(output, self.target)

    def backward_of(self, loss: Tensor) -> Callable[[], object]:
        """Return the backward pass from the loss, ready to run; it spares every `.grad`."""
        return prepare_backward(loss, self.step.model.parameters())


@contextmanager
def resting_collector() -> Iterator[None]:
    """Switch garbage collection off inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
