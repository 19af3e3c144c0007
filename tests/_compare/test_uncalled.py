"""A side may use the weights of a layer without calling it: that alone is no difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchfmri import Comparison, compare

pytestmark = pytest.mark.usefixtures("one_thread")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.called = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) if self.called else functional.linear(x, self.up.weight, self.up.bias)
        found: Tensor = self.down(self.act(x))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.called = nn.LayerNorm(16), Mlp(), True
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        norm, y = self.norm, x
        if self.called:
            y = norm(x)
        elif not self.skips:
            y = functional.layer_norm(x, (16,), norm.weight, norm.bias, norm.eps)
        found: Tensor = x + self.mlp(y)
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.pos = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.called = nn.Linear(16, 40), True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        at = self.pos(torch.arange(length)[None]) if self.called else self.pos.weight[:length]
        x = self.emb(input_ids) + at
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


def uncall_pos(net: Any) -> None:
    net.called = False


def uncall_norms(net: Any) -> None:
    for block in net.blocks:
        block.called = False


def uncall_up(net: Any) -> None:
    net.blocks[0].mlp.called = False


PORTS = [uncall_pos, uncall_norms, uncall_up]


def sides(change: Callable[[Any], None]) -> list[Any]:
    net = Net().eval()
    port: Any = copy.deepcopy(net)
    change(port)
    return [net, port]


def parted(a: Any, b: Any, loss: bool = True) -> Comparison:
    ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))
    data = {"input_ids": ids, "labels": ids} if loss else {"input_ids": ids}
    found: Comparison = compare(a, b, data=data)
    return found


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("change", PORTS)
def test_a_layer_that_one_side_never_calls_is_a_note(
    change: Callable[[Any], None], turned: bool, loss: bool
) -> None:
    found = parted(*sides(change)[:: -1 if turned else 1], loss)
    assert found.agree
    assert found.first is None
    layer = {uncall_pos: "pos", uncall_norms: "blocks.0.norm", uncall_up: "blocks.0.mlp.up"}[change]
    (note,) = (each for each in found.notes if "never calls" in each)
    assert note.startswith(f"{'a' if turned else 'b'}: never calls '")
    assert f"'{layer}'" in note


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("change", PORTS)
def test_a_fault_further_on_is_named(change: Callable[[Any], None], turned: bool) -> None:
    net, port = sides(change)
    with torch.no_grad():
        port.blocks[2].mlp.up.bias += 0.05
    first = parted(*(net, port)[:: -1 if turned else 1]).first
    assert first is not None
    assert (first.layer, first.seen_at) == ("blocks.2.mlp.up", "blocks.2.mlp.up")
    assert (first.direction, first.token) == ("forward", 0)
    assert first.kinds[0].name == "parameter"
    assert not {"order", "unmatched_layers"} & {each.name for each in first.kinds}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("loss", [True, False])
def test_a_layer_that_is_skipped_is_named(turned: bool, loss: bool) -> None:
    net, port = sides(lambda net: None)
    port.blocks[1].called, port.blocks[1].skips = False, True
    found = parted(*(net, port)[:: -1 if turned else 1], loss)
    assert found.first is not None
    assert (found.first.layer, found.first.seen_at) == ("blocks.1", "blocks.1.mlp.up")
    texts = [each.text for each in found.first.kinds]
    only = "b" if turned else "a"
    assert f"just before it only {only} runs 'blocks.1.norm'" in texts
    assert not [each for each in found.first.kinds if each.name in ("order", "missing_layer")]


def test_a_loss_that_does_not_see_a_difference_is_not_the_model() -> None:
    """The logits of a token without a label differ, and the loss agrees."""
    net, port = sides(lambda net: None)
    port.head.register_forward_hook(
        lambda module, given, out: out * (1 + 0.5 * (torch.arange(8) == 7)[None, :, None])
    )
    ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 7] = -100
    first = compare(net, port, data={"input_ids": ids, "labels": labels}).first
    assert first is not None
    assert (first.layer, first.token) == ("head", 7)
    assert "agree again" not in first.reason


def test_a_module_that_one_side_shares_is_a_note() -> None:
    def share(net: Any) -> None:
        for block in net.blocks:
            block.mlp.act = net.blocks[0].mlp.act

    found = parted(*sides(share))
    assert found.agree
    assert any("less often than the other side" in each for each in found.notes)
