"""The records of one kind of failure, and of the clues about one that happened.

Every table in `*_failures` is made of `Failure`, and every function that reads clues returns
`Clues`. A failure without `error` matches only messages that PyTorch itself raised, so that a
user's own `ValueError` with similar words is left alone. Patterns are searched in messages of
several PyTorch versions: keep them loose. A further field needs a default, because the tables have
about a hundred entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torchfmri._explain.crash import Crash, SourceLine

SIZES = (
    r"(?:size of tensor a|expanded size of the tensor) \((?P<first>\d+)\) must match the "
    r"(?:size of tensor b|existing size) \((?P<second>\d+)\)"
)
"""Words about two sizes that do not agree, which several failures share."""


class Clues(NamedTuple):
    """The clues about one failure.

    Attributes:
        facts: What was found, one sentence each.
        cure: Cures that these facts suggest; they come first.
        layer: The layer, if it is known better than from the traceback.
        near: The layer before the place, if the layer itself is unknown.
        forward: For a failed backward pass: the line of the forward pass.
    """

    facts: tuple[str, ...] = ()
    cure: tuple[str, ...] = ()
    layer: str | None = None
    near: str | None = None
    forward: SourceLine | None = None


@dataclass(frozen=True)
class Failure:
    """One kind of failure, with its pattern and its explanation.

    Attributes:
        kind: A short name for programs.
        pattern: A regular expression that is searched in the message; case does not matter.
        what: What happened, one sentence; `{group}` stands for a group of the pattern.
        why: What usually causes it.
        cure: What to do, most likely cure first.
        error: The class it must have, raised anywhere; None: any class, raised inside PyTorch.
        when: A further condition.
        clues: A function that reads more than the message says.
    """

    kind: str
    pattern: str
    what: str
    why: str
    cure: tuple[str, ...]
    error: type[BaseException] | None = None
    when: Callable[[Crash, re.Match[str]], bool] | None = None
    clues: Callable[[Crash, re.Match[str]], Clues] | None = None

    def match(self, crash: Crash) -> re.Match[str] | None:
        """Return the match of the pattern if this is the failure, else None."""
        if self.error is not None and not isinstance(crash.error, self.error):
            return None
        if self.error is None and crash.raised_by_others:
            return None
        found = re.search(self.pattern, crash.message, re.IGNORECASE | re.DOTALL)
        if found is None or (self.when is not None and not self.when(crash, found)):
            return None
        return found
