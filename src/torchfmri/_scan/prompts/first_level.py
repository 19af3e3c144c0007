"""Fit the linear model of a scan: split a formula into regressors of tokens and of prompts.

`Scan.glm` calls `fit_glm`; the test over prompts is made later, in `_contrast/linear_model`. Every
prompt has a regression of its own over its tokens. Anything that would mix tokens of several
prompts (formulaic's `poly`, `center`) is refused: the prompt is the unit of replication, and the
p-values would be wrong without any sign of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import from_extra
from torchfmri._contrast import GLM, Level, first_level
from torchfmri._scan.prompts.prompt_columns import chosen_columns
from torchfmri._scan.prompts.question import SIGNED, Question, ValueSource
from torchfmri._scan.prompts.token_choice import choose_tokens, token_words
from torchfmri._scan.record.reading import Reading
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.fields import field_columns
from torchfmri._text import listed, plural
from torchfmri.exceptions import InspectionError

OF_TOKENS = ("position", "surprisal", "entropy", "generated")
"""What a formula can say of a token; everything else is said of a prompt."""


def fit_glm(source: ValueSource, formula: str, question: Question) -> GLM:
    """Fit the first level of every prompt, and lay out the second; see `Scan.glm`.

    Raises:
        InspectionError: formulaic is not installed, the formula names something unknown, or no
            prompt has enough tokens.
    """
    if question.level == "feature":
        raise InspectionError(
            "A linear model is of layers, voxels or heads. Test features with scan.contrast "
            "(level='feature')."
        )
    if question.metric == SIGNED or question.level == "unit":
        raise InspectionError(
            "A linear model is of layers, voxels or heads: of units only mean vectors are kept, "
            "which have no tokens to regress over. Test units with scan.contrast (metric='signed', "
            "level='unit')."
        )
    split = _Formula(formula, source)
    columns, places = chosen_columns(source, question)
    rows = zip(source.sequences, split.token_designs(), split.known, strict=True)
    fitted = [
        _fit_prompt(Reading(source.anatomy, sequence, source.meta), question, places, regressors)
        for sequence, regressors, known in rows
        if known
    ]
    names = [each.name for each in fitted]
    short = [each.name for each in fitted if each.is_short]
    if len(short) == len(names):
        raise InspectionError(
            f"No prompt has enough tokens for {plural(len(split.token_names), 'regressor')} of "
            f"tokens ({', '.join(split.token_names)}), or they do not vary within a prompt. Tokens "
            "without a value do not count: with per=None only generated ones have a surprisal. "
            "Choose other tokens, leave regressors out, or scan with per='position'."
        )
    # The average token is one of those that count, so it is known only now.
    middle = np.concatenate([each.regressors for each in fitted if not each.is_short]).mean(0)
    slopes = np.stack([each.slopes for each in fitted])
    means = np.stack([each.mean for each in fitted]) + np.einsum("r,nrv->nv", middle, slopes)
    lacking = {each.name: each.lacks for each in fitted if each.lacks.any()}
    return GLM(
        formula=formula,
        levels=_levels(split, means, slopes),
        columns=columns,
        prompts=tuple(names),
        metric=question.metric,
        level=question.level,
        tokens=token_words(question.tokens),
        model=str(source.meta.get("model") or ""),
        notes=tuple(_notes(short, lacking, split)),
        token_names=split.token_names,
        token_designs=tuple(each.regressors - middle for each in fitted),
    )


@dataclass(frozen=True, eq=False)
class _Fitted:
    """The first level of one prompt.

    Attributes:
        name: The name of the prompt.
        mean: (v,) its values where all regressors are 0.
        slopes: (r, v).
        regressors: (s, r) of the tokens that count.
        lacks: (v,) which columns lack a value at one of these tokens.
        is_short: Whether there are too few tokens, so that everything is nan.
    """

    name: str
    mean: NDArray[np.float64]
    slopes: NDArray[np.float64]
    regressors: NDArray[np.float64]
    lacks: NDArray[np.bool_]
    is_short: bool


def _fit_prompt(
    reading: Reading,
    question: Question,
    places: NDArray[np.int64],
    regressors: NDArray[np.float64],
) -> _Fitted:
    table = reading.table(question.metric, "layer" if question.level == "layer" else "voxel")
    measured = np.isfinite(table).any(1) if table.shape[1] else np.zeros(len(table), bool)
    kept = choose_tokens(reading.sequence, question.tokens, measured)
    kept &= np.isfinite(regressors).all(1)
    values = table[kept][:, places].astype(np.float64)
    lacks = np.asarray(~np.isfinite(values).all(0), bool)
    found = first_level(np.where(lacks, 0.0, values), regressors[kept])
    mean, slopes = found or (np.array(np.nan), np.full((regressors.shape[1], 1), np.nan))
    return _Fitted(
        name=reading.sequence.name,
        mean=np.where(lacks, np.nan, mean),
        slopes=np.where(lacks, np.nan, slopes),
        regressors=regressors[kept],
        lacks=lacks,
        is_short=found is None,
    )


def _levels(
    split: _Formula, means: NDArray[np.float64], slopes: NDArray[np.float64]
) -> dict[str, Level]:
    design_names, design = split.prompt_design()
    levels = {"": Level(names=design_names, design=design, values=means)}
    for index, name in enumerate(split.token_names):
        by, own = split.slope_design(name)
        levels[name] = Level(
            names=tuple(name if each == "Intercept" else f"{name}:{each}" for each in by),
            design=own,
            values=slopes[:, index],
        )
    return levels


def _notes(
    short: Sequence[str], lacking: Mapping[str, NDArray[np.bool_]], split: _Formula
) -> list[str]:
    said = ["coefficients of each prompt first, then a test over prompts"]
    if split.token_names:
        said.append(
            "coefficients of prompts are of their values at average tokens: regressors of tokens "
            f"({', '.join(split.token_names)}) are held at their means over the tokens that count"
        )
    if split.left_out:
        said.append(
            f"{plural(len(split.left_out), 'prompt')} without a value of a field that the formula "
            f"names left out: {listed(split.left_out)}"
        )
    if short:
        said.append(f"{plural(len(short), 'prompt')} with too few tokens left out: {listed(short)}")
    if lacking:
        columns = plural(int(np.stack(list(lacking.values())).any(0).sum()), "column")
        prompts = listed(list(lacking))
        said.append(f"{columns} without a finite value at some tokens of {prompts}: not tested")
    return said


class _Formula:
    """A formula of formulaic, split by what its terms are of."""

    def __init__(self, formula: str, source: ValueSource) -> None:
        with from_extra("A formula needs formulaic and pandas", "glm"):
            import formulaic
            import pandas
        self._formulaic, self._pandas, self._source = formulaic, pandas, source
        if not isinstance(formula, str) or "~" in formula:
            raise InspectionError(
                f"formula={formula!r}: write the right side alone, as in 'surprisal + condition'; "
                "the left side is what was measured."
            )
        try:
            terms = list(formulaic.Formula(formula))
        except Exception as error:  # formulaic has many kinds of errors
            raise InspectionError(f"{formula!r} is not a formula: {error}") from error
        self._prompts = self._frame()
        self._of_prompts: list[Any] = []
        self._of_tokens: list[Any] = []
        self._mixed: dict[str, list[Any]] = {}
        for term in terms:
            self._sort(term)
        self._leave_out(terms)
        self._tokens = self._token_matrix()
        self.token_names = tuple(map(str, self._tokens.columns))

    def _frame(self) -> Any:
        """Return a DataFrame with a row per prompt: its condition, its length and its fields."""
        sequences = self._source.sequences
        columns = field_columns(sequences, (*OF_TOKENS, "tokens"))
        data: dict[str, list[Any]] = {each.name: [] for each in columns} | {"condition": []}
        for sequence in sequences:
            found = {each.name: each.value(sequence.fields) for each in columns}
            found["condition"] = sequence.condition
            for name, value in found.items():
                data[name].append(None if value == "" else value)
        return self._pandas.DataFrame(data | {"tokens": list(map(len, sequences))})

    def _leave_out(self, terms: Sequence[Any]) -> None:
        """Leave out the prompts that lack a field of the formula, which are no baseline."""
        needed = set().union(*map(self._variables, terms)).difference(OF_TOKENS)
        lacks = self._prompts[sorted(needed)].isna()
        self.known = ~lacks.any(axis=1).to_numpy(dtype=bool)
        names = [sequence.name for sequence in self._source.sequences]
        self.left_out = [name for name, known in zip(names, self.known, strict=True) if not known]
        if names and not self.known.any():
            empty = ", ".join(map(repr, lacks.columns[lacks.any()]))
            raise InspectionError(
                f"No prompt has a value of every field that the formula names: {empty} lack some. "
                "Leave one of them out, or choose another field."
            )
        self._prompts = self._prompts[self.known].infer_objects()  # without gaps, bool again

    def _variables(self, term: Any) -> set[str]:
        needed = set(map(str, self._formulaic.Formula([term]).required_variables))
        # formulaic does not say what poly, bs, center and the like are of.
        inside = {name for factor in term.factors for name in _names_in(factor)}
        hidden = sorted(inside.intersection(OF_TOKENS) - needed)
        if hidden:
            raise InspectionError(
                f"{term} cannot be fitted: such a transform learns from all rows at once, and each "
                f"prompt has a regression of its own. Write {hidden[0]} + I({hidden[0]}**2), or a "
                f"function of single values such as np.log({hidden[0]} + 1)."
            )
        needed |= inside.intersection(self._prompts.columns)
        unknown = needed.difference(OF_TOKENS, self._prompts.columns)
        if unknown:
            raise InspectionError(
                f"There is nothing called {', '.join(sorted(map(repr, unknown)))}. Of tokens there "
                f"are {', '.join(OF_TOKENS)}; of prompts {', '.join(self._prompts.columns)}."
            )
        return needed

    def _sort(self, term: Any) -> None:
        needed = self._variables(term)
        if not needed & set(OF_TOKENS):
            self._of_prompts.append(term)
            return
        if needed <= set(OF_TOKENS):
            self._of_tokens.append(term)
            return
        single = [self._formulaic.parser.types.Term([factor]) for factor in term.factors]
        mine = [each for each in single if self._variables(each) & set(OF_TOKENS)]
        others = [each for each in single if not self._variables(each) & set(OF_TOKENS)]
        if len(mine) != 1 or not others:
            raise InspectionError(
                f"{term} cannot be split: write products of one regressor of tokens with "
                "regressors of prompts, such as surprisal:condition."
            )
        factors = [factor for each in others for factor in each.factors]
        joined = self._formulaic.parser.types.Term(factors)
        self._mixed.setdefault(str(mine[0]), []).append(joined)
        if str(mine[0]) not in map(str, self._of_tokens):
            self._of_tokens.append(mine[0])

    def _token_matrix(self) -> Any:
        """Return the regressors of all tokens of all prompts below each other."""
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in OF_TOKENS}
        self._lengths = []
        for sequence in self._source.sequences:
            self._lengths.append(len(sequence))
            for name, values in _token_values(sequence).items():
                parts[name].append(values)
        frame = self._pandas.DataFrame(
            {name: np.concatenate([np.empty(0), *each]) for name, each in parts.items()}
        )
        if not self._of_tokens:
            return self._pandas.DataFrame(index=frame.index)
        terms = dict.fromkeys(self._of_tokens)
        formula = self._formulaic.Formula(list(terms))
        found = self._formulaic.model_matrix(formula, frame, na_action="ignore")
        return self._pandas.DataFrame(found).drop(columns="Intercept", errors="ignore")

    def token_designs(self) -> Iterator[NDArray[np.float64]]:
        """Yield (s, r) of each prompt in turn, also of prompts that are left out."""
        ends = np.cumsum([0, *self._lengths])
        whole = self._tokens.to_numpy(dtype=np.float64)
        known = np.isfinite(whole).all(1)
        whole = whole - whole[known].mean(0) if known.any() else whole
        for first, last in pairwise(ends):
            yield whole[first:last]

    def prompt_design(self) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """Return the names of the regressors of prompts, and (n, k)."""
        return self._design(self._of_prompts)

    def slope_design(self, name: str) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """Return the design that explains the slopes of one regressor of tokens."""
        one = next((term for term in self._of_prompts if str(term) == "1"), None)
        intercept = [one] if one is not None else list(self._formulaic.Formula("1"))
        return self._design([*intercept, *self._mixed.get(name, [])])

    def _design(self, terms: Sequence[Any]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        found = self._pandas.DataFrame(
            self._formulaic.model_matrix(self._formulaic.Formula(list(terms)), self._prompts)
        )
        names = tuple(map(str, found.columns))
        return names, found.to_numpy(dtype=np.float64)


def _names_in(factor: Any) -> set[str]:
    """Return the names that a factor written in Python uses."""
    if factor.eval_method.value != "python":
        return set()
    return {each.id for each in ast.walk(ast.parse(factor.expr)) if isinstance(each, ast.Name)}


def _token_values(sequence: ScannedSequence) -> dict[str, NDArray[Any]]:
    tokens = sequence.tokens
    return {
        "position": np.arange(len(tokens), dtype=np.float64),
        "surprisal": tokens.surprisal.astype(np.float64),
        "entropy": tokens.entropy.astype(np.float64),
        "generated": tokens.generated.astype(np.float64),
    }
