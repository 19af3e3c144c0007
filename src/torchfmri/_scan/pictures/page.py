"""The page of a sequence: its values, texts and scales as one self-contained file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.record.blocks import kinds_of
from torchfmri._scan.record.reading import Reading
from torchfmri._text import layer_label, star
from torchfmri.visualization import meaning, render, scale_colours, token_label, tops


def scan_page(reading: Reading, layers: str | Sequence[str]) -> str:
    """The page as HTML; layers of one kind stand together.

    Raises:
        LayerNotFoundError: No layer matches.
    """
    chosen = reading.columns(layers)
    names = [reading.anatomy.layers[column] for column in chosen]
    kinds = kinds_of(names)
    order = [place for members in kinds.values() for place in members]
    columns = [chosen[place] for place in order]
    tokens = reading.sequence.tokens
    model = str(reading.meta.get("model") or "model")
    return render(
        {
            "model": model,
            "loss": str(reading.meta.get("loss") or ""),
            "layers": [layer_label(names[place]) for place in order],
            "types": [reading.anatomy.types[column] for column in columns],
            "bands": [
                [layer_label(star(kind) if len(members) > 1 else kind), len(members)]
                for kind, members in kinds.items()
            ],
            "pieces": tokens.pieces,
            "labels": [token_label(piece) for piece in tokens.pieces],
            "surprisal": _floats(tokens.surprisal),
            "entropy": _floats(tokens.entropy),
            "generated": tokens.generated.astype(int).tolist(),
            "special": tokens.special.astype(int).tolist(),
            "metrics": [_metric(reading, metric, columns) for metric in reading.metrics],
        }
    )


def _metric(reading: Reading, metric: str, columns: Sequence[int]) -> dict[str, Any]:
    """Values (row, s) and the two scales in which the page shows them."""
    values = reading.table(metric, "layer")[:, columns].T
    scales = {}
    for normalise in ("layer", "global"):
        scale = scale_colours(values, metric, normalise)
        scales[normalise] = {"low": scale.low, "high": scale.high, "log": scale.logarithmic}
    signed = metric == "delta_sc"
    return {
        "name": metric,
        "meaning": meaning(metric),
        "signed": signed,
        "tops": _floats(np.ones(len(values)) if signed else tops(np.asarray(values, np.float64))),
        "scales": scales,
        "values": _floats(values),
    }


def _floats(values: NDArray[np.floating]) -> str:
    """Little-endian float32 in base64."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
