"""Try whether the condition of a prompt can be read from a layer, for prompts not trained on.

`Scan.classify` calls `classify`; it is a second opinion beside `contrast`. A ridge probe is trained
on some prompts and tried on the others, of which nothing may be looked at: scaling is learnt from
the prompts for training, and the penalty is fixed in advance. Folds are drawn without regard to the
labels, so that shuffled labels go through exactly the same, or p would be too small. The table may
change freely; another probe would change results that people have published. Index letters: n
prompts, w features, m relabellings (the true labels first).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_number, from_extra
from torchfmri._contrast.comparison import ContrastTrial, labelled
from torchfmri._contrast.corrections import adjust_fdr
from torchfmri._contrast.distributions import Doubles
from torchfmri._contrast.permutations import relabel
from torchfmri._contrast.prompt_table import PromptTable
from torchfmri._contrast.remarks import about_copies, prompts_lacking
from torchfmri._contrast.weights import Definition
from torchfmri._text import Column, Grid, listed, number_text, plural
from torchfmri.exceptions import InspectionError

if TYPE_CHECKING:
    import pandas

_TIE = 1e-12


class LayerAccuracy(NamedTuple):
    """The accuracy of a probe on one layer, beside that with shuffled labels.

    Attributes:
        layer: Its name.
        features: What the probe saw: "signed" (the mean vector), or a metric of its voxels.
        width: How many features.
        accuracy: Over prompts not trained on, averaged over the two conditions; 0.5 is chance.
        null_mean: The mean of the same with shuffled labels.
        null_high: Its 95th percentile.
        p: The share of relabellings that are as accurate.
        p_max: The share in which any row is.
        q: p adjusted for the false discovery rate over all rows.

    Examples:
        >>> import torchfmri
        >>> torchfmri.LayerAccuracy._fields[:4]
        ('layer', 'features', 'width', 'accuracy')
    """

    layer: str
    features: str
    width: int
    accuracy: float
    null_mean: float
    null_high: float
    p: float
    p_max: float
    q: float


@dataclass(frozen=True, eq=False)
class Classification:
    """The result of cross-validated probes: which layers tell two conditions apart.

    Attributes:
        question: The conditions.
        rows: One per layer and kind of features, in model order.
        folds: How many parts the prompts were divided into.
        prompts: How many there are of each condition.
        permutations: How many relabellings were compared, the true one among them.
        tokens: Over which tokens the features are averaged.
        notes: What has to be known.

    Examples:
        >>> import torchfmri
        >>> found = torchfmri.Classification("a against b", (), 5, (4, 4), 1001, "the last token")
        >>> found.folds, found.prompts
        (5, (4, 4))
    """

    question: str
    rows: tuple[LayerAccuracy, ...]
    folds: int
    prompts: tuple[int, int]
    permutations: int
    tokens: str
    notes: tuple[str, ...] = ()

    def table(self, number: int = 20, width: int | None = None) -> str:
        """Return the most accurate rows as text.

        Args:
            number: How many.
            width: In characters; that of the terminal by default.
        """
        best = sorted(self.rows, key=lambda row: -row.accuracy)[:number]
        columns = [
            Column("features", [row.features for row in best], 5, right=False),
            Column("accuracy", [f"{row.accuracy:.3f}" for row in best], 9),
            Column("null 95%", [f"{row.null_high:.3f}" for row in best], 4),
            Column("p", [number_text(row.p) for row in best], 6),
            Column("p_max", [number_text(row.p_max) for row in best], 7),
            Column("q", [number_text(row.q) for row in best], 8),
        ]
        return Grid(
            repr(self)[1:-1], "layer", [row.layer for row in best], columns, self.notes
        ).text(width)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return all rows. Needs pandas.

        Raises:
            InspectionError: pandas is not installed.
        """
        with from_extra("A DataFrame needs pandas", "tables"):
            import pandas
        return pandas.DataFrame([row._asdict() for row in self.rows])

    def __repr__(self) -> str:
        counts = " and ".join(map(str, self.prompts))
        return (
            f"<Classification: {self.question}; {counts} prompts, {self.folds} folds, ridge probe, "
            f"{plural(self.permutations, 'relabelling')}; {self.tokens}>"
        )


