"""CAPTURE: the way that a pass takes: its operations and the numbers that they are called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchfmri._torch import DispatchMode


def step(way: int, function: Any, arguments: Any, keywords: Any) -> int:
    """The way after another operation: the same number for the same operations."""
    return hash((way, id(function), _plain(arguments), _plain(tuple(keywords.items()))))


def _plain(value: Any) -> object:
    """What is no tensor among the operands; numbers that are not whole move no entries."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return None if isinstance(value, (Tensor, float)) else str(value)


class Way(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes the way that a pass takes, where its tokens are known if it is the usual one."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `Trace`

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.way = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        self.way = step(self.way, function, arguments, keywords)
        return function(*arguments, **keywords)
