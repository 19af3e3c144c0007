"""Turn the features of a dictionary into columns of a table of prompts.

`prompt_values.tabulate` uses `FeatureRows` for level="feature". A scan keeps the strongest features
of each token only, so a feature that is absent counts as 0; `notes` tells the user how often that
may have lost something, and must stay. The sequences are read twice: first to find the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast import PromptColumns
from torchfmri._lens import feature_labels
from torchfmri._scan.prompts.question import ValueSource
from torchfmri._scan.prompts.token_choice import TokenChoice, choose_tokens
from torchfmri._scan.record.readouts import choose_readouts, readout_name
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._text import plural

_ADVICE = "Scan with features={place: dictionary}."


class FeatureRows:
    """The features that any prompt has among its strongest, and how a prompt becomes a row of them.

    Args:
        sequences: All prompts; they are read twice.
        places: A pattern over the places at which features were read.
        tokens: Which tokens count.
        labels: The user's table of texts; see `feature_labels`.
    """

    def __init__(
        self,
        sequences: Iterable[ScannedSequence],
        places: str | Sequence[str],
        tokens: TokenChoice,
        labels: object,
    ) -> None:
        self._places, self._tokens = places, tokens
        seen: dict[str, set[int]] = {}
        kept, full, total = 0, 0, 0
        for sequence in sequences:
            for place, ids, _ in self._read(sequence):
                seen.setdefault(place, set()).update(np.unique(ids[ids >= 0]).tolist())
                kept, total = max(kept, ids.shape[1]), total + len(ids)
                full += int((ids >= 0).all(1).sum())
        found = {place: np.array(sorted(ids), np.int64) for place, ids in seen.items()}
        starts = np.cumsum([0, *map(len, found.values())]).tolist()
        self._found = dict(zip(found, zip(starts, found.values(), strict=False), strict=True))
        self.columns = _columns(found, labels)
        self.notes = [_note(len(self.columns), kept, full, total)]

    def _read(
        self, sequence: ScannedSequence
    ) -> Iterator[tuple[str, NDArray[Any], NDArray[np.float64]]]:
        """Place, ids (s, k) and values (s, k) of one prompt."""
        for place, ids in choose_readouts(sequence, "feature_ids", self._places, _ADVICE).items():
            values = sequence.tensors[readout_name(place, "feature_values")]
            yield place, np.asarray(ids), np.asarray(values, np.float64)

    def row(self, _: ValueSource, sequence: ScannedSequence) -> tuple[NDArray[np.float64], int]:
        """Return (v,) the means of features over a prompt's chosen tokens, and how many count."""
        chosen = choose_tokens(sequence, self._tokens, np.ones(len(sequence), bool))
        count = int(chosen.sum())
        total = np.zeros(len(self.columns))
        for place, ids, values in self._read(sequence):
            start, known = self._found[place]
            on = chosen[:, None] & (ids >= 0)
            np.add.at(total, start + np.searchsorted(known, ids[on]), values[on])
        return (total / count if count else np.full(len(total), np.nan)), count


def _columns(found: dict[str, NDArray[np.int64]], labels: object) -> PromptColumns:
    sizes = [len(each) for each in found.values()]
    texts = [text for place, ids in found.items() for text in feature_labels(labels, place, ids)]
    ids = np.concatenate([np.empty(0, np.int64), *found.values()])
    return PromptColumns(
        layer=np.repeat(np.array(list(found), object), sizes),
        module=np.full(len(ids), "dictionary", object),
        kind=np.full(len(ids), "feature", object),
        start=ids,
        count=np.ones(len(ids), np.int64),
        label=np.array(texts, object),
    )


def _note(features: int, kept: int, full: int, total: int) -> str:
    said = (
        f"{plural(features, 'feature')} that were on at any token; the scan kept the {kept} "
        "strongest of each token, and a feature that is not among them counts as 0 there"
    )
    if not full:
        return f"{said} (no token had {kept} on, so nothing was lost)"
    return (
        f"{said} (at {full:,} of {total:,} tokens all {kept} were on, so weaker ones may be lost)"
    )
