"""Diagnoses of batch norms and dropout: their mode, and the statistics they take.

`registry` calls each function; `_checkup` fills `NormFacts`. A run that ends in evaluation mode is
not judged for statistics, because it evaluates on purpose then. Texts may be changed freely.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import NormFacts, Observation
from torchfmri._records import Finding, warn
from torchfmri._text import listed

_LEAST_CALLS = 3


def evaluation_mode(seen: Observation) -> Iterator[Finding]:
    """Find dropout and batch norms in evaluation mode while the model is trained."""
    modes = seen.structure.modes
    judged = [each for each in modes if seen.reach is None or each in seen.reach.called]
    first = _evaluated_since(seen, judged)
    if not judged or first is None:
        return
    since = f" from step {first} on" if first else ""
    yield warn(
        "evaluation_mode",
        layers=tuple(judged),
        step=first,
        text=f"The model is trained in evaluation mode{since}: what dropout and batch norms do in "
        f"training is switched off in {listed(judged)}.",
        advice="Call model.train() before training, and again after each evaluation.",
    )


def _evaluated_since(seen: Observation, layers: list[str]) -> int | None:
    """Return the step since which everything is in evaluation mode; None if something is not."""
    if seen.steps is None or not len(seen.steps.evaluated):
        modes = seen.structure.modes
        trains = seen.structure.trains or any(modes[layer] for layer in layers)
        return None if trains else 0
    evaluated = seen.steps.evaluated
    trained = np.flatnonzero(~evaluated)
    first = int(trained[-1]) + 1 if len(trained) else 0
    lasts = len(evaluated) - first >= (_LEAST_CALLS if first else 1)
    return first if lasts else None


def batch_norm_of_few(seen: Observation) -> Iterator[Finding]:
    """Find batch norms whose statistics in training come from one sample or a few numbers."""
    few = [
        each
        for each in _judged(seen)
        if each.training and (each.samples == 1 or each.values < cuts.NORM_VALUES)
    ]
    if not few:
        return
    worst = min(few, key=lambda each: each.values)
    yield warn(
        "batch_norm_of_few",
        layers=tuple(each.layer for each in few),
        text=f"{worst.layer!r} takes its mean and variance from {worst.samples} "
        f"sample{'s' if worst.samples > 1 else ''} ({worst.values} numbers of a channel): "
        "differences between samples are divided away, and evaluation computes something else.",
        advice="Use larger batches, or GroupNorm or LayerNorm, or put the batch norms in "
        "evaluation mode if they have statistics.",
        evidence={"samples": worst.samples, "values": worst.values},
    )


def batch_norm_statistics(seen: Observation) -> Iterator[Finding]:
    """Find running statistics that no data ever set, or that only the last batches set."""
    judged = _judged(seen)
    unset = [each for each in judged if each.untouched and each.calls >= _LEAST_CALLS]
    if unset:
        trains = any(each.training for each in unset)
        yield warn(
            "batch_norm_statistics",
            layers=tuple(each.layer for each in unset),
            text=f"The running statistics of {listed([each.layer for each in unset])} are still "
            "the 0 and 1 that they were made with: "
            + (
                "in evaluation nothing is normalised (momentum=0?)."
                if trains
                else "in evaluation mode, in which they run, nothing is normalised."
            ),
            advice="Leave momentum at 0.1."
            if trains
            else "Call train() on these layers, or load their statistics before you freeze them.",
        )
    hasty = [each for each in judged if each.training and each.momentum > cuts.NORM_MOMENTUM]
    if hasty:
        momentum = max(each.momentum for each in hasty)
        yield warn(
            "batch_norm_statistics",
            layers=tuple(each.layer for each in hasty),
            text=f"{listed([each.layer for each in hasty])} take {momentum:g} of their running "
            "statistics from the newest batch: evaluation uses those of the last one or two.",
            advice=f"Set momentum to {1 - momentum:.2g} if {momentum:g} is what Keras or a paper "
            "calls momentum; PyTorch's is the share of the new, 0.1 by default.",
            evidence={"momentum": momentum},
        )


def _judged(seen: Observation) -> list[NormFacts]:
    """Return the batch norms to judge; none if the run ends in evaluation mode."""
    if seen.steps is not None and len(seen.steps.evaluated) and seen.steps.evaluated[-1]:
        return []
    return [each for each in seen.norms if each.calls >= 1]
