"""Calls of flash-attention kernels, read by the names of their arguments.

`reader` asks it about every registered operator. The kernels come from other packages (flash-attn 2
and 3, and what the package `kernels` downloads), so they are known by name alone: a name with
"flash" and "fwd" or "forward", and arguments q, k and v of shape (b, s, heads, d). A call with an
argument that is not in `_KNOWN` is refused with its name, because it may change the pattern. Tested
with an operator that stands in, not with the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfmri._attention.fused import FusedAttention

_SCALE = ("softmax_scale", "scale")
_CAUSAL = ("causal", "is_causal")
_WINDOWS = ("window_size_left", "window_size_right")
# What changes nothing about the pattern.
_DROPOUT = ("dropout_p", "p_dropout")
_IGNORED = ("q", "k", "v", "out", "gen", "gen_", "rng_state")
_FLAGS = ("return_softmax", "num_splits", "sm_margin", "pack_gqa", "return_attn_probs")
_KNOWN = frozenset([*_DROPOUT, *_SCALE, *_CAUSAL, *_WINDOWS, *_IGNORED, *_FLAGS])


def is_flash(schema: Any) -> bool:
    """Whether an operator is the forward pass of a flash-attention kernel."""
    name = schema.name.lower()
    names = {each.name for each in schema.arguments}
    return "flash" in name and ("fwd" in name or "forward" in name) and {"q", "k", "v"} <= names


def read_flash(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[FusedAttention, bool] | str:
    """Return what a kernel was handed and whether it drops weights; or why it cannot be read."""
    given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
    others = [name for name, value in given.items() if name not in _KNOWN and _says_much(value)]
    if others:
        return (
            f"the flash-attention kernel {schema.name!r} was called with {', '.join(others)}, "
            "which is not read (several sequences in one row, a paged cache, a softcap or slopes)"
        )
    query, key = given["q"], given["k"]
    if query.ndim != 4 or key.ndim != 4:
        return f"the flash-attention kernel {schema.name!r} took {tuple(query.shape)} as queries"
    scale = next((given[name] for name in _SCALE if given.get(name) is not None), None)
    left, right = (given.get(name, -1) for name in _WINDOWS)
    if any(given.get(name) for name in _CAUSAL):
        right = 0
    found = FusedAttention(
        query=query.detach().transpose(1, 2),
        key=key.detach().transpose(1, 2),
        mask=_window(query.shape[1], key.shape[1], left, right, query.device),
        scale=scale,
        causal=False,
    )
    return found, any(bool(given.get(name)) for name in _DROPOUT)


def _says_much(value: object) -> bool:
    return isinstance(value, Tensor) or (value is not None and bool(value))


def _window(queries: int, keys: int, left: int, right: int, device: torch.device) -> Tensor | None:
    """Return which keys each query may read, the last one up to the last key; None if all."""
    if left < 0 and right < 0:
        return None
    at = torch.arange(keys - queries, keys, device=device)[:, None]
    apart = torch.arange(keys, device=device) - at
    allowed = torch.ones_like(apart, dtype=torch.bool)
    if right >= 0:
        allowed &= apart <= right
    if left >= 0:
        allowed &= apart >= -left
    return allowed
