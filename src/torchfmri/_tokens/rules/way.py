"""Recognize whether a pass runs the same operations as the one that was followed.

`trace` computes the number of a pass with `step` while following it; `passes` runs later passes
inside a `Way` when Python state has changed, and refuses the tokens that were kept if the numbers
differ. `Reads` reports values that leave torch, on which Python may decide what to run next. The
hash leaves out tensors and floats, which move no entries, and includes everything else. It holds
within one process only and must not be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchfmri._torch import FollowingMode

# Methods that hand memory of a tensor to others without any operation; `item`, `int` and `bool` are
# operations, which a dispatch mode sees.
_HANDS_OUT = frozenset(
    {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}
)


def step(way: int, function: Any, arguments: Any, keywords: Any) -> int:
    """The way after another operation: the same number for the same operations."""
    return hash((way, id(function), _plain(arguments), _plain(tuple(keywords.items()))))


def _plain(value: Any) -> object:
    """What is no tensor among the operands; numbers that are not whole move no entries."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return None if isinstance(value, (Tensor, float)) else str(value)


class Way(FollowingMode):  # type: ignore[no-untyped-call]
    """Notes the way that a pass takes, where its tokens are known if it is the usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.way = 0

    def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operation, and note it."""
        self.way = step(self.way, function, arguments, keywords)
        return function(*arguments, **keywords)


class Reads(TorchFunctionMode):
    """Tells of values that leave torch: what Python does next may depend on them.

    Args:
        note: Told the tensor that they are of.
    """

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _HANDS_OUT and isinstance(arguments[0], Tensor):
            # The address of memory on a device is for kernels: Python cannot read there.
            is_address = name in ("data_ptr", "untyped_storage") and not arguments[0].is_cpu
            if not is_address:
                self._note(arguments[0])
        return function(*arguments, **(keywords or {}))
