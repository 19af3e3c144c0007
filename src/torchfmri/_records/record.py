"""What was captured of one layer: its calls, their tensors, and what flowed back to them.

The `Recorder` of `_inspect` fills the attributes that begin with an underscore, and
`inspection_files` writes them; everybody else reads the public ones, which are documented.
Gradients are kept by (backward pass, what, path) beside the values of their own call, never by the
order in which they came. Keep the containers per call few: their number decides how long the
garbage collector takes. How values are kept inside may change, together with `inspection_files`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from torchfmri._arguments import is_whole
from torchfmri._records.values import (
    ELEMENTS_OF,
    PARAMETER_WHAT,
    WHAT,
    Value,
    check_per,
    check_what,
)
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import ChannelStatistics, Statistics, merge_statistics

Tensors: TypeAlias = "Tensor | list[Tensor | None] | None"


@dataclass(slots=True, repr=False)
class Call:
    """One execution of a module.

    Attributes:
        layer: The layer.
        index: How many calls of it came before.
        order: Its place among all calls of the run, in the order in which they finished.

    Examples:
        >>> import torch
        >>> from torchfmri import Inspector
        >>> inspector = Inspector(torch.nn.LSTM(4, 8))
        >>> inspection = inspector.run_inspection(torch.randn(5, 2, 4), keep="tensors")
        >>> call = inspection[""].calls[0]
        >>> call.elements("activations")
        ['0', '1.0', '1.1']
        >>> call.activations[0].shape
        torch.Size([5, 2, 8])
    """

    layer: str
    index: int
    order: int = -1
    # Few containers, because their number is what a recording costs the garbage collector.
    _values: dict[tuple[str, str], Value | None] = field(default_factory=dict)
    _gradients: dict[tuple[int, str, str], Value] = field(default_factory=dict)
    _differentiable: tuple[str, ...] = ()

    def __repr__(self) -> str:
        outputs, passes = len(self.elements("activations")), len(self.backwards)
        return (
            f"<Call {self.index} of {self.layer!r}: {outputs} tensors returned, {passes} backward "
            "passes>"
        )

    @property
    def backwards(self) -> list[int]:
        """The numbers of the backward passes that reached this call, oldest first."""
        return list(dict.fromkeys(backward for backward, _, _ in self._gradients))

    def elements(self, what: str) -> list[str]:
        """Return the paths of the tensors: `""` alone, `"0"` in a tuple, `"logits"` by key."""
        check_what(what)
        of = ELEMENTS_OF.get(what, what)
        return [path for each, path in self._values if each == of]

    def values(self, what: str, backward: int = -1) -> list[Value | None]:
        """Return what was captured, one entry per element; None if no gradient arrived.

        Args:
            what: inputs, activations, gradients, input_gradients or attention.
            backward: Which of `backwards` to take gradients from; the latest by default.
        """
        check_what(what)
        if what not in ELEMENTS_OF:
            return [value for (each, _), value in self._values.items() if each == what]
        numbers = self.backwards
        if not numbers:
            return [None] * len(self.elements(what))
        number = numbers[backward]
        return [self._gradients.get((number, what, path)) for path in self.elements(what)]

    def tensors(self, what: str, backward: int = -1) -> list[Tensor | None]:
        """Return the tensors, one entry per element; None if no gradient arrived.

        Raises:
            InspectionError: Only statistics were kept.
        """
        return [None if each is None else each.tensor for each in self.values(what, backward)]

    @property
    def inputs(self) -> list[Tensor | None]:
        """The tensors among the arguments, as they were when the call began."""
        return self.tensors("inputs")

    @property
    def activations(self) -> list[Tensor | None]:
        """The tensors in the output."""
        return self.tensors("activations")

    @property
    def gradients(self) -> list[Tensor | None]:
        """dL/d output, one per tensor in the output."""
        return self.tensors("gradients")

    @property
    def input_gradients(self) -> list[Tensor | None]:
        """dL/d input through this call only, one per tensor among the arguments."""
        return self.tensors("input_gradients")

    @property
    def attention(self) -> list[Tensor | None]:
        """The attention patterns, (b, heads, q, k) each."""
        return self.tensors("attention")

    def statistics(
        self, what: str = "activations", element: int | str = 0, backward: int = -1
    ) -> Statistics | None:
        """Return the statistics of one element; None if no gradient arrived."""
        value = self.value(what, element, backward)
        return None if value is None else value.statistics

    def value(self, what: str, element: int | str = 0, backward: int = -1) -> Value | None:
        """Return what was captured of one element, named by its index or its path."""
        values, paths = self.values(what, backward), self.elements(what)
        index = paths.index(element) if element in paths else element
        if not isinstance(index, int) or not -len(values) <= index < len(values):
            if element == 0:  # nothing of this kind here at all
                return None
            raise InspectionError(f"{self.layer!r} has no element {element!r} of {what}: {paths}.")
        return values[index]


class Record:
    """What was captured of one layer.

    Attributes:
        layer: Its name; `names` has them all if one instance stands under several.
        kind: The class of its module.
        calls: One `Call` per execution, in order.

    Examples:
        >>> import torch
        >>> from torchfmri import Inspector
        >>> inspector = Inspector(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
        >>> inspection = inspector.run_inspection(torch.randn(3, 4), keep="tensors")
        >>> record = inspection["1"]
        >>> record
        <Record '1' (ReLU): activations; 1 call>
        >>> tuple(record.activations.shape), record.statistics()["min"] >= 0
        ((3, 8), True)
    """

    def __init__(self, layer: str, kind: str, what: frozenset[str]) -> None:
        self.layer, self.kind = layer, kind
        self.names: tuple[str, ...] = (layer,)
        self.what = tuple(each for each in WHAT if each in what)
        self.calls: list[Call] = []
        self._parameters: dict[int, dict[str, dict[str, Value]]] = {}

    def __repr__(self) -> str:
        calls = "1 call" if len(self.calls) == 1 else f"{len(self.calls)} calls"
        return f"<Record {self.layer!r} ({self.kind}): {', '.join(self.what)}; {calls}>"

    @property
    def inputs(self) -> Tensors:
        """The input tensor; a list with one per call if there were several calls."""
        return self._only("inputs")

    @property
    def activations(self) -> Tensors:
        """The output tensor (the first, of several); a list with one per call of several."""
        return self._only("activations")

    @property
    def gradients(self) -> Tensors:
        """dL/d output; None if none arrived; a list with one per call of several."""
        return self._only("gradients")

    @property
    def input_gradients(self) -> Tensors:
        """dL/d input through the call; a list with one per call of several."""
        return self._only("input_gradients")

    @property
    def attention(self) -> Tensors:
        """The attention pattern, (b, heads, q, k); a list with one per call of several."""
        return self._only("attention")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The layer's own parameters by name, as they were when watching began."""
        self._check("parameters")
        return {name: each.tensor for name, each in self.parameter_values("parameters").items()}

    @property
    def parameter_gradients(self) -> dict[str, Tensor]:
        """What the latest backward pass brought to the layer's own parameters, by name."""
        self._check("parameter_gradients")
        values = self.parameter_values("parameter_gradients")
        return {name: each.tensor for name, each in values.items()}

    def parameter_values(self, what: str, backward: int = -1) -> dict[str, Value]:
        """Return what was captured of the layer's own parameters, by name."""
        numbers = [number for number, found in self._parameters.items() if what in found]
        return self._parameters[numbers[backward]][what] if numbers else {}

    def tensors(self, what: str) -> Tensors | dict[str, Tensor]:
        """Return the captured tensors, as the property of that name gives them."""
        found: Tensors | dict[str, Tensor] = getattr(self, check_what(what))
        return found

    def statistics(
        self,
        what: str | None = None,
        *,
        element: int | str | None = None,
        call: int | None = None,
        per: str | None = None,
    ) -> Statistics | ChannelStatistics | None:
        """Return the layer's statistics, merged over its calls; None if no gradient arrived.

        Args:
            what: What to describe; by default activations, or the first thing watched.
            element: Which tensor of a tuple or dict, by index or path (the first by default), or
                which parameter (all of them merged by default).
            call: One call instead of all.
            per: `"channel"` for one value per unit.
        """
        what = self._check(what or self._default_what())
        check_per(per)
        if per is None:
            return self.tensor_statistics(what, element, call)
        parts = [value.channels for value in self._values(what, element, call)]
        return merge_statistics(parts) if parts else None

    def tensor_statistics(
        self, what: str, element: int | str | None = None, call: int | None = None
    ) -> Statistics | None:
        """Return what `statistics` returns without `per`."""
        parts = [value.statistics for value in self._values(what, element, call)]
        return merge_statistics(parts) if parts else None

    def _values(self, what: str, element: int | str | None, call: int | None) -> list[Value]:
        if what in PARAMETER_WHAT:
            found = self.parameter_values(what)
            if element is not None and element not in found:
                raise InspectionError(f"{self.layer!r} has no {what} {element!r}: {list(found)}.")
            return [each for name, each in found.items() if element in (None, name)]
        count = len(self.calls)
        if call is not None and not (is_whole(call) and -count <= call < count):
            raise InspectionError(f"{self.layer!r} has {count} calls, not call {call!r}: give 0.")
        calls = self.calls if call is None else [self.calls[call]]
        values = [each.value(what, 0 if element is None else element) for each in calls]
        return [value for value in values if value is not None]

    def _only(self, what: str) -> Tensors:
        self._check(what)
        values = [each.value(what) for each in self.calls]
        tensors = [None if each is None else each.tensor for each in values]
        if not tensors:
            raise InspectionError(f"{self.layer!r} was never called. See inspection.missing.")
        return tensors[0] if len(tensors) == 1 else tensors

    def _check(self, what: str) -> str:
        if check_what(what) not in self.what:
            raise InspectionError(
                f"{what!r} of {self.layer!r} was not watched, only {', '.join(self.what)}. "
                f"Write inspector.watch({self.layer!r}, what={what!r})."
            )
        return what

    def _default_what(self) -> str:
        return "activations" if "activations" in self.what else self.what[0]
