"""A general linear model in two levels, as fMRI does it: tokens within a prompt, then prompts.

`Scan.glm` returns a `GLM`, and `GLM.contrast` tests its coefficients. At the first level each
prompt has a regression of its own over its tokens; only its coefficients go on. At the second level
these are regressed on what is known of the prompts (`second_level`). So the unit of replication is
the prompt, and tokens that resemble their neighbours do no harm. `GLM` is public. Its table and
figure may change freely. Index letters: n prompts, v columns, k regressors, q contrasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast.comparison import JUDGED, TestOptions, threshold
from torchfmri._contrast.distributions import Doubles
from torchfmri._contrast.prompt_table import MEASURED, PromptColumns
from torchfmri._contrast.record import Contrast
from torchfmri._contrast.second_level import Level, Refit, fit
from torchfmri._contrast.weights import Definition, read_terms, words
from torchfmri._model import nearest_names
from torchfmri._text import Column as TextColumn
from torchfmri._text import Grid, plural
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import axes_or_new, draw_cells, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        token_names: (r,) the regressors of tokens.
        token_designs: (s, r) of each prompt: the tokens that count, their averages over
            all prompts subtracted.

    Examples:
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
    columns: PromptColumns
    prompts: tuple[str, ...]
    metric: str
    level: str
    tokens: str
    model: str
    notes: tuple[str, ...] = ()
    token_names: tuple[str, ...] = ()
    token_designs: tuple[Doubles, ...] = ()

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of all coefficients, each of which can be tested."""
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
        q, survives = threshold(fitted.p, None, options)
        used = dict(zip(level.names, weights.T, strict=True))
        kept = tuple(name for name in level.names if used[name].any())
        return Contrast(
            question="; ".join(words(row, level.names) for row in weights),
            conditions=kept,
            weights=np.stack([used[name] for name in kept], 1),
            test="GLM F" if len(weights) > 1 else "GLM t",
            **{name: getattr(options, name) for name in JUDGED},
            **{name: getattr(self, name) for name in MEASURED},
            prompts=dict.fromkeys(kept, self.prompts),
            q=q,
            survives=survives,
            dof_num=len(weights) if len(weights) > 1 else None,
            notes=self.notes,
            trial=Refit(level, weights, options),
            **vars(fitted),
        )

    def _level(self, weights: Doubles, term: Any) -> tuple[Level, Doubles]:
        """Return the level that all terms belong to, and their weights there."""
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
        """Return the model with the rows of its design shuffled among prompts: a null model."""
        order = np.random.default_rng(seed).permutation(len(self.prompts))
        levels = {
            name: replace(each, design=each.design[order]) for name, each in self.levels.items()
        }
        return replace(self, levels=levels)

    def _matrix(self, prompt: str | None) -> tuple[Doubles, tuple[str, ...], list[str], str]:
        """Return a design matrix, the names of its columns and rows, and what a row is."""
        if prompt is None:
            return self.design, self.design_names, list(self.prompts), "prompt"
        if prompt not in self.prompts:
            near = nearest_names(str(prompt), list(self.prompts))
            raise InspectionError(
                f"There is no prompt {prompt!r} among {len(self.prompts)}. Nearest: "
                f"{', '.join(map(repr, near)) or 'none'}. List them with glm.prompts."
            )
        if not self.token_names:
            raise InspectionError(
                f"{self.formula!r} has no regressors of tokens. Leave prompt= out, or add one, "
                "such as surprisal."
            )
        tokens = self.token_designs[self.prompts.index(prompt)]
        return tokens, self.token_names, list(map(str, range(len(tokens)))), "token that counts"

    def plot_design(self, prompt: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw a design matrix as an image: prompts down, regressors across, each from -1 to 1.

        Args:
            prompt: The name of a prompt, for the matrix of the regression over its tokens.
            ax: Where to draw.

        Raises:
            InspectionError: There is no such prompt, or no regressor of tokens.
        """
        design, names, _, row = self._matrix(prompt)
        size = np.abs(design).max(0, initial=0.0)
        ax = axes_or_new(ax, 1.2 + 0.6 * design.shape[1], 4.5)
        draw_cells(ax, design / np.where(size > 0, size, 1.0), "PuOr_r", vmin=-1, vmax=1)
        labels = [escape(each) for each in names]
        ax.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize=8)
        ax.set_ylabel(row)
        title = self.formula if prompt is None else f"{self.formula}\ntokens of {prompt}"
        ax.set_title(escape(title), fontsize=10)
        return ax

    def table(self, width: int | None = None, *, prompt: str | None = None) -> str:
        """Return a design matrix as text, a line for each prompt.

        Args:
            width: In characters; that of the terminal by default.
            prompt: The name of a prompt, for the matrix of the regression over its tokens.

        Raises:
            InspectionError: There is no such prompt, or no regressor of tokens.
        """
        design, names, rows, row = self._matrix(prompt)
        columns = [
            TextColumn(name, [f"{value:.6g}" for value in design[:, k]], k)
            for k, name in enumerate(names)
        ]
        return Grid(repr(self)[1:-1], row, rows, columns, self.notes).text(width)

    def __repr__(self) -> str:
        return (
            f"<GLM: {self.formula}; {plural(len(self.prompts), 'prompt')}, "
            f"{plural(len(self.columns), self.level)}; terms {', '.join(self.terms)}>"
        )


def first_level(
    values: NDArray[np.floating], regressors: Doubles
) -> tuple[Doubles, Doubles] | None:
    """Return a prompt's values (v,) at regressors of 0 and its slopes (r, v); None if too short.

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
