"""Shell-style patterns over dotted layer names.

`layers`, `places`, histories, scans and contrasts match names with it, and every "nearest" in an
error comes from here. `*` matches any run of characters, dots included; `?` one character; `[0-3]`
one of a set; `{q,k,v}_proj` one of several alternatives. A leading `*.` may match nothing, so
`*.conv*` finds `conv1` as well as `features.conv1`. These rules are public (docs and users' scripts
hold patterns); how names are scored as near may change freely.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from torchfmri._arguments import require
from torchfmri.exceptions import LayerNotFoundError


def match_names(pattern: object, names: Iterable[str]) -> list[str]:
    """Return the names that match `pattern`, in the order given; none if it is not a text.

    A pattern that is itself one of the names matches that name, whatever characters it holds.
    """
    if not isinstance(pattern, str):
        return []
    if pattern == "*":
        return list(names)
    expression = compile_pattern(pattern)
    return [name for name in names if name == pattern or expression.fullmatch(name)]


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that matches what the shell-style `pattern` matches."""
    return re.compile("|".join(map(_translate, expand_braces(pattern))))


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that `{a,b}` alternatives stand for; braces may be nested.

    A brace that is never closed, or that holds no comma, is an ordinary character.
    """
    start = pattern.find("{")
    while start >= 0:
        options, end = _split_options(pattern, start)
        if len(options) > 1:
            head, tails = pattern[:start], expand_braces(pattern[end:])
            inner = [expanded for option in options for expanded in expand_braces(option)]
            return [head + middle + tail for middle in inner for tail in tails]
        start = pattern.find("{", start + 1)
    return [pattern]


def nearest_names(pattern: object, names: Sequence[str], count: int = 3) -> list[str]:
    """Return up to `count` names that come closest to `pattern`, compared segment by segment."""
    text = str(pattern)  # whatever somebody took for a name
    options = [option.split(".") for option in expand_braces(text)]
    scored = [
        (min(_distance(option, name.split(".")) for option in options), index)
        for index, name in enumerate(names)
    ]
    # One wrong segment costs at most 1; further away than that is noise, not a suggestion.
    limit = max(0.75, min((score for score, _ in scored), default=0.0) + 0.25)
    close = sorted(item for item in scored if item[0] <= limit and item[0] < len(text))
    return [names[index] for _, index in close[:count]]


def match_all(patterns: str | Sequence[str], names: Sequence[str], hint: str = "") -> set[str]:
    """Return the names that at least one of the patterns matches.

    Raises:
        LayerNotFoundError: A pattern matches none; `hint` is the user's way to list the names.
        InspectionError: `patterns` is neither a name nor a list of names.
    """
    chosen: set[str] = set()
    for pattern in check_names(patterns):
        found = match_names(pattern, names)
        if not found:
            raise not_found(pattern, names, hint)
        chosen.update(found)
    return chosen


def not_found(
    pattern: object, names: Iterable[str], hint: str = "", kind: str = "layer"
) -> LayerNotFoundError:
    """Return the error for an unknown name; `hint` is the user's way to list the names."""
    known = list(names)
    return LayerNotFoundError(pattern, nearest_names(pattern, known), len(known), hint, kind)


def _split_options(pattern: str, start: int) -> tuple[list[str], int]:
    """Return the comma-separated options of the brace at `start`, and the index after its end."""
    depth, begin = 0, start + 1
    options: list[str] = []
    for index in range(start, len(pattern)):
        character = pattern[index]
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return [*options, pattern[begin:index]], index + 1
        elif character == "," and depth == 1:
            options.append(pattern[begin:index])
            begin = index + 1
    return [], len(pattern)


def _translate(pattern: str) -> str:
    """Return a regular expression for a pattern without braces."""
    found = fnmatch.translate(pattern.removeprefix("*.").replace("[^", "[!"))
    return rf"(?:.*\.)?{found}" if pattern.startswith("*.") else found


def _distance(pattern: list[str], name: list[str]) -> float:
    """Return how far a name is from a pattern: the cheapest alignment of their segments.

    A segment costs between 0 (equal or matched by its wildcard) and 1 (nothing in common); a
    segment left over costs 1, unless a lone `*` takes it.
    """
    best = [float(len(name[:column])) for column in range(len(name) + 1)]
    if pattern and pattern[0] == "*":
        best = [0.0] * (len(name) + 1)
        pattern = pattern[1:]
    for segment in pattern:
        row = [best[0] + (0.0 if segment == "*" else 1.0)]
        for column, word in enumerate(name, start=1):
            take = best[column - 1] + _segment_distance(segment, word)
            skip = row[column - 1] + (0.0 if segment == "*" else 1.0)
            row.append(min(take, best[column] + 1.0, skip))
        best = row
    return best[-1]


def _segment_distance(segment: str, word: str) -> float:
    if compile_pattern(segment).fullmatch(word):
        return 0.0
    return 1.0 - SequenceMatcher(None, segment.strip("*?"), word).ratio()


def check_names(patterns: str | Sequence[str]) -> list[str]:
    """Return the single patterns of one or several over names.

    Raises:
        InspectionError: It is neither a pattern nor a list of them.
    """
    several = [patterns] if isinstance(patterns, str) else patterns
    listed = isinstance(several, (list, tuple, set, frozenset)) and bool(several)
    meaning = "give a pattern such as '*.mlp', or a list of these"
    require(listed and all(isinstance(each, str) for each in several), "layers", patterns, meaning)
    return list(several)
