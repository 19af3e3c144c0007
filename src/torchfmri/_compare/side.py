"""A `Side` of a comparison: a recording, and its noise, the difference between it and itself.

`sources` makes sides, and `entry_point` calls `measure_spread` on live ones: it runs the model
again with redrawn rounding, unchanged, and with rows and threads rearranged. Each tensor gets the
largest of these as its `Spread`. A tensor that moves far more when rows change places than when
rounding is redrawn depends on the order of the batch. That is left out of the noise and reported,
because it would hide real differences. The limits at the top are measured, as their comments say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._compare.recording import (
    FORWARD,
    WHAT,
    Axes,
    RecordedPlace,
    RecordedRows,
    Recording,
    relative,
)
from torchfmri._compare.run import RecordedPass, Run, record, record_rearranged, record_rounded
from torchfmri._model import named_layers
from torchfmri._text import listed
from torchfmri._torch import CompiledForward, flatten
from torchfmri.exceptions import InspectionError

_UNSTEADY = 0.01
"""A run that is repeated usually gives the same bits; sums in any order stay far below this."""
_MOST_ROUNDING, _MOST_ROUNDING_SUMS = 5.0, 100.0
"""Rows that change by more than this many times what redrawn rounding does, when they change
places, depend on their place: that is no noise. The second is for sums over the batch, which are
added up in another order then (`python -m benchmarks compare --unseen`)."""
_NO_ARRANGEMENT = 1e-2
"""... or sums by more than this share."""


class Spread(NamedTuple):
    """How far a side differs from itself in one tensor, relative to the size of its rows.

    Attributes:
        worst: The largest difference of a row.
        typical: The root of the mean square over rows.
    """

    worst: float
    typical: float

    def larger(self, other: Spread) -> Spread:
        """The larger of two spreads."""
        return Spread(max(self.worst, other.worst), max(self.typical, other.typical))


@dataclass(eq=False)
class Side:
    """A recording with its own noise.

    Attributes:
        recording: What is compared.
        run: What it was recorded of; None for a recording of old.
        spread: RecordedPlace -> how far the recording differs from other runs of the same side.
            Empty where it was not measured.
        rounded: A recording with every layer rounding anew; None where there is none.
        placed: The tensors whose rows depend on their place: those of a batch in another order
            differ by more than rounding. So do tensors whose first axis is not the batch.
        notes: What to know about this side.
        tokens: Texts of the tokens, where they are known.
    """

    recording: Recording
    run: Run | None = None
    spread: dict[RecordedPlace, Spread] = field(default_factory=dict)
    rounded: Recording | None = None
    placed: set[RecordedPlace] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    @cached_property
    def modules(self) -> Mapping[str, nn.Module]:
        """The layers of a live model; empty without one."""
        return {} if self.run is None else named_layers(self.run.model)

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled code, which shows no layers."""
        return self.run is not None and CompiledForward(self.run.model).known

    @cached_property
    def coarsest(self) -> torch.dtype | None:
        """The least precise dtype that the forward pass computed in."""
        places = self.recording.places(FORWARD)
        dtypes = {self.recording.dtype(place) for place in places} & _PRECISION.keys()
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


