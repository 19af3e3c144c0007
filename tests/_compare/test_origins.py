"""Where a difference comes from, and pairs of equal models that look different."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build, padded
from torchfmri import Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block with two branches, of more layers than are looked through at once."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.rest = nn.Sequential(*(nn.Linear(width, width) for _ in range(14)))
        self.detached = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(torch.tanh(self.left(x) * self.right(x)))
        return y + (x.detach() if self.detached else x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small() -> Any:
    torch.manual_seed(0)
    return Small()


def found_in(a: nn.Module, b: nn.Module, **options: Any) -> Any:
    return compare(a, b, data={"input_ids": IDS}, loss=lambda y: y.square().mean(), **options)


def detach_branch(model: Any) -> None:
    forward = model.blocks[1].left.forward
    model.blocks[1].left.forward = lambda x: forward(x).detach()


def detach_residual(model: Any) -> None:
    model.blocks[1].detached = True


def detach_input(model: Any) -> None:
    forward = model.blocks[1].left.forward
    model.blocks[1].left.forward = lambda x: forward(x.detach())


def detach_in_block(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: x + block.rest(torch.tanh(block.left(x.detach()) * block.right(x)))


@pytest.mark.parametrize("turned", [False, True], ids=["in b", "in a"])
@pytest.mark.parametrize(
    ("plant", "layer"),
    [
        (detach_branch, "blocks.1.left"), (detach_residual, "blocks.1"),
        (detach_input, "blocks.1.left"), (detach_in_block, "blocks.1"),
    ],
)  # fmt: skip
def test_a_branch_without_a_gradient_is_located(
    plant: Callable[[Any], None], layer: str, turned: bool
) -> None:
    sides = [small(), small()]
    plant(sides[1])
    first = found_in(*(reversed(sides) if turned else sides)).first
    assert first is not None
    assert (first.direction, first.layer) == ("backward", layer)


def test_a_parameter_that_only_b_trains_is_a_difference() -> None:
    frozen = small()
    frozen.head.bias.requires_grad_(False)
    for sides, lacks in (((frozen, small()), "a"), ((small(), frozen), "b")):
        first = found_in(*sides).first
        assert first is not None
        assert (first.direction, first.layer) == ("parameters", "head")
        assert first.reason == f"{lacks} has no gradient of 'bias'"


def test_gradients_reach_other_layers_where_other_layers_are_trained() -> None:
    frozen = small().requires_grad_(False)
    adapted = small().requires_grad_(False)
    adapted.adapter = nn.Linear(20, 20)
    nn.init.zeros_(adapted.adapter.weight)
    nn.init.zeros_(adapted.adapter.bias)
    adapted.head.register_forward_hook(lambda _, __, y: y + adapted.adapter(y))
    assert found_in(adapted, frozen).agree
    assert found_in(frozen, adapted).agree
    # Against the model that trains all of its layers, as before it was given an adapter.
    for sides in ((small(), adapted), (adapted, small())):
        found = found_in(*sides)
        assert found.agree, str(found)
        assert any("only one side trains them" in each for each in found.notes)


class Turned(nn.Module):
    """A Linear that keeps its weight as (in, out), as Conv1D of GPT-2 does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("layer", ["head", "blocks.1.left"], ids=["oblong", "square"])
def test_a_weight_that_is_kept_transposed_has_the_same_gradient(layer: str) -> None:
    port = small()
    port.set_submodule(layer, Turned(port.get_submodule(layer)))
    found = found_in(small(), port)
    assert found.agree, str(found)
    assert not found.changes, "it is how the class keeps its weights"
    linear = port.get_submodule(layer)
    linear.forward = lambda x: x @ (linear.weight * 1.0).detach() + linear.bias
    assert not found_in(small(), port).agree


class Positions(nn.Module):
    """Looks up positions; `step` is a mistake in the code, not in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.step = nn.Embedding(32, 16), 1

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1]).div(self.step, rounding_mode="floor")
        return x + self.table(at.expand(x.shape[0], -1))


def test_whole_numbers_that_a_module_makes_are_its_own_mistake() -> None:
    def made(step: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 16), Positions(), nn.Linear(16, 4))
        model[1].step = step
        return model

    first = compare(made(1), made(2), data=IDS).first
    assert first is not None
    assert (first.layer, first.seen_at, first.token) == ("1", "1.table", 1)


class Unread(nn.Module):
    """Uses the weights of a layer that it never calls, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def test_weights_of_a_layer_that_is_never_called_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Unread())
    other = copy.deepcopy(model)
    nn.init.zeros_(other[1].inner.bias)
    first = compare(model, other, data=torch.randn(4, 6)).first
    assert first is not None
    assert first.layer == "1"
    assert ("missing_parameter", "inner.bias is zero in b") in first.kinds


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_that_are_computed_at_once_agree_with_one_by_one(wrong: bool) -> None:
    """Their activation is called once for each expert, or once for all."""
    a, b = (Run(build("mixtral"), batch("mixtral")) for _ in range(2))
    a.model.set_experts_implementation("eager")
    b.model.set_experts_implementation("grouped_mm")
    if wrong:
        with torch.no_grad():
            b.model.model.layers[1].mlp.experts.down_proj[2] *= 1.1
    found = compare(a, b)
    assert found.agree != wrong, str(found)
    if not wrong:
        assert any("in other parts" in note for note in found.notes)
    else:
        assert found.first.layer == "model.layers.1.mlp.experts"


