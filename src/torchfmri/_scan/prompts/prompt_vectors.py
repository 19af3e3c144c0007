"""The mean vectors of a prompt: one per layer, over the chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.prompts.token_choice import TokenChoice, choose_tokens, token_words
from torchfmri._scan.record.sequence import VECTORS, ScannedSequence
from torchfmri.exceptions import InspectionError


def mean_of(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """(v,) the mean over tokens of what is finite; nan where nothing is."""
    finite = np.isfinite(rows)
    if finite.all() and len(rows):
        return np.asarray(rows.mean(0, dtype=np.float64))
    count = finite.sum(0)
    total = np.where(finite, rows, 0.0).sum(0, dtype=np.float64)
    found: NDArray[np.float64] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return found


def vectors_of(
    sequence: ScannedSequence, tokens: TokenChoice
) -> Mapping[str, NDArray[np.floating[Any]]]:
    """Layer -> (w,) the mean vector over the chosen tokens: as kept, or from full tensors.

    Raises:
        InspectionError: There are neither.
    """
    if isinstance(tokens, str) and tokens in sequence.vectors:
        return sequence.vectors[tokens]
    if sequence.tensors:
        return {
            layer: mean_of(tensor[choose_tokens(sequence, tokens, np.isfinite(tensor).any(1))])
            for layer, tensor in sequence.tensors.items()
        }
    kept = ", ".join(map(repr, sequence.vectors)) or "none"
    possible = ", ".join(map(repr, VECTORS))
    raise InspectionError(
        f"{sequence.name!r} has no mean vectors over {token_words(tokens)}; it has those over "
        f"{kept}. Scan with ScanOptions(vectors=...) ({possible}), or keep layers in full with "
        "tensors=, for any other choice."
    )
