"""A general linear model in two levels, as fMRI does it: tokens within a prompt, then prompts.

At the first level each prompt has a regression of its own, over its tokens; only its coefficients
go on. At the second level these are regressed on what is known of the prompts. So the unit of
replication is the prompt, and tokens that resemble their neighbours do no harm.
Index letters: n prompts, v columns, k regressors, q contrasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast.comparison import TestOptions, threshold
from torchfmri._contrast.distributions import Doubles, f_tail, t_tail
from torchfmri._contrast.group_tests import hedges
from torchfmri._contrast.prompt_table import Columns
from torchfmri._contrast.record import Contrast
from torchfmri._contrast.weights import Definition, read_terms, words
from torchfmri._text import Column as TextColumn
from torchfmri._text import Grid, plural
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import axes_or_new, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
class GLM:
    """A fitted linear model of a scan; `contrast` tests its coefficients.

    Attributes:
        formula: As it was given.
        levels: First-level coefficient -> its second level; "" is the mean of a prompt, adjusted
            for the regressors of tokens.
        columns: What was measured.
        prompts: The names of the prompts.
        metric: What the values are.
        level: "layer", "voxel" or "head".
        tokens: Which tokens count, in words.
        model: Whose values they are.
        notes: What has to be known.

    Example:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> rows = [{"prompt": f"{n} {w}", "condition": w} for w in ("is", "was") for n in "ABC"]
        >>> options = torchfmri.ScanOptions(per=None, layers="*.mlp")
        >>> done = torchfmri.scan_dataset(model, tokenizer, rows, "g.fmri", 1, options=options)
        >>> torchfmri.load("g.fmri").glm("condition").terms
        ('Intercept', 'condition[T.was]')
    """

    formula: str
    levels: Mapping[str, Level]
    columns: Columns
    prompts: tuple[str, ...]
    metric: str
    level: str
    tokens: str
    model: str
    notes: tuple[str, ...] = ()

    @property
    def terms(self) -> tuple[str, ...]:
        """What can be tested: the names of all coefficients."""
        return tuple(name for level in self.levels.values() for name in level.names)

    @property
    def design(self) -> Doubles:
        """(n, k) the design matrix over prompts; its columns are `design_names`."""
        return self.levels[""].design

    @property
    def design_names(self) -> tuple[str, ...]:
        """The names of the design's columns."""
        return self.levels[""].names

    def contrast(
        self,
        term: Definition,
        *,
        alpha: float = 0.05,
        height_control: str | None = "fdr",
        two_sided: bool = True,
    ) -> Contrast:
        """Test coefficients against 0, over prompts.

        Args:
            term: One of `terms`, a sum of several ("a - b", or a mapping), or a list of these for
                an F-test.
            alpha: The threshold.
            height_control: What it bounds: "fdr", "bonferroni", "fpr" or None.
            two_sided: Whether both directions count.

        Raises:
            InspectionError: There is no such term, terms of different levels are mixed, or there
                are too few prompts.
        """
        options = TestOptions(alpha, height_control, two_sided)
        if height_control == "max":
            raise InspectionError(
                "height_control='max' needs labels that can be exchanged, and a model with several "
                "regressors has none. Choose 'fdr' or 'bonferroni', or use scan.contrast."
            )
        weights = read_terms(term, self.terms)
        level, weights = self._level(weights, term)
        fitted = fit(level, weights, options)
        q, survives = threshold(fitted["p"], None, options)
        used = dict(zip(level.names, weights.T, strict=True))
        kept = tuple(name for name in level.names if used[name].any())
        return Contrast(
            question="; ".join(words(row, level.names) for row in weights),
            conditions=kept,
            weights=np.stack([used[name] for name in kept], 1),
            test="GLM F" if len(weights) > 1 else "GLM t",
            alpha=alpha,
            height_control=height_control,
            two_sided=two_sided,
            metric=self.metric,
            level=self.level,
            tokens=self.tokens,
            model=self.model,
            prompts=dict.fromkeys(kept, self.prompts),
            columns=self.columns,
            q=q,
            survives=survives,
            dof_above=len(weights) if len(weights) > 1 else None,
            notes=self.notes,
            **fitted,
        )

    def _level(self, weights: Doubles, term: Any) -> tuple[Level, Doubles]:
        """The level that all terms belong to, and their weights there."""
        at = 0
        for level in self.levels.values():
            own = weights[:, at : at + len(level.names)]
            if own.any():
                if np.count_nonzero(weights) != np.count_nonzero(own):
                    raise InspectionError(
                        f"{term!r} mixes coefficients of the mean with slopes over tokens: they "
                        "have different units. Test them one by one."
                    )
                return level, own
            at += len(level.names)
        raise InspectionError(f"{term!r} has no weight. The terms are {', '.join(self.terms)}.")

    def shuffled(self, seed: int = 0) -> GLM:
        """The same with what is known of the prompts exchanged among them: a null, to calibrate."""
        order = np.random.default_rng(seed).permutation(len(self.prompts))
        levels = {
            name: replace(each, design=each.design[order]) for name, each in self.levels.items()
        }
        return replace(self, levels=levels)

    def plot_design(self, *, ax: Axes | None = None) -> Axes:
        """The design matrix as an image: prompts down, regressors across, each from -1 to 1."""
        design = self.design
        size = np.abs(design).max(0, initial=0.0)
        ax = axes_or_new(ax, 1.2 + 0.6 * design.shape[1], 4.5)
        ax.imshow(design / np.where(size > 0, size, 1.0), aspect="auto", cmap="PuOr_r", vmin=-1,
                  vmax=1, interpolation="nearest")  # fmt: skip
        ax.set_xticks(range(design.shape[1]), [escape(each) for each in self.design_names],
                      rotation=45, ha="right", fontsize=8)  # fmt: skip
        ax.set_ylabel("prompt")
        ax.set_title(escape(self.formula), fontsize=10)
        return ax

    def table(self, width: int | None = None) -> str:
        """The design matrix as text, a line for each prompt."""
        columns = [
            TextColumn(name, [f"{value:g}" for value in self.design[:, k]], k)
            for k, name in enumerate(self.design_names)
        ]
        return Grid(repr(self)[1:-1], "prompt", self.prompts, columns, self.notes).text(width)

    def __repr__(self) -> str:
        return (
            f"<GLM: {self.formula}; {plural(len(self.prompts), 'prompt')}, "
            f"{plural(len(self.columns), self.level)}; terms {', '.join(self.terms)}>"
        )


