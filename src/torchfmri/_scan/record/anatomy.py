"""The anatomy of a scanned model: its layers in order, and the voxels that each is made of.

The scanner makes one `Anatomy` per model, and everything else uses it to name the columns of its
tables. It is public and stands in `meta.json` of every stored scan. The order of the layers and
voxels must not change, because it is the only thing that says which column is which. Neither may
the order of `KINDS`: files hold its indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_number, is_list, require
from torchfmri._model import not_found
from torchfmri.exceptions import InspectionError

KINDS = ("units", "head", "expert")
"""What a voxel is: neighbouring units, an attention head, or an expert."""


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Layers and voxels; the rows of a scan's tables are tokens, the columns are these.

    A layer's voxels stand in a row. Those of kind "expert" belong to parameters that hold experts
    as rows: they have a learning cost, and neither activation nor gradient.

    Attributes:
        layers: The names, in model order.
        types: The type of each layer's module, such as "Linear".
        layer: (v,) the index of the layer that each voxel belongs to, never falling.
        start: (v,) its first unit there (its first expert).
        count: (v,) how many units it has.
        kind: (v,) an index into KINDS.

    Examples:
        >>> anatomy = Anatomy.of_widths(["q_proj", "mlp"], ["Linear", "MLP"], [128, 100], [64, 64])
        >>> anatomy.count.tolist()
        [64, 64, 64, 36]
        >>> anatomy.voxels_of("mlp")
        slice(2, 4, None)
    """

    layers: tuple[str, ...]
    types: tuple[str, ...]
    layer: NDArray[np.int32]
    start: NDArray[np.int32]
    count: NDArray[np.int32]
    kind: NDArray[np.uint8]

    def __post_init__(self) -> None:
        for name in ("layers", "types"):
            value = getattr(self, name)
            texts = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
            require(texts, name, value, "give a tuple of names, one for each layer")
        for name in ("layer", "start", "count", "kind"):
            value = getattr(self, name)
            whole = isinstance(value, np.ndarray) and value.ndim == 1
            whole = whole and np.issubdtype(value.dtype, np.integer)
            require(whole, name, value, "give an array (v,) of integers, one for each voxel")
        self.check()

    @classmethod
    def of_widths(
        cls,
        layers: Sequence[str],
        types: Sequence[str],
        widths: Sequence[int],
        sizes: Sequence[int],
        kinds: Sequence[str] | None = None,
        experts: Sequence[int] | None = None,
    ) -> Anatomy:
        """Return the anatomy of layers with so many units each, cut into voxels of the given size.

        Args:
            layers: Their names.
            types: The types of their modules.
            widths: How many units each has.
            sizes: How many units a voxel of each has; the last one may have fewer.
            kinds: What the voxels of each are, "units" by default.
            experts: How many experts the parameters of each hold as rows.
        """
        require(is_list(layers), "layers", layers, "give a list of names")
        kinds = ["units"] * len(layers) if kinds is None else kinds
        lists: dict[str, Any] = {"types": types, "widths": widths, "sizes": sizes, "kinds": kinds}
        if experts is not None:
            lists["experts"] = experts
        for name, value in lists.items():
            fits = is_list(value) and len(value) == len(layers)
            require(fits, name, value, f"give a list with one for each of {len(layers)} layers")
        for name, least in (("widths", 0), ("sizes", 1), ("experts", 0)):
            for value in lists.get(name, ()):
                check_number(f"one of {name}", value, least, f"a number from {least} upwards")
        for value in lists["kinds"]:
            require(value in KINDS, "one of kinds", value, f"choose {', '.join(map(repr, KINDS))}")
        rows: list[tuple[int, int, int, int]] = []
        for index, (width, size) in enumerate(zip(widths, sizes, strict=True)):
            kind = KINDS.index(kinds[index])
            rows += [(index, at, min(size, width - at), kind) for at in range(0, width, size)]
            if experts is not None:
                rows += [
                    (index, expert, 1, KINDS.index("expert")) for expert in range(experts[index])
                ]
        table = np.array(rows, dtype=np.int32).reshape(-1, 4)
        return cls(
            layers=tuple(layers),
            types=tuple(types),
            layer=table[:, 0].copy(),
            start=table[:, 1].copy(),
            count=table[:, 2].copy(),
            kind=table[:, 3].astype(np.uint8),
        )

    @cached_property
    def index(self) -> dict[str, int]:
        """Layer -> its column."""
        return {name: index for index, name in enumerate(self.layers)}

    def column(self, layer: str) -> int:
        """Return the column of a layer.

        Raises:
            LayerNotFoundError: There is no such layer in the scan.
        """
        if layer not in self.index:
            raise not_found(layer, self.layers, "scan.layers")
        return self.index[layer]

    def voxels_of(self, layer: str) -> slice:
        """Return the columns of a layer's voxels."""
        first, last = np.searchsorted(self.layer, [self.column(layer), self.column(layer) + 1])
        return slice(int(first), int(last))

    def check(self) -> None:
        """Raise where the tables contradict each other."""
        sizes = {len(each) for each in (self.layer, self.start, self.count, self.kind)}
        if len(self.types) != len(self.layers) or len(sizes) > 1:
            lengths = f"{len(self.layers)}, {len(self.types)}, {sorted(sizes)}"
            raise InspectionError(
                f"The layers, types and voxels of this scan have different lengths ({lengths}); "
                "give one type for each layer, and four numbers for each voxel."
            )
        if len(set(self.layers)) != len(self.layers):
            raise InspectionError(
                f"This scan has a layer twice, in {self.layers[:20]}; give each layer once."
            )
        if len(self.layer) and (
            self.layer.min() < 0
            or self.layer.max() >= len(self.layers)
            or (np.diff(self.layer) < 0).any()
            or self.kind.max() >= len(KINDS)
            or self.count.min() < 1
            or self.start.min() < 0
        ):
            raise InspectionError(
                "The voxels of this scan point at layers that it does not have, or are not in "
                f"their order: give numbers from 0 to {len(self.layers) - 1} that never fall, "
                f"counts from 1, starts from 0, and kinds below {len(KINDS)}."
            )
