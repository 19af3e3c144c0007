"""Which axis of a model's argument holds the features, told by the layers that read it.

A float argument (b, x, y) can be tokens by features or the reverse, and nothing in its shape says
which. `sums` and the rules in `operations` report here how parameters meet it (summed over, per
entry, by channel); `Layouts` notes that in the `Layout` of the argument's source and then chooses a
reading. Evidence is only collected, never overwritten: where it contradicts itself or is missing,
`uses` refuses and asks the user for `channels=`. So a new kind of evidence must hold for every
layer that gives it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.numbers import (
    agrees_along,
    broadcast,
    compact,
    is_constant_along,
    unique,
)
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import CHANNELS_FIRST, Layout, Sources


class Layouts:
    """Notes what layers say about the layouts of arguments, and chooses one of two readings.

    Args:
        sources: The tokens of the pass.
        grids: Makes new ones.
    """

    def __init__(self, sources: Sources, grids: Grids) -> None:
        self.sources, self._grids = sources, grids

    def layout_of(self, origins: Origins) -> Layout | None:
        """The layout of the argument that a tensor is, where that is still a question."""
        if not origins.is_raw or origins.second is None:
            return None
        layouts = [each.layout for each in self.sources.present(origins.first)]
        return layouts[0] if len(layouts) == 1 else None

    def summed_by_layer(self, origins: Origins | None, axes: Sequence[int]) -> Origins | None:
        """Note that a layer takes these axes for features, which may tell the layout.

        Returns the origins; where the other layout is followed beside this, with features last.
        """
        if origins is None:
            return None
        layout = self.layout_of(origins)
        if layout is not None:
            fits = self._fitting(origins, axes)
            layout.last |= fits == (True, False)
            layout.second |= fits == (False, True)
            if fits == (False, True) and layout.is_followed:
                return origins.but(second=None, is_decided=True, is_raw=False)
        elif origins.second is None and len(axes) == 1 and self._mixes(origins.first, axes[0]):
            self._deny(origins.first)
        return origins

    def mixed_by_parameter(self, origins: Origins | None, axis: int) -> Origins | None:
        """Note a product with a square parameter that is no layer's; see `Layout.is_mixed`."""
        layout = None if origins is None else self.layout_of(origins)
        if origins is not None and layout is not None:
            if self._fitting(origins, [axis]) == (False, True):
                layout.is_mixed = True
                return origins
        elif origins is not None and not self._is_second(origins.first):
            return origins
        return self.summed_by_layer(origins, [axis])

    def _is_second(self, numbers: Tensor) -> bool:
        """Whether these are tokens of an argument that is read with its features second."""
        return any(CHANNELS_FIRST in each.name for each in self.sources.present(numbers))

    def lengthened(self, origins: Origins, axis: int) -> None:
        """Note that a parameter is put beside data along an axis: that of positions, as a rule."""
        layout = self.layout_of(origins)
        if layout is not None:
            fits = self._fitting(origins, [axis])
            layout.last |= fits == (False, True)
            layout.second |= fits == (True, False)

    def _mixes(self, numbers: Tensor, axis: int) -> bool:
        """Whether a sum over an axis is one over all positions, for each of several features."""
        if any(numbers.shape[axis] < each.grid[1] for each in self.sources.present(numbers)):
            return False  # patches
        rows = numbers.movedim(axis, -1).reshape(-1, numbers.shape[axis])
        if rows.shape[0] < 2 or rows.shape[1] < 2 or len(unique(rows[0])) < rows.shape[1]:
            return False
        return len(unique(rows, dim=0)) < len(rows)

    def used_by_entry(self, origins: Origins, shape: Sequence[int]) -> None:
        """Note that a parameter of this shape is used on an argument entry by entry."""
        layout = self.layout_of(origins)
        varies = [-1 - k for k, size in enumerate(reversed(shape)) if size > 1]
        if layout is not None:
            layout.is_used = True
            fits = self._fitting(origins, varies)
            layout.per_second |= fits == (False, True)
        elif origins.second is None and varies:
            self._used_by_position(origins.first, varies)

    def _used_by_position(self, numbers: Tensor, varies: Sequence[int]) -> None:
        """Where features were taken to be second: a parameter per position is one per feature."""
        others = {each - numbers.ndim for each in range(1, numbers.ndim)} - {*varies}
        if any(is_constant_along(numbers, axis) for axis in varies):
            return
        if any(numbers.shape[each] > 1 and is_constant_along(numbers, each) for each in others):
            self._deny(numbers)

    def _deny(self, numbers: Tensor) -> None:
        """Note that a layer sums over what was taken for positions of an argument."""
        for each in self.sources.present(numbers):
            if each.layout is not None and not each.layout.is_settled:
                is_second = CHANNELS_FIRST in each.name
                each.layout.last |= is_second
                each.layout.second |= not is_second

    def _fitting(self, origins: Origins, axes: Sequence[int]) -> tuple[bool, bool]:
        """Whether each of two candidates does not change along the axes, which are features."""
        both = (origins.first, origins.second)
        one, other = (
            each is not None and all(is_constant_along(each, axis) for axis in axes)
            for each in both
        )
        return one, other and (one or not self._is_piece(origins, axes))

    def _is_piece(self, origins: Origins, axes: Sequence[int]) -> bool:
        """Whether axes are a piece of the second one of an argument: patches along (b, s, d)."""
        if not origins.is_raw or origins.second is None or not origins.first.numel():
            return False
        keep = [each % origins.first.ndim for each in axes]
        first = compact(origins.first).amin(keep, keepdim=True)
        first, second = broadcast(first, compact(origins.second).amin(keep, keepdim=True))
        pairs = unique(first * (int(second.max()) + 1) + second)
        return len(pairs) > len(unique(second))

    def settled(self, origins: Origins, axes: Sequence[int], are_features: bool = False) -> Origins:
        """Return the candidate, of two, that does not change along these axes, if there is one.

        Args:
            origins: The candidates.
            axes: The axes.
            are_features: Whether the axes are those that a layer takes as features; of an argument
                of the model features come last, unless a layer says otherwise.
        """
        if origins.second is None:
            return origins
        if origins.is_raw:
            layout = self.layout_of(origins)
            is_told = layout is not None and layout.last and not layout.second
            fits = is_told or all(is_constant_along(origins.first, axis) for axis in axes)
            if fits or not are_features:
                return origins.but(second=None, is_decided=True, is_raw=False)
        return self._settled(origins, axes)

    def by_channel(self, origins: Origins) -> Origins:
        """The origins for a layer with the features second."""
        if origins.second is None:
            return origins
        layout = self.layout_of(origins)
        if layout is not None and self._are_both_places(origins):
            layout.is_mixed = True
            return origins
        if layout is not None:
            layout.by_channel |= self._fitting(origins, [1]) == (False, True)
            layout.last |= not layout.by_channel
        found = self._settled(origins, [1])
        if found.is_raw and is_constant_along(origins.first, 1):  # the reading with more positions
            counts = [len(unique(compact(each))) for each in (origins.first, origins.second)]
            kept = origins.first if counts[0] > counts[1] else origins.second
            found = origins.but(first=kept, second=None, is_decided=True, is_raw=False)
        elif found.is_raw:  # an argument in another form: frames of a video, one below the other
            shape = origins.first.shape
            first = self._grids.by_place(origins.first, [shape[0], 1, *shape[2:]]).expand(shape)
            found = origins.but(first=first, second=None, is_decided=True, is_raw=False)
        return found

    def _are_both_places(self, origins: Origins) -> bool:
        """Whether an argument got its channels in the model: conv(x[:, None]) with x (b, s, d)."""
        assert origins.second is not None
        one, other = (
            {axis for axis in range(each.ndim) if not is_constant_along(each, axis)}
            for each in (origins.first, origins.second)
        )
        return 1 not in one | other and bool(one - other) and bool(other - one)

    def _settled(self, origins: Origins, axes: Sequence[int]) -> Origins:
        assert origins.second is not None
        both = origins.first, origins.second
        fits = [all(agrees_along(each, axis) for axis in axes) for each in both]
        if fits[0] == fits[1]:
            return origins
        kept = both[0] if fits[0] or self._is_piece(origins, axes) else both[1]
        return origins.but(first=kept, second=None, is_decided=True, is_raw=False)
