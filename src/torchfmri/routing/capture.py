"""The sink that keeps x, g and y of every SparseProtoLinear call, by layer and call.

`LearningDynamics` and `map_prototypes` attach one, run a backward pass and `take` its calls. Inputs
are known in the forward pass and gradients in the backward pass, in whatever order; they are joined
by layer and number of the call. Tensors are kept detached and are forgotten after each `take`, or a
training run would grow. An error inside a hook is raised by `take`, after the user's own backward
pass is through. What is kept of a call may grow freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._capture import CallKey, Padding, Sink, Taps, Target, masked_modules
from torchfmri._model import each_once, named_layers
from torchfmri._torch import Attached, Element
from torchfmri.exceptions import InspectionError
from torchfmri.routing.signals import Factors
from torchfmri.routing.sparse_proto_linear import SparseProtoLinear

COMPUTATION = ".computation"


@dataclass(slots=True)
class _Call:
    """The parts of one call that are known so far."""

    x: Tensor | None = None
    inherited: Tensor | None = None
    y: Tensor | None = None
    g: Tensor | None = None
    mask: Tensor | None = None


class Captured(NamedTuple):
    """One call of a layer that a gradient came back to.

    Attributes:
        call: The layer, and which call of it.
        module: The layer itself.
        factors: Its x, g and y.
        inherited: The prototypes it built upon, in the graph they came from.
        mask: (b, s), False where a position is padding; None if all count.
    """

    call: CallKey
    module: SparseProtoLinear
    factors: Factors
    inherited: Tensor | None
    mask: Tensor | None


class RoutingCapture(Sink, Attached):
    """Hooks on every SparseProtoLinear while the block runs, and what they bring until it is taken.

    The input is known when a layer is called, the gradient when the backward pass reaches it, in
    whatever order. Both carry the layer and the number of the call, and are joined by these.

    Args:
        model: The model.
        with_totals: Keep the gradient that a pass brings to each weight, too.
    """

    def __init__(self, model: nn.Module, with_totals: bool = False) -> None:
        layers = named_layers(model)
        self.modules = {
            name: module
            for name, module in each_once(layers).items()
            if isinstance(module, SparseProtoLinear)
        }
        if not self.modules:
            raise InspectionError(
                f"{type(model).__name__} has no SparseProtoLinear layer; build it from "
                "torchfmri.routing.MoIETransformerBlock or SparseProtoLinear."
            )
        self._calls: dict[CallKey, _Call] = {}
        self._inputs: dict[tuple[object, ...], Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._error: Exception | None = None
        self._padding = Padding(masked_modules(layers.values()))
        inner = {"gradients", "parameter_gradients"} if with_totals else {"gradients"}
        targets = []
        for name, module in self.modules.items():
            targets.append(Target(name, module, frozenset({"activations"})))
            targets.append(Target(name + COMPUTATION, module.computation, frozenset(inner)))
        self._taps = Taps(targets, self, wanted=self._wanted, called=self._called)

    def _attach(self, stack: ExitStack) -> None:
        stack.callback(self._forget)
        stack.enter_context(self._taps)
        stack.callback(self._padding.detach)
        self._padding.attach()

    def take(self) -> list[Captured]:
        """Return the calls that a gradient came back to, by layer and call, and forget them."""
        try:
            if self._error is not None:
                raise self._error
            return self._join()
        finally:
            self._forget()
            self._taps.next_step()

    def _join(self) -> list[Captured]:
        lengths: dict[int, Tensor] = {}
        found = []
        order = {name: position for position, name in enumerate(self.modules)}
        for key in sorted(self._calls, key=lambda key: (order[key.layer], key.number)):
            call = self._calls[key]
            if call.g is None:  # a forward pass that no backward followed
                continue
            assert call.x is not None
            assert call.y is not None
            if id(call.x) not in lengths:  # queries, keys and values read one x
                wide = torch.promote_types(call.x.dtype, torch.float32)
                norm = torch.linalg.vector_norm(call.x, dim=-1, keepdim=True, dtype=wide)
                lengths[id(call.x)] = norm
            factors = Factors(
                call.x, call.g, call.y, lengths[id(call.x)], self._totals.get(key.layer)
            )
            module = self.modules[key.layer]
            found.append(Captured(key, module, factors, call.inherited, call.mask))
        return found

    def _forget(self) -> None:
        self._calls, self._inputs, self._totals, self._error = {}, {}, {}, None

    # -- what the taps call --------------------------------------------------------------------

    def _wanted(self, layer: str) -> bool:
        return torch.is_grad_enabled()

    def _called(
        self,
        call: CallKey,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
    ) -> None:
        if call.layer.endswith(COMPUTATION):
            return
        x = arguments[0] if arguments else keywords["x"]
        inherited = arguments[1] if len(arguments) > 1 else keywords.get("inherited")
        assert isinstance(x, Tensor)
        assert inherited is None or isinstance(inherited, Tensor)
        found = self._calls.setdefault(call, _Call())
        found.x = self._shared(x)
        found.inherited = inherited
        mask = self._padding.current()
        if mask is not None and mask.kept is not None and mask.kept.shape == x.shape[:2]:
            found.mask = mask.kept

    def _shared(self, x: Tensor) -> Tensor:
        """Return the input detached: one object per tensor, so that its norm is computed once."""
        place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        return self._inputs.setdefault(place, x.detach())

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Keep the masked output of a layer."""
        if not call.layer.endswith(COMPUTATION):
            self._calls.setdefault(call, _Call()).y = elements[0].tensor.detach()

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        """Keep dL/d computation output; several passes through one graph add up."""
        key = CallKey(call.layer.removesuffix(COMPUTATION), call.number)
        found = self._calls.get(key)
        if found is not None and gradient is not None:
            found.g = gradient if found.g is None else found.g + gradient

    def parameter(self, layer: str, what: str, name: str, tensor: Tensor, backward: int) -> None:
        """Keep the gradient that a pass brought to a weight."""
        if name == "weight":
            layer = layer.removesuffix(COMPUTATION)
            before = self._totals.get(layer)
            self._totals[layer] = tensor.clone() if before is None else before + tensor

    def missed(self, layer: str, what: str, reason: str) -> None:
        """Keep an error for `take`: without these signals the training would be another one."""
        self._error = self._error or InspectionError(f"No signals of layer {layer!r}: {reason}")

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """Keep an error of ours, which `take` raises after the user's backward pass is through."""
        self._error = self._error or error
