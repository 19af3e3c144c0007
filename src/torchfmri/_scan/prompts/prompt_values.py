"""Make the table that a contrast tests, one row per prompt, from one scan or several.

`Scan.contrast`, `Scan.classify` and `torchfmri.contrast` call `tabulate`. A prompt is one row,
however long it is, because tokens of one prompt are not independent. Prompts that cannot be used
are left out with a note. Tables too large for memory are mapped from a temporary file; then values
are float32, which they were before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast import PromptTable
from torchfmri._scan.prompts.feature_values import FeatureRows
from torchfmri._scan.prompts.prompt_rows import PromptRows
from torchfmri._scan.prompts.prompt_vectors import mean_vectors
from torchfmri._scan.prompts.question import Question, ValueSource, condition_of, walk
from torchfmri._scan.prompts.token_choice import token_words, why_none
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.fields import label_of
from torchfmri._text import listed, plural
from torchfmri.exceptions import InspectionError

_IN_MEMORY = 512 << 20
"""Larger tables are kept in a temporary file that is mapped."""


def tabulate(sources: Sequence[ValueSource], question: Question) -> PromptTable:
    """Return the table of all prompts that have a condition; the others are noted.

    Raises:
        LayerNotFoundError: No layer matches.
        InspectionError: There is no such metric, field or token.
    """
    made = _rows_of(sources, question)
    known: list[tuple[Any, ...]] = []
    left_out: list[str] = []
    values: NDArray[Any] | None = None
    total = sum(len(each.sequences) for each in sources)
    for place, (source, sequence) in enumerate(walk(sources)):
        group = _label(source, sequence, question.by)
        if group is None:
            left_out.append(sequence.name)
            continue
        row, count = made.row(source, sequence)
        if values is None:
            values = _room(total, len(row))
        values[len(known)] = row
        pair = None if question.paired is None else label_of(sequence.fields.get(question.paired))
        text = hash(b"".join(sequence.tokens.spelling))
        known.append((sequence.name, group, pair, count, place, text))
    if values is None:
        raise _no_conditions(sources, question.by)
    names, groups, pairs, counts, places, texts = zip(*known, strict=True)
    if question.paired is not None and not any(each is not None for each in pairs):
        raise _no_pairs(sources, question.paired)
    if not any(counts):
        raise InspectionError(
            f"tokens={question.tokens!r} chooses no token of any prompt that has a value. "
            f"{why_none(question.tokens)} Choose 'all', 'prompt', 'generated' or 'last', or look "
            "at scan[0].text and scan[0].tokens for what there is."
        )
    notes = list(made.notes)
    if left_out:
        notes.append(
            f"{plural(len(left_out), 'prompt')} without {question.by!r} left out: "
            f"{listed(left_out)}"
        )
    return PromptTable(
        names=names,
        groups=np.array(groups, object),
        pairs=np.array(pairs, object) if question.paired is not None else None,
        values=values[: len(names)],
        columns=made.columns,
        counts=np.array(counts, np.int64),
        metric=question.metric,
        level=question.level,
        tokens=token_words(question.tokens),
        model=" and ".join(dict.fromkeys(str(each.meta.get("model") or "") for each in sources)),
        places=np.array(places, np.int64),
        vectors=lambda labels, number: mean_vectors(sources, question.tokens, labels, number),
        notes=notes,
        texts=texts,
        scans=tuple(dict.fromkeys(each.folder.name for each in sources if each.folder is not None)),
    )


def _rows_of(sources: Sequence[ValueSource], question: Question) -> FeatureRows | PromptRows:
    """Return what makes a row of a prompt, with the columns of the table."""
    if question.level != "feature":
        return PromptRows(sources, question)
    prompts = (
        sequence
        for source, sequence in walk(sources)
        if _label(source, sequence, question.by) is not None
    )
    return FeatureRows(prompts, question.layers, question.tokens, question.labels)


def _room(rows: int, columns: int) -> NDArray[Any]:
    if rows * columns * 8 <= _IN_MEMORY:
        return np.empty((rows, columns), np.float64)
    with tempfile.TemporaryFile() as file:  # the map holds it open
        return np.memmap(file, np.float32, "w+", shape=(rows, columns))


def _label(source: ValueSource, sequence: ScannedSequence, by: str) -> str | None:
    """Return the condition of a prompt; None if it has none."""
    return condition_of(sequence, by) if source.label is None else source.label


def _no_pairs(sources: Sequence[ValueSource], paired: str) -> InspectionError:
    first = next(sequence for _, sequence in walk(sources))
    has = ", ".join(map(repr, first.fields)) or "none"
    return InspectionError(
        f"No prompt has anything in {paired!r}, by which prompts are paired; the fields of "
        f"{first.name!r} are {has}. Name one of them, or leave paired= out."
    )


def _no_conditions(sources: Sequence[ValueSource], by: str) -> InspectionError:
    first = next((sequence for _, sequence in walk(sources)), None)
    if first is None:
        return InspectionError(
            "The scan has no sequences: there is nothing to compare. Scan some prompts first."
        )
    has = ", ".join(map(repr, first.fields)) or "none: scan a dataset, whose rows have fields"
    return InspectionError(
        f"No prompt of the scan has a condition in {by!r}. The fields of its rows are {has}. Name "
        "one of them (by=, --by)."
    )
