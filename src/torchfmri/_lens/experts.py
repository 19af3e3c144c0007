"""Which experts a mixture sent each token to, read from its routers while it runs.

`_scan` opens a `RouterReader`. Routers are found by name or class, and their output is read by
shape: whole numbers are ids, and floats of the same shape are weights. A router that returns no ids
is named as missing, because the choice is then made elsewhere. Names of routers may be added; what
does not fit must stay refused, because a guess would store wrong experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchfmri._lens.lens import entropy_of
from torchfmri._model import named_layers
from torchfmri._torch import Attached, Hook, flatten

# How routers are called, and what their classes are called.
_NAMES = ("gate", "router")
_CLASSES = ("router", "topkgate", "moegate")


@dataclass(frozen=True, eq=False)
class ExpertRouting:
    """What a router said of some tokens, in their order.

    Attributes:
        layer: The router.
        ids: (tokens, k) the experts that were chosen.
        weights: (tokens, k) what their outputs are multiplied with.
        entropy: (tokens,) of softmax(router logits) over all experts, in nats.
    """

    layer: str
    ids: Tensor
    weights: Tensor
    entropy: Tensor


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that look like routers: by class, or called `gate` or `router`."""
    return {
        name: module
        for name, module in named_layers(model).items()
        if name.rpartition(".")[2] in _NAMES
        or any(each in type(module).__name__.lower() for each in _CLASSES)
    }


class RouterReader(Attached):
    """Hands over what routers say while its block runs; a context manager.

    Args:
        model: The model.
        found: Called with the routing of each call.
        missed: Called with a layer and why it could not be read.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Callable[[ExpertRouting], None],
        missed: Callable[[str, str], None],
    ) -> None:
        self.routers = find_routers(model)
        self._found, self._missed = found, missed

    def _attach(self, stack: ExitStack) -> None:
        for name, module in self.routers.items():
            hook = Hook(partial(self._read, name), module)
            stack.callback(module.register_forward_hook(hook).remove)

    def _read(self, name: str, _: nn.Module, __: Any, output: object) -> None:
        tensors = [each.tensor.detach() for each in flatten(output)]
        chosen = [each for each in tensors if not each.is_floating_point()]
        if len(chosen) != 1:
            self._missed(
                name,
                "experts: it returns no ids of experts beside its logits, so which ones are chosen "
                "is decided elsewhere",
            )
            return
        ids = chosen[0].reshape(-1, chosen[0].shape[-1])
        floats = [each.reshape(-1, each.shape[-1]) for each in tensors if each.is_floating_point()]
        weights = [each for each in floats if each.shape == ids.shape]
        logits = [each for each in floats if len(each) == len(ids) and each.shape[1] > ids.shape[1]]
        if not weights or not logits:
            shapes = [tuple(each.shape) for each in tensors]
            self._missed(name, f"experts: it returns {shapes}, without weights or without logits")
            return
        entropy = entropy_of(logits[0].float().log_softmax(-1))
        self._found(ExpertRouting(layer=name, ids=ids, weights=weights[-1], entropy=entropy))
