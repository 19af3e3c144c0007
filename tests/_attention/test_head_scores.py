"""Head scores against loops over plain numbers, padding included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchfmri._attention import HEAD_SCORES, score_heads


def by_hand(pattern: Tensor, ids: list[int], query: int) -> dict[str, float]:
    """The scores of one query of one head, over tokens without padding."""
    weights = pattern.tolist()
    after = [j + 1 for j in range(query) if ids[j] == ids[query]]
    return {
        "entropy": -sum(p * math.log(p) for p in weights if p > 0),
        "distance": sum(p * abs(query - j) for j, p in enumerate(weights)),
        "first": weights[0],
        "previous": weights[query - 1] if query else math.nan,
        "induction": sum(weights[j] for j in after) if after else math.nan,
    }


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_equal_loops(side: str, rows: int, causal: bool) -> None:
    b, heads, s = 2, 3, 8
    ids = torch.randint(0, 3, (b, s))
    mask = torch.ones(b, s, dtype=torch.long)
    if side != "none":
        mask[1, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    logits = torch.randn(b, heads, s, s, dtype=torch.float64)
    hidden = (mask == 0)[:, None, None, :].expand_as(logits)
    if causal:
        hidden = hidden | torch.ones(s, s, dtype=torch.bool).triu(1)
    pattern = logits.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num()
    chunks = [(first, pattern[:, :, first : first + rows]) for first in range(0, s, rows)]
    found = score_heads(chunks, ids, mask)
    assert set(found) == set(HEAD_SCORES)
    for row in range(b):
        kept = mask[row].nonzero().flatten().tolist()
        own = pattern[row][:, kept][:, :, kept]
        for name, each in found.items():
            assert torch.isnan(each[row][mask[row] == 0]).all(), name
            for head in range(heads):
                for place, position in enumerate(kept):
                    expected = by_hand(own[head, place], ids[row, kept].tolist(), place)[name]
                    value = float(each[row, position, head])
                    assert value == pytest.approx(expected, abs=1e-6, nan_ok=True), name


def test_a_perfect_induction_head_scores_one() -> None:
    ids = torch.randperm(50)[:6].repeat(2)[None]
    pattern = torch.zeros(1, 1, 12, 12)
    for i in range(12):
        pattern[0, 0, i, i - 5 if i >= 6 else 0] = 1.0
    found = score_heads([(0, pattern)], ids, torch.ones_like(ids))
    assert found["induction"][0, 6:, 0].tolist() == [1.0] * 6
    assert torch.isnan(found["induction"][0, :6]).all()
