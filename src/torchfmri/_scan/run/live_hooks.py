"""The hooks on layers while a model generates, and the outputs that they put aside.

`live` attaches them: `LayerHook` keeps a reference in `StepOutputs`, and `live` joins and reduces
them when the step is over. A step runs hundreds of these hooks, so a line added to
`LayerHook.__call__` slows every scan. A reference is only good while nobody writes into the tensor,
which its version counter tells; inference tensors have no counter and are copied. Hooks do nothing
while torch compiles, or the graph would contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchfmri._scan.run.flat_layout import FlatLayout
from torchfmri._scan.run.subject import ScannedLayer
from torchfmri._scan.run.token_axis import first_tensor
from torchfmri._torch import Hook
from torchfmri.exceptions import InspectionError

_is_compiling = torch.compiler.is_compiling
_Output: TypeAlias = tuple[ScannedLayer, Tensor | None]


class StepOutputs:
    """The outputs of all layers in a pass, by reference.

    Args:
        layout: The layers, and their order.
        b: Rows of the batch.

    Attributes:
        layout: As given.
        is_step: Whether references are kept of the pass that runs.
        slots: The output of each layer; None before its call.
        versions: How often each had been written into when the layer returned it.
    """

    def __init__(self, layout: FlatLayout, b: int) -> None:
        self.layout, self._b = layout, b
        self.is_step, self._count = False, 1
        self.slots: list[Any] = []
        self.versions: list[int] = []
        # Most outputs of a token are (b, 1, w) as they come. Of the others the units of a token lie
        # side by side too, but where all rows of the batch share one output.
        self._viewed = [
            (place, each.axis, torch.Size(each.axis.expected(b, 1)), (b, 1, each.axis.width))
            for place, each in enumerate(layout.layers)
            if each.axis is not None and each.axis.expected(b, 1) != (b, 1, each.axis.width)
        ]

    def begin(self, is_step: bool, count: int = 1) -> None:
        """Begin a pass over `count` tokens."""
        self.is_step, self._count = is_step, count
        self.slots = [None] * len(self.layout.layers)
        self.versions = [0] * len(self.layout.layers)

    @property
    def is_single_step(self) -> bool:
        """Whether references are kept of a pass over a single token."""
        return self.is_step and self._count == 1

    def put(self, place: int, output: Tensor) -> None:
        """Keep a reference to an output that no hook has seen."""
        if output.is_inference():  # has no version counter
            with torch.inference_mode(False):
                output = output.clone()
        self.slots[place], self.versions[place] = output, output._version

    def joined(self) -> Tensor | None:
        """All outputs of a single token, (b, 1, width).

        None where one is missing, written into, or of another size.
        """
        rows = list(self.slots)
        try:
            if [each._version for each in rows] != self.versions:
                return None
        except AttributeError:  # None
            return None
        for place, axis, shape, viewed in self._viewed:
            row = rows[place]
            is_usual = row.shape == shape and not axis.axis.shared
            rows[place] = row.reshape(viewed) if is_usual else axis.rows(row, self._b, 1)
        try:
            flat = torch.cat(rows, -1).detach()
        except (RuntimeError, TypeError):  # one has another shape: they are looked at one by one
            return None
        return flat if flat.shape == (self._b, 1, self.layout.width) else None

    def split(self) -> tuple[list[_Output], list[_Output]]:
        """The outputs that have every token, (b, count, w), and those to be looked at singly."""
        whole: list[_Output] = []
        others: list[_Output] = []
        for layer, output in self.single():
            assert layer.axis is not None
            shape = (self._b, self._count, layer.axis.width)
            fits = output is not None and output.shape == shape == layer.axis.expected(*shape[:2])
            (whole if fits else others).append((layer, output))
        return whole, others

    def single(self) -> Iterator[_Output]:
        """Each layer that was called, with its output; None if that was modified in place."""
        for layer, output, version in zip(
            self.layout.layers, self.slots, self.versions, strict=True
        ):
            if output is not None:
                yield layer, output if output._version == version else None


class EagerHook(Hook):
    """A hook that does nothing while a graph is compiled: such graphs have hooks of their own."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> None:
        if not _is_compiling():
            super().__call__(*arguments)


class LayerHook(Hook):
    """The hook on a layer that is called once in a pass.

    While references are kept it does nothing else: there are hundreds of these hooks in a step.

    Args:
        called: Told layer and output in any other pass.
        layer: Whose hook it is.
        outputs: Takes the references.
        place: The layer's slot there.
    """

    __slots__ = ("_copies", "_module", "_outputs", "_place")

    def __init__(
        self,
        called: Callable[[ScannedLayer, Tensor], None],
        layer: ScannedLayer,
        outputs: StepOutputs,
        place: int,
    ) -> None:
        super().__init__(partial(call_with_tensor, called, layer), layer.module)
        self._module, self._outputs, self._place = layer.module, outputs, place
        self._copies = layer.is_written

    def __call__(self, module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        if _is_compiling():  # first of all: what comes before it is traced, and guarded
            return
        outputs = self._outputs
        if not outputs.is_step or module is not self._module:
            super().__call__(module, arguments, keywords, output)
            return
        if type(output) is not Tensor:
            output = first_tensor(output)
            if output is None:
                return
        place = self._place
        try:
            outputs.versions[place] = output._version
        except RuntimeError:  # inference tensors have no version counter
            self._copies = True
        if self._copies:
            with torch.inference_mode(False):
                output = output.clone()
            outputs.versions[place] = output._version
        outputs.slots[place] = output


def call_with_tensor(
    called: Callable[[ScannedLayer, Tensor], None],
    layer: ScannedLayer,
    *call: Any,
) -> None:
    """Tell of the first tensor that a layer returned."""
    tensor = first_tensor(call[-1])
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
            "The model was called without token ids (perhaps with inputs_embeds) while it was "
            "scanned. A scan needs the ids of its tokens: pass input_ids."
        )
    found: Tensor = ids
    return found
