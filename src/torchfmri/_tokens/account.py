"""CAPTURE: what came of each parameter: whether a gradient reached it, and why it is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchfmri._tokens.checks import Checks
from torchfmri._tokens.record import Watched


@dataclass(slots=True)
class Account:
    """Kept while the passes run, read afterwards.

    Attributes:
        checks: The sum against autograd's gradient.
        homes: The layers in which a parameter lives; several where it is tied.
        reasons: Parameters whose token gradients cannot be had, with the error that says why.
        notes: Reservations, with the layers they concern.
        layers: Those whose output a gradient reached; `narrow`, those where it came in 16 bits.
    """

    checks: Checks
    homes: Mapping[str, list[str]]
    reasons: dict[str, Exception] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)
    narrow: set[str] = field(default_factory=set)

    def received(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters to which a gradient came, or to a layer that they belong to."""
        came, layers, homes = self.checks.received, self.layers, self.homes
        return [
            name for name in names if name in came or any(each in layers for each in homes[name])
        ]

    def is_narrow(self, name: str) -> bool:
        """Whether its gradients came in 16 bits."""
        return any(layer in self.narrow for layer in self.homes[name])

    def refuse(self, names: Iterable[str], error: Exception) -> None:
        """Note why these parameters are missing; the first reason counts."""
        for name in names:
            self.reasons.setdefault(name, error)

    def noted(self, layer: str, text: str) -> None:
        """Note a reservation about a layer."""
        layers = self.notes.setdefault(text, [])
        if layer and layer not in layers:
            layers.append(layer)


def homes_of(watched: Mapping[str, Watched]) -> dict[str, list[str]]:
    """The layers in which each parameter lives."""
    homes: dict[str, list[str]] = defaultdict(list)
    for layer, each in watched.items():
        for name in each.parameters.values():
            homes[name].append(layer)
    return homes
