"""Laws of how cost grows with batch size b and length s, fitted to counted sizes.

`cost_run` calls `fit_growth` and hands `Growth` to the user as `cost.growth`. It is public:
attributes and `to_dict` must stay. An axis of which one size was measured has no law, and
predictions along it are refused instead of guessed. The table and the notes may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from torchfmri._arguments import check_number
from torchfmri._cost.laws import Law, PeakLaw, Sample, Term, choose_terms, fit_law, same_program
from torchfmri._cost.resizing import Size
from torchfmri._text import Column, Grid, bytes_text, flops_text, layer_label, star
from torchfmri.exceptions import InspectionError


class Prediction(NamedTuple):
    """The predicted cost of a size that was not measured.

    Attributes:
        batch: Batch size.
        length: Length.
        peak_bytes: The most bytes alive at once; see `Cost.peak_bytes`.
        saved_bytes: Bytes kept from forward to backward.
        forward_flops: FLOPs of the forward pass.
        backward_flops: FLOPs of the backward pass.
    """

    batch: int
    length: int
    peak_bytes: int
    saved_bytes: int
    forward_flops: int
    backward_flops: int

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, length {self.length}: peak {bytes_text(self.peak_bytes)}, saved "
            f"{bytes_text(self.saved_bytes)}, {flops_text(self.forward_flops)} + "
            f"{flops_text(self.backward_flops)} FLOPs"
        )


class LayerGrowth(NamedTuple):
    """The growth laws of one layer, without the layers inside it."""

    forward_flops: Law
    backward_flops: Law
    saved_bytes: Law


@dataclass(frozen=True)
class Growth:
    """The laws of how cost grows with batch size and length.

    The same program runs at every size, so each allocation follows a law of its own. The predicted
    peak is the highest point of all allocations together, even if it is another point than at the
    measured sizes. Sizes that run another program than the largest size are left out. If too few
    remain (a loop over time steps, routing), a law is fitted to the measured peaks instead, and a
    note says so.

    Attributes:
        layers: Layer -> its laws.
        total: The laws of all layers together.
        measured: (batch, length) -> peak bytes.
        check: Relative error when the largest measured size is predicted from the others; None if
            the others are too few.
        notes: What the reader should know.

    Examples:
        >>> import torch, torchfmri
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> sizes = {"batch": (1, 2), "length": (4, 8, 16)}
        >>> growth = torchfmri.cost(layer, torch.randn(1, 4, 16), sizes=sizes, rounds=0).growth
        >>> str(growth["self_attn"].forward_flops)  # 4 x width for every pair of tokens
        '64·b·s² + 2,048·b·s'
        >>> growth.predict(batch=2, length=1024).forward_flops == 2 * (64 * 1024**2 + 4096 * 1024)
        True
    """

    layers: dict[str, LayerGrowth]
    total: LayerGrowth
    measured: dict[tuple[int, int], int]
    check: float | None
    notes: tuple[str, ...]
    _peak: PeakLaw = field(repr=False)

    def __getitem__(self, layer: str) -> LayerGrowth:
        if layer not in self.layers:
            raise InspectionError(
                f"{layer!r} is not a layer with FLOPs or saved bytes of its own; there are "
                f"{', '.join(map(repr, list(self.layers)[:5]))}, ..."
            )
        return self.layers[layer]

    def predict(self, *, batch: int | None = None, length: int | None = None) -> Prediction:
        """Predict the cost of another size; an axis left out stays at its largest measured size.

        Raises:
            InspectionError: A size is not positive, or differs from the only measured size of an
                axis, which shows no law.
        """
        b = self._size("batch", 0, batch)
        s = self._size("length", 1, length)
        forward, backward, saved = (round(law(b, s)) for law in self.total)
        return Prediction(
            batch=b,
            length=s,
            peak_bytes=round(self._peak(b, s)),
            saved_bytes=saved,
            forward_flops=forward,
            backward_flops=backward,
        )

    def _size(self, axis: str, place: int, asked: int | None) -> int:
        """Return the size to predict along an axis."""
        seen = sorted({size[place] for size in self.measured})
        if asked is None:
            return seen[-1]
        check_number(axis, asked, 1, "give a whole number from 1 upwards")
        if len(seen) == 1 and asked != seen[0]:
            raise InspectionError(
                f"{axis}={asked} cannot be predicted: {axis} {seen[0]} alone was measured, which "
                f"does not show how cost grows with it. Measure others too, as in "
                f"sizes={{'{axis}': (1, 2, 4), ...}} (--{axis} 1,2,4), or leave it at {seen[0]}."
            )
        return asked

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return self._grid().html()

    def table(self, *, width: int | None = None) -> str:
        """Return the laws of the layers and of the total as text."""
        return self._grid().text(width)

    def to_dict(self) -> dict[str, Any]:
        """Return laws and measured peaks as plain numbers, for JSON."""
        return {
            "layers": {name: _as_dict(laws) for name, laws in self.layers.items()},
            "total": _as_dict(self.total),
            "measured": [
                {"batch": b, "length": s, "peak_bytes": peak}
                for (b, s), peak in self.measured.items()
            ],
            "check": self.check,
            "notes": list(self.notes),
        }

    def _grid(self) -> Grid:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for name, laws in self.layers.items():
            words = (str(laws.forward_flops), str(laws.saved_bytes))
            groups.setdefault((star(name), *words), []).append(name)
        names = [
            layer_label(names[0]) if len(names) == 1 else f"{pattern} ({len(names)}, each)"
            for (pattern, *_), names in groups.items()
        ]
        flops, saved = ([key[index] for key in groups] for index in (1, 2))
        sizes = ", ".join(f"{b} x {s}" for b, s in self.measured)
        return Grid(
            title=f"growth with batch size b and length s, counted at {sizes}",
            heading="layer",
            names=[*names, "total"],
            columns=[
                Column("FLOPs forward", [*flops, str(self.total.forward_flops)], 2, right=False),
                Column("bytes saved", [*saved, str(self.total.saved_bytes)], 1, right=False),
            ],
            notes=self.notes,
            emphasised=frozenset([len(names)]),
        )


def fit_growth(samples: Sequence[Sample]) -> Growth:
    """Fit laws to samples of several sizes, and return them."""
    measured = {(s.size.batch, s.size.length): s.peak_bytes for s in samples}
    samples = same_program(samples)
    sizes = [sample.size for sample in samples]
    terms = choose_terms(sizes)
    other = [f"{b} x {s}" for b, s in measured if Size(b, s) not in sizes]
    names = list(dict.fromkeys(name for sample in samples for name in sample.layers))
    counts = np.array(
        [[sample.layers.get(name, (0, 0, 0)) for name in names] for sample in samples], float
    )  # (size, layer, 3)
    layers = {
        name: LayerGrowth(*(fit_law(terms, sizes, counts[:, index, k]) for k in range(3)))
        for index, name in enumerate(names)
    }
    total = LayerGrowth(*(fit_law(terms, sizes, counts[:, :, k].sum(1)) for k in range(3)))
    peak = PeakLaw(terms, samples)
    check = _check(samples)
    notes = _describe(terms, total, peak, check)
    if other:
        notes.append(f"another program runs at {', '.join(other)}: not part of the laws")
    return Growth(
        layers=layers, total=total, measured=measured, check=check, notes=tuple(notes), _peak=peak
    )


def _check(samples: Sequence[Sample]) -> float | None:
    """Measure how well the largest size is predicted from the smaller ones along an axis."""
    largest = max(samples, key=lambda sample: (sample.size.batch * sample.size.length, sample.size))
    axis = 1 if len({sample.size.length for sample in samples}) > 2 else 0
    others = [sample for sample in samples if sample.size[axis] < largest.size[axis]]
    terms = choose_terms([sample.size for sample in others]) if others else []
    if not others or len(terms) < len(choose_terms([sample.size for sample in samples])):
        return None
    return abs(PeakLaw(terms, others)(*largest.size) / largest.peak_bytes - 1)


def _describe(
    terms: Sequence[Term], total: LayerGrowth, peak: PeakLaw, check: float | None
) -> list[str]:
    notes = []
    if max(j for _, j in terms) == 1:
        notes.append("two lengths cannot show a quadratic term: give three or more")
    if not peak.same_program:
        notes.append(
            "the program is not the same at all sizes (a loop over time steps, routing): the peak "
            "is predicted from the peaks alone"
        )
    if peak.error > 0.01:
        notes.append(f"the law of the peak misses measured sizes by up to {peak.error:.1%}")
    worst = max(law.error for law in total)
    if worst > 0.01:
        notes.append(f"the laws of the total miss measured sizes by up to {worst:.1%}")
    if check is not None:
        notes.append(f"the largest size, predicted from the smaller ones: {check:.2%} off")
    return notes


def _as_dict(laws: LayerGrowth) -> dict[str, Any]:
    return {name: law.to_dict() for name, law in laws._asdict().items()}
