"""The numbers in a list are places: a block that only one side has moves all that follow."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Comparison, Inspector, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, WORDS = 16, 20
IDS = torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return found


class Unchanged(nn.Module):
    """Return what it is given, as a port may mark a place; it has a layer inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mark(x)
        return found


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def sides(more: nn.Module, at: int) -> tuple[Model, Model]:
    """Return a model of four blocks, and a copy of it with one block more at a place."""
    torch.manual_seed(0)
    model = Model([Block() for _ in range(4)]).eval()
    longer = copy.deepcopy(model)
    longer.blocks.insert(at, more.eval())
    return model, longer


def compared(a: nn.Module, b: nn.Module) -> Comparison:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    found: Comparison = compare(Run(a, IDS, IDS, loss), Run(b, IDS, IDS, loss))
    return found


@pytest.mark.parametrize(
    ("more", "at"),
    [(nn.Identity, 0), (nn.Identity, 2), (nn.Dropout, 1), (Unchanged, 1), (Unchanged, 3)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_block_more_hides_nothing_and_raises_no_alarm(
    more: Callable[[], nn.Module], at: int, turned: bool
) -> None:
    a, b = sides(more(), at)
    found = compared(b, a) if turned else compared(a, b)
    assert found.agree, str(found)
    assert f"blocks.{at}" in (found.only_a if turned else found.only_b)
    assert any("in the order of their list" in note for note in found.notes), "the doubt is said"
    with torch.no_grad():
        b.get_parameter("blocks.4.up.bias")[3] += 0.1
    first = (compared(b, a) if turned else compared(a, b)).first
    assert first is not None
    layers = [first.partner, first.layer] if turned else [first.layer, first.partner]
    assert layers == ["blocks.3.up", "blocks.4.up"]
    assert first.token == 0


def test_another_activation_beside_a_block_more_is_named() -> None:
    a, b = sides(nn.Identity(), 1)
    b.blocks[3].act = nn.GELU(approximate="tanh")
    first = compared(a, b).first
    assert first is not None
    assert (first.layer, first.partner) == ("blocks.2.act", "blocks.3.act")
    one, two = (nn.Sequential(*each).eval() for each in _activations())
    first = compare(one, two, data=torch.randn(5, 8)).first
    assert first is not None
    assert (first.layer, first.partner) == ("3", "4"), "by its place between the same layers"


def _activations() -> tuple[list[nn.Module], list[nn.Module]]:
    torch.manual_seed(0)
    one, two, three = (nn.Linear(8, 8) for _ in range(3))
    longer = [one, nn.ReLU(), nn.Identity(), two, nn.Tanh(), three]
    return [one, nn.ReLU(), two, nn.ReLU(), three], longer


def test_of_equal_blocks_the_one_with_other_weights_is_the_new_one() -> None:
    a, b = sides(Block(), 1)
    found = compared(a, b)
    assert {"blocks.1", "blocks.1.up"} <= set(found.only_b)
    assert found.first is not None
    assert "'blocks.1.norm'" in str(found.first), "that only one side runs it is why they differ"


def test_a_recording_has_no_weights_and_is_aligned_by_its_classes() -> None:
    a, b = sides(Unchanged(), 1)
    with torch.no_grad():
        b.get_parameter("blocks.3.down.weight")[2] *= 1.5

    def recorded(model: nn.Module) -> object:
        inspector = Inspector(model, keep="tensors")
        inspector.watch("*")
        return inspector.run_inspection(IDS)

    for first, second in ((a, recorded(b)), (recorded(a), recorded(b))):
        found = compare(first, second, data=IDS if first is a else None).first
        assert found is not None
        assert (found.layer, found.partner) == ("blocks.2.down", "blocks.3.down")


class Named(Model):
    """A model whose blocks are in a ModuleDict, under numbers in another order than they run."""

    def __init__(self, model: Model, names: list[str]) -> None:
        super().__init__([])
        self.words, self.head = copy.deepcopy(model.words), copy.deepcopy(model.head)
        blocks = dict(zip(names, copy.deepcopy(list(model.blocks)), strict=True))
        self.blocks = nn.ModuleDict({name: blocks[name] for name in sorted(names)})  # type: ignore[assignment]
        self.names = names

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for name in self.names:
            x = self.blocks[name](x)  # type: ignore[index]
        found: Tensor = self.head(x)
        return found


@pytest.mark.parametrize("names", [["1", "2", "3", "4"], ["3", "2", "1", "0"]])
def test_numbers_that_tell_another_order_give_way_to_weights(names: list[str]) -> None:
    torch.manual_seed(0)
    model = Model([Block() for _ in range(4)]).eval()
    port = Named(model, names).eval()
    found = compared(model, port)
    assert found.agree, str(found)
    assert any("in the order of their list" in note for note in found.notes), "the doubt is said"
    with torch.no_grad():
        port.get_parameter(f"blocks.{names[2]}.up.weight").mul_(1.1)
    first = compared(model, port).first
    assert first is not None
    assert (first.layer, first.partner) == ("blocks.2.up", f"blocks.{names[2]}.up")
    other = Model([Block() for _ in range(4)]).eval()
    first = compared(model, other).first
    assert first is not None
    assert first.layer == first.partner == "words", "another checkpoint is matched by its numbers"
