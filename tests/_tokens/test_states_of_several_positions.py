"""Recurrences whose states have several positions, or no data: refused, and not misplaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchfmri


class _Walk(nn.Module):
    """Both directions in one state, two frames at once, or a weight that changes by step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Parameter(torch.tensor([0.5, 0.7, 0.9]))

    def forward(self, x: Tensor) -> Tensor:
        h, weight = torch.zeros(2, 2, 3), torch.ones(3)
        if self.kind == "weight":
            h = torch.zeros(2, 3)
            for t in range(4):
                weight = weight * self.a
                h = h + weight * x[:, t]
            return h
        both = torch.stack([x, x.flip(1)], 1) if self.kind == "both" else x.view(2, 2, 2, 3)
        for t in range(both.shape[2]):
            h = (self.a * h + both[:, :, t]).tanh()
        return h


@pytest.mark.parametrize("kind", ["both", "frames", "weight"])
def test_it_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    model = _Walk(kind)
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(2, 4, 3)).square().sum().backward()
    assert [row.name for row in tokens.coverage().missing] == ["a"]
    with pytest.raises(torchfmri.UnsupportedLayerError, match=r"positions|recurrence"):
        tokens["a"]


class Chunk(nn.Module):
    """The rows of a matrix of pairs are written one after the other, as in gated delta rules."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.copies: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        key = self.key(x)
        pairs = (key[:, :, None] * key[:, None]).sum(-1).tril(-1) / 3
        for t in range(1, x.shape[1]):
            row, before = pairs[:, t, :t].clone(), pairs[:, :t, :t].clone()
            pairs[:, t, :t] = row + (row[..., None] * before).sum(1)
        scores = (key[:, :, None] * key[:, None]).sum(-1).tril()
        y = x + scores @ (pairs @ key)
        if self.copies is None:
            return self.head(y)  # type: ignore[no-any-return]
        return torch.einsum("bsi,bsoi->bso", y, self.copies) + self.head.bias


def test_rows_of_pairs_that_are_written_are_no_recurrence() -> None:
    model, x = Chunk().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    model.copies = model.head.weight.detach().expand(2, 5, 3, 3).clone().requires_grad_()
    model(x).square().sum().backward()
    wanted = model.copies.grad
    assert wanted is not None
    model.copies = None
    model.zero_grad()
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    found = tokens["head.weight"].materialise()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found.flip(1), wanted)
