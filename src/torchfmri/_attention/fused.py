"""The pattern of a fused attention, recomputed from what the kernel was handed.

`reader` keeps a `FusedAttention` of each call, `_checkup` uses `masked_logits`. Patterns are
computed in float32 at least, in parts, so that a long text fits into memory. Hidden keys are -inf
and a row without any key is 0, as the kernels have it. The mask may be boolean or added to the
logits; both forms must stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class FusedAttention(NamedTuple):
    """What `F.scaled_dot_product_attention` was handed, without the values.

    Attributes:
        query: (..., heads, q, d).
        key: (..., heads or fewer, k, d).
        mask: True where a key may be read, or a number added to the logit; None without one.
        scale: What logits are multiplied with; None for 1 / sqrt(d).
        causal: Whether query i may read keys 0 to i alone.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float | None
    causal: bool

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedAttention:
        """Return the arguments of one call of `F.scaled_dot_product_attention`."""
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        query, key, mask = given["query"], given["key"], given.get("attn_mask")
        return cls(
            query=query.detach(),
            key=key.detach(),
            mask=None if mask is None else mask.detach(),
            scale=given.get("scale"),
            causal=bool(given.get("is_causal", False)),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., heads, q, k)."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    def rows(self, first: int, last: int) -> Tensor:
        """Return the pattern of queries `first` to `last` - 1, (..., heads, rows, k).

        A query that may read no key at all has a row of zeros, as the kernels return zeros for it.
        """
        query, queries = self.query[..., first:last, :], self.query.shape[-2]
        given = (query, self.key, self.mask, self.scale, self.causal)
        logits = masked_logits(*given, first=first, queries=queries)
        pattern = logits.softmax(-1)
        return pattern.masked_fill_(logits.amax(-1, keepdim=True) == -math.inf, 0.0)


def masked_logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    *,
    first: int = 0,
    queries: int | None = None,
) -> Tensor:
    """Return an attention's logits with -inf for hidden keys, in float32 or float64.

    Args:
        query: (..., heads, rows, d), the queries from number `first` on.
        key: (..., heads, k, d); fewer heads than the queries are shared by neighbouring ones.
        mask: True where a key may be read, or a number added to the logit.
        scale: What logits are multiplied with; None for 1 / sqrt(d).
        causal: Whether query i may read keys 0 to i alone.
        first: The number of the first of these queries.
        queries: How many queries there are in all; as many as are given by default.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = query.detach().to(dtype), key.detach().to(dtype)
    rows, keys = query.shape[-2], key.shape[-2]
    queries = rows if queries is None else queries
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:  # grouped queries
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits: Tensor = (query @ key.transpose(-1, -2)) * scale
    if mask is not None:
        if mask.shape[-2] == queries:  # else it is one row for all of them
            mask = mask[..., first : first + rows, :]
        is_bool = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -math.inf) if is_bool else logits + mask
    if causal:
        at = torch.arange(first, first + rows, device=query.device)[:, None]
        after = torch.arange(keys, device=query.device) > at
        logits = logits.masked_fill(after, -math.inf)
    return logits