def classify(
    tables: list[PromptTable],
    contrast: Definition,
    *,
    is_paired: bool,
    folds: int,
    permutations: int,
    seed: int,
) -> Classification:
    """Train and try a probe for every layer of the tables, which have the same prompts.

    Raises:
        InspectionError: There are too few prompts.
    """
    check_number("folds", folds, 2, "how many parts, such as 5")
    check_number("permutations", permutations, 1, "how many relabellings, such as 1000")
    random = np.random.default_rng(seed)
    trials = [labelled(table, contrast, is_paired=is_paired) for table in tables]
    conditions, labels = trials[0].conditions, trials[0].labels
    blocks = np.arange(len(labels)) % (len(labels) // 2) if is_paired else np.arange(len(labels))
    count = len(np.unique(blocks))
    if count < folds or np.bincount(labels).min() < 2:
        raise InspectionError(
            f"{plural(count, 'pair' if is_paired else 'prompt')} cannot be divided into {folds} "
            "folds with both conditions to learn from. Choose fewer folds, or scan more prompts."
        )
    fold = _folds(blocks, folds, random)
    drawn = _relabellings(labels, is_paired, permutations, random)
    found, null = [], []
    for layer, metric, values in _values_by_layer(trials):
        found.append((layer, metric, values.shape[1]))
        null.append(accuracies(values, drawn, fold))
    if not null:
        raise InspectionError(
            "No layer has values of every prompt: there is nothing to learn from. Choose other "
            "tokens= or layers=."
        )
    rows = _rows(found, np.stack(null))
    question = f"{conditions[0]} against {conditions[1]}"
    counts = (int((labels == 0).sum()), int((labels == 1).sum()))
    return Classification(
        question=question,
        rows=rows,
        folds=folds,
        prompts=counts,
        permutations=len(drawn),
        tokens=trials[0].table.tokens,
        notes=_notes([trial.table for trial in trials], conditions),
    )


def _values_by_layer(trials: Sequence[ContrastTrial]) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Yield a layer, a metric and (prompts, columns): the columns that every prompt has."""
    for trial in trials:
        layers = trial.table.columns.layer
        known = np.isfinite(trial.table.values).all(0)
        for layer in dict.fromkeys(layers.tolist()):
            values = np.asarray(trial.table.values[:, (layers == layer) & known], np.float64)
            if values.shape[1]:
                yield layer, trial.table.metric, values


def _notes(tables: list[PromptTable], conditions: list[str]) -> tuple[str, ...]:
    """Return what has to be known of the features, each note once."""
    said = about_copies(tables[0], conditions)
    for table in tables:
        said += [*_about_gaps(table), *table.notes]
    return tuple(dict.fromkeys(said))


def _about_gaps(table: PromptTable) -> list[str]:
    """Say which features a probe cannot use, because some prompts lack them."""
    finite = np.isfinite(table.values)
    known = finite.all(0)
    if known.all():
        return []
    lacking = ~known & finite.any(0)
    prompts = f" ({listed(prompts_lacking(table, lacking))})" if lacking.any() else ""
    shown = listed(list(dict.fromkeys(table.columns.layer[~known].tolist())))
    count = f"{int((~known).sum()):,} of {len(known):,} features ({table.metric})"
    return [f"{count} lack finite values for some prompts{prompts} and are left out: {shown}"]


def _folds(blocks: NDArray[np.int64], folds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return (n,) the fold of each prompt; those of one block stay together."""
    names = np.unique(blocks)
    place = random.permutation(len(names)) % folds
    found: NDArray[np.int64] = place[np.searchsorted(names, blocks)]
    return found


def _relabellings(
    labels: NDArray[np.int64], is_paired: bool, number: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return (m, n) labels, the true ones first; of pairs the two are exchanged."""
    if not is_paired:
        return relabel(labels, number, random)[0]
    half = len(labels) // 2
    first = (random.random((number, half)) < 0.5).astype(np.int64)
    return np.concatenate([labels[None], np.concatenate([first, 1 - first], 1)])


def accuracies(
    values: Doubles, labels: NDArray[np.int64], fold: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return (m,) the cross-validated accuracy with each labelling, the mean of both conditions.

    The prediction of a ridge probe is linear in the labels, so one matrix (n, n) serves them all.
    """
    n = len(values)
    readout = np.zeros((n, n))
    for part in np.unique(fold):
        test, train = np.flatnonzero(fold == part), np.flatnonzero(fold != part)
        mean, spread = values[train].mean(0), values[train].std(0)
        scaled = (values - mean) / np.where(spread > _TIE * np.abs(mean), spread, np.inf)
        gram = scaled @ scaled[train].T / max(values.shape[1], 1)
        inner = gram[train] + np.eye(len(train))  # the mean of the diagonal is 1: so is the penalty
        centring = np.eye(len(train)) - 1 / len(train)
        readout[np.ix_(test, train)] = np.linalg.solve(inner, gram[test].T).T @ centring
    signs = 1.0 - 2.0 * labels  # the first condition is +1
    score = signs @ readout.T
    right = np.where(np.abs(score) <= _TIE, 0.5, (score > 0) == (signs > 0))
    first = labels == 0
    found: Doubles = (
        (right * first).sum(1) / first.sum(1) + (right * ~first).sum(1) / (~first).sum(1)
    ) / 2
    return found


def _rows(found: list[tuple[Any, ...]], null: Doubles) -> tuple[LayerAccuracy, ...]:
    """Return the rows of (layer, features, width) and accuracies (row, m)."""
    seen = null[:, :1] - 1e-9
    p = (null >= seen).mean(1)
    p_max = (null.max(0)[None] >= seen).mean(1)
    numbers = {  # in the order of the fields
        "accuracy": null[:, 0],
        "null_mean": null[:, 1:].mean(1),
        "null_high": np.quantile(null[:, 1:], 0.95, axis=1),
        "p": p,
        "p_max": p_max,
        "q": adjust_fdr(p),
    }
    return tuple(
        LayerAccuracy._make([*place, *(float(each[row]) for each in numbers.values())])
        for row, place in enumerate(found)
    )
