"""An edit bound to a place of one model: it turns the value found there into the edited one.

`attached` and `_lesion` make a `BoundEdit` of each edit and place, and call `change` for each
value. `change` never writes to the value of the model: it returns a new tensor or writes into a
copy, so gradients flow and a checkpoint can run again. If `into` is given, it is a copy that
earlier edits of the same value made; `change` then writes there and reads the value itself. Random
draws depend on seed, row and position alone, so a repeated pass and a cached token draw the same. A
donor that does not fit is refused with both shapes; it is never broadcast silently over tokens.
Words of errors are free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._edit.edit import Edit
from torchfmri._edit.parts import EditPart, index_of, numbers_of, tokens_in, units_in
from torchfmri._edit.passes import EditPasses
from torchfmri._model import Place
from torchfmri._records import channel_axis
from torchfmri.exceptions import InspectionError


class BoundEdit:
    """One edit of one place.

    Args:
        place: The place in the model.
        edit: The edit, with a tensor as its donor.
        module: The layer's module.
        passes: Knows what the model is fed.
        voxel: How many units a voxel of the layer has.

    Attributes:
        acted: In how many calls it changed something.
        called: In how many calls it was asked.
    """

    def __init__(
        self, place: Place, edit: Edit, module: nn.Module, passes: EditPasses, voxel: int
    ) -> None:
        self.place, self.edit = place, edit
        self._kind, self._passes, self._voxel = type(module), passes, voxel
        self._units: dict[int, Any] = {}
        self.acted = self.called = 0
        _refuse_impossible(place, edit)

    def change(self, value: Tensor, into: Tensor | None) -> Tensor | None:
        """Return the value with this edit, written into the copy `into` if there is one.

        Returns `into` as it is if no selected token is in this pass.
        """
        self.called += 1
        if not value.is_floating_point():
            raise InspectionError(
                f"The edit of {self.place.name!r}: layer {self.place.layer!r} has {value.dtype} "
                "there, and only floating-point values can be edited."
            )
        axis = self._axis(value)
        rows = value.movedim(axis, -1) if axis != value.ndim - 1 else value
        shape = rows.shape
        b, s, before = self._layout(rows)
        if s is not None and shape[:2] != (b, s):
            rows = rows.reshape(b, s, *shape[1:])
        part = self._part(rows, b, s, before)
        if part is None:
            return into
        self.acted += 1
        old = part.read(rows)
        new = self._new(old, rows, part)
        if part.is_whole and into is None:
            found = new if s is None or shape == new.shape else new.reshape(shape)
            return found.movedim(-1, axis) if axis != value.ndim - 1 else found
        copy = value.clone(memory_format=torch.contiguous_format) if into is None else into
        seen = copy.movedim(axis, -1) if axis != value.ndim - 1 else copy
        part.write(new, rows, seen if seen.shape == rows.shape else seen.view(rows.shape))
        return copy

    def overlaps(self, other: BoundEdit) -> bool:
        """Whether both may change the same value."""
        if (self.place.layer, self.place.what) != (other.place.layer, other.place.what):
            return False
        for name in ("rows", "tokens"):
            one, two = getattr(self.edit, name), getattr(other.edit, name)
            if _are_lists(one, two) and not _listed(one) & _listed(two):
                return False
        mine, theirs = self._fixed_units(), other._fixed_units()
        return mine is None or theirs is None or not set(mine).isdisjoint(theirs)

    # -- which part ---------------------------------------------------------------------------

    def _axis(self, value: Tensor) -> int:
        axis = channel_axis(self._kind, value) if self.place.what == "activations" else None
        return value.ndim - 1 if axis is None else axis % value.ndim

    def _layout(self, rows: Tensor) -> tuple[int, int | None, int]:
        """Return rows, tokens (None if they do not matter) and the first position."""
        edit = self.edit
        donor = edit.kind in ("replace", "add") and getattr(edit.values, "ndim", 0) >= 3
        if edit.tokens is None and not donor and edit.kind != "resample":
            return rows.shape[0] if rows.ndim else 1, None, 0
        if edit.tokens is None and rows.ndim == 2 and self._passes.current is None:
            return rows.shape[0], None, 0
        return self._passes.positions(rows, self.place.layer)

    def _part(self, rows: Tensor, b: int, s: int | None, before: int) -> EditPart | None:
        edit, device = self.edit, rows.device
        chosen = numbers_of(edit.rows, b, "row")
        row_index = index_of(chosen, b, device)
        units = self._unit_index(rows.shape[-1], device)
        if s is None:
            return EditPart(rows=row_index, units=units)
        if isinstance(edit.tokens, Tensor):
            return self._masked(edit.tokens, chosen, b, s, before, units)
        wanted = slice(None) if edit.tokens is None else edit.tokens
        positions = tokens_in(wanted, before, s)
        if not positions or not chosen:
            return None
        return EditPart(
            rows=row_index,
            tokens=index_of([each - before for each in positions], s, device),
            positions=torch.tensor(positions, device=device),
            sources=self._sources(positions, before + s),
            units=units,
        )

    def _masked(
        self, mask: Tensor, rows: list[int], b: int, s: int, before: int, units: Any
    ) -> EditPart | None:
        """Return the part that a mask over rows and positions selects; None if that is nothing."""
        if mask.shape[0] not in (1, b):
            raise InspectionError(
                f"The edit of {self.place.name!r}: tokens has {mask.shape[0]} rows, and the batch "
                f"has {b}. Give a mask with as many, or with one."
            )
        here = torch.zeros(b, s, dtype=torch.bool, device="cpu")
        known = mask[:, before : before + s].cpu()
        here[rows, : known.shape[1]] = known.expand(b, -1)[rows]
        return EditPart(mask=here, units=units) if bool(here.any()) else None

    def _unit_index(self, width: int, device: torch.device) -> Any:
        if width not in self._units:
            units = self._unit_numbers(width)
            self._units[width] = None if units is None else index_of(units, width, device)
        return self._units[width]

    def _unit_numbers(self, width: int) -> list[int] | None:
        edit = self.edit
        if edit.units is not None:
            return numbers_of(edit.units, width, f"unit of layer {self.place.layer!r}")
        if edit.voxels is not None:
            count = -(-width // self._voxel)
            voxels = numbers_of(edit.voxels, count, f"voxel of layer {self.place.layer!r}")
            spans = [(each * self._voxel, min((each + 1) * self._voxel, width)) for each in voxels]
            return units_in(tuple(spans))
        return self._fixed_units()

    def _fixed_units(self) -> list[int] | None:
        """Return the units that are known without the value; None for all, or if it is needed."""
        edit, place = self.edit, self.place
        if edit.heads is not None and place.heads is not None:
            heads = numbers_of(edit.heads, len(place.heads), f"head of {place.name!r}")
            return [unit for head in heads for unit in units_in(place.heads[head])]
        if _listed(edit.units) and min(_listed(edit.units)) >= 0:
            return sorted(_listed(edit.units))
        if _listed(edit.voxels) and min(_listed(edit.voxels)) >= 0:
            first = (each * self._voxel for each in sorted(_listed(edit.voxels)))
            return [unit for start in first for unit in range(start, start + self._voxel)]
        return None if place.units is None else units_in(place.units)

    # -- what comes there ---------------------------------------------------------------------

    def _new(self, old: Tensor, rows: Tensor, part: EditPart) -> Tensor:
        edit = self.edit
        if edit.kind == "zero":
            return torch.zeros_like(old)
        if edit.kind == "scale":
            return old * edit.factor
        if edit.kind == "function":
            seen = self._by_head(old)
            return self._checked(edit.values(seen), seen).reshape(old.shape)
        if edit.kind == "resample":
            return self._drawn(old, rows, part)
        values = self._fitting(edit.values, old, rows, part)
        if edit.kind == "add":
            return old + values * edit.factor
        return values.expand(old.shape)

    def _by_head(self, old: Tensor) -> Tensor:
        """Return the part as (..., head, d) if whole heads are meant, as in TransformerLens."""
        edit, place = self.edit, self.place
        by_units = edit.units is not None or edit.voxels is not None
        if place.heads is None or place.head is not None or by_units:
            return old
        count = len(numbers_of(edit.heads, len(place.heads), f"head of {place.name!r}"))
        return old.unflatten(-1, (count, -1))  # type: ignore[no-untyped-call, no-any-return]

    def _checked(self, new: Any, old: Tensor) -> Tensor:
        """Return what the user's function returned, if it can take the place of the value."""
        if not isinstance(new, Tensor) or new.shape != old.shape:
            found = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise InspectionError(
                f"The function that edits {self.place.name!r} returned {found}, and the value has "
                f"the shape {tuple(old.shape)}. Return a tensor of that shape."
            )
        if bool((~torch.isfinite(new.detach())).any()) and bool(torch.isfinite(old.detach()).all()):
            raise InspectionError(
                f"The function that edits {self.place.name!r} returned NaN or infinite values for "
                "finite ones. Everything after it would be too."
            )
        return new.to(old.dtype)

    def _fitting(self, values: Tensor, old: Tensor, rows: Tensor, part: EditPart) -> Tensor:
        """Return a donor or direction, cut to the part."""
        if values.requires_grad and not self._passes.with_grad:
            raise InspectionError(
                f"The values of the edit of {self.place.name!r} require grad, and grad mode is off "
                "here, so they would get none. Leave torch.no_grad(), or detach() them."
            )
        values = values.to(device=old.device, dtype=old.dtype)
        # `source` names positions of the donor, also of one that has just the selected tokens.
        if values.ndim == 0 or (values.shape == old.shape and self.edit.source is None):
            return values
        if values.ndim == 1 and len(values) in (old.shape[-1], rows.shape[-1]):
            return values if len(values) == old.shape[-1] else values[part.units]
        if values.ndim == rows.ndim and values.shape[2:] == rows.shape[2:]:
            found = self._same_part(values, rows, part)
            if found is not None:
                return found
        raise InspectionError(
            f"A donor of shape {tuple(values.shape)} does not fit {self.place.name!r}: layer "
            f"{self.place.layer!r} has the shape {tuple(rows.shape)} there, and the selected part "
            f"{tuple(old.shape)}. Give one of these shapes, or ({old.shape[-1]},)."
        )

    def _same_part(self, values: Tensor, rows: Tensor, part: EditPart) -> Tensor | None:
        """Return the part of another run's whole value; None if it has other rows or tokens."""
        if values.shape[0] not in (1, rows.shape[0]):
            return None
        if part.mask is not None:
            same = values.shape[1] >= rows.shape[1]
            whole = values[:, : rows.shape[1]].expand(rows.shape) if same else None
            return None if whole is None else part.read(whole)
        chosen = values
        if part.positions is not None:
            at = part.positions if part.sources is None else part.sources
            if int(at.max()) >= values.shape[1] or int(at.min()) < -values.shape[1]:
                return None
            chosen = values[:, at.to(values.device)]
        elif values.shape[1:] != rows.shape[1:]:
            return None
        if len(chosen) > 1 and part.rows is not None:
            chosen = chosen[part.rows]
        return chosen if part.units is None else chosen[..., part.units]

    def _sources(self, positions: list[int], total: int) -> Tensor | None:
        """Return the positions in the donor for those in the sequence, of `total` fed so far."""
        tokens, source = self.edit.tokens, self.edit.source
        if source is None or not isinstance(tokens, (list, tuple, range)):
            return None
        absolute = [each + total if each < 0 else each for each in tokens]
        table = dict(zip(absolute, source, strict=True))
        return torch.tensor([table[each] for each in positions], device="cpu")

    def _drawn(self, old: Tensor, rows: Tensor, part: EditPart) -> Tensor:
        """Return values of tokens drawn at random; a row and position draws the same each time."""
        pool: Tensor = self.edit.values.to(device=old.device, dtype=old.dtype)
        if pool.shape[-1] not in (old.shape[-1], rows.shape[-1]):
            raise InspectionError(
                f"Values of width {pool.shape[-1]} cannot be drawn for {self.place.name!r}: layer "
                f"{self.place.layer!r} has {rows.shape[-1]} units, and the selected part "
                f"{old.shape[-1]}. Give values (..., {rows.shape[-1]}) of that layer."
            )
        pool = pool.reshape(-1, pool.shape[-1])
        if part.units is not None and pool.shape[-1] != old.shape[-1]:
            pool = pool[..., part.units]
        if part.mask is not None or part.positions is None:
            draw = torch.Generator().manual_seed(self.edit.seed)
            index = torch.randint(len(pool), old.shape[:-1], generator=draw, device="cpu")
        else:
            seeds = [self.edit.seed * 1_000_003 + each for each in part.positions.tolist()]
            draws = [torch.Generator().manual_seed(each) for each in seeds]
            columns = [
                torch.randint(len(pool), old.shape[:1], generator=draw, device="cpu")
                for draw in draws
            ]
            index = torch.stack(columns, 1).reshape(*old.shape[:2], *[1] * (old.ndim - 3))
            index = index.expand(old.shape[:-1])
        return pool[index.to(pool.device)]


