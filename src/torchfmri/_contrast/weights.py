"""Read a contrast in words: "true - false", {"true": 1, "false": -1}, or several of these.

`comparison`, `linear_model` and `Scan.contrast` call this file. The notation is public. Names of
conditions may hold any character, also + and -, so the longest name that fits is taken. Weights of
conditions must add up to 0; coefficients of a linear model need not.
"""

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
    """Return (q, k) the weights of the conditions in each of the contrasts.

    Args:
        contrast: A text of conditions, numbers, + and -; a mapping from conditions to weights; or a
            list of these, for an F-test.
        conditions: The conditions that there are.

    Raises:
        InspectionError: It names something else, or its weights do not add up to 0.
    """
    several = _listed(contrast, conditions)
    return _independent(np.array([_row(each, conditions) for each in several]), several)


def _listed(contrast: Definition, conditions: Sequence[str], what: str = "conditions") -> list[Any]:
    several = list(contrast) if is_list(contrast) else [contrast]
    if not several:
        raise InspectionError(f"The list of contrasts is empty. {_there_are(conditions, what)}")
    return several


def _independent(rows: Doubles, several: Sequence[Any]) -> Doubles:
    """Return the rows, none of which follows from the others: F would count it twice."""
    if len(rows) > 1 and np.linalg.matrix_rank(rows) < len(rows):
        raise InspectionError(
            f"The contrasts {several!r} follow from each other: leave out those that the others "
            "already say."
        )
    return rows


def difference(a: object, b: object) -> dict[str, float]:
    """Return the weights of one condition against another.

    Raises:
        InspectionError: They are the same.
    """
    if str(a) == str(b):
        raise InspectionError(
            f"{str(a)!r} would be compared with itself: name two conditions that differ. "
            "scan.conditions lists those that there are."
        )
    return {str(a): 1.0, str(b): -1.0}


def read_terms(term: Definition, names: Sequence[str]) -> Doubles:
    """Return (q, k) the weights of coefficients, which need not add up to 0.

    Raises:
        InspectionError: It names something else, nothing, or a term that others already say.
    """
    several = _listed(term, names, "terms")
    rows = np.array([_weights(each, names, "terms") for each in several])
    return _independent(rows.reshape(len(several), -1), several)


def _row(contrast: Any, conditions: Sequence[str]) -> Doubles:
    weights = _weights(contrast, conditions)
    if not weights.any():
        raise InspectionError(
            f"{contrast!r} compares nothing: every condition has the weight 0. Name two conditions "
            f"that differ. {_there_are(conditions)}"
        )
    if abs(weights.sum()) > 1e-9 or not (weights > 0).any():
        raise InspectionError(
            f"The weights of {contrast!r} add up to {weights.sum():g}. A contrast compares: "
            f"write weights that add up to 0, as in 'a - b'. {_there_are(conditions)}"
        )
    return weights


def _weights(contrast: Any, conditions: Sequence[str], what: str = "conditions") -> Doubles:
    if isinstance(contrast, str):
        found = _parse(contrast, conditions, what)
    elif isinstance(contrast, Mapping):
        found = _read_mapping(contrast, conditions, what)
    else:
        raise InspectionError(
            f"A contrast is a text such as 'true - false', or a mapping from {what} to "
            f"weights, not {contrast!r}. {_there_are(conditions, what)}"
        )
    return np.array([found.get(condition, 0.0) for condition in conditions])


def _read_mapping(
    contrast: Mapping[Any, Any], conditions: Sequence[str], what: str
) -> dict[str, float]:
    for name, weight in contrast.items():
        if str(name) not in conditions:
            there_are = _there_are(conditions, what)
            raise InspectionError(f"There is no {what.removesuffix('s')} {name!r}. {there_are}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not np.isfinite(weight):
            raise InspectionError(f"The weight of {name!r} is {weight!r}: give a number.")
    return {str(name): float(weight) for name, weight in contrast.items()}


def _parse(text: str, conditions: Sequence[str], what: str) -> dict[str, float]:
    # Names may hold any character, also + and -: the longest one that fits is taken.
    names = "|".join(re.escape(each) for each in sorted(conditions, key=len, reverse=True) if each)
    term = re.compile(rf"\s*([+-]?)\s*(?:({_NUMBER})\s*\*\s*)?({names})\s*" if names else r"(?!)")
    found: dict[str, float] = {}
    at = 0
    while at < len(text):
        matched = term.match(text, at)
        if matched is None or (at and not matched[1]):
            raise InspectionError(
                f"{text!r} is not a contrast: at {text[at:][:40]!r} a {what.removesuffix('s')} "
                f"should follow. {_there_are(conditions, what)} Write 'a - b', or 'a - 0.5 * b - "
                "0.5 * c'."
            )
        sign = -1.0 if matched[1] == "-" else 1.0
        found[matched[3]] = found.get(matched[3], 0.0) + sign * float(matched[2] or 1.0)
        at = matched.end()
    return found


def _there_are(conditions: Sequence[str], what: str = "conditions") -> str:
    return f"The {what} are {', '.join(map(repr, conditions)) or 'none'}."


def words(weights: Doubles, conditions: Sequence[str]) -> str:
    """Return the contrast of weights (k,) as a text.

    Examples:
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
