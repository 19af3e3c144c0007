"""What an attention pattern says of each token and head, in five numbers.

`_scan` calls `score_heads` for each layer. It takes the pattern in parts, so that no whole pattern
has to exist. Padding counts neither as a token nor as a distance, and its own scores are nan; the
names in `HEAD_SCORES` are stored in scans and must stay. A new score is an entry there and in
`_score`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

HEAD_SCORES = {
    "entropy": "entropy of the attention in nats; 0 if all of it is on one token",
    "distance": "mean distance to the tokens attended to, in tokens",
    "first": "share of the attention on the first token of the sequence",
    "previous": "share on the token before; nan for the first token",
    "induction": "share on the tokens that followed earlier copies of this token; nan without one",
}
"""What is measured per token and head."""


def score_heads(
    chunks: Iterable[tuple[int, Tensor]], ids: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Return the scores of one layer's self-attention by name, (b, s, heads) each, in float32.

    Padding counts neither as a token nor as a distance; its own scores are nan.

    Args:
        chunks: First query and rows (b, heads, rows, s) of the pattern, as
            `AttentionCall.chunks` gives them.
        ids: (b, s) the tokens.
        mask: (b, s) 0 for padding.
    """
    kept = mask.bool()
    position = (kept.long().cumsum(-1) - 1).clamp(min=0)
    start = kept.long().argmax(-1)
    parts: dict[str, list[Tensor]] = {name: [] for name in HEAD_SCORES}
    for first, pattern in chunks:
        last = first + pattern.shape[2]
        for name, score in _score(pattern, first, last, ids, kept, position, start).items():
            hidden = ~kept[:, first:last, None]
            parts[name].append(score.transpose(1, 2).masked_fill(hidden, torch.nan).float())
    return {name: torch.cat(each, 1) for name, each in parts.items()}


def _score(
    pattern: Tensor,
    first: int,
    last: int,
    ids: Tensor,
    kept: Tensor,
    position: Tensor,
    start: Tensor,
) -> dict[str, Tensor]:
    """Return the scores of queries `first` to `last` - 1 by name, (b, heads, rows) each."""
    b, heads, rows, keys = pattern.shape
    at = torch.arange(first, last, device=ids.device)
    apart = (position[:, first:last, None] - position[:, None, :]).abs().to(pattern.dtype)
    where = start[:, None, None, None].expand(b, heads, rows, 1)
    before = (at - 1).clamp(min=0)[None, None, :, None].expand(b, heads, rows, 1)
    has_previous = (at > 0) & kept[:, (at - 1).clamp(min=0)] & kept[:, at]
    previous = pattern.gather(-1, before).squeeze(-1)
    after_copy = _after_copies(ids, kept, at, keys)
    induction = torch.einsum("bhik,bik->bhi", pattern, after_copy.to(pattern.dtype))
    has_copy = after_copy.any(-1)[:, None]
    return {
        "entropy": torch.special.entr(pattern).sum(-1),
        "distance": torch.einsum("bhik,bik->bhi", pattern, apart),
        "first": pattern.gather(-1, where).squeeze(-1),
        "previous": previous.masked_fill(~has_previous[:, None], torch.nan),
        "induction": induction.masked_fill(~has_copy, torch.nan),
    }


def _after_copies(ids: Tensor, kept: Tensor, at: Tensor, keys: int) -> Tensor:
    """Return (b, rows, k): True if the token before a key is an earlier copy of the query's."""
    same = (ids[:, at, None] == ids[:, None, :]) & kept[:, None, :]  # the copies
    same = same & (torch.arange(keys, device=ids.device) < at[:, None])
    shifted = torch.zeros_like(same)
    shifted[..., 1:] = same[..., :-1]
    return shifted & kept[:, None, :]
