"""Turn a prompt into a row of a table: the mean of each column over the chosen tokens.

`prompt_values.tabulate` uses `PromptRows` for all levels but "feature". Values that are not finite
are left out of a mean and counted, and the counts become notes of the contrast: a column must never
lose tokens silently. Of two scans, only the columns that both have are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.prompts.prompt_columns import chosen_columns
from torchfmri._scan.prompts.prompt_vectors import are_kept, chosen_rows, mean_of, vectors_of
from torchfmri._scan.prompts.question import SIGNED, Question, ValueSource
from torchfmri._scan.prompts.token_choice import choose_tokens
from torchfmri._scan.record.reading import Reading
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._text import listed, plural
from torchfmri.exceptions import InspectionError


class PromptRows:
    """The columns that all sources have, and how a prompt becomes a row of them."""

    def __init__(self, sources: Sequence[ValueSource], question: Question) -> None:
        self._question = question
        self._unpaired: list[str] = []
        found = [chosen_columns(source, question) for source in sources]
        keys = [
            dict.fromkeys(zip(each.layer, each.kind, each.start, each.count, strict=True))
            for each, _ in found
        ]
        shared = [key for key in keys[0] if all(key in each for each in keys[1:])]
        if not shared:
            raise InspectionError(
                "The scans have no layer in common, so nothing can be compared: "
                + " and ".join(
                    f"{source.meta.get('model')} has {', '.join(source.anatomy.layers[:3])}, ..."
                    for source in sources
                )
            )
        self._index: dict[int, NDArray[np.int64]] = {}
        self._layers: dict[int, list[str]] = {}
        for source, (columns, places), own in zip(sources, found, keys, strict=True):
            self._layers[id(source)] = list(dict.fromkeys(columns.layer.tolist()))
            order = {key: place for place, key in enumerate(own)}
            chosen = np.array([order[key] for key in shared], np.int64)
            self._index[id(source)] = places[chosen]
            alone = sorted({key[0] for key in own} - {key[0] for key in shared})
            fewer = len(own) - len(shared)
            if fewer:
                which = f": {listed(alone)}" * bool(alone)
                self._unpaired.append(
                    f"{fewer:,} columns of {source.label or source.meta.get('model')} have no "
                    f"partner in the other scan and are left out{which}"
                )
        each, _ = found[0]
        place = {key: index for index, key in enumerate(keys[0])}
        self.columns = each[np.array([place[key] for key in shared], np.int64)]
        self._without = _Tokens()
        self._partly = _Tokens()
        self._partly_columns = np.zeros(len(self.columns), bool)

    def row(
        self, source: ValueSource, sequence: ScannedSequence
    ) -> tuple[NDArray[np.float64], int]:
        """Return (v,) the values of one prompt, and how many tokens count."""
        if self._question.metric == SIGNED:
            return self._signed_row(source, sequence)
        question, index = self._question, self._index[id(source)]
        reading = Reading(source.anatomy, sequence, source.meta)
        table = reading.table(question.metric, "layer" if question.level == "layer" else "voxel")
        finite = np.isfinite(table)
        measured = finite.any(1)
        kept = choose_tokens(sequence, question.tokens, measured) & measured
        if not source.is_aligned:
            run = measured.copy()
            run[:-1] = True  # the model need not have been run on the last token, or have a loss
            wanted = choose_tokens(sequence, question.tokens, run)
            self._without.add(sequence.name, wanted & run & ~measured)
        if not finite[kept].all():
            self._count(sequence.name, kept, finite[:, index])
        return mean_of(table[kept][:, index]), int(kept.sum())

    def _signed_row(
        self, source: ValueSource, sequence: ScannedSequence
    ) -> tuple[NDArray[np.float64], int]:
        tokens, index = self._question.tokens, self._index[id(source)]
        layers = self._layers[id(source)]  # all that it has: places count over these
        found = vectors_of(sequence, tokens)
        absent = [layer for layer in layers if layer not in found]
        if absent:
            raise InspectionError(
                f"{sequence.name!r} has no mean vector of {absent[0]!r}. Choose layers= that all "
                "prompts have."
            )
        whole = np.concatenate([found[layer] for layer in layers])
        kept = choose_tokens(sequence, tokens, np.ones(len(sequence), bool))
        if not are_kept(sequence, tokens):
            rows = [sequence.tensors[layer] for layer in layers]
            chosen = [chosen_rows(each, sequence, tokens) for each in rows]
            # A token that does not count for a layer is not missing there.
            finite = [
                np.isfinite(row) | ~own[:, None] for row, own in zip(rows, chosen, strict=True)
            ]
            together = np.concatenate(finite, 1)[:, index]
            self._count(sequence.name, np.asarray(together.any(1)), together)
        return whole.astype(np.float64)[index], int(kept.sum())

    def _count(self, name: str, kept: NDArray[np.bool_], finite: NDArray[np.bool_]) -> None:
        """Count the tokens that count (s,) at which some columns lack a value: finite is (s, v)."""
        lacks = ~finite[kept] & finite[kept].any(0)  # a column without any value has its own note
        self._partly_columns |= lacks.any(0)
        self._partly.add(name, np.asarray(lacks.any(1)))

    @property
    def notes(self) -> list[str]:
        """The notes of a contrast about its columns and the rows made so far."""
        said = list(self._unpaired)
        if self._without:
            said.append(f"no finite value in any column at {self._without}: left out of the means")
        if self._partly:
            lacking = np.flatnonzero(self._partly_columns)
            names = ", ".join(self.columns[lacking[:2]].names)
            said.append(
                f"{len(lacking):,} of {len(self.columns):,} columns have no finite value at some "
                f"tokens, which are left out of their means ({self._partly}): "
                f"{names}{', ...' * (len(lacking) > 2)}"
            )
        return said


class _Tokens:
    """A count of tokens, and of which prompts."""

    def __init__(self) -> None:
        self._count = 0
        self._prompts: list[str] = []

    def add(self, prompt: str, which: NDArray[np.bool_]) -> None:
        """Add the tokens of a prompt for which `which` is true."""
        if which.any():
            self._count += int(which.sum())
            self._prompts.append(prompt)

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def __str__(self) -> str:
        tokens = plural(self._count, "token")
        if len(self._prompts) == 1:
            return f"{tokens} of {self._prompts[0]!r}"
        return f"{tokens} of {plural(len(self._prompts), 'prompt')}: {listed(self._prompts)}"
