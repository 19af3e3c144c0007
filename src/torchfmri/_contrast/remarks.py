"""What has to be said about a contrast: power, lengths, columns that were not tested."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from torchfmri._contrast.distributions import normal_quantile, t_quantile, t_tail
from torchfmri._contrast.group_tests import Tested
from torchfmri._contrast.permutations import Permuted
from torchfmri._contrast.prompt_table import PromptTable
from torchfmri._text import plural

FEW = 5
"""Fewer prompts in a group than this are called few."""
_POWER = 0.8


def detectable(n_a: int, n_b: int, alpha: float, *, is_paired: bool = False) -> float:
    """The smallest g that a two-sided test finds in four of five experiments; nan for one prompt.

    Example:
        >>> round(detectable(20, 20, 0.05), 2)
        0.91
    """
    dof = n_a - 1 if is_paired else n_a + n_b - 2
    if dof < 1 or min(n_a, n_b) < 2:
        return math.nan
    spread = 1 / n_a if is_paired else 1 / n_a + 1 / n_b
    return (t_quantile(1 - alpha / 2, dof) + normal_quantile(_POWER)) * math.sqrt(spread)


def remarks_of(
    table: PromptTable,
    conditions: Sequence[str],
    tested: Tested,
    permuted: Permuted | None,
    alpha: float,
    is_paired: bool,
) -> list[str]:
    """The notes of a contrast, the most important first."""
    groups = table.groups.astype(str)
    counts = {condition: int((groups == condition).sum()) for condition in conditions}
    return [
        *_about_copies(table, conditions),
        *_about_power(counts, len(table.columns), alpha, is_paired),
        *_about_permutations(permuted, alpha),
        *_about_lengths(table, conditions),
        *_about_columns(table, tested, permuted),
        *table.notes,
    ]


def _about_copies(table: PromptTable, conditions: Sequence[str]) -> list[str]:
    """Prompts that are copies of each other count as one, and the tests do not know that."""
    groups = table.groups.astype(str)
    said = []
    for condition in conditions:
        rows = table.values[groups == condition]
        different = len({np.ascontiguousarray(row).tobytes() for row in rows})
        if different < len(rows):
            said.append(f"{different} of {len(rows)} prompts of {condition!r}")
    if not said:
        return []
    text = f"not independent: only {' and '.join(said)} differ, the others are copies"
    return [f"{text}. Copies make everything look certain: leave them out"]


def _about_power(counts: dict[str, int], tests: int, alpha: float, is_paired: bool) -> list[str]:
    single = [condition for condition, count in counts.items() if count < 2]
    if single:
        said = (
            f"effects only, no p-values: {' and '.join(map(repr, single))} has one prompt, and one "
            "prompt does not say how much prompts of its kind differ among themselves"
        )
        return [said]
    first, *others = counts.values()
    alone, corrected = (
        detectable(first, min(others), each, is_paired=is_paired)
        for each in (alpha, alpha / max(tests, 1))
    )
    least = min(counts.values())
    said = (
        f"effects of g = {alone:.2f} are found in four of five experiments by a single test, of "
        f"g = {corrected:.2f} after Bonferroni for {plural(tests, 'test')}"
    )
    if least < FEW:
        few = f"little power: with {plural(least, 'prompt')} in a group, only "
        return [f"{few}{said}; nothing found does not mean nothing there"]
    return [f"power: {said}"]


def _about_permutations(permuted: Permuted | None, alpha: float) -> list[str]:
    if permuted is None or not permuted.number:
        return []
    least = 1 / permuted.number
    which = "all" if permuted.exact else "drawn at random, the true one among them"
    said = [f"{plural(permuted.number, 'relabelling')} ({which}): no p is below {least:.2g}"]
    if least > alpha:
        said.append(
            f"nothing can survive at alpha = {alpha:g}: there are only {permuted.number} ways to "
            "label these prompts. Scan more prompts."
        )
    return said


def _about_lengths(table: PromptTable, conditions: Sequence[str]) -> list[str]:
    """A mean over tokens depends on how many there are, if the first ones are special."""
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


def _about_columns(table: PromptTable, tested: Tested, permuted: Permuted | None) -> list[str]:
    total = tested.n_a + tested.n_b
    known = int(total.max(initial=0))
    none = total == 0
    partly = (total > 0) & (total < known)
    constant = ~none & np.isnan(tested.t) & (total == known) & (known > 2)
    said = []
    for what, which in (
        ("have no value and are not tested", none),
        ("lack finite values for some prompts, which are left out there", partly),
        ("do not vary within the conditions: an effect, but no test", constant),
    ):
        if which.any():
            shown = ", ".join(table.columns[np.flatnonzero(which)[:2]].names)
            said.append(f"{int(which.sum()):,} of {len(which):,} columns {what}: {shown}, ...")
    if permuted is not None and partly.any():
        said.append("columns that lack values have no p-value by relabelling")
    return said