class Partners(NamedTuple):
    """A tensor of a and its partner in b.

    Attributes:
        a: One side.
        b: The other.
        place: The tensor of a.
        partner: That of b.
    """

    a: Side
    b: Side
    place: RecordedPlace
    partner: RecordedPlace

    @property
    def spreads(self) -> tuple[Spread | None, Spread | None]:
        """How far each of them differs from itself; None where that was not measured."""
        return self.a.spread.get(self.place), self.b.spread.get(self.partner)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """In which they were computed."""
        return self.a.recording.dtype(self.place), self.b.recording.dtype(self.partner)

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """The two tensors; None if only statistics were kept."""
        return self.a.recording.tensor(self.place), self.b.recording.tensor(self.partner)

    def rows(
        self, axes: Axes = (), *, rounded: bool = False
    ) -> tuple[RecordedRows | None, RecordedRows | None]:
        """Return both as rows; axes of length 1 that only one side has count for nothing.

        Embeddings of positions may be (1, s, w) or (s, w), and a Linear a convolution of width 1.

        Args:
            axes: In which order to take the axes of b; empty to leave them as they are.
            rounded: Take the recordings with new rounding, which both sides must have then.
        """
        a, b = (side.rounded if rounded else side.recording for side in (self.a, self.b))
        assert a is not None
        assert b is not None
        one, two = a.tensor(self.place), b.tensor(self.partner)
        if one is None or two is None:
            return a.rows(self.place), b.rows(self.partner)
        two = two.permute(axes) if axes else two
        longer = max(one.shape, two.shape, key=len)
        if one.squeeze().shape == two.squeeze().shape:
            one, two = one.reshape(longer), two.reshape(longer)
        return a.as_rows(one, self.place.what), b.as_rows(two, self.partner.what)


_NO_SPREAD = Spread(worst=0.0, typical=0.0)
_PRECISION = dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16))


def live_side(run: Run, max_bytes: int | None) -> Side:
    """Record a run.

    Raises:
        InspectionError: Its data are empty, or its `call` never calls the model.
    """
    first = next((each.tensor for each in flatten(run.data)), None)
    if first is not None and not first.numel():
        raise InspectionError(
            f"data holds a tensor of shape {tuple(first.shape)}: there is nothing to compare. Give "
            "at least one row with one token."
        )
    found = record(run, max_bytes=max_bytes)
    if isinstance(run.model, torch.jit.ScriptModule):
        raise InspectionError(
            f"The {type(run.model).__name__} is TorchScript, which shows no layers. Give the model "
            "that it was made from."
        )
    if not any(each.calls for each in found.inspection.values()):
        raise InspectionError(
            f"call={run.call!r:.80} did not run the {type(run.model).__name__}. Call the model "
            "that it is given: call=lambda model, data: model(**data)."
        )
    return Side(Recording(found), run, notes=list(found.notes))


def measure_spread(
    side: Side, coarsest: torch.dtype | None, max_bytes: int | None, *, redraw: bool
) -> None:
    """Run a side again: unchanged, with rows and threads rearranged, and with new rounding.

    Args:
        side: A live side; its `spread` is filled.
        coarsest: The precision of the other side where that cannot be run itself, else None.
        max_bytes: The most bytes to keep of a pass.
        redraw: Drop other units than the first time, if dropout is on.
    """
    run = side.run
    assert run is not None
    if run.compiled_parts:
        _add(side, record(run, max_bytes=max_bytes))
        # Its layers round as they do when they are seen, which is when they are run eagerly.
        plain = record(run, max_bytes=max_bytes, eager=True)
        _add(side, record_rounded(run, coarsest, max_bytes=max_bytes), plain)
        return
    anew = _beside(side.recording, record_rounded(run, coarsest, max_bytes=max_bytes))
    if not run.has_dropout:  # the same units are dropped again, so that would come back too
        side.rounded = anew
    rounded = _spread(side.recording, anew)
    again = record(run, max_bytes=max_bytes, other_seed=redraw and run.has_dropout)
    repeated = _spread(side.recording, _beside(side.recording, again))
    _merge(rounded, repeated, known=rounded)
    if not run.has_dropout:
        other = _beside(side.recording, record_rearranged(run, max_bytes=max_bytes))
        moved = _spread(side.recording, other)
        steady = _independent(side, moved, rounded)
        side.placed = set(moved) - set(steady)
        _merge(rounded, steady, known=rounded)
        _note_unsteady(side, repeated)
    side.spread = rounded


