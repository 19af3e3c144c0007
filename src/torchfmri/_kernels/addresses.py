"""Addresses as pointers in code that numba compiles; imported only where numba is installed.

`compiled` and `compiled_rows` take memory by its address: a call with numbers alone is several
times cheaper than one with arrays. Nothing here checks an address or keeps its memory alive; who
calls such a kernel holds the tensor until it has returned.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic


def _cast_address(context: Any, address: Any) -> Any:
    """Return what numba compiles for an address that is taken for a pointer."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_cast_address)
