"""Tokens of two prompts that stand for each other."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from torch import Tensor

from torchfmri._arguments import require
from torchfmri._lesion.questions import LesionQuestion

Pairs = list[tuple[int, int]]
"""(Clean position, corrupted position)."""


def match_roles(clean: Sequence[int], corrupted: Sequence[int]) -> Pairs:
    """The positions of two prompts that stand for each other.

    Equal runs of tokens are matched one to one, and so are exchanged runs of equal length. Of
    exchanged runs of different lengths the last tokens are matched: there a name is complete.

    Examples:
        >>> match_roles([1, 2, 3, 9], [1, 7, 8, 3, 9])
        [(0, 0), (1, 2), (2, 3), (3, 4)]
    """
    pairs: Pairs = []
    steps = SequenceMatcher(None, list(clean), list(corrupted), autojunk=False).get_opcodes()
    for kind, a, a_end, b, b_end in steps:
        if kind == "equal" or (kind == "replace" and a_end - a == b_end - b):
            pairs += zip(range(a, a_end), range(b, b_end), strict=True)
        elif kind == "replace":
            pairs.append((a_end - 1, b_end - 1))
    return pairs


def matched_tokens(
    asked: Sequence[LesionQuestion], given: Sequence[tuple[int, int]] | None
) -> Pairs:
    lengths = [len(each.ids) for each in asked]
    if given is None:
        return match_roles(asked[0].ids.tolist(), asked[1].ids.tolist())
    found = [(int(one), int(other)) for one, other in given]
    wrong = [p for p in found if not (0 <= p[0] < lengths[0] and 0 <= p[1] < lengths[1])]
    meaning = (
        f"positions are 0 to {lengths[0] - 1} in the clean prompt and 0 to {lengths[1] - 1} in the "
        "corrupted one"
    )
    require(bool(found) and not wrong, "pairs", wrong or given, meaning)
    twice = len({other for _, other in found}) < len(found)
    require(not twice, "pairs", given, "a corrupted position stands twice; give each once")
    return found


def token_label(tokenizer: Any, ids: Tensor, position: int) -> str:
    token = int(ids[position])
    text = tokenizer.decode([token]) if hasattr(tokenizer, "decode") else str(token)
    return f"{position} {text!r}"


def unmatched_tokens(
    tokenizer: Any, asked: Sequence[LesionQuestion], pairs: Pairs
) -> tuple[str, ...]:
    missing = []
    for side, (question, name) in enumerate(zip(asked, ("clean", "corrupted"), strict=True)):
        known = {each[side] for each in pairs}
        rest = [each for each in range(len(question.ids)) if each not in known]
        missing += [f"{name} {token_label(tokenizer, question.ids, each)}" for each in rest]
    return tuple(missing)
