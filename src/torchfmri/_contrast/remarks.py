"""The notes of a contrast: its power, copies of prompts, lengths, columns that were not tested.

`compare` calls `remarks_of`, and `classify` uses some of the notes. They answer what a reviewer
would ask, so a condition under which a result misleads belongs here. Wording may change freely;
each note states the number that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast.distributions import t_power, t_tail
from torchfmri._contrast.group_tests import Tested
from torchfmri._contrast.permutations import Permuted
from torchfmri._contrast.prompt_table import PromptTable
from torchfmri._text import listed, plural

if TYPE_CHECKING:
    from torchfmri._contrast.comparison import ContrastTrial

FEW = 5
"""Fewer prompts in a group than this are called few."""
_POWER = 0.8
WARNINGS = ("not independent", "little power", "effects only", "nothing can survive")
"""How notes begin without which a result misleads; the viewer shows them as findings."""


@lru_cache(maxsize=256)  # a search with noncentral t: it would take longer than the test itself
def detectable(
    n_a: int, n_b: int, alpha: float, *, is_paired: bool = False, two_sided: bool = True
) -> float:
    """Return the smallest g that is found in four of five experiments; nan for one prompt.

    Examples:
        >>> round(detectable(20, 20, 0.05), 2)
        0.91
    """
    dof = n_a - 1 if is_paired else n_a + n_b - 2
    if dof < 1 or min(n_a, n_b) < 2:
        return math.nan
    low, high = 0.0, 1.0
    while t_power(high, dof, alpha, two_sided=two_sided) < _POWER:
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        enough = t_power(middle, dof, alpha, two_sided=two_sided) >= _POWER
        low, high = (low, middle) if enough else (middle, high)
    return high * math.sqrt(1 / n_a if is_paired else 1 / n_a + 1 / n_b)


def remarks_of(trial: ContrastTrial, tested: Tested, permuted: Permuted | None) -> list[str]:
    """Return the notes of a contrast, the most important first."""
    table, conditions, alpha = trial.table, trial.conditions, trial.options.alpha
    counts = _prompts_that_count(trial)
    return [
        *about_copies(table, conditions),
        *_about_power(trial, counts, int((~np.isnan(tested.p)).sum())),
        *_about_permutations(permuted, alpha),
        *_about_lengths(table, conditions),
        *_about_columns(table, tested, permuted, few=min(counts.values()) < 2),
        *table.notes,
    ]


def _prompts_that_count(trial: ContrastTrial) -> dict[str, int]:
    """Return condition -> how many of its prompts have a chosen token, of pairs: both of them."""
    chosen = trial.table.counts > 0
    if trial.is_paired:
        first, second = np.split(chosen, 2)
        chosen = np.tile(first & second, 2)
    groups = trial.table.groups.astype(str)
    return {each: int((chosen & (groups == each)).sum()) for each in trial.conditions}


def about_copies(table: PromptTable, conditions: Sequence[str]) -> list[str]:
    """Note prompts that are copies of each other: the tests take them for independent ones."""
    groups = table.groups.astype(str)
    said = []
    for condition in conditions:
        rows = np.flatnonzero((groups == condition) & (table.counts > 0))
        texts = table.texts if len(table.texts) else np.zeros(len(groups), bool)
        different = len({(texts[row], table.values[row].tobytes()) for row in rows.tolist()})
        if different < len(rows):
            said.append(f"{different} of {len(rows)} prompts of {condition!r}")
    if not said:
        return []
    text = f"not independent: only {' and '.join(said)} differ, the others are copies"
    return [f"{text}. Copies make everything look certain: leave them out"]


def _about_power(trial: ContrastTrial, counts: dict[str, int], tests: int) -> list[str]:
    single = [condition for condition, count in counts.items() if count < 2]
    if single:
        most = max(counts[condition] for condition in single)
        said = (
            f"effects only, no p-values: {' and '.join(map(repr, single))} "
            f"{'has' if len(single) == 1 else 'have'} "
            f"{'one prompt' if most else 'no prompt with a chosen token'}, and one "
            "prompt does not say how much prompts of its kind differ among themselves"
        )
        return [said]
    if not tests:  # the note on columns says why
        return []
    first, *others = counts.values()
    alpha = trial.options.alpha
    two_sided = trial.options.two_sided or trial.dof_num is not None
    alone, corrected = (
        detectable(first, min(others), each, is_paired=trial.is_paired, two_sided=two_sided)
        for each in (alpha, alpha / max(tests, 1))
    )
    least = min(counts.values())
    between = "between two of these conditions, " if len(counts) > 2 else ""
    said = (
        f"{between}effects of g = {alone:.2f} are found in four of five experiments by a single "
        f"test, of g = {corrected:.2f} after Bonferroni for {plural(tests, 'test')}"
    )
    if least < FEW:
        few = f"little power: with {plural(least, 'prompt')} in a group, only "
        return [f"{few}{said}; nothing found does not mean nothing there"]
    return [f"power: {said}"]


def _about_permutations(permuted: Permuted | None, alpha: float) -> list[str]:
    if permuted is None or not permuted.number:
        return []
    which = "all" if permuted.exact else "drawn at random, the true one among them"
    said = [
        f"{plural(permuted.number, 'relabelling')} ({which}): no p is below {permuted.least:.2g}"
    ]
    if permuted.least > alpha:
        said.append(
            f"nothing can survive at alpha = {alpha:g}: there are only {permuted.number} ways to "
            "label these prompts. Scan more prompts."
        )
    return said


def _about_lengths(table: PromptTable, conditions: Sequence[str]) -> list[str]:
    """Note conditions whose prompts differ in length: a mean over tokens would show that too."""
    groups = table.groups.astype(str)
    own = [table.counts[groups == condition].astype(float) for condition in conditions]
    empty = int((table.counts == 0).sum())
    said = [f"{plural(empty, 'prompt')} without a chosen token"] if empty else []
    if min(map(len, own)) < 2 or max(each.max(initial=0) for each in own) <= 1:
        return said
    means = [each.mean() for each in own]
    low, high = own[int(np.argmin(means))], own[int(np.argmax(means))]
    spread = low.var(ddof=1) / len(low) + high.var(ddof=1) / len(high)
    gap = high.mean() - low.mean()
    differs = gap > 0 and (
        spread == 0 or float(t_tail(gap / math.sqrt(spread), len(low) + len(high) - 2)) < 0.01
    )
    if differs:
        said.append(
            f"the conditions differ in length: {', '.join(f'{mean:.1f}' for mean in means)} tokens "
            "on average. Early tokens are unlike later ones, so a mean over tokens also shows "
            "length; compare one token (tokens='last'), or prompts of one length"
        )
    return said


def prompts_lacking(table: PromptTable, columns: NDArray[np.bool_]) -> list[str]:
    """Return the names of the prompts with chosen tokens that lack a value in these columns."""
    lacks = ~np.isfinite(table.values[:, columns]).all(1) & (table.counts > 0)
    return [table.names[row] for row in np.flatnonzero(lacks).tolist()]


def _about_columns(
    table: PromptTable, tested: Tested, permuted: Permuted | None, *, few: bool
) -> list[str]:
    """Note columns not tested, or over fewer prompts; `few` says that none could be tested."""
    total = tested.n_a + tested.n_b
    known = int(total.max(initial=0))
    untested = np.isnan(tested.statistic)
    none = total == 0
    partly = (total > 0) & (total < known)
    constant = ~none & untested & (total == known) & (not few)
    said = []
    for what, which in (
        ("have no value and are not tested", none),
        ("lack finite values for too many prompts and are not tested", partly & untested),
        ("lack finite values for some prompts, which are left out there", partly & ~untested),
        ("do not vary within the conditions: an effect, but no test", constant),
    ):
        if which.any():
            where = np.flatnonzero(which)
            shown = ", ".join(table.columns[where[:2]].names) + ", ..." * (len(where) > 2)
            lacking = prompts_lacking(table, which) if (which & partly).any() else []
            prompts = f" ({listed(lacking)})" if lacking else ""
            said.append(f"{len(where):,} of {len(which):,} columns {what}{prompts}: {shown}")
    if permuted is not None and partly.any():
        said.append("columns that lack values have no p-value by relabelling")
    return said
