"""The hooks of a scan on a model that generates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._scan.run.flat_layout import FlatLayout
from torchfmri._scan.run.subject import ScannedLayer
from torchfmri._scan.run.token_axis import first_tensor
from torchfmri._torch import Hook
from torchfmri.exceptions import InspectionError


class StepOutputs:
    """The outputs of all layers in a step of one token, by reference.

    Args:
        layout: The layers, and their order.
        b: Rows of the batch.

    Attributes:
        is_step: Whether the pass that runs is such a step.
        slots: For each layer its output and the version that this had; None before its call.
    """

    def __init__(self, layout: FlatLayout, b: int) -> None:
        self.layout, self._b = layout, b
        self.is_step = False
        self.slots: list[tuple[Tensor, int] | None] = []

    def begin(self, is_step: bool) -> None:
        """Begin a pass."""
        self.is_step = is_step
        self.slots = [None] * len(self.layout.layers)

    def rows(self) -> list[tuple[ScannedLayer, Tensor | None]]:
        """Each layer that was called with (b, 1, w); None where somebody wrote into its output."""
        found: list[tuple[ScannedLayer, Tensor | None]] = []
        for layer, slot in zip(self.layout.layers, self.slots, strict=True):
            if slot is not None:
                tensor, version = slot
                usable = layer.is_written or tensor.is_inference() or tensor._version == version
                found.append((layer, self._flat(layer, tensor) if usable else None))
        self.slots = []
        return found

    def _flat(self, layer: ScannedLayer, tensor: Tensor) -> Tensor:
        if tensor.ndim == 3 and tensor.shape[:2] == (self._b, 1):
            return tensor
        assert layer.axis is not None
        return tensor.reshape(-1, 1, layer.axis.width).expand(self._b, -1, -1)


class EagerHook(Hook):
    """A hook that is not there for a graph that is being compiled: that has hooks of its own."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(*arguments)


class LayerHook(Hook):
    """The hook on one layer; in a step of one token it does nothing but keep a reference.

    Args:
        called: Told layer and output in any other pass.
        layer: Whose hook it is.
        outputs: Takes the references.
        place: The layer's slot there; None where it has none, because it is called repeatedly.
        b: Rows of the batch.
    """

    __slots__ = ("_copies", "_layer", "_module", "_outputs", "_place", "_shape")

    def __init__(
        self,
        called: Callable[[ScannedLayer, Tensor], None],
        layer: ScannedLayer,
        outputs: StepOutputs,
        place: int | None,
        b: int,
    ) -> None:
        super().__init__(partial(_call, called, layer), layer.module)
        self._layer, self._module, self._outputs, self._place = layer, layer.module, outputs, place
        assert layer.axis is not None
        self._shape = layer.axis.expected(b, 1)
        self._copies = layer.is_written

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        module, _, output = arguments
        outputs = self._outputs
        if not outputs.is_step or self._place is None or module is not self._module:
            super().__call__(*arguments)
            return
        if type(output) is not Tensor:
            output = first_tensor(output)
        if output is None or output.shape != self._shape:
            super().__call__(*arguments)
        elif self._copies or output.is_inference():  # whose version nobody counts
            outputs.slots[self._place] = (output.clone(), 0)
        else:
            outputs.slots[self._place] = (output, output._version)


def _call(
    called: Callable[[ScannedLayer, Tensor], None],
    layer: ScannedLayer,
    module: nn.Module,
    arguments: object,
    output: object,
) -> None:
    tensor = first_tensor(output)
    if tensor is not None:
        called(layer, tensor)


def ids_of(arguments: tuple[Any, ...], keywords: Any) -> Tensor:
    """The token ids that a model is called with, (b, n).

    Raises:
        InspectionError: It is called with something else.
    """
    ids = keywords.get("input_ids")
    if ids is None:
        ids = next((each for each in arguments if isinstance(each, Tensor)), None)
    if ids is None or ids.ndim != 2 or ids.is_floating_point():
        raise InspectionError(
            "The model is called without token ids (with inputs_embeds, perhaps) while it is "
            "scanned; the tokens of a scan are ids. Hand it input_ids."
        )
    found: Tensor = ids
    return found
