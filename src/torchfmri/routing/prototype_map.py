"""Put prototypes on a plane: two principal components, and which are good, bad or inactive.

`TrainingRun` keeps these maps in its result, and `plot_prototypes` draws them. `PrototypeMap` is
public, and its fields stand in result files. The model's gradients are as they were before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_module, require
from torchfmri._model import spared_grad, watched
from torchfmri.routing.capture import Captured, RoutingCapture
from torchfmri.routing.meta_loss import Goodness, worth
from torchfmri.routing.scaling import shares
from torchfmri.routing.signals import read_signals

GOOD, BAD, INACTIVE = "good", "bad", "inactive"


class PrototypeMap(NamedTuple):
    """The prototypes of one layer.

    Attributes:
        layer: Its name.
        points: (o, 2), the prototypes in use on their two principal components.
        states: One of good, bad and inactive per unit. Inactive: no token reached it. Good: its
            share of Goodness is at least its share of the routing, so that the meta loss keeps it.
        variance: The share of the prototypes' variance that the plane shows.
    """

    layer: str
    points: list[list[float]]
    states: list[str]
    variance: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return self._asdict()


def map_prototypes(
    model: nn.Module, ids: Tensor, labels: Tensor, goodness: Goodness = worth
) -> list[PrototypeMap]:
    """Return one map per layer, from the signals of one batch; gradients are as they were before.

    Args:
        model: Called with (ids, labels=labels), which returns a `loss`.
        ids: (b, s).
        labels: (b, s).
        goodness: What is good.
    """
    check_module("model", model)
    meaning = "give a function of the signals, such as torchfmri.routing.worth"
    require(callable(goodness), "goodness", goodness, meaning)
    capture = RoutingCapture(model)
    with watched(model), spared_grad(model.parameters()), capture, torch.enable_grad():
        model(ids, labels=labels).loss.backward()
        calls = capture.take()
    with torch.no_grad():
        return [_map(each, goodness) for each in calls if each.call.number == 0]


def _map(each: Captured, goodness: Goodness) -> PrototypeMap:
    routing = each.module.route(each.factors.x.float(), each.inherited)
    weights = routing.weights
    signals = read_signals(each.call, each.factors, each.mask, "token", lambda: weights)
    good = shares(goodness(signals)).flatten(0, -2).mean(0)
    used = shares(routing.logits).flatten(0, -2).mean(0)
    active = (routing.weights > 0).flatten(0, -2).any(0)
    states = [
        INACTIVE if not on else GOOD if keep else BAD
        for on, keep in zip(active.tolist(), (good >= used).tolist(), strict=True)
    ]
    points, variance = principal_plane(each.module.effective_prototypes(each.inherited))
    return PrototypeMap(each.call.layer, points.tolist(), states, variance)


def principal_plane(rows: Tensor) -> tuple[Tensor, float]:
    """Return rows on their two principal components, (n, 2), and the share of variance in them."""
    centred = (rows - rows.mean(0)).double().cpu()
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]
    # Of the two signs of a direction the one whose largest entry is positive.
    at = directions.abs().argmax(1, keepdim=True)
    points = centred @ (directions * directions.gather(1, at).sign()).mT
    if points.shape[1] < 2:
        points = torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
    total = sizes.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return points, float(sizes[:2].square().sum() / total)
