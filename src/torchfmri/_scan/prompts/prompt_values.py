"""A table of prompts made of scans: means of layers, voxels or units over the chosen tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import require
from torchfmri._contrast import Columns, PromptTable
from torchfmri._model import nearest_names
from torchfmri._scan.prompts.feature_values import FeatureRows
from torchfmri._scan.prompts.prompt_vectors import mean_of, vectors_of
from torchfmri._scan.prompts.token_choice import (
    TokenChoice,
    check_tokens,
    choose_tokens,
    token_words,
    why_none,
)
from torchfmri._scan.record.anatomy import KINDS, Anatomy
from torchfmri._scan.record.reading import DELTA, Reading, matching_layers
from torchfmri._scan.record.sequence import METRICS, ScannedSequence
from torchfmri._text import plural
from torchfmri.exceptions import InspectionError, LayerNotFoundError

LEVELS = ("layer", "voxel", "head", "unit", "feature")
SIGNED = "signed"
_IN_MEMORY = 512 << 20
"""Larger tables are kept in a temporary file that is mapped."""
_KINDS = np.array(KINDS, object)


@dataclass(frozen=True, eq=False)
class Source:
    """Sequences that go into a table.

    Attributes:
        anatomy: Their layers and voxels.
        sequences: To be iterated over, several times.
        meta: How they were measured.
        label: The condition of all of them; None leaves it to each.
        folder: Where they are stored, or None.
    """

    anatomy: Anatomy
    sequences: Sequence[ScannedSequence]
    meta: Mapping[str, Any]
    label: str | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Question:
    """What is asked of the prompts.

    Attributes:
        metric: "activation", "gradient", "learning_cost", "delta_sc", or "signed" for the mean
            vectors.
        level: "layer", "voxel", "head", "unit" or "feature".
        layers: A pattern, or several; over the places of dictionaries for "feature".
        tokens: Which tokens count.
        by: The field that holds the condition.
        paired: The field that pairs belong together by, or None.
        labels: The user's texts for features; None without.
    """

    metric: str = "activation"
    level: str = "voxel"
    layers: str | Sequence[str] = "*"
    tokens: TokenChoice = "all"
    by: str = "condition"
    paired: str | None = None
    labels: object = None

    def __post_init__(self) -> None:
        known = (*METRICS, DELTA, SIGNED)
        meaning = f"choose one of {', '.join(map(repr, known))}"
        require(self.metric in known, "metric", self.metric, meaning)
        meaning = f"choose one of {', '.join(map(repr, LEVELS))}"
        require(self.level in LEVELS, "level", self.level, meaning)
        signed = self.metric == SIGNED
        if signed != (self.level == "unit"):
            raise InspectionError(
                f"metric={self.metric!r} has no level={self.level!r}: signed activations are "
                "compared unit by unit (metric='signed', level='unit'), the other metrics by "
                "layer, voxel or head."
            )
        if self.level == "feature" and self.metric != "activation":
            raise InspectionError(
                f"metric={self.metric!r} has no level='feature': of features, activations are kept "
                "(metric='activation')."
            )
        if self.labels is not None and self.level != "feature":
            raise InspectionError(
                f"labels= are texts for features, and level={self.level!r} has none: "
                "level='feature'."
            )
        for name in ("by", "paired"):
            value = getattr(self, name)
            text = isinstance(value, str) or (name == "paired" and value is None)
            require(text, name, value, "name a field of the rows, such as 'condition'")
        check_tokens(self.tokens)


def tabulate(sources: Sequence[Source], question: Question) -> PromptTable:
    """The table of all prompts that have a condition; the others are noted.

    Raises:
        LayerNotFoundError: No layer matches.
        InspectionError: There is no such metric, field or token.
    """
    shared = _shared(sources, question)
    names: list[str] = []
    groups: list[str] = []
    pairs: list[str | None] = []
    counts: list[int] = []
    places: list[int] = []
    texts: list[int] = []
    left_out: list[str] = []
    values: NDArray[Any] | None = None
    total = sum(len(each.sequences) for each in sources)
    for place, (source, sequence) in enumerate(_walk(sources)):
        group = _label(source, sequence, question.by)
        if group is None:
            left_out.append(sequence.name)
            continue
        if isinstance(shared, FeatureRows):
            row, count = shared.row(sequence)
        else:
            row, count = shared.row(source, sequence)
        if values is None:
            values = _room(total, len(row))
        values[len(names)] = row
        names.append(sequence.name)
        groups.append(group)
        counts.append(count)
        places.append(place)
        texts.append(hash(b"".join(sequence.tokens.spelling)))
        if question.paired is not None:
            value = sequence.fields.get(question.paired)
            pairs.append(None if value is None else str(value))
    if values is None:
        raise _no_conditions(sources, question.by)
    if question.paired is not None and not any(each is not None for each in pairs):
        raise _no_pairs(sources, question.paired)
    if not any(counts):
        raise InspectionError(
            f"tokens={question.tokens!r} chooses no token of any prompt that has a value. "
            f"{why_none(question.tokens)} Choose 'all', 'prompt', 'generated' or 'last', or look "
            "at scan[0].text and scan[0].tokens for what there is."
        )
    notes = list(shared.notes)
    if left_out:
        notes.append(
            f"{plural(len(left_out), 'prompt')} without {question.by!r} left out: "
            f"{', '.join(map(repr, left_out[:3]))}{', ...' if len(left_out) > 3 else ''}"
        )
    return PromptTable(
        names=names,
        groups=np.array(groups, object),
        pairs=np.array(pairs, object) if question.paired is not None else None,
        values=values[: len(names)],
        columns=shared.columns,
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


def _shared(sources: Sequence[Source], question: Question) -> FeatureRows | _Shared:
    """The columns of the table, and how a prompt becomes a row of it."""
    if question.level != "feature":
        return _Shared(sources, question)
    prompts = (
        sequence
        for source, sequence in _walk(sources)
        if _label(source, sequence, question.by) is not None
    )
    return FeatureRows(prompts, question.layers, question.tokens, question.labels)


def _walk(sources: Sequence[Source]) -> Iterator[tuple[Source, ScannedSequence]]:
    for source in sources:
        for sequence in source.sequences:
            yield source, sequence


def _room(rows: int, columns: int) -> NDArray[Any]:
    if rows * columns * 8 <= _IN_MEMORY:
        return np.empty((rows, columns), np.float64)
    with tempfile.TemporaryFile() as file:  # the map holds it open
        return np.memmap(file, np.float32, "w+", shape=(rows, columns))


def _label(source: Source, sequence: ScannedSequence, by: str) -> str | None:
    """The condition of a prompt; None where it has none."""
    if source.label is not None:
        return source.label
    if by == "condition" and sequence.condition:
        return sequence.condition
    value = sequence.fields.get(by)
    return None if value is None or value == "" else str(value)


def _no_pairs(sources: Sequence[Source], paired: str) -> InspectionError:
    first = next(sequence for _, sequence in _walk(sources))
    has = ", ".join(map(repr, first.fields)) or "none"
    return InspectionError(
        f"No prompt has anything in {paired!r}, by which prompts are paired; the fields of "
        f"{first.name!r} are {has}. Name one of them, or leave paired= out."
    )


def _no_conditions(sources: Sequence[Source], by: str) -> InspectionError:
    first = next((sequence for _, sequence in _walk(sources)), None)
    if first is None:
        return InspectionError("The scan has no sequences: there is nothing to compare.")
    has = ", ".join(map(repr, first.fields)) or "none: scan a dataset, whose rows have fields"
    return InspectionError(
        f"No prompt of the scan has a condition in {by!r}. The fields of its rows are {has}. Name "
        "one of them (by=, --by)."
    )


class _Shared:
    """The columns that all sources have, and how a prompt becomes a row of them."""

    def __init__(self, sources: Sequence[Source], question: Question) -> None:
        self._question = question
        self.notes: list[str] = []
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
                which = f": {', '.join(alone[:3])}{', ...' if len(alone) > 3 else ''}" * bool(alone)
                self.notes.append(
                    f"{fewer:,} columns of {source.label or source.meta.get('model')} have no "
                    f"partner in the other scan and are left out{which}"
                )
        each, _ = found[0]
        place = {key: index for index, key in enumerate(keys[0])}
        self.columns = each[np.array([place[key] for key in shared], np.int64)]

    def row(self, source: Source, sequence: ScannedSequence) -> tuple[NDArray[np.float64], int]:
        """(v,) of one prompt, and how many tokens count."""
        question, index = self._question, self._index[id(source)]
        if question.metric == SIGNED:
            layers = self._layers[id(source)]  # all that it has: places count over these
            found = vectors_of(sequence, question.tokens)
            absent = [layer for layer in layers if layer not in found]
            if absent:
                raise InspectionError(f"{sequence.name!r} has no mean vector of {absent[0]!r}.")
            whole = np.concatenate([found[layer] for layer in layers])
            kept = choose_tokens(sequence, question.tokens, np.ones(len(sequence), bool))
            return whole.astype(np.float64)[index], int(kept.sum())
        reading = Reading(source.anatomy, sequence, source.meta)
        level = "layer" if question.level == "layer" else "voxel"
        table = reading.table(question.metric, level)
        measured = np.isfinite(table).any(1) if table.shape[1] else np.zeros(len(table), bool)
        kept = choose_tokens(sequence, question.tokens, measured) & measured
        return mean_of(table[kept][:, index]), int(kept.sum())


def chosen_columns(source: Source, question: Question) -> tuple[Columns, NDArray[np.int64]]:
    """What a source can give, and where that stands in its tables."""
    anatomy = source.anatomy
    chosen = matching_layers(question.layers, anatomy.layers, source.meta)
    if question.level == "unit":
        return _units(source, question, chosen)
    types = np.array(anatomy.types, object)
    names = np.array(anatomy.layers, object)
    if question.level == "layer":
        places = np.array([anatomy.index[name] for name in chosen], np.int64)
        nothing = np.zeros(len(places), np.int64)
        kind = np.full(len(places), "layer", object)
        return Columns(names[places], types[places], kind, nothing, nothing), places
    wanted = np.isin(anatomy.layer, [anatomy.index[name] for name in chosen])
    if question.level == "head":
        wanted &= anatomy.kind == KINDS.index("head")
        if not wanted.any():
            raise InspectionError(
                "None of the chosen layers has heads: the voxels of q_proj, k_proj, v_proj and "
                "(heads=True) o_proj.input are, where the configuration says how large a head is."
            )
    places = np.flatnonzero(wanted)
    owner = anatomy.layer[places]
    return Columns(
        names[owner],
        types[owner],
        _KINDS[anatomy.kind[places]],
        anatomy.start[places].astype(np.int64),
        anatomy.count[places].astype(np.int64),
    ), places


def _units(
    source: Source, question: Question, chosen: Sequence[str]
) -> tuple[Columns, NDArray[np.int64]]:
    first = next(iter(source.sequences), None)
    found = {} if first is None else vectors_of(first, question.tokens)
    layers = [layer for layer in chosen if layer in found]
    if not layers:
        raise LayerNotFoundError(
            str(question.layers),
            nearest_names(str(question.layers), list(found)),
            len(found),
            "scan[0].vectors",
        )
    types = source.anatomy.types
    widths = [len(found[layer]) for layer in layers]
    count = sum(widths)
    columns = Columns(
        np.repeat(np.array(layers, object), widths),
        np.repeat(np.array([types[source.anatomy.index[each]] for each in layers], object), widths),
        np.full(count, "unit", object),
        np.concatenate([np.arange(width) for width in widths]),
        np.ones(count, np.int64),
    )
    return columns, np.arange(count)


def has_vectors(source: Source, tokens: TokenChoice) -> bool:
    """Whether the first sequence has mean vectors over these tokens."""
    first = next(iter(source.sequences), None)
    if first is None:
        return False
    return bool(first.tensors) or (isinstance(tokens, str) and tokens in first.vectors)


def mean_vectors(
    sources: Sequence[Source], tokens: TokenChoice, labels: Mapping[int, int], number: int
) -> dict[str, NDArray[np.float64]]:
    """Layer -> (k, w) the mean of the prompts' vectors in each group, of layers that all have."""
    totals: dict[str, NDArray[np.float64]] = {}
    having: dict[str, int] = {}
    counts = np.zeros(number)
    for place, (_, sequence) in enumerate(_walk(sources)):
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
