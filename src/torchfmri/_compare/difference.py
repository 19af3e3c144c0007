"""The records of a comparison: a `Pair` for each tensor, the first `Difference`, and its `Kind`s.

`pairing` makes the pairs, `entry_point` the public `Difference`, and all files that explain a
difference return `Kind`s. A pair keeps distances per row and no tensor of the model, so a result
does not hold the memory of two passes. `FACTOR` separates rounding from mistakes, for pairs here
and in `origin`. It was measured: run `python -m benchmarks compare --unseen` before and after you
change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.recording import Axes, RecordedPlace

Floats = NDArray[np.float64]
FACTOR = 5.0
"""How many times its own spread a side may differ from the other. Pairs that differ by rounding
reach 2.5 (`python -m benchmarks compare --unseen`)."""


class Kind(NamedTuple):
    """What kind of difference it is.

    Attributes:
        name: A short name, such as "factor" or "epsilon".
        text: In words, with the numbers.
    """

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class Pair:
    """One tensor of both sides.

    Attributes:
        direction: forward, backward or parameters.
        place: Where it is in a.
        gaps: (row,) the relative difference in each row: of each token, where `grid` is known.
        partner: Where it is in b; None where b has none.
        grid: What the rows are; None where they are no tokens.
        spread_a: The largest relative difference between a and a; nan where it was not measured.
        spread_b: That of b.
        threshold: What `gaps` may be.
        largest: The largest absolute difference of one value; nan for statistics.
        reason: Why they cannot be compared, or how they differ; empty for a plain difference.
        repeating: (row,) True where a difference beyond typical noise repeats under new rounding;
            None if that is not known.
        alike: The cosine between the difference and the one under new rounding, where it is larger
            than typical noise; else nan.
        nonfinite: "NaN" or "infinite" if both sides have such values in the same place, where they
            cannot be compared; else empty.
        axes: In which order b has to take its axes to have those of a; empty if it has them.
    """

    direction: str
    place: RecordedPlace
    gaps: Floats
    partner: RecordedPlace | None = None
    grid: PositionGrid | None = None
    spread_a: float = math.nan
    spread_b: float = math.nan
    threshold: float = 0.0
    largest: float = math.nan
    reason: str = ""
    repeating: NDArray[np.bool_] | None = None
    alike: float = math.nan
    nonfinite: str = ""
    axes: Axes = ()

    @property
    def worst(self) -> float:
        """The largest relative difference of a row."""
        return float(self.gaps.max(initial=0.0))

    @property
    def differs(self) -> bool:
        """Whether some row differs by more than both sides differ from themselves."""
        return self.worst > self.threshold

    @property
    def is_structural(self) -> bool:
        """Whether the two have other shapes, or only one of them has the tensor."""
        return self.partner is None or self.reason.startswith("shape ")

    @property
    def counting(self) -> NDArray[np.bool_]:
        """(row,) True where a row counts as different."""
        counts: NDArray[np.bool_] = self.gaps > self.threshold
        if self.grid is None or self.repeating is None:
            return counts
        if self.repeats and self.repeating.any():
            return self.repeating
        return counts | self.repeating

    @property
    def repeats(self) -> bool:
        """Whether it counts though it is within noise, because it repeats under new rounding."""
        return self.differs and self.worst <= self.noise

    @property
    def noise(self) -> float:
        """The difference that noise explains in one row; `threshold` if it was not measured."""
        spreads = [each for each in (self.spread_a, self.spread_b) if not math.isnan(each)]
        return max([self.threshold, *(FACTOR * each for each in spreads)])

    @property
    def beyond(self) -> Floats:
        """(row,) the difference in units of what is allowed."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.gaps / self.threshold
        return np.where(self.gaps > 0, ratio, 0.0)


def beyond_text(tolerance: float | None) -> str:
    """The words for the bound that a difference must exceed: the noise, or a tolerance."""
    if tolerance is None:
        return " beyond noise"
    return f" of more than {tolerance:g}" if tolerance else ""


