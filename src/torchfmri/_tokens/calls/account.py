"""`Account`: which parameters got a gradient, and why token gradients are missing.

`Capture` makes one per block; `arrivals` and `owners` write into it while passes run, and
`TokenGradients` reads it for `names`, `notes`, `coverage()` and its errors. Errors are kept without
their frames, and `reason` returns a copy to raise: an error that keeps its frames keeps every
tensor in them alive. The first reason of a parameter counts, since later ones often follow from it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchfmri._tokens.calls.checks import Checks
from torchfmri._tokens.rules.record import Watched
from torchfmri.exceptions import InspectionError


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
        """Return the parameters that got a gradient themselves or through their layer."""
        came, layers, homes = self.checks.received, self.layers, self.homes
        return [
            name for name in names if name in came or any(each in layers for each in homes[name])
        ]

    def is_narrow(self, name: str) -> bool:
        """Whether its gradients came in 16 bits."""
        return any(layer in self.narrow for layer in self.homes[name])

    def refuse(self, names: Iterable[str], error: Exception) -> None:
        """Note why these parameters are missing; the first reason counts."""
        if isinstance(error, InspectionError):  # it says all; others say where they came from
            _let_go_of_frames(error)
        for name in names:
            self.reasons.setdefault(name, error)

    def reason(self, name: str) -> Exception:
        """Why a parameter is missing, to be raised: another error each time.

        The frames that it goes through keep the gradients alive, which keep the reasons.
        """
        error = self.reasons[name]
        if not isinstance(error, InspectionError):
            return error
        found = copy.copy(error)
        found.__cause__ = error.__cause__
        return found

    def noted(self, layer: str, text: str) -> None:
        """Note a reservation about a layer."""
        layers = self.notes.setdefault(text, [])
        if layer and layer not in layers:
            layers.append(layer)


def _let_go_of_frames(error: BaseException | None) -> None:
    """Forget where an error of ours and its causes were raised."""
    while error is not None:
        error.__traceback__ = error.__context__ = None
        error = error.__cause__


def homes_of(watched: Mapping[str, Watched]) -> dict[str, list[str]]:
    """The layers in which each parameter lives."""
    homes: dict[str, list[str]] = defaultdict(list)
    for layer, each in watched.items():
        for name in each.parameters.values():
            homes[name].append(layer)
    return homes
