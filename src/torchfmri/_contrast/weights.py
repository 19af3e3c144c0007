"""A contrast in words: "true - false", {"true": 1, "false": -1}, or several of these."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchfmri._arguments import is_list
from torchfmri._contrast.distributions import Doubles
from torchfmri.exceptions import InspectionError

Definition = str | Mapping[str, float] | Sequence[Any]
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"


def read_weights(contrast: Definition, conditions: Sequence[str]) -> Doubles:
    """(q, k) the weights of the conditions in each of the contrasts.

    Args:
        contrast: A text of conditions, numbers, + and -; a mapping from conditions to weights; or a
            list of these, for an F-test.
        conditions: Those that there are.

    Raises:
        InspectionError: It names something else, or its weights do not add up to 0.
    """
    several = list(contrast) if is_list(contrast) else [contrast]
    if not several:
        raise InspectionError(f"The list of contrasts is empty. {_there_are(conditions)}")
    rows = np.array([_row(each, conditions) for each in several])
    if len(rows) > 1 and np.linalg.matrix_rank(rows) < len(rows):
        raise InspectionError(
            f"The contrasts {several!r} follow from each other: leave out those that the others "
            "already say."
        )
    return rows


def read_terms(term: Definition, names: Sequence[str]) -> Doubles:
    """(q, k) the weights of coefficients, which need not add up to 0.

    Raises:
        InspectionError: It names something else.
    """
    several = list(term) if is_list(term) else [term]
    return np.array([_weights(each, names) for each in several]).reshape(len(several), -1)


def _row(contrast: Any, conditions: Sequence[str]) -> Doubles:
    weights = _weights(contrast, conditions)
    if abs(weights.sum()) > 1e-9 or not (weights > 0).any():
        raise InspectionError(
            f"The weights of {contrast!r} add up to {weights.sum():g}. A contrast compares: "
            f"write weights that add up to 0, as in 'a - b'. {_there_are(conditions)}"
        )
    return weights


def _weights(contrast: Any, conditions: Sequence[str]) -> Doubles:
    if isinstance(contrast, str):
        found = _parse(contrast, conditions)
    elif isinstance(contrast, Mapping):
        found = _read_mapping(contrast, conditions)
    else:
        raise InspectionError(
            "A contrast is a text such as 'true - false', or a mapping from conditions to "
            f"weights, not {contrast!r}. {_there_are(conditions)}"
        )
    return np.array([found.get(condition, 0.0) for condition in conditions])


def _read_mapping(contrast: Mapping[Any, Any], conditions: Sequence[str]) -> dict[str, float]:
    for name, weight in contrast.items():
        if str(name) not in conditions:
            raise InspectionError(f"There is no condition {name!r}. {_there_are(conditions)}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not np.isfinite(weight):
            raise InspectionError(f"The weight of {name!r} is {weight!r}: give a number.")
    return {str(name): float(weight) for name, weight in contrast.items()}


def _parse(text: str, conditions: Sequence[str]) -> dict[str, float]:
    # Names may hold any character, also + and -: the longest one that fits is taken.
    names = "|".join(re.escape(each) for each in sorted(conditions, key=len, reverse=True) if each)
    term = re.compile(rf"\s*([+-]?)\s*(?:({_NUMBER})\s*\*\s*)?({names})\s*" if names else r"(?!)")
    found: dict[str, float] = {}
    at = 0
    while at < len(text):
        matched = term.match(text, at)
        if matched is None or (at and not matched[1]):
            raise InspectionError(
                f"{text!r} is no contrast: at {text[at:][:40]!r} a condition should follow. "
                f"{_there_are(conditions)} Write 'a - b', or 'a - 0.5 * b - 0.5 * c'."
            )
        sign = -1.0 if matched[1] == "-" else 1.0
        found[matched[3]] = found.get(matched[3], 0.0) + sign * float(matched[2] or 1.0)
        at = matched.end()
    return found


def _there_are(conditions: Sequence[str]) -> str:
    return f"The conditions are {', '.join(map(repr, conditions)) or 'none'}."


def words(weights: Doubles, conditions: Sequence[str]) -> str:
    """The contrast of weights (k,) as a text.

    Example:
        >>> words(np.array([1.0, -0.5, -0.5]), ["a", "b", "c"])
        'a - 0.5 * b - 0.5 * c'
    """
    text = ""
    for weight, name in zip(weights, conditions, strict=True):
        if weight:
            sign = ("- " if weight < 0 else "+ ") if text else ("-" if weight < 0 else "")
            size = "" if abs(weight) == 1 else f"{abs(weight):g} * "
            text += f"{' ' if text else ''}{sign}{size}{name}"
    return text
