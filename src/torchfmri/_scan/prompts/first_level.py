"""The model of a scan: a formula split into regressors of tokens and regressors of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast import GLM, Level, first_level
from torchfmri._scan.prompts.prompt_values import Question, Source, chosen_columns
from torchfmri._scan.prompts.token_choice import choose_tokens, token_words
from torchfmri._scan.record.reading import Reading
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.store.fields import field_columns
from torchfmri._text import plural
from torchfmri.exceptions import InspectionError

OF_TOKENS = ("position", "surprisal", "entropy", "generated")
"""What a formula can say of a token; everything else is said of a prompt."""


def fit_glm(source: Source, formula: str, question: Question) -> GLM:
    """Fit the first level of every prompt, and lay out the second; see `Scan.glm`.

    Raises:
        InspectionError: formulaic is not installed, the formula names something unknown, or no
            prompt has enough tokens.
    """
    split = _Formula(formula, source)
    columns, places = chosen_columns(source, question)
    means: list[Any] = []
    slopes: list[Any] = []
    names: list[str] = []
    short: list[str] = []
    partly = 0
    for sequence, regressors in zip(source.sequences, split.token_designs(), strict=True):
        reading = Reading(source.anatomy, sequence, source.meta)
        table = reading.table(question.metric, "layer" if question.level == "layer" else "voxel")
        measured = np.isfinite(table).any(1) if table.shape[1] else np.zeros(len(table), bool)
        kept = choose_tokens(sequence, question.tokens, measured)
        kept &= np.isfinite(regressors).all(1)
        values = table[kept][:, places].astype(np.float64)
        gone = ~np.isfinite(values).all(0)
        partly = max(partly, int(gone.sum()))
        found = first_level(np.where(gone, 0.0, values), regressors[kept])
        names.append(sequence.name)
        if found is None:
            short.append(sequence.name)
            found = (
                np.full(len(places), np.nan),
                np.full((regressors.shape[1], len(places)), np.nan),
            )
        means.append(np.where(gone, np.nan, found[0]))
        slopes.append(np.where(gone, np.nan, found[1]))
    if len(short) == len(names):
        raise InspectionError(
            f"No prompt has enough tokens for {plural(len(split.token_names), 'regressor')} of "
            f"tokens ({', '.join(split.token_names)}), or they do not vary within a prompt. Tokens "
            "without a value do not count: with per=None only generated ones have a surprisal. "
            "Choose other tokens, leave regressors out, or scan with per='position'."
        )
    return GLM(
        formula=formula,
        levels=_levels(split, np.stack(means), np.stack(slopes)),
        columns=columns,
        prompts=tuple(names),
        metric=question.metric,
        level=question.level,
        tokens=token_words(question.tokens),
        model=str(source.meta.get("model") or ""),
        notes=tuple(_notes(short, partly, split)),
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


def _notes(short: Sequence[str], partly: int, split: _Formula) -> list[str]:
    said = ["coefficients of each prompt first, then a test over prompts"]
    if split.token_names:
        said.append(
            "coefficients of prompts are of their values at average tokens: regressors of tokens "
            f"({', '.join(split.token_names)}) are held at their means over all prompts"
        )
    if short:
        said.append(
            f"{plural(len(short), 'prompt')} with too few tokens left out: "
            f"{', '.join(map(repr, short[:3]))}"
        )
    if partly:
        said.append(f"up to {partly:,} columns lack values at some tokens and are not tested")
    return said


class _Formula:
    """A formula of formulaic, split by what its terms are of."""

    def __init__(self, formula: str, source: Source) -> None:
        try:
            import formulaic
            import pandas
        except ImportError as error:
            raise InspectionError(
                "A formula needs formulaic and pandas: pip install 'torchfmri[glm]'."
            ) from error
        self._formulaic, self._pandas, self._source = formulaic, pandas, source
        if not isinstance(formula, str) or "~" in formula:
            raise InspectionError(
                f"formula={formula!r}: write the right side alone, as in 'surprisal + condition'; "
                "the left side is what was measured."
            )
        try:
            terms = list(formulaic.Formula(formula))
        except Exception as error:  # formulaic has many kinds of errors
            raise InspectionError(f"{formula!r} is no formula: {error}") from error
        self._prompts = self._frame()
        self._of_prompts: list[Any] = []
        self._of_tokens: list[Any] = []
        self._mixed: dict[str, list[Any]] = {}
        for term in terms:
            self._sort(term)
        self._tokens = self._token_matrix()
        self.token_names = tuple(map(str, self._tokens.columns))

    def _frame(self) -> Any:
        """What is known of the prompts, a row each."""
        sequences = self._source.sequences
        columns = field_columns(sequences, OF_TOKENS)
        data: dict[str, list[Any]] = {each.name: [] for each in columns}
        data |= {"condition": [], "tokens": []}
        for sequence in sequences:
            for each in columns:
                if each.name != "condition":
                    data[each.name].append(each.value(sequence.fields))
            data["condition"].append(sequence.condition)
            data["tokens"].append(len(sequence))
        return self._pandas.DataFrame(data)

    def _variables(self, term: Any) -> set[str]:
        needed = set(map(str, self._formulaic.Formula([term]).required_variables))
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
        """The regressors of all tokens of all prompts below each other."""
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
        """(s, r) of each prompt in turn."""
        ends = np.cumsum([0, *self._lengths])
        whole = self._tokens.to_numpy(dtype=np.float64)
        known = np.isfinite(whole).all(1)
        whole = whole - whole[known].mean(0) if known.any() else whole
        for first, last in pairwise(ends):
            yield whole[first:last]

    def prompt_design(self) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """The names of the regressors of prompts, and (n, k)."""
        return self._design(self._of_prompts)

    def slope_design(self, name: str) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """What the slopes of a regressor of tokens are explained by: their mean, and products."""
        one = next((term for term in self._of_prompts if str(term) == "1"), None)
        intercept = [one] if one is not None else list(self._formulaic.Formula("1"))
        return self._design([*intercept, *self._mixed.get(name, [])])

    def _design(self, terms: Sequence[Any]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        found = self._pandas.DataFrame(
            self._formulaic.model_matrix(self._formulaic.Formula(list(terms)), self._prompts)
        )
        if len(found) < len(self._prompts):
            raise InspectionError(
                f"{len(self._prompts) - len(found)} prompts lack a value that the formula names. "
                "Scan without them, or choose another field."
            )
        names = tuple(map(str, found.columns))
        return names, found.to_numpy(dtype=np.float64)


def _token_values(sequence: ScannedSequence) -> dict[str, NDArray[Any]]:
    tokens = sequence.tokens
    return {
        "position": np.arange(len(tokens), dtype=np.float64),
        "surprisal": tokens.surprisal.astype(np.float64),
        "entropy": tokens.entropy.astype(np.float64),
        "generated": tokens.generated.astype(np.float64),
    }
