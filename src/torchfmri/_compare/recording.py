"""A recording: the tensors of one pass, layer by layer, as rows of tokens."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._compare.grid import Grid
from torchfmri._compare.run import Pass
from torchfmri._records import Value

FORWARD, BACKWARD, PARAMETERS = "forward", "backward", "parameters"
WHAT = {FORWARD: "activations", BACKWARD: "gradients", PARAMETERS: "parameter_gradients"}
"""Direction -> what of each layer is compared, in the order in which they come about."""
_SMALL = 0.1
"""A token whose values are smaller than this share of the median token's is compared with that:
what is left of a sum that cancels is all rounding."""


class Place(NamedTuple):
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


class Rows(NamedTuple):
    """A tensor as a table.

    Attributes:
        values: (row, unit) in float64.
        grid: What the rows are; None where they are no tokens.
    """

    values: Tensor
    grid: Grid | None


class Recording:
    """What a pass left, in the order in which it came about.

    Args:
        passed: The tensors, or the statistics, of the layers, and where the tokens are.
        reduced: What to reduce tensors to before they are compared: "rms", as a scan keeps it, or
            nothing.
    """

    def __init__(self, passed: Pass, reduced: str = "") -> None:
        self.inspection, self.grids, self.reduced = passed.inspection, list(passed.grids), reduced
        self._batch, self._turned = passed.batch, passed.turned
        self._joined: dict[Place, Tensor] = {}
        self._values: dict[Place, Value] = {}
        self._order: dict[str, list[Place]] = {direction: [] for direction in WHAT}
        self._list_calls()
        self._list_parameters()
        self._order[BACKWARD].reverse()

    def places(self, direction: str) -> list[Place]:
        """The tensors of the forward pass, of the backward pass, or of the parameters, in order."""
        return self._order[direction]

    def value(self, place: Place) -> Value | None:
        """What was captured there; None where nothing was."""
        return self._values.get(place)

    def dtype(self, place: Place) -> torch.dtype:
        """The precision in which it was computed."""
        return self._values[place].dtype

    def rows(self, place: Place) -> Rows | None:
        """The tensor as rows; None if only statistics were kept."""
        value = self._values[place]
        if not value.has_tensor:
            return None
        return self.as_rows(self._joined.get(place, value.tensor), place.what)

    def as_rows(self, tensor: Tensor, what: str) -> Rows:
        """A tensor of this pass as rows: of tokens, of samples, or all in one."""
        if tensor.is_nested or tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.detach().to("cpu")
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if "parameter" not in what:
            for grid in self.grids:
                rows = grid.rows(tensor)
                if rows is not None:
                    return Rows(self._reduce(rows.double(), what), grid)
        order = self._row_order(tensor)
        if order is not None and "parameter" not in what:
            return Rows(tensor[order].flatten(1).double(), None)
        return Rows(tensor.reshape(1, -1).double(), None)

    def padded(self, place: Place) -> Tensor | None:
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
        size = rows.norm(dim=1, keepdim=True)
        return size / math.sqrt(max(rows.shape[1], 1)) if what == "activations" else size

    def _row_order(self, tensor: Tensor) -> list[int] | None:
        """How to order the rows of a tensor with one for each sample; None without such rows."""
        if tensor.ndim < 2 or (self._batch and tensor.shape[0] != self._batch):
            return None
        order = range(tensor.shape[0])
        return list(reversed(order)) if self._turned else list(order)

    def _list_calls(self) -> None:
        for call in self.inspection.calls():
            for direction in (FORWARD, BACKWARD):
                what = WHAT[direction]
                paths, values = call.elements(what), call.values(what)
                for path, value in zip(paths, values, strict=False):
                    if value is not None and (value.dtype.is_floating_point or
                                              value.dtype.is_complex):
                        place = Place(call.layer, call.index, what, path)
                        if not self._join(place, value):
                            self._values[place] = value
                            self._order[direction].append(place)

    def _join(self, place: Place, value: Value) -> bool:
        """Add a later part of the tokens (a step with a cache) to the first call of its layer."""
        first = place._replace(call=0)
        before = self._joined.get(first)
        if place.call == 0:
            if value.has_tensor and self._is_part(value.tensor):
                self._joined[first] = value.tensor
            return False
        if before is None or not value.has_tensor or value.tensor.ndim != before.ndim:
            return False
        parts = (before, value.tensor)
        axis = 1 if before.ndim == 3 else 2
        lengths = sum(part.shape[axis] for part in parts)
        if lengths > max(grid.kept.shape[1] for grid in self.grids):
            return False
        self._joined[first] = torch.cat(parts, axis)
        return True

    def _is_part(self, tensor: Tensor) -> bool:
        """Whether a tensor holds the first tokens only, as the first call with a cache does."""
        for grid in self.grids:
            b, s = grid.kept.shape
            if tensor.ndim == 3 and tensor.shape[0] in (1, b) and tensor.shape[1] < s:
                return True
        return False

    def _list_parameters(self) -> None:
        seen = set()
        for record in self.inspection.values():
            if id(record) in seen:
                continue
            seen.add(id(record))
            for name, value in record.parameter_values(WHAT[PARAMETERS]).items():
                place = Place(record.layer, 0, WHAT[PARAMETERS], name)
                self._values[place] = value
                self._order[PARAMETERS].append(place)


def relative(one: Tensor, two: Tensor) -> Tensor:
    """How far two tables are apart in each row, (row,): |one - two| / |one| (L2 over units).

    Infinite where a value is finite in one table only; the same infinity or NaN is no difference.
    """
    if not one.numel():
        return torch.zeros(len(one), dtype=torch.float64)
    finite = one.isfinite() & two.isfinite()
    same = (one == two) | (one.isnan() & two.isnan())
    gap = torch.where(finite, two - one, 0.0).norm(dim=1)
    size = torch.where(finite, one, 0.0).norm(dim=1)
    some = size[size > 0]
    floor = _SMALL * some.median() if len(some) else size.new_zeros(())
    scale = torch.maximum(size, floor)
    found = torch.where(gap > 0, gap / scale, 0.0)
    return torch.where((~finite & ~same).any(1), math.inf, found)
