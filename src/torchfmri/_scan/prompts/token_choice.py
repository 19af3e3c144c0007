"""Choose the tokens of a sequence that count: by author, by place, or by what the text says there.

Contrasts, linear models and probes call `choose_tokens`. A new form of choice needs a line in
`check_tokens`, in `token_words` and in `choose_tokens`, and one in `cli/contrast.read_tokens`.
Positions of characters are counted over the text without special tokens. One character may be
spread over several tokens, so places are compared in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import is_whole
from torchfmri._scan.record.sequence import ScannedSequence, Tokens
from torchfmri.exceptions import InspectionError

TokenChoice = str | int | slice | tuple[int, int] | re.Pattern[str] | Mapping[str, Any]
WORDS = {
    "all": "all tokens",
    "prompt": "the tokens of the prompt",
    "generated": "the generated tokens",
    "last": "the last token",
    "prompt_last": "the last token of the prompt",
}
_KEYS = ("match", "characters", "field", "role")
_FORMS = (
    f"one of {', '.join(map(repr, WORDS))}; a position, or (first, end) of positions; a compiled "
    "regular expression of text, not of bytes; or one of {'match': 'regex'}, "
    "{'characters': (first, end)}, {'field': "
    "'name of a field'}, {'role': 'user'}"
)


def check_tokens(tokens: Any) -> None:
    """Raise where this does not choose tokens.

    Raises:
        InspectionError: It says which there are.
    """
    good = isinstance(tokens, slice) or is_whole(tokens)
    good = good or (isinstance(tokens, re.Pattern) and isinstance(tokens.pattern, str))
    good = good or (isinstance(tokens, str) and tokens in WORDS) or _is_span(tokens)
    if isinstance(tokens, Mapping) and len(tokens) == 1 and next(iter(tokens)) in _KEYS:
        key, value = next(iter(tokens.items()))
        good = _is_span(value) if key == "characters" else isinstance(value, str)
        if key == "match" and good:
            try:
                re.compile(value)
            except re.error as error:
                raise InspectionError(
                    f"{value!r} is not a regular expression: {error}. Give one for re.compile."
                ) from error
    if not good:
        raise InspectionError(f"tokens={tokens!r}: give {_FORMS}.")


def _is_span(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_whole, value))


def token_words(tokens: TokenChoice) -> str:
    """Return the choice in words."""
    if isinstance(tokens, str):
        return WORDS[tokens]
    if isinstance(tokens, re.Pattern):
        return f"tokens that match {tokens.pattern!r}"
    if isinstance(tokens, slice):
        step = "" if tokens.step is None else f":{tokens.step}"
        return f"tokens {tokens.start}:{tokens.stop}{step}"
    if isinstance(tokens, int):
        return f"token {tokens}"
    if isinstance(tokens, Mapping):
        key, value = next(iter(tokens.items()))
        return {
            "match": f"tokens that match {value!r}",
            "characters": f"tokens at characters {value[0]}:{value[1]}",
            "field": f"the tokens that spell {value!r}",
            "role": f"the tokens of the {value}",
        }[key]
    return f"tokens {tokens[0]}:{tokens[1]}"


def why_none(tokens: TokenChoice) -> str:
    """Return the hint for a user whose choice chose no token."""
    if isinstance(tokens, (re.Pattern, Mapping)):
        return (
            "Characters are counted, and patterns looked for, in the text without its special "
            "tokens."
        )
    return (
        "The last token that was written has none, because the model was not run on it; 'last' is "
        "the last one that has."
    )


def choose_tokens(
    sequence: ScannedSequence, tokens: TokenChoice, measured: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return (s,) which tokens count. Special tokens never do, unless a position names them.

    Args:
        sequence: The tokens, and the row that they come from.
        tokens: Which.
        measured: (s,) which of them have values; the last one is the last that has.
    """
    said = sequence.tokens
    usable = ~said.special & measured
    if isinstance(tokens, str):
        if tokens in ("last", "prompt_last"):
            found = np.flatnonzero(usable if tokens == "last" else usable & ~said.generated)
            return _only(len(said), found[-1:])
        kept = {"all": usable, "prompt": ~said.generated, "generated": said.generated}[tokens]
        return usable & kept
    if isinstance(tokens, int):
        return (
            _only(len(said), tokens) if -len(said) <= tokens < len(said) else _only(len(said), [])
        )
    if isinstance(tokens, slice):
        return _only(len(said), tokens)
    if isinstance(tokens, (tuple, list)):
        return _only(len(said), slice(*tokens))
    return usable & _standing_in(sequence, tokens)


