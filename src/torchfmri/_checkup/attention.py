"""Attention as numbers per head: entropy, largest logit, and how much of the future is open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfmri._attention import masked_logits
from torchfmri._diagnosis import HeadActivity

LEAST_KEYS = 4
"""Entropy over fewer keys says little."""


def logits_of_fused(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The masked logits that a fused attention never writes down; None where there are few keys."""
    q, k = args[0], args[1]
    if q.ndim != 4 or k.shape[-2] < LEAST_KEYS:
        return None
    options = dict(kwargs)
    scale = options.get("scale")
    causal = options.get("is_causal", next((a for a in args[3:] if isinstance(a, bool)), False))
    mask = options.get("attn_mask", options.get("attn_bias"))
    if mask is None:
        mask = next((a for a in args[3:] if isinstance(a, Tensor)), None)
    mask = None if mask is None else mask.detach()
    return masked_logits(q, k, mask, scale, bool(causal)).float()


def head_activity(
    layer: str, step: int, logits: Tensor, probabilities: Tensor
) -> HeadActivity | None:
    """Of logits (b, heads, s, s) or (b * heads, s, s); None where no query has enough keys."""
    if logits.ndim == 3:
        logits, probabilities = logits[None], probabilities[None]
    hidden = torch.finfo(torch.float16).min / 2  # as -inf, and as the smallest number
    open_keys = logits > hidden
    keys = open_keys.sum(-1)
    entropy = torch.special.entr(probabilities).sum(-1) / keys.clamp(min=2).log()
    rows = keys >= LEAST_KEYS
    if not bool(rows.any()):
        return None
    sums = (entropy * rows).sum(dim=(0, -1)) / rows.sum(dim=(0, -1)).clamp(min=1)
    largest = logits.masked_fill(~open_keys, 0).abs().amax(dim=(0, -1, -2))
    return HeadActivity(
        layer=layer,
        step=step,
        entropy=tuple(sums.tolist()),
        logit=tuple(largest.tolist()),
        keys=logits.shape[-1],
        future=_open_future(open_keys),
    )


def _open_future(open_keys: Tensor) -> float:
    """The share of keys after their query that it may read; nan where they are not one text."""
    queries, keys = open_keys.shape[-2:]
    if queries != keys:
        return math.nan
    after = torch.ones(queries, keys, dtype=torch.bool, device=open_keys.device).triu(1)
    return float(open_keys[..., after].float().mean())
