"""Read the mean vectors of a prompt, one per layer, over the chosen tokens.

`prompt_rows` compares them unit by unit (metric="signed"), and a contrast reads its directions from
them. A scan may have kept them itself (`ScanOptions(vectors=...)`); otherwise they are computed
from full tensors, if there are any. Both ways must agree, which `test_prompt_values.py` checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.prompts.question import ValueSource, walk
from torchfmri._scan.prompts.token_choice import TokenChoice, choose_tokens, token_words
from torchfmri._scan.record.sequence import VECTORS, ScannedSequence
from torchfmri.exceptions import InspectionError


def mean_of(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return (v,) the mean over tokens of what is finite; nan where nothing is."""
    finite = np.isfinite(rows)
    if finite.all() and len(rows):
        return np.asarray(rows.mean(0, dtype=np.float64))
    count = finite.sum(0)
    total = np.where(finite, rows, 0.0).sum(0, dtype=np.float64)
    found: NDArray[np.float64] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return found


def are_kept(sequence: ScannedSequence, tokens: TokenChoice) -> bool:
    """Return whether the scan itself kept mean vectors over these tokens."""
    return isinstance(tokens, str) and tokens in sequence.vectors


def chosen_rows(tensor: NDArray[Any], sequence: ScannedSequence, tokens: TokenChoice) -> Any:
    """Return (s,) which tokens count for a tensor (s, w); "last" is the last one with values."""
    return choose_tokens(sequence, tokens, np.isfinite(tensor).any(1))


def vectors_of(
    sequence: ScannedSequence, tokens: TokenChoice
) -> Mapping[str, NDArray[np.floating[Any]]]:
    """Return layer -> (w,) the mean vector over the chosen tokens: as kept, or of full tensors.

    Raises:
        InspectionError: There are neither.
    """
    if are_kept(sequence, tokens):
        return sequence.vectors[str(tokens)]
    if sequence.tensors:
        return {
            layer: mean_of(tensor[chosen_rows(tensor, sequence, tokens)])
            for layer, tensor in sequence.tensors.items()
        }
    kept = ", ".join(map(repr, sequence.vectors)) or "none"
    possible = ", ".join(map(repr, VECTORS))
    raise InspectionError(
        f"{sequence.name!r} has no mean vectors over {token_words(tokens)}; it has those over "
        f"{kept}. Scan with ScanOptions(vectors=...) ({possible}), or keep layers in full with "
        "tensors=, for any other choice."
    )


def has_vectors(source: ValueSource, tokens: TokenChoice) -> bool:
    """Return whether the first sequence has mean vectors over these tokens."""
    first = next(iter(source.sequences), None)
    if first is None:
        return False
    return bool(first.tensors) or are_kept(first, tokens)


def mean_vectors(
    sources: Sequence[ValueSource], tokens: TokenChoice, labels: Mapping[int, int], number: int
) -> dict[str, NDArray[np.float64]]:
    """Return layer -> (k, w) the mean vector of each group, for layers that all prompts have."""
    totals: dict[str, NDArray[np.float64]] = {}
    having: dict[str, int] = {}
    counts = np.zeros(number)
    for place, (_, sequence) in enumerate(walk(sources)):
        if place not in labels:
            continue
        counts[labels[place]] += 1
        for layer, vector in vectors_of(sequence, tokens).items():
            if layer not in totals:
                totals[layer] = np.zeros((number, len(vector)))
            if totals[layer].shape[1] != len(vector):  # two models of different width
                continue
            totals[layer][labels[place]] += vector
            having[layer] = having.get(layer, 0) + 1
    everywhere = [layer for layer in totals if having[layer] == counts.sum()]
    return {layer: totals[layer] / counts[:, None] for layer in everywhere}
