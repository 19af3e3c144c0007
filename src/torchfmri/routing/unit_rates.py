"""Count how often every unit is on, by task.

`TrainingRun` measures activation and selectivity with a `UnitRates`, which is public. A unit is on
where the layer's output is not 0. Padding does not count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_module, check_number
from torchfmri._capture import CallKey, Sink, Taps, Target
from torchfmri._model import named_layers
from torchfmri._torch import Element
from torchfmri.exceptions import InspectionError
from torchfmri.routing.sparse_proto_linear import SparseProtoLinear


class UnitRates(Sink):
    """Counts, while a model runs, the tokens that reach each unit, by the task of their sample.

    Args:
        model: A model of SparseProtoLinear layers.
        tasks: How many tasks there are.

    Examples:
        >>> import torch
        >>> from torchfmri.routing import RoutingConfig, RoutingLanguageModel
        >>> model = RoutingLanguageModel(RoutingConfig(20, hidden_size=16, blocks=1, heads=2))
        >>> rates = UnitRates(model, tasks=2)
        >>> with torch.no_grad():
        ...     _ = rates.run(lambda: model(torch.randint(20, (3, 5))), torch.tensor([0, 1, 1]))
        >>> rates.rates["blocks.0.query"].shape
        torch.Size([2, 16])
    """

    def __init__(self, model: nn.Module, tasks: int) -> None:
        check_module("model", model)
        check_number("tasks", tasks, 1, "how many tasks there are, at least 1")
        layers = named_layers(model)
        self._targets = [
            Target(name, module, frozenset({"activations"}))
            for name, module in layers.items()
            if isinstance(module, SparseProtoLinear)
        ]
        self._tasks = tasks
        self._chosen: Tensor | None = None
        self._mask: Tensor | None = None
        self._active: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}

    def run(self, call: Callable[[], object], tasks: Tensor, mask: Tensor | None = None) -> object:
        """Return what `call` returns, and count the units that were on.

        Args:
            call: Runs the model on one batch.
            tasks: (b,), the task of each sample.
            mask: (b, s), 0 where a position is padding.
        """
        self._chosen = torch.nn.functional.one_hot(tasks, self._tasks).float()
        self._mask = None if mask is None else mask.float()
        with Taps(self._targets, self):
            return call()

    @property
    def rates(self) -> dict[str, Tensor]:
        """Layer -> (task, o): the share of a task's tokens that reach each unit."""
        return {
            layer: active / self._tokens[layer].clamp_min(1)[:, None]
            for layer, active in self._active.items()
        }

    # -- what the taps call --------------------------------------------------------------------

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Count the units that are on in the masked output of a layer: where it is not 0."""
        on = (elements[0].tensor.detach() != 0).float()
        counted = on.new_ones(on.shape[:2]) if self._mask is None else self._mask
        assert self._chosen is not None
        per_sample = torch.einsum("bso,bs->bo", on, counted)
        active, tokens = self._chosen.mT @ per_sample, self._chosen.mT @ counted.sum(1)
        layer = call.layer
        self._active[layer] = active + self._active.get(layer, 0)
        self._tokens[layer] = tokens + self._tokens.get(layer, 0)

    def missed(self, layer: str, what: str, reason: str) -> None:
        """Raise for a layer whose outputs cannot be read."""
        raise InspectionError(f"The units of layer {layer!r} cannot be counted: {reason}")

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """Raise an error of ours: nothing of the user's runs here."""
        raise error
