"""Diagnosis of one inspection: what a single forward and backward pass tells."""

from __future__ import annotations

import math

from torch import nn

from torchfmri._diagnosis.observation import Observation, Reach
from torchfmri._diagnosis.registry import find
from torchfmri._diagnosis.report import Diagnosis
from torchfmri._diagnosis.structure import describe
from torchfmri._diagnosis.trace import trace_of
from torchfmri._records import History, Inspection, Series, Step
from torchfmri.statistics import Statistics

_PARAMETERS = ("parameters", "parameter_gradients")


def diagnose_inspection(inspection: Inspection, model: nn.Module) -> Diagnosis:
    """Return what one inspection tells; what was not watched cannot be judged."""
    found: dict[Series, Statistics] = {}
    for layer, record in inspection.items():
        for what in record.what:
            if what in _PARAMETERS:
                for name, value in record.parameter_values(what).items():
                    full = f"{layer}.{name}" if layer else name
                    found[Series(full, what)] = value.statistics
            elif (statistics := record.tensor_statistics(what)) is not None:
                found[Series(layer, what)] = statistics
    history = History(1)
    loss = math.nan if inspection.loss is None else inspection.loss
    history.append(Step(0, loss), found)
    order = tuple(dict.fromkeys(call.layer for call in inspection.calls()))
    reach = Reach(
        called=order,
        without_graph=frozenset(),
        consumed=frozenset(),
        reached=frozenset(),
        unregistered=(),
        loss_has_graph=True,
    )
    seen = Observation(trace_of(history), describe(model, None), reach=reach)
    findings = tuple(find(seen))
    return Diagnosis(
        model=inspection.model,
        findings=findings,
        steps=1,
        facts={},
        seconds=0.0,
        history=history,
        observation=seen,
    )
