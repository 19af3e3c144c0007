"""Test the second level of a linear model: coefficients of prompts regressed on their fields.

`GLM.contrast` calls `fit`, and `Refit` does so again with shuffled prompts for `calibrate`. It is
ordinary least squares over prompts; `test_linear_model.py` compares it with statsmodels. A column
that lacks a value of any prompt is not tested, because the design would differ from column to
column. The code may change freely as long as that comparison holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from torchfmri._contrast.comparison import TestOptions, threshold
from torchfmri._contrast.distributions import Doubles, t_tail
from torchfmri._contrast.group_tests import Tested, hedges, outcome, tested_by_f
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True, eq=False)
class Level:
    """The second level of one coefficient of the first.

    Attributes:
        names: (k,) what the regressors are called.
        design: (n, k).
        values: (n, v) the coefficient of each prompt; nan where it could not be had.
    """

    names: tuple[str, ...]
    design: Doubles
    values: Doubles


@dataclass(frozen=True, eq=False)
class Refit:
    """A test of coefficients that can be made again of prompts that are exchanged.

    Attributes:
        level: What the coefficients are of.
        weights: (q, k) of the coefficients.
        options: How they are tested.
    """

    level: Level
    weights: Doubles
    options: TestOptions

    def calibrate(self, draws: int, seed: int) -> int:
        """Return in how many draws anything survives: a share of alpha, if the test is right.

        What is known of the prompts is exchanged among them. Where only their mean is tested, signs
        are flipped instead, because an exchange changes no mean.

        Raises:
            InspectionError: The mean is tested beside regressors.
        """
        random = np.random.default_rng(seed)
        design, values = self.level.design, self.level.values
        is_mean = bool(self.weights[:, np.ptp(design, 0) == 0].any())
        if is_mean and design.shape[1] > 1:
            raise InspectionError(
                "A mean beside other regressors cannot be calibrated: no exchange of prompts makes "
                "it 0. Calibrate the other terms."
            )
        found = 0
        for _ in range(draws):
            if is_mean:
                signs = random.choice([1.0, -1.0], size=(len(values), 1))
                null = replace(self.level, values=values * signs)
            else:
                null = replace(self.level, design=design[random.permutation(len(design))])
            p = fit(null, self.weights, self.options).p
            found += bool(threshold(p, None, self.options)[1].any())
        return found

    def differences(self) -> dict[str, Doubles]:
        """Raise: a linear model has none.

        Raises:
            InspectionError: Always.
        """
        raise InspectionError(
            "A linear model has no difference of mean vectors: scan.contrast(a, b) has one."
        )


def fit(level: Level, weights: Doubles, options: TestOptions) -> Tested:
    """Fit ordinary least squares over prompts, and test weights (q, k), for every column.

    Raises:
        InspectionError: There are no degrees of freedom, or the regressors follow from each other.
    """
    known = np.isfinite(level.values)
    rows = known.any(1)
    design, usable = level.design[rows], known[rows].all(0)
    n, k = design.shape
    _require_freedom(level.names, design)
    inverse = np.linalg.inv(design.T @ design)
    filled = np.where(usable, level.values[rows], 0.0)
    beta = inverse @ (design.T @ filled)
    residual = filled - design @ beta
    dof = float(n - k)
    variance = (residual**2).sum(0) / dof
    scale = np.abs(filled).max(0, initial=0.0)
    variance = np.where(usable & (np.sqrt(variance) > 1e-7 * scale), variance, np.nan)
    effects = weights @ beta
    spread = weights @ inverse @ weights.T
    number = np.where(usable, n, 0)
    if len(weights) > 1:
        explained = np.einsum("qv,qr,rv->v", effects, np.linalg.pinv(spread), effects)
        f = explained / len(weights) / variance
        return tested_by_f(number, np.abs(effects).max(0), f, len(weights), dof)
    t = effects[0] / np.sqrt(variance * spread[0, 0])
    freedoms, spreads = np.full(len(t), dof), np.full(len(t), spread[0, 0])
    deviation = np.sqrt(variance)
    sizes = hedges(effects[0], deviation, freedoms, spreads, options.alpha, 0.0)
    effect, nobody = np.where(usable, effects[0], np.nan), np.zeros_like(number)
    tail = partial(t_tail, two_sided=options.two_sided)
    return outcome(number, nobody, effect, sizes, t, dof, tail)


def _require_freedom(names: Sequence[str], design: Doubles) -> None:
    """Raise if a design (n, k) leaves nothing to test its coefficients with."""
    n, k = design.shape
    if np.linalg.matrix_rank(design) < k:
        raise InspectionError(
            f"The regressors {', '.join(names)} follow from each other over {n} prompts: leave one "
            "out, or scan prompts that tell them apart."
        )
    if n <= k:
        raise InspectionError(
            f"{n} prompts and {k} regressors: nothing is left to estimate the spread from. Scan "
            "more prompts, or leave regressors out."
        )