def _only(length: int, where: Any) -> NDArray[np.bool_]:
    kept = np.zeros(length, bool)
    kept[where] = True
    return kept


def _standing_in(
    sequence: ScannedSequence, tokens: re.Pattern[str] | Mapping[str, Any]
) -> NDArray[np.bool_]:
    """Return (s,) the tokens with a byte in what a pattern, a range, a field or a role names."""
    said = sequence.tokens
    if isinstance(tokens, re.Pattern):
        return _matching(said, tokens)
    key, value = next(iter(tokens.items()))
    if key == "match":
        return _matching(said, re.compile(value))
    if key == "characters":
        spelling = _without_special(said)
        first, last, _ = slice(*value).indices(len(_text(spelling)))
        return _touching(spelling, [(first, last)])
    if key == "role":
        return _touching(said.spelling, _role_spans(sequence, value, _text(said.spelling)))
    if value not in sequence.fields:
        has = ", ".join(map(repr, sequence.fields)) or "none"
        raise InspectionError(
            f"{sequence.name!r} has no field {value!r}; its fields are {has}. Name one of them."
        )
    wanted = re.escape(str(sequence.fields[value]))
    return _touching(said.spelling, _found(wanted, _text(said.spelling)) if wanted else [])


def _without_special(tokens: Tokens) -> list[bytes]:
    """Return the spelling of the tokens as the user wrote them: nothing for special ones."""
    pairs = zip(tokens.spelling, tokens.special, strict=True)
    return [b"" if special else each for each, special in pairs]


def _matching(tokens: Tokens, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Return (s,) the tokens that match, in each stretch of text between special tokens."""
    spelling = _without_special(tokens)
    kept = np.zeros(len(tokens), bool)
    borders = [-1, *np.flatnonzero(tokens.special).tolist(), len(tokens)]
    for before, after in pairwise(borders):
        own = slice(before + 1, after)
        kept[own] = _touching(spelling[own], _found(pattern, _text(spelling[own])))
    return kept


def _found(pattern: str | re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    return (each.span() for each in re.finditer(pattern, text))


def _text(spelling: Sequence[bytes]) -> str:
    # Bytes that are not a character stay one each, so that places can be counted back.
    return b"".join(spelling).decode("utf-8", "surrogateescape")


def _role_spans(sequence: ScannedSequence, role: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield where the messages of a role stand; what was generated is the assistant's."""
    at, roles = 0, []
    for message in _messages(sequence):
        content = str(message.get("content", ""))
        first = text.find(content, at)
        if content and first >= 0:
            at = first + len(content)
            roles.append(str(message.get("role")))
            if roles[-1] == role:
                yield first, at
    if role == "assistant":
        ends = list(accumulate(map(len, sequence.tokens.spelling), initial=0))
        data = b"".join(sequence.tokens.spelling)
        for index in np.flatnonzero(sequence.tokens.generated):
            yield tuple(
                len(data[: ends[place]].decode("utf-8", "surrogateescape"))
                for place in (index, index + 1)
            )  # type: ignore[misc]
    elif role not in roles:
        has = ", ".join(map(repr, dict.fromkeys([*roles, "assistant"])))
        raise InspectionError(
            f"{sequence.name!r} has no message of role {role!r}: its roles are {has}. Roles are "
            "known where rows of a dataset have messages, or a prompt that was wrapped as one."
        )


def _messages(sequence: ScannedSequence) -> Sequence[Mapping[str, Any]]:
    for value in sequence.fields.values():
        listed = isinstance(value, list) and bool(value)
        if listed and all(isinstance(each, dict) and "role" in each for each in value):
            return list(value)
    prompt = sequence.fields.get("prompt", sequence.fields.get("text"))
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []


def _touching(spelling: Sequence[bytes], spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return (s,) the tokens with a byte in one of the spans (first, end) of characters."""
    text = _text(spelling)
    ends = np.cumsum([0, *map(len, spelling)])
    kept = np.zeros(len(spelling), bool)
    for first, last in spans:
        low, high = (
            len(text[:place].encode("utf-8", "surrogateescape")) for place in (first, last)
        )
        kept |= (ends[:-1] < high) & (ends[1:] > low)
    return kept