def fit(level: Level, weights: Doubles, options: TestOptions) -> dict[str, Any]:
    """Ordinary least squares over prompts, and the test of weights (q, k), for every column.

    Raises:
        InspectionError: There are no degrees of freedom, or the regressors follow from each other.
    """
    known = np.isfinite(level.values)
    complete = known.all(1)
    whole = known[complete | ~known.any(1)].all() if len(known) else False
    rows = np.flatnonzero(known.any(1))
    design, values = level.design[rows], level.values[rows]
    n, k = design.shape
    if np.linalg.matrix_rank(design) < k:
        raise InspectionError(
            f"The regressors {', '.join(level.names)} follow from each other over {n} prompts: "
            "leave one out, or scan prompts that tell them apart."
        )
    if n <= k:
        raise InspectionError(
            f"{n} prompts and {k} regressors: nothing is left to estimate the spread from. Scan "
            "more prompts, or leave regressors out."
        )
    inverse = np.linalg.inv(design.T @ design)
    usable = np.ones(values.shape[1], bool) if whole else np.isfinite(values).all(0)
    filled = np.where(usable, values, 0.0)
    beta = inverse @ (design.T @ filled)
    residual = filled - design @ beta
    dof = float(n - k)
    variance = (residual**2).sum(0) / dof
    scale = np.abs(filled).max(0, initial=0.0)
    variance = np.where(usable & (np.sqrt(variance) > 1e-7 * scale), variance, np.nan)
    effects = weights @ beta
    spread = weights @ inverse @ weights.T
    number = np.where(usable, n, 0)
    freedom = np.where(np.isnan(variance), np.nan, dof)
    if len(weights) > 1:
        explained = np.einsum("qv,qr,rv->v", effects, np.linalg.pinv(spread), effects)
        f = explained / len(weights) / variance
        nothing = np.full(len(f), np.nan)
        return {
            "n_a": number, "n_b": np.zeros_like(number), "effect": np.abs(effects).max(0),
            "g": nothing, "ci_low": nothing, "ci_high": nothing, "t": f, "dof": freedom,
            "p": f_tail(f, float(len(weights)), freedom),
        }  # fmt: skip
    t = effects[0] / np.sqrt(variance * spread[0, 0])
    g, low, high = hedges(
        effects[0], np.sqrt(variance), np.full(len(t), dof), np.full(len(t), spread[0, 0]),
        options.alpha, 0.0,
    )  # fmt: skip
    return {
        "n_a": number, "n_b": np.zeros_like(number),
        "effect": np.where(usable, effects[0], np.nan), "g": g, "ci_low": low, "ci_high": high,
        "t": t, "dof": freedom, "p": t_tail(t, freedom, two_sided=options.two_sided),
    }  # fmt: skip


def first_level(
    values: NDArray[np.floating], regressors: Doubles
) -> tuple[Doubles, Doubles] | None:
    """The value (v,) of a prompt where its regressors are 0, and the slopes (r, v); None without.

    Args:
        values: (s, v), finite.
        regressors: (s, r), finite, their averages over all prompts subtracted.
    """
    s, r = regressors.shape
    design = np.concatenate([np.ones((s, 1)), regressors], 1)
    if s < (r + 2 if r else 1) or np.linalg.matrix_rank(design) < r + 1:
        return None
    found: Doubles = np.linalg.lstsq(design, values, rcond=None)[0]
    return found[0], found[1:]
