"""The state of a page as Python may set it: the same names and values as in the page's address.

The names are those of `viewer/src/state.ts`, and both must be changed together. A state that
cannot be shown is refused here with what exists, where a page would silently drop it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchfmri._arguments import require
from torchfmri._viewer.board import Board

CHOICES: dict[str, tuple[str, ...]] = {
    "norm": ("row", "global"),
    "map": ("viridis", "cividis", "batlow"),
    "depth": ("blocks", "parts", "all"),
    "pool": ("max", "mean"),
}
_COUNTS, _PLACES, _LISTS = ("sequence", "column"), ("first", "last", "top"), ("toggled", "voxels")
KEYS = ("metric", "layer", "follow", *_COUNTS, *_PLACES, *_LISTS, *CHOICES)


def check_state(given: Mapping[str, Any], board: Board, sequence: int = 0) -> None:
    """Raise where a state names something that the page of a board does not have.

    Args:
        given: The part of the state that is set.
        board: What the page shows.
        sequence: The one in view, where the state names none.

    Raises:
        InspectionError: A key or a value is unknown.
    """
    require(isinstance(given, Mapping), "state", given, "give a mapping, such as view.state")
    for key, value in given.items():
        name = f"state[{key!r}]"
        require(key in KEYS, name, value, f"known are {', '.join(KEYS)}")
        if key in CHOICES:
            require(value in CHOICES[key], name, value, f"choose from {', '.join(CHOICES[key])}")
        elif key in _COUNTS:
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            require(whole, name, value, "give a number from 0")
        elif key in _PLACES:
            number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            require(number, name, value, "give a number from 0")
        elif key in _LISTS:
            texts = isinstance(value, list | tuple) and all(isinstance(e, str) for e in value)
            require(texts, name, value, "give a list of layers")
        else:
            kind = bool if key == "follow" else str
            require(isinstance(value, kind), name, value, f"give a {kind.__name__}")
    _check_place(given, board, given.get("sequence", sequence))


def _check_place(given: Mapping[str, Any], board: Board, sequence: int) -> None:
    """Whether what is named is there; what may still come is not asked for."""
    count = len(board.entries())
    if not count:
        return
    require(sequence < count or board.live, "state['sequence']", sequence, f"there are {count}")
    if sequence >= count:
        return
    metrics = [each.name for each in board.metrics(sequence)]
    metric, layer = given.get("metric", ""), given.get("layer", "")
    choices = f"choose from {', '.join(metrics)}"
    require(not metric or metric in metrics or board.live, "state['metric']", metric, choices)
    known = layer.split("[")[0] in board.layers
    require(not layer or known or board.live, "state['layer']", layer, "give the name of a layer")
    length = board.length(sequence)
    column = given.get("column", 0)
    fits = column < max(1, length) or board.live
    require(fits, "state['column']", column, f"there are {length} {board.axis}s")
