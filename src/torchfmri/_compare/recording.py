"""A `Recording`: the tensors of one pass in their order, each as a table with one row per token.

`side` makes recordings from a `RecordedPass` of `run`, and `sources` from saved results; nearly all
files of this room read them. Tables are float64 on the CPU, whatever the model computed in, so that
comparing adds no rounding. `relative` measures noise as well as differences, because only distances
of one kind can be compared by a factor. A `RecordedPlace` names a tensor and is a key of
dictionaries in other files.
"""

from __future__ import annotations

import collections
import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.parts import BatchParts, find_parts
from torchfmri._compare.run import RecordedPass, kept_value
from torchfmri._records import Value

FORWARD, BACKWARD, PARAMETERS = "forward", "backward", "parameters"
WHAT = {FORWARD: "activations", BACKWARD: "gradients", PARAMETERS: "parameter_gradients"}
"""Direction -> what of each layer is compared, in the order in which they come about."""
Axes = tuple[int, ...]
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
        parts: How its calls make up the batch; found out by default.

    Attributes:
        parts: How the calls of the model make up the batch.
        left_out: (layer, path) of tensors of several calls that do not fit together.
    """

    def __init__(
        self, passed: RecordedPass, reduced: str = "", parts: BatchParts | None = None
    ) -> None:
        self.inspection, self.grids, self.reduced = passed.inspection, list(passed.grids), reduced
        self.batch, self._turned = passed.batch, passed.turned
        self.parts = find_parts(self.inspection, self.grids, self.batch) if parts is None else parts
        self._extend(self.parts.length)
        self.left_out: set[tuple[str, str]] = set()
        self._joined: dict[RecordedPlace, Tensor] = {}
        self._values: dict[RecordedPlace, Value] = {}
        self._order: dict[str, list[RecordedPlace]] = {direction: [] for direction in WHAT}
        self._list_calls()
        self._list_loss()
        self._list_parameters()
        self._order[BACKWARD] = self._by_arrival(self._order[BACKWARD])

    def places(self, direction: str) -> list[RecordedPlace]:
        """The tensors of the forward pass, of the backward pass, or of the parameters, in order."""
        return self._order[direction]

    def value(self, place: RecordedPlace) -> Value | None:
        """Return the value captured at a place; None if there is none."""
        return self._values.get(place)

    def dtype(self, place: RecordedPlace) -> torch.dtype:
        """Return the dtype in which the tensor was computed."""
        return self._values[place].dtype

    def tensor(self, place: RecordedPlace) -> Tensor | None:
        """Return the tensor at a place, of the whole batch; None if only statistics were kept."""
        value = self._values.get(place)
        return self._joined.get(place, value.tensor) if value and value.has_tensor else None

    def rows(self, place: RecordedPlace) -> RecordedRows | None:
        """Return the tensor at a place as rows; None if only statistics were kept."""
        tensor = self.tensor(place)
        return None if tensor is None else self.as_rows(tensor, place.what)

    def tensors(self, layer: str, call: int, what: str) -> dict[str, Tensor]:
        """Return what a layer was given or returned in one call, by path; parts put together."""
        calls = self.inspection[layer].calls
        if not calls:
            return {}
        one = calls[min(call, len(calls) - 1)]
        joined = bool(self.parts.calls and self._calls_per_part(layer))
        found = {}
        for path, value in zip(one.elements(what), one.values(what), strict=False):
            if value is None or not value.has_tensor:
                continue
            tensor = self._join(RecordedPlace(layer, call, what, path)) if joined else value.tensor
            if tensor is not None:
                found[path] = tensor
        return found

    def is_whole(self, place: RecordedPlace) -> bool:
        """Whether rows that were computed apart were put together as in a batch."""
        return self.parts.by_rows and place in self._joined

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
            tensor = self._without_padded_keys(tensor)
            for grid in self.grids:
                rows = grid.rows(tensor)
                if rows is not None:
                    return RecordedRows(self._reduce(rows.double(), what), grid)
        order = self._row_order(tensor)
        if order is not None and "parameter" not in what:
            return RecordedRows(tensor[order].flatten(1).double(), None)
        return RecordedRows(tensor.reshape(1, -1).double(), None)

    def _without_padded_keys(self, tensor: Tensor) -> Tensor:
        """Return attention weights, (b, heads, query, key), with zeros for keys that are padding.

        Nothing is computed with those, but gradients arrive at them.
        """
        lengths = {grid.kept.shape[1] for grid in self.grids}
        for kept in (grid.kept for grid in self.grids if not grid.kept.all()):
            keys = (tensor.shape[0], tensor.shape[-1]) if tensor.ndim == 4 else ()
            if keys == tuple(kept.shape) and tensor.shape[2] in lengths:
                return tensor.masked_fill(~kept[:, None, None], 0)
        return tensor

    def choices(self) -> dict[tuple[str, int, str], Tensor]:
        """Return the whole numbers that layers returned for each token, (token, numbers), in order.

        Such as the experts that a router chose; by layer, call and path.
        """
        what, found = WHAT[FORWARD], {}
        for call in self.inspection.calls():
            for path, tensor in self.tensors(call.layer, call.index, what).items():
                if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
                    continue
                rows = self.as_rows(tensor, what)
                if rows.grid is not None:
                    found[call.layer, call.index, path] = rows.values
        return found

    def padded(self, place: RecordedPlace) -> Tensor | None:
        """The values at padded positions, (position, unit); None where there are none.

        Nor where a tensor was put together of parts, which may have been computed without padding.
        """
        value = self._values[place]
        if not value.has_tensor or place in self._joined:
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
        whole = {layer for layer in self.inspection if self._is_whole(layer)}
        for call in self.inspection.calls():
            joined = call.layer in whole
            by_rows = self.parts.by_rows and not joined
            most = self._calls_per_part(call.layer) * (self.parts.steps if by_rows else 1)
            if (joined or by_rows) and 0 < most <= call.index:
                continue  # part of an earlier one
            for direction in (FORWARD, BACKWARD):
                what = WHAT[direction]
                several = zip(call.elements(what), call.values(what), strict=False)
                # The loss of a model stands before its logits, and is computed from them.
                for path, value in sorted(several, key=_is_number):
                    if value is None or not (
                        value.dtype.is_floating_point or value.dtype.is_complex
                    ):
                        continue
                    place = RecordedPlace(call.layer, call.index, what, path)
                    if joined or by_rows:
                        tensor = self._join(place) if joined else self._stack(place)
                        if tensor is None:
                            self.left_out.add((call.layer, path))
                            continue
                        self._joined[place] = tensor
                    self._values[place] = value
                    self._order[direction].append(place)

    def _list_loss(self) -> None:
        """List a loss that was computed of what the model returned, as if the model returned it."""
        loss, calls = (
            self.inspection.loss,
            self.inspection[""].calls if "" in self.inspection else [],
        )
        if loss is None or len(calls) != 1 or "loss" in calls[0].elements(WHAT[FORWARD]):
            return
        place = RecordedPlace("", 0, WHAT[FORWARD], "loss")
        dtypes = [self.dtype(each) for each in self._order[FORWARD] if not each.layer]
        tensor = torch.tensor(loss, dtype=dtypes[0] if dtypes else None, device="cpu")
        self._values[place] = kept_value("loss", tensor)
        self._order[FORWARD].append(place)

    def _calls_per_part(self, layer: str) -> int:
        """How often a layer is called for each part of the batch; 0 if that is no whole number."""
        per_part, rest = divmod(len(self.inspection[layer].calls), max(len(self.parts.calls), 1))
        return 0 if rest else per_part

    def _is_whole(self, layer: str) -> bool:
        """Whether a layer is called part by part, and its parts can be put together."""
        if not self.parts.calls or not self._calls_per_part(layer):
            return False
        what = WHAT[FORWARD]
        paths = self.inspection[layer].calls[0].elements(what)
        return any(self._join(RecordedPlace(layer, 0, what, path)) is not None for path in paths)

    def _join(self, place: RecordedPlace) -> Tensor | None:
        """Put the parts of a tensor together as that of the batch; None if they do not fit."""
        calls = self.inspection[place.layer].calls[place.call :: self._calls_per_part(place.layer)]
        known = [call for call in calls if place.element in call.elements(place.what)]
        values = [call.value(place.what, place.element) for call in known]
        tensors = [v.tensor.detach().cpu() for v in values if v is not None and v.has_tensor]
        if len(tensors) < len(self.parts.calls):
            return None
        return self.parts.join(tensors, self.grids[0].kept if self.grids else None)

    def _stack(self, place: RecordedPlace) -> Tensor | None:
        """Put the rows of one step below one another, such as logits of the last token alone."""
        each = self._calls_per_part(place.layer) * self.parts.steps
        if not each:
            return None
        values = [call.value(place.what, place.element)
                  for call in self.inspection[place.layer].calls[place.call :: each]
                  if place.element in call.elements(place.what)]  # fmt: skip
        found = [v.tensor.detach().cpu() for v in values if v is not None and v.has_tensor]
        rows = [part.rows for part in self.parts.calls[:: self.parts.steps]]
        if [len(tensor) if tensor.ndim > 1 else 0 for tensor in found] != rows:
            return None
        fits = len({tensor.shape[1:] for tensor in found}) == 1
        return torch.cat(found) if fits else None

    def _extend(self, length: int) -> None:
        """Count the tokens that the model generated; their numbers are not known."""
        if not self.grids or length <= self.grids[0].kept.shape[1]:
            return
        kept = self.grids[0].kept
        more = kept.new_ones(kept.shape[0], length - kept.shape[1])
        self.grids[0] = replace(self.grids[0], kept=torch.cat([kept, more], 1), ids=None)

    @property
    def layout(self) -> tuple[object, ...]:
        """The layout of the batch, on which the order of values without a token axis depends."""
        given = [grid for grid in self.grids if grid.ids is not None or not grid.kept.all()]
        grids = [(grid.order, grid.kept.tolist()) for grid in given]
        return (self.parts.calls, self._turned, str(grids))

    def _by_arrival(self, places: list[RecordedPlace]) -> list[RecordedPlace]:
        """Return the places of the backward pass in the order in which their gradients arrive.

        A model may return what a layer inside it computed long before, such as the states of its
        encoder. The gradient of that arrives when that of the layer does.
        """
        counts = collections.Counter((place.layer, place.call) for place in places)
        order = {place: float(at) for at, place in enumerate(places)}
        known: dict[RecordedPlace, Value] = {}
        for at, place in enumerate(places):
            output = self._values.get(place._replace(what=WHAT[FORWARD]))
            if output is None or not output.has_tensor or not output.shape:
                continue
            if counts[place.layer, place.call] > 1:
                same = (each for each, value in known.items() if _is_equal(value, output))
                order[place] = order.get(next(same, place), at) + at / len(places) / 2
            known[place] = output
        return sorted(places, key=lambda place: -order[place])

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


def _is_equal(one: Value, two: Value) -> bool:
    """Whether two values hold the same numbers; the first ones tell most apart."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    first, other = (each.tensor.reshape(-1)[:8] for each in (one, two))
    return torch.equal(first, other) and torch.equal(one.tensor, two.tensor)


def _is_number(entry: tuple[str, Value | None]) -> bool:
    return entry[1] is not None and entry[1].shape == ()


def relative(one: Tensor, two: Tensor) -> Tensor:
    """How far two tables are apart in each row, (row,): |one - two| / the larger of both (L2).

    Infinite where a value is finite in one table only; the same infinity or NaN is no difference.
    """
    if not one.numel():
        return torch.zeros(len(one), dtype=torch.float64, device="cpu")
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
