"""Whether numba does the passes over float32 and narrower values; without it torch alone does.

Every pass on the CPU asks here at each call, so that `use_accelerator` (benchmarks, tests) takes
effect at once. numba is imported at the first question and not before: whoever needs no pass does
not wait for it.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

_allowed = True
_module: ModuleType | None = None
_missing = False


def use_accelerator(allowed: bool) -> None:
    """Let numba be used where it is installed (the default), or not."""
    global _allowed
    _allowed = allowed


def compiled() -> ModuleType | None:
    """The module of compiled passes, or None where numba is not installed or not wanted."""
    global _module, _missing
    if _module is None and _allowed and not _missing:
        try:
            _module = importlib.import_module("torchfmri._kernels.compiled")
        except Exception:
            # Not installed, or built for another NumPy: the result is the same, only slower.
            _missing = True
    return _module if _allowed else None


def compiled_rows() -> ModuleType | None:
    """The module of compiled passes over rows, likewise."""
    return None if compiled() is None else _rows()


@lru_cache(maxsize=1)
def _rows() -> ModuleType:
    return importlib.import_module("torchfmri._kernels.compiled_rows")


def accelerator_name() -> str:
    """What does these passes: "numba" or "torch"."""
    return "torch" if compiled() is None else "numba"
