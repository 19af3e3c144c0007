"""The difference of two conditions as a vector to steer with, and random ones as its control.

`Contrast.direction` returns a `Direction`, which is public; `steer` in `_lesion` takes its vector.
The random directions have the same length, so that a steered answer can be compared with what any
push of that size does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchfmri._arguments import check_number
from torchfmri._contrast.distributions import Doubles


@dataclass(frozen=True, eq=False)
class Direction:
    """The difference of two conditions' mean vectors in a layer: something to steer with.

    Attributes:
        layer: Where it is to be added.
        vector: (w,) the difference.
        question: Which conditions it is of.
        tokens: Over which tokens the means are.

    Examples:
        >>> direction = Direction("mlp", np.array([3.0, 4.0]), "a - b", "all tokens")
        >>> direction.norm
        5.0
        >>> np.linalg.norm(direction.random(2), axis=1).round(6).tolist()
        [5.0, 5.0]
    """

    layer: str
    vector: Doubles
    question: str
    tokens: str

    @property
    def norm(self) -> float:
        """Its length."""
        return float(np.linalg.norm(self.vector))

    def random(self, number: int = 10, seed: int = 0) -> Doubles:
        """Return (number, w) random directions of the same length, as a control for steering."""
        check_number("number", number, 1, "how many directions, such as 10")
        drawn = np.random.default_rng(seed).normal(size=(number, len(self.vector)))
        found: Doubles = drawn * (self.norm / np.linalg.norm(drawn, axis=1, keepdims=True))
        return found
