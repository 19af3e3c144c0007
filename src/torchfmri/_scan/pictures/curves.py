"""The curves below the map of a scan: surprisal, entropy, and the norm of each token's gradient.

The boards of stored and of live scans share them. Their texts may change freely; the names are read
by the page and stand in saved views.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._viewer import Metric

_CURVES = (
    Metric("surprisal", "Surprisal", "How unexpected the token was.", "nats"),
    Metric("entropy", "Entropy", "How undecided the model was before it.", "nats"),
    Metric(
        "gradient_norm",
        "Gradient norm",
        "Norm of this token's gradient, all layers together.",
        "norm of dL/d parameters",
    ),
)
CURVES = {each.name: each for each in _CURVES}


def curves_of(sequence: ScannedSequence) -> list[Metric]:
    """Return the curves of a sequence; the gradient's norm where it was measured."""
    tokens = sequence.tokens
    tops = {"surprisal": tokens.surprisal, "entropy": tokens.entropy}
    # A prompt may surprise far more than an answer, whose bars could not be read beside it.
    return [
        replace(each, top=_largest(tops[name][tokens.generated])) if name in tops else each
        for name, each in CURVES.items()
        if name != "gradient_norm" or "learning_cost" in sequence.layers
    ]


def curve_values(sequence: ScannedSequence) -> NDArray[np.float32]:
    """Return (token, curve) the values of the curves of a sequence."""
    curves = {"surprisal": sequence.tokens.surprisal, "entropy": sequence.tokens.entropy}
    if "learning_cost" in sequence.layers:
        costs = np.asarray(sequence.layers["learning_cost"], np.float64)
        known = np.isfinite(costs)
        total = np.sqrt((np.where(known, costs, 0.0) ** 2).sum(1))
        curves["gradient_norm"] = np.where(known.any(1), total, np.nan).astype(np.float32)
    return np.stack(list(curves.values()), 1)


def _largest(values: NDArray[np.floating[Any]]) -> float:
    """Return the largest finite value, 0 if there is none."""
    return float(values[np.isfinite(values)].max(initial=0.0))
