"""How often a contrast finds something in nothing: the count, and what is expected of it.

`Contrast.calibrate` returns a `Calibration`, which is public and stands in `.contrast` files:
fields may be added with a default, none may go. `bound` must stay exact (a binomial distribution),
because tests and benchmarks judge every statistical path by it. The sentence that `print` shows may
change freely.
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p
from typing import NamedTuple

from torchfmri._text import plural


class Calibration(NamedTuple):
    """In how many relabellings of its prompts a contrast finds anything.

    Attributes:
        path: Which test, of what, with which correction.
        draws: How many times the labels were shuffled.
        found: In how many of these anything survived.
        alpha: The threshold: the share of draws that is expected of a test that is right.

    Examples:
        >>> import torchfmri
        >>> found = torchfmri.Calibration("Welch t by voxel, fdr", draws=200, found=5, alpha=0.05)
        >>> found.expected, found.bound, found.is_within
        (10.0, 19, True)
    """

    path: str
    draws: int
    found: int
    alpha: float

    @property
    def expected(self) -> float:
        """How many draws find something if the test is right; a cautious one finds fewer."""
        return self.alpha * self.draws

    @property
    def bound(self) -> int:
        """The upper end of the 99 % interval around `expected`, of a binomial distribution."""
        total = 0.0
        for count in range(self.draws + 1):
            others = self.draws - count
            ways = lgamma(self.draws + 1) - lgamma(count + 1) - lgamma(others + 1)
            total += exp(ways + count * log(self.alpha) + others * log1p(-self.alpha))
            if total >= 0.995:
                return count
        return self.draws

    @property
    def is_within(self) -> bool:
        """Whether no more draws than `bound` found something."""
        return self.found <= self.bound

    def __str__(self) -> str:
        verdict = "within" if self.is_within else "MORE THAN"
        return (
            f"{self.path}: {self.found} of {plural(self.draws, 'relabelling')} found anything "
            f"({self.expected:g} expected; {verdict} the bound of {self.bound})"
        )
