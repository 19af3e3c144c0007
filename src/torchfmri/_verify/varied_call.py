"""One call of a module as a function of its inputs and parameters.

`layer_verdict` makes a `VariedCall`, `judgement` runs it many times. The module is never written
to: parameters, buffers and attributes are exchanged for copies in its dictionaries and put back
however a run ends. Tensors are found by id, so `_hold` keeps every one alive whose id is known.
Inputs are cloned for each run, because a leaf cannot be written in place and an input may be. How
inputs are named may change freely.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchfmri._model import unchanged
from torchfmri._torch import NO_BACKWARD, current_backward, flatten
from torchfmri._verify.directional import SEED, seed_all
from torchfmri._verify.module_calls import ModuleCall, copy_with, tensors_within

T = TypeVar("T")


class ForwardError(Exception):
    """Raised if the module's forward pass raised; the cause is its exception."""


class VariedTensor(NamedTuple):
    """A group of numbers varied together: one tensor, or all parameters of the layers inside.

    Attributes:
        name: `input x`, `weight`, `output of mlp`.
        places: The places of its tensors among the call's values.
    """

    name: str
    places: tuple[int, ...]


class Stub(NamedTuple):
    """A layer inside that is not run: its outputs are variables, its inputs are results."""

    layer: str
    module: nn.Module
    outputs: list[Any]


