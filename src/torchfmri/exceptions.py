"""The errors of torchfmri.

    InspectionError (RuntimeError)            anything that an inspection cannot do
    ├── LayerNotFoundError (KeyError)         a name or pattern that no layer has
    └── MemoryLimitError (MemoryError)        max_bytes would be exceeded

Catch `InspectionError` for all of them. Errors raised by the model itself pass
through unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence


class InspectionError(RuntimeError):
    """An inspection cannot do what was asked; the message says why and what to write instead."""


class LayerNotFoundError(InspectionError, KeyError):
    """No layer has this name, or none matches this pattern.

    Attributes:
        pattern: What was asked for, as the user wrote it.
        nearest: Names of the layers that come closest, best first.
        count: How many layers there are to choose from.
    """

    def __init__(self, pattern: object, nearest: Sequence[str] = (), count: int = 0) -> None:
        self.pattern = pattern
        self.nearest = tuple(nearest)
        self.count = count
        message = f"No layer matches {pattern!r} among {count} layers."
        if self.nearest:
            message += f" Nearest: {', '.join(repr(name) for name in self.nearest)}."
        super().__init__(message + " List them with inspector.layers().")

    __str__ = Exception.__str__  # that of KeyError quotes the message

    def __reduce__(self) -> tuple[type[LayerNotFoundError], tuple[object, tuple[str, ...], int]]:
        return (type(self), (self.pattern, self.nearest, self.count))


class MemoryLimitError(InspectionError, MemoryError):
    """Keeping one more tensor would exceed `max_bytes`; nothing beyond it was kept.

    Attributes:
        layer: The layer whose tensor did not fit.
        needed: Bytes of that tensor.
        kept: Bytes kept so far.
        max_bytes: The limit.
    """

    def __init__(self, layer: str, needed: int, kept: int, max_bytes: int) -> None:
        self.layer = layer
        self.needed = needed
        self.kept = kept
        self.max_bytes = max_bytes
        super().__init__(
            f"Keeping the tensor of layer {layer!r} needs {needed:,} bytes, but {kept:,} of "
            f"max_bytes={max_bytes:,} are in use. Watch fewer layers, keep a smaller dtype "
            f"(dtype=torch.bfloat16), or keep statistics only (keep='statistics')."
        )

    def __reduce__(self) -> tuple[type[MemoryLimitError], tuple[str, int, int, int]]:
        return (type(self), (self.layer, self.needed, self.kept, self.max_bytes))
