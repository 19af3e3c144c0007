"""Passes that branch on a mask, or on a constant that was written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri._tokens.calls import passes
from torchfmri._torch import FollowingMode, Hook

B, S, H = 2, 5, 4
PASSES = 14
"""A wrong answer comes when what was found in one pass is used in another that took another way."""


def by_copied_sum(x: Tensor, mask: Tensor) -> bool:
    found = torch.zeros(())
    found.copy_(x.sum())
    return found.item() > 0


def by_view_of_constant(x: Tensor, mask: Tensor) -> bool:
    found = torch.zeros(2)
    first = found[0]
    found.copy_(x.sum().expand(2))
    return first.item() > 0


def by_written_mask(x: Tensor, mask: Tensor) -> bool:
    mask = mask.clone()
    mask[:, 0] = (x.sum() > 0).to(mask.dtype)
    return bool(mask.all())


BRANCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all": lambda x, mask: mask.all(),
    "all of it as booleans": lambda x, mask: mask.to(torch.bool).all(),
    "its sum": lambda x, mask: int(mask.sum()) % 2,
    "a list of it": lambda x, mask: sum(map(sum, mask.tolist())) % 2,
    "its first column": lambda x, mask: mask[:, 0].all(),
    "its largest value": lambda x, mask: int(mask.max()) > 1,
    "a product with ones": lambda x, mask: (torch.ones_like(mask) * mask).all(),
    "a copied sum": by_copied_sum,
    "a view of a constant": by_view_of_constant,
    "a mask with data in it": by_written_mask,
}


class Rolled(nn.Module):
    """Rolls its tokens where a function of tokens and mask says no."""

    def __init__(self, branch: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, H), nn.Linear(H, H)
        self.branch = branch

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        stays = bool(self.branch(x.detach(), attention_mask))
        self.layer.rolled = not stays  # for the test
        return self.layer(x if stays else x.roll(1, 1))


def masks() -> list[Tensor]:
    """Full, with holes at other places, and with a 2, each several times in no simple order."""
    found = []
    for number in range(PASSES):
        mask = torch.ones(B, S, dtype=torch.long)
        if number % 3 == 2:
            mask[0, :2] = 0
        if number % 4 == 3:
            mask[1, 0] = 0
        if number % 7 == 6:
            mask[1, 3] = 2
        found.append(mask)
    return found


def norms_of_one(model: nn.Module, ids: Tensor, mask: Tensor, weights: Tensor) -> Tensor | None:
    """What token gradients say, None where they refuse."""
    with torchfmri.token_gradients(model, "layer.weight") as tokens:
        (model(input_ids=ids, attention_mask=mask) * weights).sum().backward()
    model.zero_grad()
    try:
        return tokens["layer.weight"].norm()
    except torchfmri.UnsupportedLayerError:
        return None


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_on_masks_and_constants_are_right_or_refused(name: str) -> None:
    model: Any = Rolled(BRANCHES[name]).double()
    right = 0
    for mask in masks():
        ids, weights = torch.randint(0, 20, (B, S)), torch.randn(B, S, H, dtype=torch.float64)
        found = norms_of_one(model, ids, mask, weights)
        if found is None:
            continue
        x = model.embedding(ids).detach()
        rows = weights.norm(dim=-1) * (x.roll(1, 1) if model.layer.rolled else x).norm(dim=-1)
        by_token = rows.roll(-1, 1) if model.layer.rolled else rows
        torch.testing.assert_close(found, by_token * (mask != 0))
        right += 1
    assert right > PASSES // 2


@pytest.mark.parametrize("mask", [torch.ones(B, S), torch.tensor([[0, 0, 1, 1, 1], [1] * S])])
def test_a_mask_that_is_asked_whether_it_is_full_costs_later_passes_nothing(
    mask: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers ask for that in every pass. Its operations need not be compared then."""
    compared = []
    monkeypatch.setattr(passes, "Way", lambda: compared.append(1) or pytest.fail("compared"))
    model = Rolled(BRANCHES["all of it as booleans"])
    for _ in range(4):
        ids = torch.randint(0, 20, (B, S))
        assert norms_of_one(model, ids, mask.long(), torch.randn(B, S, H)) is not None
    assert not compared


def test_a_watcher_inside_the_pass_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Monitor reads values while tokens are followed; the model itself reads none."""
    compared = []
    monkeypatch.setattr(passes, "Way", lambda: compared.append(1) or pytest.fail("compared"))
    model = nn.Sequential(nn.Embedding(20, H), nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchfmri.Monitor(model, optimizer) as monitor:
        for _ in range(4):
            with torchfmri.token_gradients(model) as tokens:
                model(torch.randint(0, 20, (B, S))).square().mean().backward()
            assert tokens["1.weight"].norm().shape == (B, S)
            optimizer.step()
            optimizer.zero_grad()
    assert len(monitor.history) == 4
    assert not compared


class Count(FollowingMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        self.names.append(function._schema.name)
        return function(*arguments, **keywords)


def test_a_mode_does_not_see_what_hooks_of_ours_compute() -> None:
    """But one that was entered inside of the hook does, and the outer one goes on afterwards."""
    inner = Count()

    def act(*_: object) -> None:
        torch.ones(3).cos()
        with inner:
            torch.ones(3).sin()

    layer = nn.Tanh()
    layer.register_forward_hook(Hook(act, layer))
    with Count() as outer:
        layer(torch.ones(3)).exp()
    assert outer.names == ["aten::ones", "aten::tanh", "aten::exp"]
    assert inner.names == ["aten::ones", "aten::sin"]


class Keywords(nn.Module):
    """A model whose mask comes through `**keywords`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, **keywords: Tensor) -> Tensor:
        return self.layer(x * keywords["scale"])  # type: ignore[no-any-return]


def test_a_mask_among_further_keywords_is_applied() -> None:
    model, x = Keywords(), torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with torchfmri.token_gradients(model) as tokens:
        model(x, attention_mask=mask, scale=torch.tensor(2.0)).square().sum().backward()
    assert torch.equal(tokens["layer.bias"].norm() > 0, mask.bool())
    with torchfmri.token_gradients(model) as tokens:
        model(x, scale=torch.tensor(2.0)).square().sum().backward()
    assert bool((tokens["layer.bias"].norm() > 0).all())
