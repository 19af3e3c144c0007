"""The thresholds of the diagnosis with what their comments say of them.

`diagnosis --thresholds` prints them, and tests compare them with `docs/diagnosis.md`.
"""

import inspect
import re
from typing import NamedTuple

from torchfmri._diagnosis import cuts


class Cut(NamedTuple):
    """A threshold.

    Attributes:
        value: The threshold itself.
        signal: The number that is compared with the threshold, in words.
        above: Whether a finding lies above it, and not below.
        reason: The source of the value: arithmetic, literature, or a measured separation.
    """

    value: float
    signal: str
    above: bool
    reason: str


def read_cuts() -> dict[str, Cut]:
    """Return every threshold by name; a name without a comment of its own raises."""
    found = {}
    pattern = re.compile(r"((?:^# .*\n)*)^([A-Z_]+) = ", re.MULTILINE)
    for comment, name in pattern.findall(inspect.getsource(cuts)):
        words = " ".join(comment.replace("\n# ", " ").removeprefix("# ").split())
        said = re.fullmatch(r"(Above|Below): (.+?)\. Why: (.+)\.", words)
        assert said is not None, f"{name} says nothing of itself: {words!r}"
        found[name] = Cut(getattr(cuts, name), said[2], said[1] == "Above", said[3])
    assert found.keys() == {name for name in vars(cuts) if name.isupper()}
    return found


CUTS = read_cuts()
