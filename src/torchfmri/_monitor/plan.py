"""What a Monitor watches at every step.

`Monitor` makes one plan when it is made; every `WatchedStep` reads it. It holds the modules and
asks them at every step, so that parameters which were replaced in the meantime are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from torchfmri._records import Series
from torchfmri._torch import local_part
from torchfmri.statistics import Statistics

WHAT = ("activations", "gradients", "parameters", "parameter_gradients", "updates")


@dataclass(frozen=True)
class WatchPlan:
    """What is watched at every step.

    Attributes:
        modules: The layers by name.
        owners: The modules whose own parameters are watched, by name: with all leaf layers also
            those that are none (an attention with its projections, a model with a class token).
        what: What is wanted of them.
        histogram: Whether to take histograms.
        max_bytes: How many bytes may be referenced before they are reduced; None: see Collector.
        scaler: The GradScaler, or None.
        immediate: The series that cannot be collected by reference, found out by and by.
        known: The series that were put in order already.
    """

    modules: Mapping[str, nn.Module]
    owners: Mapping[str, nn.Module]
    what: frozenset[str]
    histogram: bool
    max_bytes: int | None
    scaler: Any = None
    immediate: set[Series] = field(default_factory=set)
    known: set[Series] = field(default_factory=set)

    def in_order(self, found: Mapping[Series, Statistics]) -> Mapping[Series, Statistics]:
        """The series by what they are of; outputs as they were computed, parameters in model order.

        A module may define its norm after the attention that reads it.
        """
        ran = [each.layer for each in found if each.what == "activations"]
        first = {layer: at for at, layer in enumerate(ran)}

        def place(series: Series) -> tuple[int, int, int]:
            owner = series.layer.rpartition(".")[0] if "param" in series.what else series.layer
            at = self.places.get(owner, len(self.places))
            ran_at = 0 if "param" in series.what else first.get(owner, len(ran))
            return WHAT.index(series.what), ran_at, at

        if len(found) > len(self.known):  # the first step decides the order of all
            self.known.update(found)
            return {series: found[series] for series in sorted(found, key=place)}
        return found

    @cached_property
    def places(self) -> dict[str, int]:
        """Layer -> its place in the model."""
        return {layer: place for place, layer in enumerate(self.owners)}

    @cached_property
    def batch_norms(self) -> dict[str, nn.modules.batchnorm._BatchNorm]:
        """Layer -> batch norm."""
        kind = nn.modules.batchnorm._BatchNorm
        return {layer: each for layer, each in self.owners.items() if isinstance(each, kind)}

    def running_variances(self) -> dict[str, Tensor]:
        """Batch norm that keeps running statistics now -> its variances."""
        found = {
            layer: each.running_var for layer, each in self.batch_norms.items() if each.training
        }
        return {
            layer: local_part(each)
            for layer, each in found.items()
            if each is not None and each.numel() and not each.is_meta
        }

    def parameters(self) -> dict[str, Tensor]:
        """The layers' own parameters by their full names, each once, as they are now."""
        found: dict[int, tuple[str, Tensor]] = {}
        for layer, module in self.owners.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{layer}.{name}" if layer else name
                    found.setdefault(id(parameter), (full, parameter))
        return dict(found.values())