def test_parameters_that_a_port_keeps_elsewhere_are_listed() -> None:
    class Held(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.inner = linear

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.inner.weight, self.inner.bias)

    port = small()
    port.blocks[0].left = Held(port.blocks[0].left)
    found = found_in(small(), port)
    assert found.agree, str(found)
    assert any("only a has weight" in each.text for each in found.changes)


# -- what the two are given ----------------------------------------------------------------------


def test_dropout_on_one_side_only_is_a_difference() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3)).eval()
    found = compare(model, copy.deepcopy(model).train(), data=torch.randn(8, 6))
    assert found.first is not None
    assert found.first.layer == "1"
    assert ("mode", "training is False in a and True in b") in found.first.kinds
    assert any("on this side only" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("position_ids", lambda x: x + 2, "first [0, 0]: 0 in a and 2 in b"),
        ("attention_mask", lambda x: torch.cat([x[:2], 1 - x[2:]]), "first [2, 0]: 1 in a and 0"),
    ],
)
def test_other_data_is_listed(name: str, change: Callable[[Tensor], Tensor], said: str) -> None:
    a = Run(build("llama"), batch("llama"))
    b = replace(a, data={**a.data, name: change(a.data[name])})
    found = compare(a, b)
    assert found.first is not None
    texts = [kind.text for kind in found.first.kinds if kind.name == "data"]
    assert any(text.startswith(f"{name} differs") and said in text for text in texts)
    assert texts[0] in [each.text for each in found.changes]


def test_data_that_only_one_side_is_given_is_named() -> None:
    a = Run(build("bert"), batch("bert"))
    kinds = torch.ones_like(a.data["input_ids"])
    first = compare(a, replace(a, data={**a.data, "token_type_ids": kinds})).first
    assert first is not None
    assert ("data", "only b is given token_type_ids") in first.kinds


def test_data_without_a_name_is_called_so() -> None:
    a = Run(nn.Tanh(), torch.ones(2, 3))
    assert compare(a, replace(a, data=torch.ones(2, 4))).changes[0].text.startswith("the data is")


def test_the_same_tokens_padded_elsewhere_are_no_other_data() -> None:
    """Eager attention returns its weights, whose keys are padded too."""
    ids = batch("llama", None)["input_ids"]
    sides = [padded(ids, side) for side in ("right", "left")]
    for each in sides:
        each["labels"] = each["labels"].masked_fill(each["position_ids"] == 0, -100)
    a, b = (Run(build("llama", "eager"), each) for each in sides)
    found = compare(a, b)
    assert found.agree, str(found)
    assert any("attention weights" in note for note in found.notes)
    assert not [each for each in found.changes if "differs" in each.text]


def test_a_cache_beside_attention_weights() -> None:
    """The first part has as many tokens as there are heads, so weights look like tokens."""

    def decode(model: nn.Module, data: Any) -> Any:
        ids, first = data["input_ids"], 4
        with torch.no_grad():
            output = model(input_ids=ids[:, :first], use_cache=True)
            for at in range(first, ids.shape[1]):
                cache = output.past_key_values
                output = model(input_ids=ids[:, at : at + 1], past_key_values=cache)
        return output

    run = Run(build("llama", "eager"), {"input_ids": batch("llama", None)["input_ids"]})
    assert compare(run, replace(run, call=decode)).agree


# -- within noise --------------------------------------------------------------------------------


def test_a_mistake_in_one_row_of_the_batch_counts_within_noise() -> None:
    class Mixed(nn.Module):
        """A sum that cancels, so that bfloat16 leaves much noise; row 2 may be scaled."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.factor = nn.Linear(32, 32), 1.0

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(x) + 12.0
            y = y - 12.0
            return torch.cat([y[:2], y[2:3] * self.factor, y[3:]])

    def made(factor: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), Mixed(), nn.Linear(32, 8)).bfloat16()
        model[1].factor = factor
        return model

    data = torch.randn(8, 12, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert compare(made(1.0), made(1.0), data=data).agree
    first = compare(made(1.0), made(1.25), data=data).first
    assert first is not None
    assert (first.layer, first.row) == ("1", 2)
    assert ("attribute", "factor is 1 in a and 1.25 in b") in first.kinds