def unit_text(tolerance: float | None) -> str:
    """The unit in which pictures show differences."""
    allowed = "noise explains" if tolerance is None else "was allowed"
    return f"difference in units of what {allowed}"


BRIGHTEST = "the brightest is NaN, infinite or on one side only"
"""What a picture says of infinite differences."""


def drawable(ratios: Floats) -> Floats:
    """Return differences in units of the noise with infinite ones in the brightest colour."""
    largest = ratios[np.isfinite(ratios)].max(initial=1.0)
    return np.where(np.isposinf(ratios), 10 * largest, ratios)


@dataclass(frozen=True, eq=False)
class Difference:
    """The first place where two runs part.

    Attributes:
        direction: forward, backward or parameters (their gradients).
        layer: The layer in a that the difference comes from, as far as that can be told.
        seen_at: The layer in a whose tensor is the first to differ; often `layer` itself.
        partner: `layer` in b.
        call: Which call of it.
        what: activations, gradients or parameter_gradients.
        element: The path of the tensor in a tuple or dict, or the name of the parameter.
        row: Which row of the batch; None where rows are neither tokens nor samples.
        token: Which token of that row, counted from 0 without padding; None without tokens.
        text: The text of the token, where it is known.
        relative: |a - b| there, divided by the larger of |a| and |b| (L2 over units).
        largest: The largest absolute difference of one value of that tensor.
        spread_a: What a differs from itself in that tensor; nan where it was not measured.
        spread_b: What b differs from itself.
        threshold: The relative difference that was allowed.
        compared: How many tensors agree before it.
        kinds: What kind of difference it is, as far as that can be told.
        reason: In words.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.PReLU())
        >>> x, inspector = torch.randn(8, 4), torchfmri.Inspector(model, keep="tensors")
        >>> before = inspector.run_inspection(x)
        >>> with torch.no_grad():
        ...     _ = model[2].weight.mul_(1.1)
        >>> difference = torchfmri.compare(before, inspector.run_inspection(x)).first
        >>> difference.layer, difference.compared
        ('2', 2)
    """

    direction: str
    layer: str
    seen_at: str
    partner: str
    call: int
    what: str
    element: str
    row: int | None
    token: int | None
    text: str
    relative: float
    largest: float
    spread_a: float
    spread_b: float
    threshold: float
    compared: int
    kinds: tuple[Kind, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.place()}: {self.reason}{self.kind_text()}"

    def place(self) -> str:
        """Where it is, in words."""
        name = {"activations": "output", "gradients": "dL/d output"}.get(self.what)
        element = f" ({self.element})" if self.element and name else ""
        subject = f"the {name}{element}" if name else f"dL/d {self.element}"
        where = f"{subject} of {_named(self.seen_at)}"
        where = "the loss" if (self.seen_at, self.element) == ("", "loss") else where
        where += f", call {self.call}" if self.call else ""
        if self.token is not None:
            said = f" {self.text!r}" if self.text else ""
            where += f", token {self.token}{said}" + (f" of row {self.row}" if self.row else "")
        elif self.row is not None:
            where += f", row {self.row} of the batch"
        if self.layer != self.seen_at:
            where += f"; it comes from {_named(self.layer)}"
        return where

    def kind_text(self) -> str:
        """The kinds, as the rest of a sentence."""
        return "".join(f"; {kind.text}" for kind in self.kinds)

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data, for JSON: numbers that are not finite are None."""
        return dict(finite({**vars(self), "kinds": [each._asdict() for each in self.kinds]}))


def finite(data: Any) -> Any:
    """Return plain data with None for NaN and infinity, which JSON does not know."""
    if isinstance(data, dict):
        return {name: finite(each) for name, each in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(each) for each in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _named(layer: str) -> str:
    return repr(layer) if layer else "the model"


def spread_text(value: float) -> str:
    """A relative difference in words."""
    if math.isnan(value):
        return "not measured"
    return "0" if value == 0 else f"{value:.1e}"
