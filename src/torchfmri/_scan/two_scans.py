"""Compare two scans: prompts of one against those of the other, or two models on the same ones.

`torchfmri.contrast` is `contrast` of this file; `Scan.contrast` compares conditions within a scan.
With paired=True prompts are matched by name and then by text, and only tokens that stand for the
same bytes at the same place in both are compared: two models may cut a text differently, and a mean
over different text would show the text and not the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import is_list, require
from torchfmri._contrast import Contrast, TestOptions, compare
from torchfmri._scan.prompts.prompt_values import tabulate
from torchfmri._scan.prompts.question import SIGNED, Question, ValueSource
from torchfmri._scan.prompts.token_choice import TokenChoice
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.scan_record import Scan
from torchfmri._scan.store.stored_sequences import LazySequences
from torchfmri.exceptions import InspectionError

_Place = tuple[Scan, int]
_PARTNER = "$partner"
"""The field in which matched prompts get the number of their pair."""
_ABOUT_TOKENS = "only tokens of text that both have are compared"
_ABOUT_VECTORS = (
    "mean vectors were made while scanning, over all chosen tokens of each model, also of text "
    "that only one of them wrote: choose tokens='prompt', or scan the same texts with "
    "max_new_tokens=0"
)


def contrast(
    a: Scan | Sequence[Scan],
    b: Scan | Sequence[Scan],
    *,
    names: tuple[str, str] | None = None,
    paired: bool | str = False,
    metric: str = "activation",
    level: str = "voxel",
    layers: str | Sequence[str] = "*",
    tokens: TokenChoice = "all",
    alpha: float = 0.05,
    height_control: str | None = "fdr",
    two_sided: bool = True,
    test: str = "t",
    permutations: int | None = None,
    seed: int = 0,
    labels: object = None,
) -> Contrast:
    """Return what differs between the prompts of two scans, or two models on the same prompts.

    The unit of replication is the prompt: values are averaged over the chosen tokens of each, and
    the test is over prompts. Layers are aligned by name and voxels by their units; what has no
    partner is listed in the notes.

    Args:
        a: A scan, or several.
        b: A scan, or several, whose prompts those of `a` are compared with.
        names: What to call the two.
        paired: True pairs the prompts by name, the others by text: two models, two checkpoints.
            Only tokens of text that both have are then compared. Or a field of the rows to pair by.
        metric: "activation", "gradient", "learning_cost", "delta_sc", or "signed" (level="unit").
        level: "layer", "voxel", "head", "feature" (both scans need the same dictionary), or "unit"
            for the signed activation.
        layers: A pattern, or several; for features, over the places where they were read.
        tokens: Which tokens count: "all", "prompt", "generated", "last", "prompt_last", a position,
            (first, end), a compiled regular expression, {"characters": (first, end)}, {"field":
            name} or {"role": name}.
        alpha: The threshold.
        height_control: What it bounds: "fdr", "bonferroni", "max", "fpr", or None for no threshold.
        two_sided: Whether the other direction counts.
        test: Where p comes from: "t", or "permutation".
        permutations: How many relabellings; by default 1,000 if they are needed.
        seed: The seed of the relabellings.
        labels: Texts for features: {feature: text}, a list, or {place: one of these}.

    Returns:
        The contrast a - b.

    Raises:
        InspectionError: Nothing can be compared; the message says why.
    """
    options = TestOptions(
        alpha=alpha,
        height_control=height_control,
        two_sided=two_sided,
        test=test,
        permutations=permutations,
        seed=seed,
    )
    field = paired if isinstance(paired, str) else _PARTNER if paired else None
    question = Question(
        metric=metric,
        level=level,
        layers=layers,
        tokens=tokens,
        by="condition",
        paired=field,
        labels=labels,
    )
    sides = (_scans("a", a), _scans("b", b))
    labels = _names(sides, names)
    if paired is True:
        sources, notes = _matched(sides, labels)
        notes.append(_ABOUT_VECTORS if metric == SIGNED else _ABOUT_TOKENS)
    else:
        if not paired:
            _refuse_overlap(sides)
        notes = []
        sources = [
            ValueSource(scan.anatomy, scan, scan.meta, label, scan.folder)  # type: ignore[arg-type]
            for label, scans in zip(labels, sides, strict=True)
            for scan in scans
        ]
    table = tabulate(sources, question)
    table.notes += notes
    weights = {labels[0]: 1.0, labels[1]: -1.0}
    return compare(table, weights, is_paired=field is not None, options=options)


def _scans(name: str, given: Any) -> list[Scan]:
    several = list(given) if is_list(given) else [given]
    good = bool(several) and all(isinstance(each, Scan) for each in several)
    require(good, name, given, "give a Scan, or a list of Scans: torchfmri.load('x.fmri')")
    return several


def _names(sides: tuple[list[Scan], list[Scan]], names: Any) -> tuple[str, str]:
    if names is not None:
        good = is_list(names) and len(names) == 2 and all(isinstance(each, str) for each in names)
        require(good and names[0] != names[1], "names", names, "give two different names")
        return names[0], names[1]
    models = [str(side[0].meta.get("model") or "") for side in sides]
    return (models[0], models[1]) if models[0] != models[1] and all(models) else ("a", "b")


def _refuse_overlap(sides: tuple[list[Scan], list[Scan]]) -> None:
    """Raise where a prompt is in both groups: it would be compared with itself."""
    weights = [{str(scan.meta.get("weights")) for scan in side} for side in sides]
    if weights[0].isdisjoint(weights[1]):
        return
    own = {name for scan in sides[0] for name in scan.names}
    texts = {
        (sequence.name, sequence.text) for scan in sides[0] for sequence in scan
        if sequence.name in own
    }  # fmt: skip
    for scan in sides[1]:
        for sequence in scan:
            if sequence.name in own and (sequence.name, sequence.text) in texts:
                raise InspectionError(
                    f"{sequence.name!r} is in both groups, with the same text: a prompt cannot be "
                    "compared with itself. Leave it out of one of them; for two models on the same "
                    "prompts, write paired=True."
                )


def _prompt_text(sequence: ScannedSequence) -> str:
    parts = zip(sequence.tokens.spelling, sequence.tokens.generated, strict=True)
    return b"".join(each for each, generated in parts if not generated).decode(errors="replace")


def _matched(
    sides: tuple[list[Scan], list[Scan]], labels: tuple[str, str]
) -> tuple[list[ValueSource], list[str]]:
    """Return the prompts of both sides, paired by name or text, with the tokens that both have."""
    first, second = ([(scan, k) for scan in side for k in range(len(scan))] for side in sides)
    pairs, by_text = _pairs(first, second)
    if not pairs:
        names = (", ".join(scan.names[k] for scan, k in each[:2]) for each in (first, second))
        raise InspectionError(
            f"No prompt of the one is a prompt of the other, neither by name ({'; '.join(names)}) "
            "nor by text: paired=True needs the same prompts. Leave it out to compare different "
            "ones."
        )
    sources = []
    for side, label in enumerate(labels):
        for scan in dict.fromkeys(pair[side][0] for pair in pairs):
            own = [
                (pair[side], pair[1 - side], str(number))
                for number, pair in enumerate(pairs)
                if pair[side][0] is scan
            ]
            partners = _Partners(own)
            sources.append(
                ValueSource(scan.anatomy, partners, scan.meta, label, scan.folder, is_aligned=True)
            )
    notes = [
        f"{len(places) - len(pairs)} prompts of {label!r} have no partner and are left out"
        for places, label in zip((first, second), labels, strict=True)
        if len(places) > len(pairs)
    ]
    if 0 < by_text < len(pairs):
        notes.append(f"{by_text} of {len(pairs)} pairs matched by text, the others by name")
    return sources, notes


def _pairs(
    first: Sequence[_Place], second: Sequence[_Place]
) -> tuple[list[tuple[_Place, _Place]], int]:
    """Return pairs of prompts with the same name, then text, and how many match by text.

    Of several prompts with one name or text, the first is the partner of the first, and so on.
    """
    partner: dict[int, int] = {}
    by_text = 0
    for key in (lambda at: at[0].names[at[1]], lambda at: _prompt_text(at[0][at[1]])):
        taken = set(partner.values())
        free: dict[str, list[int]] = {}
        for at in range(len(second)) if len(partner) < len(first) else ():
            if at not in taken:
                free.setdefault(key(second[at]), []).append(at)
        before = len(partner)
        for at in range(len(first)) if free else ():
            if at not in partner and (found := free.get(key(first[at]))):
                partner[at] = found.pop(0)
        by_text = len(partner) - before
    return [(first[at], second[partner[at]]) for at in sorted(partner)], by_text


class _Partners(LazySequences):
    """Sequences whose tokens without a partner have no values, so they do not count."""

    def __init__(self, places: Sequence[tuple[_Place, _Place, str]]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> ScannedSequence:
        """Return a sequence; its tables have values for the tokens that the partner has too."""
        (scan, own), (other_scan, other), number = self._places[index]
        sequence, partner = scan[own], other_scan[other]
        shared = shared_tokens(sequence, partner)
        return replace(
            sequence,
            layers=_SharedTables(sequence.layers, shared),
            voxels=_SharedTables(sequence.voxels, shared),
            tensors=_SharedTables(sequence.tensors, shared),
            fields={**sequence.fields, _PARTNER: number},
        )


class _SharedTables(Mapping[str, NDArray[Any]]):
    """Tables with a row for each token: nan where a token has no partner. Made when asked for."""

    def __init__(self, tables: Mapping[str, NDArray[Any]], shared: NDArray[np.bool_]) -> None:
        self._tables, self._shared = tables, shared

    def __getitem__(self, name: str) -> NDArray[Any]:
        table = self._tables[name]
        if len(table) != len(self._shared):  # read out of something else than tokens
            return table
        alone = ~self._shared.reshape(-1, *[1] * (table.ndim - 1))
        return np.where(alone, np.nan, table) if alone.any() else table

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def shared_tokens(sequence: ScannedSequence, partner: ScannedSequence) -> NDArray[np.bool_]:
    """Return (s,) which tokens spell the same bytes at the same place as one of the partner's."""
    spellings = sequence.tokens.spelling, partner.tokens.spelling
    # The bytes up to `same` are equal in both texts, so equal spans there spell the same.
    first, second = (b"".join(each) for each in spellings)
    differs = (at for at, (x, y) in enumerate(zip(first, second, strict=False)) if x != y)
    same = next(differs, min(len(first), len(second)))
    own, others = (list(pairwise(accumulate(map(len, each), initial=0))) for each in spellings)
    known = set(others)
    return np.array([span[1] <= same and span in known for span in own], bool)
