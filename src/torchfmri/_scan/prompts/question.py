"""The question that is asked of the prompts of scans, and the sequences that it is asked of.

`Scan` and `two_scans` fill in a `Question` from the user's arguments and hand it to the functions
of this folder together with `ValueSource`s. A question checks itself when it is made, so that a
typing error is reported before anything is read. A new level is an entry of `LEVELS` and a way to
make its columns in `prompt_columns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchfmri._arguments import require
from torchfmri._scan.prompts.token_choice import TokenChoice, check_tokens
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.reading import DELTA
from torchfmri._scan.record.sequence import METRICS, ScannedSequence
from torchfmri._scan.store.fields import label_of
from torchfmri.exceptions import InspectionError

LEVELS = ("layer", "voxel", "head", "unit", "feature")
SIGNED = "signed"


@dataclass(frozen=True, eq=False)
class ValueSource:
    """Sequences that go into a table.

    Attributes:
        anatomy: Their layers and voxels.
        sequences: To be iterated over, several times.
        meta: How they were measured.
        label: The condition of all of them; None leaves it to each.
        folder: Where they are stored, or None.
        is_aligned: Whether tokens without a partner in another scan have no values, on purpose.
    """

    anatomy: Anatomy
    sequences: Sequence[ScannedSequence]
    meta: Mapping[str, Any]
    label: str | None = None
    folder: Path | None = None
    is_aligned: bool = False


@dataclass(frozen=True)
class Question:
    """The question that is asked of prompts: which values, of which tokens, grouped how.

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


def walk(sources: Sequence[ValueSource]) -> Iterator[tuple[ValueSource, ScannedSequence]]:
    """Yield the sequences of all sources, each with its source."""
    for source in sources:
        for sequence in source.sequences:
            yield source, sequence


def condition_of(sequence: ScannedSequence, by: str) -> str | None:
    """Return the condition of a prompt in the field `by`; None if it has none."""
    if by == "condition" and sequence.condition:
        return sequence.condition
    return label_of(sequence.fields.get(by))
