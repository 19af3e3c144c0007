"""Compute a contrast: the groups of a table compared over prompts, for many columns at once.

`Scan.contrast` and `torchfmri.contrast` make a `PromptTable` and call `compare`. `ContrastTrial` is
the whole path from labels to what survives; `calibrate` runs it again with shuffled labels, so
every step that decides something must be inside `decide`. The words of the options are nilearn's
and are public. Columns are worked on in blocks, because a table may be larger than memory. A new
test is a function in `group_tests` and a branch of `_test`; how columns are cut into blocks may
change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_flag, check_number, require
from torchfmri._contrast.corrections import HEIGHT_CONTROLS, adjust_bonferroni, adjust_fdr
from torchfmri._contrast.distributions import Doubles
from torchfmri._contrast.group_tests import Tested, f_test, paired, rounding_of, welch
from torchfmri._contrast.permutations import (
    Permuted,
    f_statistic,
    flip,
    paired_statistic,
    permute,
    relabel,
    welch_statistic,
)
from torchfmri._contrast.prompt_table import MEASURED, PromptTable, blocks
from torchfmri._contrast.record import Contrast
from torchfmri._contrast.remarks import remarks_of
from torchfmri._contrast.weights import Definition, read_weights, words
from torchfmri._text import listed
from torchfmri.exceptions import InspectionError

TESTS = ("t", "permutation")
JUDGED = ("alpha", "height_control", "two_sided")
"""The options that a contrast keeps."""
_PERMUTATIONS = 1_000


@dataclass(frozen=True)
class TestOptions:
    """The options of a contrast's test, in nilearn's words.

    Attributes:
        alpha: The threshold.
        height_control: What it bounds: "fdr", "bonferroni", "max", "fpr" or None.
        two_sided: Whether the other direction counts.
        test: Where p comes from: "t" (Welch, or paired), or "permutation".
        permutations: How many relabellings; None takes 1,000 if they are needed.
        seed: The seed of the relabellings.
    """

    __test__ = False  # no test of pytest's

    alpha: float = 0.05
    height_control: str | None = "fdr"
    two_sided: bool = True
    test: str = "t"
    permutations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        require(number and 0 < self.alpha < 1, "alpha", self.alpha, "give a share, such as 0.05")
        meaning = f"choose one of {', '.join(map(repr, HEIGHT_CONTROLS))}"
        known = self.height_control in HEIGHT_CONTROLS
        require(known, "height_control", self.height_control, meaning)
        require(self.test in TESTS, "test", self.test, "choose 't' or 'permutation'")
        check_flag("two_sided", self.two_sided)
        check_number("seed", self.seed, 0, "give a whole number from 0 upwards")
        if self.permutations is not None:
            meaning = "how many relabellings, such as 1000; 0 for none"
            check_number("permutations", self.permutations, 0, meaning)
        if self.permutations == 0:
            needs = self.test == "permutation" or self.height_control == "max"
            require(not needs, "permutations", 0, "this test is made of relabellings; give 1000")

    @property
    def relabellings(self) -> int:
        """The number of relabellings that are drawn."""
        if self.permutations is not None:
            return self.permutations
        needed = self.test == "permutation" or self.height_control == "max"
        return _PERMUTATIONS if needed else 0


def compare(
    table: PromptTable,
    contrast: Definition,
    *,
    is_paired: bool = False,
    options: TestOptions | None = None,
) -> Contrast:
    """Test a contrast of a table's groups; nan marks what could not be tested.

    Args:
        table: A row for each prompt.
        contrast: Weights of its groups, as a text or a mapping; a list of these for an F-test.
        is_paired: Whether the table's `pairs` are compared within.
        options: How to test.

    Raises:
        InspectionError: The contrast names no groups of the table, or nothing can be paired.
    """
    options = options or TestOptions()
    trial = replace(labelled(table, contrast, is_paired=is_paired), options=options)
    table, conditions, weights = trial.table, trial.conditions, trial.weights
    tested, permuted, p, q, survives = trial.decide()
    questions = [words(row, conditions) for row in weights]
    return Contrast(
        question="; ".join(questions),
        conditions=tuple(conditions),
        weights=weights,
        test=trial.name,
        **{name: getattr(options, name) for name in JUDGED},
        **{name: getattr(table, name) for name in MEASURED},
        prompts={
            condition: tuple(np.array(table.names, object)[table.groups.astype(str) == condition])
            for condition in conditions
        },
        **vars(replace(tested, p=p)),
        dof_num=trial.dof_num,
        q=q,
        p_max=None if permuted is None else permuted.p_max,
        survives=survives,
        permutations=0 if permuted is None else permuted.number,
        notes=tuple(remarks_of(trial, tested, permuted)),
        trial=trial,
        scans=table.scans,
    )


def labelled(table: PromptTable, contrast: Definition, *, is_paired: bool) -> ContrastTrial:
    """Return the prompts of a contrast with the number of their group, ready to be tested.

    Raises:
        InspectionError: The contrast names no groups of the table, or nothing can be paired.
    """
    conditions = list(dict.fromkeys(str(each) for each in table.groups))
    if len(conditions) < 2:
        raise InspectionError(
            f"All {len(table.names)} prompts are of one condition, {conditions[0]!r}: there is "
            "nothing to compare it with. Choose the field that tells them apart (by=, --by)."
            if conditions
            else "There are no prompts to compare."
        )
    weights = read_weights(contrast, conditions)
    used = [k for k in range(len(conditions)) if weights[:, k].any()]
    used.sort(key=lambda k: weights[0, k] <= 0)  # what is compared first, then with what
    conditions, weights = [conditions[k] for k in used], weights[:, used]
    rows = np.flatnonzero(np.isin(table.groups.astype(str), conditions))
    table = table.rows(rows) if len(rows) < len(table.names) else table
    if is_paired:
        table = _matched(table, conditions)
    number = {condition: k for k, condition in enumerate(conditions)}
    labels = np.array([number[str(each)] for each in table.groups], dtype=np.int64)
    return ContrastTrial(
        table=table,
        conditions=conditions,
        labels=labels,
        weights=weights,
        options=TestOptions(),
        is_paired=is_paired,
    )


def _matched(table: PromptTable, conditions: Sequence[str]) -> PromptTable:
    """Return the prompts that have a partner, ordered as the first condition's; note others."""
    if len(conditions) != 2:
        raise InspectionError(
            f"Pairs are of two conditions, and the contrast has {len(conditions)}: "
            f"{', '.join(map(repr, conditions))}. Leave paired= out, or compare two of them."
        )
    if table.pairs is None:
        raise InspectionError(
            "Nothing says which prompts are pairs: name a field, paired='pair_id'."
        )
    sides: list[dict[str, int]] = []
    has_pair = np.array([each is not None for each in table.pairs], bool)
    for condition in conditions:
        side: dict[str, int] = {}
        for row in np.flatnonzero((table.groups.astype(str) == condition) & has_pair):
            key = str(table.pairs[row])
            if key in side:
                names = f"{table.names[side[key]]!r} and {table.names[int(row)]!r}"
                raise InspectionError(
                    f"{names} are both {condition!r} in pair {key!r}: a pair has one prompt of "
                    "each condition. Name another field, or leave paired= out."
                )
            side[key] = int(row)
        sides.append(side)
    shared = [key for key in sides[0] if key in sides[1]]
    alone = [table.names[row] for side in sides for key, row in side.items() if key not in shared]
    alone += [name for name, has in zip(table.names, has_pair, strict=True) if not has]
    if not shared:
        raise InspectionError(
            f"No prompt of {conditions[0]!r} has a partner in {conditions[1]!r}: their pairs are "
            f"{' and '.join(', '.join(list(side)[:3]) or 'none' for side in sides)}. Name another "
            "field, or leave paired= out."
        )
    found = table.rows(np.array([side[key] for side in sides for key in shared]))
    if alone:
        found.notes.append(f"{len(alone)} prompts without a partner are left out: {listed(alone)}")
    return found


