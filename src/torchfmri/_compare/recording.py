"""A recording: the tensors of one pass, layer by layer, as rows of tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.run import RecordedPass
from torchfmri._records import Record, Value

FORWARD, BACKWARD, PARAMETERS = "forward", "backward", "parameters"
WHAT = {FORWARD: "activations", BACKWARD: "gradients", PARAMETERS: "parameter_gradients"}
"""Direction -> what of each layer is compared, in the order in which they come about."""
_FIRST = ("activations", None)
_SMALL = 0.1
"""A token whose values are smaller than this share of the median token's is compared with that:
what is left of a sum that cancels is all rounding."""


class RecordedPlace(NamedTuple):
    """One tensor of a recording.

    Attributes:
        layer: The layer.
        call: Which call of it.
        what: activations, gradients or parameter_gradients.
        element: The path in a tuple or dict, or the name of the parameter.
    """

    layer: str
    call: int
    what: str
    element: str


class RecordedRows(NamedTuple):
    """A tensor as a table.

    Attributes:
        values: (row, unit) in float64.
        grid: What the rows are; None where they are no tokens.
    """

    values: Tensor
    grid: PositionGrid | None


class Recording:
    """The tensors of one pass, in the order in which they were computed.

    Args:
        passed: The tensors, or the statistics, of the layers, and where the tokens are.
        reduced: What to reduce tensors to before they are compared: "rms", as a scan keeps it, or
            nothing.
    """

    def __init__(self, passed: RecordedPass, reduced: str = "") -> None:
        self.inspection, self.grids, self.reduced = passed.inspection, list(passed.grids), reduced
        self.batch, self._turned = passed.batch, passed.turned
        self._joined: dict[RecordedPlace, Tensor] = {}
        self._grows = False
        self._values: dict[RecordedPlace, Value] = {}
        self._order: dict[str, list[RecordedPlace]] = {direction: [] for direction in WHAT}
        self._list_calls()
        self._list_parameters()
        self._order[BACKWARD].reverse()

    def places(self, direction: str) -> list[RecordedPlace]:
        """The tensors of the forward pass, of the backward pass, or of the parameters, in order."""
        return self._order[direction]

    def value(self, place: RecordedPlace) -> Value | None:
        """Return the value captured at a place; None if there is none."""
        return self._values.get(place)

    def dtype(self, place: RecordedPlace) -> torch.dtype:
        """Return the dtype in which the tensor was computed."""
        return self._values[place].dtype

    def rows(self, place: RecordedPlace, *, transposed: bool = False) -> RecordedRows | None:
        """Return the tensor, or its transpose, as rows; None if only statistics were kept."""
        value = self._values[place]
        if not value.has_tensor:
            return None
        tensor = self._joined.get(place, value.tensor)
        return self.as_rows(tensor.T if transposed else tensor, place.what)

    def has_keys(self, place: RecordedPlace) -> bool:
        """Whether the units of a tensor are positions too, as those of attention weights."""
        shape = self._values[place].shape
        return len(shape) == 4 and any(
            shape[-1] == grid.kept.shape[1] in shape[1:3] for grid in self.grids
        )

    def as_rows(self, tensor: Tensor, what: str) -> RecordedRows:
        """Return a tensor as rows: one per token, one per sample, or a single row."""
        if tensor.is_nested or tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.detach().to("cpu")
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if "parameter" not in what:
            for grid in self.grids:
                rows = grid.rows(tensor)
                if rows is not None:
                    return RecordedRows(self._reduce(rows.double(), what), grid)
        order = self._row_order(tensor)
        if order is not None and "parameter" not in what:
            return RecordedRows(tensor[order].flatten(1).double(), None)
        return RecordedRows(tensor.reshape(1, -1).double(), None)

    def choices(self) -> dict[tuple[str, int, str], Tensor]:
        """Return the whole numbers that layers returned for each token, (token, numbers), in order.

        Such as the experts that a router chose; by layer, call and path.
        """
        found = {}
        for call in self.inspection.calls():
            what = WHAT[FORWARD]
            for path, value in zip(call.elements(what), call.values(what), strict=False):
                whole = value is not None and value.has_tensor and not value.dtype.is_floating_point
                if value is None or not whole or value.dtype == torch.bool:
                    continue
                rows = self.as_rows(value.tensor, what)
                if rows.grid is not None:
                    found[call.layer, call.index, path] = rows.values
        return found

    def padded(self, place: RecordedPlace) -> Tensor | None:
        """The values at padded positions, (position, unit); None where there are none."""
        value = self._values[place]
        if not value.has_tensor:
            return None
        for grid in self.grids:
            rows = grid.rows(value.tensor.detach().cpu(), padded=True)
            if rows is not None:
                return rows.double() if len(rows) else None
        return None

    @cached_property
    def layers(self) -> list[str]:
        """The layers with something to compare, in the order in which they finish."""
        places = [place for direction in WHAT for place in self._order[direction]]
        return list(dict.fromkeys(place.layer for place in places))

    def _reduce(self, rows: Tensor, what: str) -> Tensor:
        if not self.reduced:
            return rows
        size: Tensor = rows.square().sum(1, keepdim=True)
        return (size / max(rows.shape[1], 1) if what == "activations" else size).sqrt()

    def _row_order(self, tensor: Tensor) -> list[int] | None:
        """How to order the rows of a tensor with one for each sample; None without such rows."""
        if tensor.ndim < 2 or (self.batch and tensor.shape[0] != self.batch):
            return None
        order = range(tensor.shape[0])
        return list(reversed(order)) if self._turned else list(order)

    def _list_calls(self) -> None:
        self._parts = self._find_parts()
        joined = self._joined_layers()
        for call in self.inspection.calls():
            if call.layer in joined and call.index:
                continue
            for direction in (FORWARD, BACKWARD):
                what = WHAT[direction]
                paths, values = call.elements(what), call.values(what)
                for path, value in zip(paths, values, strict=False):
                    if value is None or not (
                        value.dtype.is_floating_point or value.dtype.is_complex
                    ):
                        continue
                    place = RecordedPlace(call.layer, call.index, what, path)
                    if call.layer in joined and not self._join(place):
                        continue
                    self._values[place] = value
                    self._order[direction].append(place)

    def _find_parts(self) -> list[int]:
        """Return how many tokens each call reads, for a model that is called part by part.

        Also of one that generates: its tokens are more than it was given, and without a cache every
        call runs on all tokens so far. Empty where every call runs on all tokens.
        """
        for record in self.inspection.values():
            lengths = _call_lengths(record)
            known = [grid.kept.shape[1] for grid in self.grids]
            if len(lengths) < 2 or not known:
                continue
            if sum(lengths) in known:
                return lengths
            steps = [later - one for one, later in itertools.pairwise(lengths)]
            self._grows = min(steps) > 0
            if lengths[0] == known[0] and (self._grows or set(lengths[1:]) == {1}):
                self._extend(lengths[-1] if self._grows else sum(lengths))
                return lengths
        return []

    def _extend(self, length: int) -> None:
        """Count the tokens that the model generated; their numbers are not known."""
        kept = self.grids[0].kept
        more = kept.new_ones(kept.shape[0], length - kept.shape[1])
        self.grids[0] = replace(self.grids[0], kept=torch.cat([kept, more], 1), ids=None)

    def _joined_layers(self) -> set[str]:
        """The layers that are called part by part, and whose parts can be put together."""
        parts = len(self._parts)
        found = (each for each in self.inspection.values() if parts and len(each.calls) == parts)
        return {each.layer for each in found if self._parts_of(each.layer, *_FIRST) is not None}

    def _join(self, place: RecordedPlace) -> bool:
        """Put the parts of a tensor together along its tokens; False where it has none."""
        parts = self._parts_of(place.layer, place.what, place.element)
        if parts is not None:
            self._joined[place] = parts[-1] if self._grows else torch.cat(parts, 1)
        return parts is not None

    def _parts_of(self, layer: str, what: str, element: str | None) -> list[Tensor] | None:
        """Return the tensor of each call of a layer, (b, s, ...); None if one has no token axis."""
        rows = self.grids[0].kept.shape[0]
        found: list[Tensor] = []
        for call, length in zip(self.inspection[layer].calls, self._parts, strict=True):
            path = next(iter(call.elements(what)), "") if element is None else element
            value = call.value(what, path)
            if value is None or not value.has_tensor:
                return None
            grid = PositionGrid(
                kept=torch.ones(rows, length, dtype=torch.bool), order=tuple(range(rows))
            )
            tensor = value.tensor.detach().cpu()
            if tensor.ndim == 2 and len(tensor) == rows * length:
                # A router returns (b * s, w), which a grid of one token takes for (b, w).
                tensor = tensor.view(rows, length, -1)
            part = grid.aligned(tensor)
            # Attention weights grow along the keys, so that their parts do not fit together.
            if part is None or (found and not self._grows and part.shape[2:] != found[0].shape[2:]):
                return None
            found.append(part)
        return found

    @property
    def layout(self) -> tuple[object, ...]:
        """The layout of the batch, on which the order of values without a token axis depends."""
        grids = [(grid.order, grid.kept.tolist()) for grid in self.grids]
        return (tuple(self._parts), self._turned, str(grids))

    def _list_parameters(self) -> None:
        seen = set()
        for record in self.inspection.values():
            if id(record) in seen:
                continue
            seen.add(id(record))
            for name, value in record.parameter_values(WHAT[PARAMETERS]).items():
                place = RecordedPlace(record.layer, 0, WHAT[PARAMETERS], name)
                self._values[place] = value
                self._order[PARAMETERS].append(place)


def _call_lengths(record: Record) -> list[int]:
    """Return how many tokens each call of a layer returns, (b, s, w); empty for other shapes."""
    values = [call.values("activations")[:1] for call in record.calls]
    shapes = [each[0].shape for each in values if each and each[0] is not None]
    if len(shapes) < len(record.calls) or any(len(shape) != 3 for shape in shapes):
        return []
    return [shape[1] for shape in shapes]


def relative(one: Tensor, two: Tensor) -> Tensor:
    """How far two tables are apart in each row, (row,): |one - two| / the larger of both (L2).

    Infinite where a value is finite in one table only; the same infinity or NaN is no difference.
    """
    if not one.numel():
        return torch.zeros(len(one), dtype=torch.float64)
    finite = one.isfinite() & two.isfinite()
    same = (one == two) | (one.isnan() & two.isnan())
    gap = torch.where(finite, two - one, 0.0).norm(dim=1)
    sizes = [torch.where(finite, each, 0.0).norm(dim=1) for each in (one, two)]
    size = torch.maximum(*sizes)
    some = size[size > 0]
    floor = _SMALL * some.median() if len(some) else size.new_zeros(())
    scale = torch.maximum(size, floor)
    found = torch.where(gap > 0, gap / scale, 0.0)
    return torch.where((~finite & ~same).any(1), math.inf, found)