def _listed(value: Any) -> set[int]:
    """Return the numbers that a selection lists; none for all, or if they are not known yet."""
    if isinstance(value, int):
        return {value}
    return set(value) if isinstance(value, (list, tuple, range)) else set()


def _are_lists(one: Any, two: Any) -> bool:
    both = [_listed(one), _listed(two)]
    return all(both) and min(map(min, both)) >= 0


def _refuse_impossible(place: Place, edit: Edit) -> None:
    if place.read_only:
        raise InspectionError(f"{place.name!r} cannot be edited: {place.read_only}.")
    if edit.source is not None and edit.tokens is None:
        raise InspectionError(
            f"The edit of {place.name!r} names positions in the donor, source={edit.source!r}, and "
            "no tokens that they stand for. Give one token for each: "
            "Edit.replace(donor, source=...).at(tokens=[...])."
        )
    if edit.heads is not None and place.heads is None:
        block = "3" if place.block is None else str(place.block)
        raise InspectionError(
            f"{place.name!r} has no heads: layer {place.layer!r} holds them mixed or not at all. "
            f"Name heads as 'L{block}H0', or edit 'blocks.{block}.attn.hook_z'."
        )
    if place.head is not None and (edit.units is not None or edit.voxels is not None):
        raise InspectionError(
            f"{place.name!r} is one head already. Name the layer {place.layer!r} to select units."
        )