def _note_unsteady(side: Side, repeated: Mapping[RecordedPlace, Spread]) -> None:
    """Note that a side differs from itself, though it was run again with the same numbers."""
    places = side.recording.places(FORWARD)
    apart = [each for each in places if repeated.get(each, _NO_SPREAD).worst > _UNSTEADY]
    if apart:
        worst = max(repeated[each].worst for each in apart)
        side.notes.append(
            f"differs from itself by up to {worst:.0%} if it is run again, from {apart[0].layer!r} "
            "on: this counts as its noise and hides differences of that size. Draw its random "
            "numbers from torch's own generator, or take out what it counts"
        )


def _independent(
    side: Side, moved: dict[RecordedPlace, Spread], rounded: Mapping[RecordedPlace, Spread]
) -> dict[RecordedPlace, Spread]:
    """Return the spreads of tensors that change only by rounding when rows change places."""

    def is_sum(place: RecordedPlace) -> bool:
        value = side.recording.value(place)
        return "parameter" in place.what or value is None or not value.shape

    def most(place: RecordedPlace) -> float:
        known = rounded.get(place, _NO_SPREAD).worst
        if is_sum(place):
            return max(0.0 if placed else _NO_ARRANGEMENT, _MOST_ROUNDING_SUMS * known)
        value = side.recording.value(place)
        assert value is not None
        return max(4 * torch.finfo(value.dtype).eps, _MOST_ROUNDING * known)

    # Sums over rows that depend on their place do so too, however little they move.
    placed = [each for each in moved if not is_sum(each) and moved[each].worst > most(each)]
    if layers := list(dict.fromkeys(p.layer for p in placed if p.what == WHAT[FORWARD])):
        worst = max(moved[each].worst for each in placed)
        side.notes.append(
            f"what {listed([each or 'the model' for each in layers])} returns depends on the order "
            f"of the rows (it moves by {worst:.1g}): that arrangement does not count as noise"
        )
    return {place: value for place, value in moved.items() if value.worst <= most(place)}


def measure_repeats(side: Side, again: RecordedPass) -> None:
    """Count another recording of the same run as this side's own spread."""
    _add(side, again)


def _add(side: Side, other: RecordedPass, reference: RecordedPass | None = None) -> None:
    base = side.recording
    if reference is not None:
        base = Recording(reference)
    _merge(side.spread, _spread(base, _beside(base, other)))


def _merge(
    spread: dict[RecordedPlace, Spread], more: Mapping[RecordedPlace, Spread],
    known: Mapping[RecordedPlace, Spread] | None = None,
) -> None:  # fmt: skip
    """Keep the larger of two spreads; only those of `known` places, if these are given.

    Without redrawn rounding nothing is known about a place: a run that is repeated as it was
    usually gives the same bits.
    """
    for place, value in more.items():
        if known is None or place in known:
            spread[place] = spread.get(place, _NO_SPREAD).larger(value)


def _beside(reference: Recording, other: RecordedPass) -> Recording:
    """Return another pass of the same side, with rows in the order of the first."""
    again = Recording(other, reference.reduced)
    # What counts as a token may have been agreed on with the other side.
    again.grids = [
        replace(grid, kept=grid.kept.flip(0), order=tuple(reversed(grid.order)))
        if other.turned
        else grid
        for grid in reference.grids
    ]
    return again


def _spread(reference: Recording, again: Recording) -> dict[RecordedPlace, Spread]:
    """The relative difference of each tensor between two passes of one side."""
    found = {}
    for direction in WHAT:
        for place in reference.places(direction):
            one = reference.rows(place)
            two = again.rows(place) if again.value(place) is not None else None
            if one is not None and two is not None and one.values.shape == two.values.shape:
                found[place] = _spread_of(relative(one.values, two.values))
    return found


def _spread_of(gaps: Tensor) -> Spread:
    if not len(gaps):
        return _NO_SPREAD
    return Spread(worst=float(gaps.max()), typical=float(gaps.square().mean().sqrt()))


def without_autocast(run: Run) -> Run:
    """The run without autocast."""
    return replace(run, autocast=None)
