"""Adjust p-values for many tests at once.

`comparison.threshold` and `ContrastBoard` use these functions. nan marks a column that was not
tested: it stays nan and does not count as a test. The results are compared with statsmodels in
`test_contrast.py`. A new way to adjust also needs its name in `HEIGHT_CONTROLS`.
"""

from __future__ import annotations

import numpy as np

from torchfmri._contrast.distributions import Doubles

HEIGHT_CONTROLS = ("fdr", "bonferroni", "max", "fpr", None)
"""nilearn's words: the false discovery rate (Benjamini and Hochberg), the family-wise error by
Bonferroni or by the permutation distribution of the largest statistic, no correction, no test."""


def adjust_fdr(p: Doubles) -> Doubles:
    """Return Benjamini and Hochberg's q of each p; nan marks what was not tested and stays nan.

    Examples:
        >>> adjust_fdr(np.array([0.01, 0.04, np.nan, 0.03])).round(4).tolist()
        [0.03, 0.04, nan, 0.04]
    """
    found = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    if not len(tested):
        return found
    order = tested[np.argsort(p[tested], kind="stable")]
    scaled = p[order] * len(order) / np.arange(1, len(order) + 1)
    found[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    return found


def adjust_bonferroni(p: Doubles) -> Doubles:
    """Return each p times the number of tests, at most 1; nan stays nan."""
    found: Doubles = np.minimum(p * np.count_nonzero(~np.isnan(p)), 1.0)
    return found