class VariedCall:
    """A call of a module that can be run again with other numbers.

    The module is never written to: parameters and buffers are exchanged for copies while it runs,
    and every run starts from the same random state.

    Args:
        call: The call.
        dtype: The dtype to compute in; None leaves every tensor as it is.
        careful: Whether to restore everything else of the module after every run (slower).

    Attributes:
        values: The numbers that can be varied, as real tensors.
        variables: Which of them are varied together, and what they are called.
        joint: All parameters of the layers inside together.
        inner: The parameters of the layers inside, one by one.
    """

    def __init__(
        self, call: ModuleCall, dtype: torch.dtype | None = torch.float64, careful: bool = False
    ) -> None:
        self.module, self.dtype, self.careful = call.module, dtype, careful
        self.values: list[Tensor] = []
        self.variables: list[VariedTensor] = []
        self.inner: list[VariedTensor] = []
        self.joint: VariedTensor | None = None
        self._inputs = call.inputs
        self._places: dict[int, int] = {}  # id of a tensor -> its place in `values`
        self._complex: set[int] = set()
        self._fixed: dict[int, Tensor] = {}  # id -> what stands for it, never written
        self._written: dict[int, Tensor] = {}  # id -> what stands for it, copied for every run
        self._stubs: list[Stub] = []
        self._hold: list[Any] = []  # what the ids above speak of
        self._add_inputs(call)
        self._add_parameters()

    # -- what can be varied ------------------------------------------------------------------

    def _add_inputs(self, call: ModuleCall) -> None:
        names: dict[int, list[str]] = {}
        for name, tensor in _named_inputs(call):
            names.setdefault(id(tensor), []).append(name)
        for tensor in tensors_within(call.inputs):
            if id(tensor) in call.wanted and id(tensor) in names and _is_plain(tensor):
                named = ", ".join(names[id(tensor)])
                name = "input" if named == "input" else f"input {named}"
                self.variables.append(self._add(tensor, name))
            else:
                self._fixed[id(tensor)] = self._convert(tensor)

    def _add_parameters(self) -> None:
        for prefix, module in self.module.named_modules():
            for key, value in module._parameters.items():
                if value is None or id(value) in self._places:
                    continue
                if not value.requires_grad or not _is_plain(value):
                    self._fixed[id(value)] = self._convert(value)
                elif prefix:
                    self.inner.append(self._add(value, f"{prefix}.{key}"))
                else:
                    self.variables.append(self._add(value, key))
            for value in [*module._buffers.values(), *vars(module).values()]:
                if isinstance(value, Tensor) and id(value) not in self._places:
                    self._written.setdefault(id(value), self._convert(value))
                    self._hold.append(value)
        if self.inner:
            places = tuple(place for variable in self.inner for place in variable.places)
            self.joint = VariedTensor("parameters of its layers", places)
            self.variables.append(self.joint)

    def _add(self, tensor: Tensor, name: str) -> VariedTensor:
        place = len(self.values)
        self._places[id(tensor)] = place
        self._hold.append(tensor)
        if tensor.is_complex():
            self._complex.add(id(tensor))
        self.values.append(_as_real(self._convert(tensor)))
        return VariedTensor(name, (place,))

    def _convert(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self.dtype is None or tensor.is_quantized:
            return tensor.clone()
        if tensor.is_complex():
            return tensor.to(self.dtype.to_complex(), copy=True)
        return tensor.to(self.dtype, copy=True) if tensor.is_floating_point() else tensor.clone()

    # -- running -----------------------------------------------------------------------------

    def run(self, values: Sequence[Tensor], use: Callable[[list[Tensor]], T]) -> T:
        """Run the module on other values, and return what `use` makes of its outputs.

        `use` runs while the exchanged parameters are in place: a checkpoint runs the module again.

        Raises:
            ForwardError: The module raised.
        """
        exchanged = {each: value.clone() for each, value in self._written.items()} | self._fixed
        for each, place in self._places.items():
            value = values[place]
            exchanged[each] = torch.view_as_complex(value) if each in self._complex else value
        with ExitStack() as stack:
            if self.careful:
                stack.enter_context(unchanged(self.module))
            stack.enter_context(_exchanged(self.module, exchanged))
            sent: list[Tensor] = []
            for stub in self._stubs:
                stack.enter_context(self._stubbed(stub, values, sent))
            # The model has already given its warnings when it ran as a whole.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            seed_all(SEED)
            try:
                arguments, keywords = copy_with(
                    self._inputs,
                    # A copy: a leaf cannot be written in place, but an input may be.
                    lambda tensor: exchanged.get(id(tensor), tensor).clone(),
                )
                output = self.module(*arguments, **keywords)
            except Exception as error:
                raise ForwardError from error
            return use([_as_real(each) for each in [*_floating(output), *sent]])

    # -- leaving out layers that are known to be wrong ----------------------------------------

    def leave_out(self, layers: Mapping[str, nn.Module]) -> None:
        """Stop running these layers inside, to judge only the code around them.

        Raises:
            ForwardError: The module raised.
        """
        found = [Stub(layer, module, []) for layer, module in layers.items()]
        with ExitStack() as stack:
            for stub in found:
                stack.enter_context(_with_forward(stub.module, _remembering(stub)))
            self.run(self.values, lambda _: None)
        for stub in found:
            for number, output in enumerate(stub.outputs):
                for element in flatten(output):
                    if element.tensor.is_floating_point():
                        call = f", call {number}" if number else ""
                        path = f"{element.path} of " if element.path else ""
                        name = f"output {path}of {stub.layer}{call}"
                        self.variables.append(self._add(element.tensor, name))
            if stub.outputs:
                self._stubs.append(stub)

    @contextmanager
    def _stubbed(self, stub: Stub, values: Sequence[Tensor], sent: list[Tensor]) -> Iterator[None]:
        count = 0

        def forward(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if current_backward() == NO_BACKWARD:
                sent.extend(each.clone() for each in _floating((arguments, keywords)))
            output = stub.outputs[count % len(stub.outputs)]
            count += 1
            return copy_with(output, replace)

        def replace(tensor: Tensor) -> Tensor:
            place = self._places.get(id(tensor))
            return (tensor if place is None else values[place]).clone()

        with _with_forward(stub.module, forward):
            yield


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor can be varied one by one."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_nested:
        return False
    return tensor.layout == torch.strided and tensor.numel() > 0


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _floating(value: Any) -> list[Tensor]:
    tensors = (element.tensor for element in flatten(value))
    return [each for each in tensors if each.is_floating_point() or each.is_complex()]


def _named_inputs(call: ModuleCall) -> list[tuple[str, Tensor]]:
    """Return the input tensors under the names that the module's forward gives them."""
    arguments, keywords = call.inputs
    try:
        bound = signature(call.module.forward).bind(*arguments, **keywords).arguments
    except (TypeError, ValueError):  # a forward without a signature: by position
        bound = {**{str(k): each for k, each in enumerate(arguments)}, **keywords}
    return [(element.path, element.tensor) for element in flatten(bound)]


@contextmanager
def _exchanged(module: nn.Module, tensors: Mapping[int, Tensor]) -> Iterator[None]:
    """Replace parameters, buffers and attributes by other tensors while the block runs."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for each in module.modules():
            homes: list[dict[str, Any]] = [each._parameters, each._buffers, vars(each)]
            for home in homes:
                for key, value in list(home.items()):
                    if isinstance(value, Tensor) and id(value) in tensors:
                        saved.append((home, key, value))
                        home[key] = tensors[id(value)]
        yield
    finally:
        for home, key, value in saved:
            home[key] = value


@contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = own


def _remembering(stub: Stub) -> Callable[..., Any]:
    original = stub.module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        output = original(*arguments, **keywords)
        stub.outputs.append(copy_with(output, lambda tensor: tensor.detach().clone()))
        return output

    return forward