@dataclass(eq=False)
class ContrastTrial:
    """A test that can be run again with other labels.

    Attributes:
        table: The prompts; of pairs, those of the first condition, then their partners.
        conditions: What is compared.
        labels: (n,) the group of each prompt.
        weights: (q, k).
        options: How to test.
        is_paired: Whether the second half are the partners of the first.
        dof_num: The degrees of freedom of the numerator, of an F-test.
    """

    table: PromptTable
    conditions: list[str]
    labels: NDArray[np.int64]
    weights: Doubles
    options: TestOptions
    is_paired: bool
    dof_num: int | None = None

    @property
    def name(self) -> str:
        """The name of the test, such as "paired t"."""
        name = "F" if len(self.weights) > 1 else "paired t" if self.is_paired else "Welch t"
        return f"permutation {name}" if self.options.test == "permutation" else name

    def run(self) -> tuple[Tested, Permuted | None]:
        """Test the table with these labels."""
        counts = np.bincount(self.labels, minlength=self.weights.shape[1])
        values = self._values()
        rounding = self._rounding()
        tested = _joined(
            [
                self._test(values[:, part], None if rounding is None else rounding[part])
                for part in blocks(values)
            ]
        )
        if counts.min() < 2:  # one prompt has no spread, so nothing can be tested
            nothing = np.full(len(tested.p), np.nan)
            return replace(tested, statistic=nothing, dof=nothing, p=nothing), None
        number = self.options.relabellings
        return tested, self._permute(values, tested, number) if number else None

    def _values(self) -> NDArray[np.floating]:
        """Return (n, v), or the weighted differences of pairs; exchanged labels turn pairs."""
        if not self.is_paired:
            return self.table.values
        half = len(self.labels) // 2
        signs: Doubles = self.weights[0][self.labels[:half]][:, None]
        first, second = self.table.values[:half], self.table.values[half:]
        found: Doubles = signs * (np.asarray(first, np.float64) - second)
        return found

    def _rounding(self) -> Doubles | None:
        """Return (v,) how much rounding may change values; None leaves it to the groups' means.

        The difference of a pair is rounded as its two values are. A unit near 0 is rounded as the
        units of its layer are that it was computed with.
        """
        if not self.is_paired and self.table.level != "unit":
            return None
        size = np.zeros(self.table.values.shape[1])
        for part in blocks(self.table.values):
            values = np.abs(np.asarray(self.table.values[:, part], np.float64))
            known = np.isfinite(values)
            total = np.where(known, values, 0.0).sum(0)
            size[part] = total / np.maximum(known.sum(0), 1)
        if self.table.level == "unit":
            _, layer = np.unique(self.table.columns.layer.astype(str), return_inverse=True)
            mean = np.bincount(layer, size) / np.bincount(layer)
            size = np.maximum(size, mean[layer])
        return rounding_of(size * np.abs(self.weights).max())

    def _test(self, values: NDArray[np.floating], rounding: Doubles | None) -> Tested:
        alpha, two_sided = self.options.alpha, self.options.two_sided
        if self.is_paired:
            return paired(values, alpha=alpha, two_sided=two_sided, rounding=rounding)
        members = self.labels == np.arange(self.weights.shape[1])[:, None]
        if len(self.weights) > 1:
            found, self.dof_num = f_test(values, members, self.weights, rounding)
            return found
        return welch(
            values, members, self.weights[0], alpha=alpha, two_sided=two_sided, rounding=rounding
        )

    def _permute(self, values: NDArray[np.floating], tested: Tested, number: int) -> Permuted:
        random = np.random.default_rng(self.options.seed)
        if self.is_paired:
            signs, exact = flip(len(values), number, random)
            statistic, count = paired_statistic(signs), len(signs)
        else:
            drawn, exact = relabel(self.labels, number, random)
            statistic, count = welch_statistic(drawn, self.weights[0]), len(drawn)
            if self.dof_num is not None:  # F: what is explained over what is left orders as F does
                statistic = f_statistic(drawn, self.weights)
        two_sided = self.options.two_sided or self.dof_num is not None
        # Exchanging all labels of groups of one size, or of all pairs, gives -t.
        sizes = np.bincount(self.labels)
        return permute(
            values,
            ~np.isnan(tested.statistic),
            statistic,
            relabellings=count,
            exact=exact,
            two_sided=two_sided,
            mirrored=len(sizes) == 2 and sizes[0] == sizes[1],
        )

    def differences(self) -> dict[str, Doubles]:
        """Return layer -> (w,) the weighted sum of the groups' mean vectors.

        Raises:
            InspectionError: There are none; the message says why.
        """
        if self.table.vectors is None:
            raise InspectionError(
                "There are no mean vectors in what was compared. Scan the prompts as a dataset, "
                "with ScanOptions(vectors=...)."
            )
        groups = dict(zip(self.table.places.tolist(), self.labels.tolist(), strict=True))
        found = self.table.vectors(groups, self.weights.shape[1])
        return {layer: self.weights[0] @ means for layer, means in found.items()}

    def decide(self) -> tuple[Tested, Permuted | None, Doubles, Doubles, NDArray[np.bool_]]:
        """Return what was found, p, q, and what survives."""
        tested, permuted = self.run()
        use = self.options.test == "permutation" and permuted is not None
        p = permuted.p if use and permuted is not None else tested.p
        return (tested, permuted, p, *threshold(p, permuted, self.options))

    def calibrate(self, draws: int, seed: int) -> int:
        """Return in how many relabellings anything survives: a share of alpha, if all is right."""
        random = np.random.default_rng(seed)
        half = len(self.labels) // 2
        found = 0
        for draw in range(draws):
            if self.is_paired:
                first = np.where(random.random(half) < 0.5, 1, 0)
                labels = np.concatenate([first, 1 - first])
            else:
                labels = random.permutation(self.labels)
            options = replace(self.options, seed=seed + draw + 1)
            trial = replace(self, labels=labels, options=options)
            found += bool(trial.decide()[-1].any())
        return found


def _joined(parts: Sequence[Tested]) -> Tested:
    names = Tested.__dataclass_fields__
    return Tested(
        **{name: np.concatenate([getattr(each, name) for each in parts]) for name in names}
    )


def threshold(
    p: Doubles, permuted: Permuted | None, options: TestOptions
) -> tuple[Doubles, NDArray[np.bool_]]:
    """Return the adjusted p-values, and what survives."""
    control = options.height_control
    if control == "max":
        q = np.full(p.shape, np.nan) if permuted is None else permuted.p_max
    else:
        q = adjust_bonferroni(p) if control == "bonferroni" else adjust_fdr(p)
        q = p.copy() if control == "fpr" else q
    with np.errstate(invalid="ignore"):
        survives: NDArray[np.bool_] = q <= options.alpha
    return q, survives if control is not None else np.zeros(p.shape, bool)
