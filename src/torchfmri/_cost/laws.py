"""Laws of growth: polynomials in batch size b and length s, fitted to counts.

`growth` fits them. Counts are whole numbers that follow a polynomial exactly, so a good fit has no
residual; `error` says how far it is off. The peak is not fitted itself: every allocation has its
own law, and the highest point of all may lie elsewhere at other sizes. That needs the same program
at every size (`same_program`). How a law is fitted may change freely as long as exact counts give
an error of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._cost.resizing import Size

Term = tuple[int, int]
"""The powers of b and of s."""
_NEGLIGIBLE = 1e-9  # of the largest coefficient: rounding of the fit


@dataclass(frozen=True)
class Law:
    """A polynomial in batch size b and length s.

    Attributes:
        coefficients: (power of b, power of s) -> coefficient.
        error: The largest relative deviation at the measured sizes.

    Examples:
        >>> law = Law({(1, 2): 4096.0, (1, 1): 131072.0, (0, 0): 12.0}, 0.0)
        >>> str(law), law(2, 8)
        ('4,096·b·s² + 131,072·b·s + 12', 2621452.0)
    """

    coefficients: Mapping[Term, float]
    error: float

    def __call__(self, batch: int, length: int = 1) -> float:
        return float(sum(v * batch**i * length**j for (i, j), v in self.coefficients.items()))

    def __str__(self) -> str:
        ordered = sorted(self.coefficients.items(), key=lambda item: item[0][::-1], reverse=True)
        terms = [_term_text(value, *powers) for powers, value in ordered if value]
        return " + ".join(terms).replace("+ -", "- ") or "0"

    def to_dict(self) -> dict[str, Any]:
        """Return the coefficients by term (`b*s^2`), and the error."""
        terms = {_term_name(*powers): value for powers, value in self.coefficients.items() if value}
        return {"terms": terms, "error": self.error}


@dataclass(frozen=True)
class Sample:
    """The counts at one size."""

    size: Size
    existing_bytes: int
    steps: NDArray[np.float64]
    layers: Mapping[str, tuple[int, int, int]]

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive at once."""
        most = int(self.steps.max()) if len(self.steps) else 0
        return self.existing_bytes + most


def choose_terms(sizes: Sequence[Size]) -> list[Term]:
    """Return the powers that the sizes can tell apart: b up to 1, s up to 2, fewer for few sizes.

    >>> choose_terms([Size(1, 8), Size(2, 8), Size(4, 8)])
    [(0, 0), (1, 0)]
    >>> choose_terms([Size(2, 8), Size(2, 16), Size(2, 32)])
    [(0, 0), (0, 1), (0, 2)]
    """
    batches, lengths = ({size[axis] for size in sizes} for axis in (0, 1))
    most = (min(len(batches) - 1, 1), min(len(lengths) - 1, 2))
    return [(i, j) for i in range(most[0] + 1) for j in range(most[1] + 1)]


def same_program(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the program of the largest; all, if those are too few for its law."""
    alike = [sample for sample in samples if len(sample.steps) == len(samples[-1].steps)]
    enough = choose_terms([sample.size for sample in alike])
    return alike if enough == choose_terms([sample.size for sample in samples]) else list(samples)


class PeakLaw:
    """The peak of a program whose allocations each follow a law."""

    def __init__(self, terms: Sequence[Term], samples: Sequence[Sample]) -> None:
        self._terms = list(terms)
        self.same_program = len({len(sample.steps) for sample in samples}) == 1
        sizes = [sample.size for sample in samples]
        heights = [
            sample.steps if self.same_program else np.array([sample.steps.max(initial=0.0)])
            for sample in samples
        ]
        offsets = np.array([[sample.existing_bytes] for sample in samples])
        self._scale = _largest(sizes)
        design = self._design(sizes)
        self._coefficients = _solve(design, np.array(heights))
        self._offset = _solve(design, offsets.astype(float))
        fitted = [self(*sample.size) / sample.peak_bytes for sample in samples]
        self.error = max(abs(each - 1) for each in fitted)

    def __call__(self, batch: int, length: int) -> float:
        row = self._design([Size(batch, length)])
        most = float((row @ self._coefficients).max(initial=0.0))
        return most + float((row @ self._offset)[0, 0])

    def _design(self, sizes: Sequence[Size]) -> NDArray[np.float64]:
        return _design(self._terms, np.array(sizes, float) / self._scale)


def _largest(sizes: Sequence[Size]) -> NDArray[np.float64]:
    """Return the largest b and s, by which sizes are divided: powers of them differ too much."""
    return np.asarray(np.array(sizes, float).max(0))


def _design(terms: Sequence[Term], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([sizes[:, 0] ** i * sizes[:, 1] ** j for i, j in terms], axis=1)


def _solve(design: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.lstsq(design, values, rcond=None)[0])


def fit_law(terms: Sequence[Term], sizes: Sequence[Size], values: NDArray[np.float64]) -> Law:
    """Fit the law with these terms to the values, by least squares."""
    scale = _largest(sizes)
    design = _design(terms, np.array(sizes, float) / scale)
    solved = _solve(design, values[:, None])[:, 0]
    largest = np.abs(solved).max(initial=0.0)
    kept = np.where(np.abs(solved) > _NEGLIGIBLE * largest, solved, 0.0)
    residual = np.abs(design @ kept - values)
    error = float((residual / np.maximum(np.abs(values), 1)).max())
    powers = np.array([scale[0] ** i * scale[1] ** j for i, j in terms])
    # Counts are whole numbers, and most coefficients too: remove rounding noise.
    values_by_term = [
        float(round(each)) if abs(each - round(each)) < 1e-6 * max(abs(each), 1) else float(each)
        for each in kept / powers
    ]
    return Law(dict(zip(terms, values_by_term, strict=True)), error)


def _term_name(i: int, j: int) -> str:
    parts = [
        letter if power == 1 else f"{letter}^{power}"
        for letter, power in (("b", i), ("s", j))
        if power
    ]
    return "*".join(parts) or "1"


def _term_text(value: float, i: int, j: int) -> str:
    number = f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"
    name = _term_name(i, j)
    return number if name == "1" else f"{number}·{name.replace('*', '·').replace('^2', '²')}"
