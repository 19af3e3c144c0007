"""The plan of a model is kept between blocks, for as long as the model looks as it did."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles import loss_of, numbers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import torchfmri
from torchfmri import InspectionError, UnsupportedLayerError
from torchfmri._tokens.calls import plans
from torchfmri._tokens.calls.gradients import TokenGradients

X = torch.ones(2, 5, 6, dtype=torch.float64)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.head = nn.LayerNorm(4), Inner(), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(x)))


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    plans._KEPT.clear()
    yield
    plans._KEPT.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The patterns for which a plan was really made."""
    found: list[object] = []
    original = plans.find_parameters

    def find(layers: Any, pattern: Any) -> Any:
        found.append(pattern)
        return original(layers, pattern)

    monkeypatch.setattr(plans, "find_parameters", find)
    return found


def block(model: nn.Module, pattern: Any = "*", **options: Any) -> TokenGradients:
    model.zero_grad()
    x = numbers(2, 5, 4).to(next(model.parameters()).dtype)
    with torchfmri.token_gradients(model, pattern, **options) as tokens:
        loss_of(model(x)).backward()
    return tokens


def test_a_plan_is_made_once(made: list[object]) -> None:
    model = Model().double()
    first = block(model)
    second = block(model)
    assert made == ["*"]
    assert second.names == first.names
    assert torch.equal(second.norm(), first.norm())
    assert second.coverage().residual < 1e-13


def test_patterns_and_voxels_have_plans_of_their_own(made: list[object]) -> None:
    model = Model().double()
    patterns: list[Any] = ["*", "head", ["head", "norm.*"], {"norm.bias"}, nn.Linear]
    for _ in range(2):
        for pattern in patterns[:4]:
            names = block(model, pattern).names
            plans._KEPT.clear()
            assert names == block(model, pattern).names, pattern
            block(model, pattern)
    made.clear()
    assert block(model, "inner*", voxel=2)["inner.up.weight"].norm(by="voxel").shape[-1] == 3
    assert block(model, "inner*", voxel=3)["inner.up.weight"].norm(by="voxel").shape[-1] == 2
    assert block(model, "inner*", voxel=2)["inner.up.weight"].norm(by="voxel").shape[-1] == 3
    assert made == ["inner*", "inner*"]


def test_few_plans_of_a_model_are_kept() -> None:
    model = Model()
    for size in range(1, 20):
        block(model, voxel=size)
    (kept,) = plans._KEPT.values()
    assert len(kept._plans) == plans._MOST


def replace_module(model: Any) -> None:
    model.head = nn.Linear(4, 3).double()


def replace_module_by_another_kind(model: Any) -> None:
    model.inner.act = nn.PReLU().double()


def add_module(model: Any) -> None:
    model.inner.act = nn.Sequential(nn.Tanh(), nn.Linear(6, 6).double())


def remove_module(model: Any) -> None:
    model.norm = nn.Identity()


def rename_module(model: Any) -> None:
    model.inner.register_module("below", model.inner.down)
    model.inner.forward = lambda x: model.inner.below(model.inner.act(model.inner.up(x)))
    del model.inner.down


def replace_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(2, 4).double())


def add_parameter(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.randn(4).double())


def tie(model: Any) -> None:
    model.head.weight = model.norm.weight = nn.Parameter(torch.randn(4, 4).double()[0])
    model.head = nn.LayerNorm(4).double()
    model.head.weight = model.norm.weight


def freeze(model: Any) -> None:
    model.inner.requires_grad_(False)


def change_dtype(model: Any) -> None:
    model.float()


def swap_data(model: Any) -> None:
    model.head.weight.data = torch.randn(7, 4).double()


def give_an_instance_a_forward(model: Any) -> None:
    model.head.forward = lambda x: nn.functional.linear(x.flip(1), model.head.weight * 2)


def parametrize(model: Any) -> None:
    parametrizations.weight_norm(model.head)


CHANGES: list[Callable[[Any], None]] = [
    replace_module,
    replace_module_by_another_kind,
    add_module,
    remove_module,
    rename_module,
    replace_parameter,
    add_parameter,
    tie,
    freeze,
    change_dtype,
    swap_data,
    give_an_instance_a_forward,
    parametrize,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_changed_model_gets_another_plan(
    change: Callable[[Any], None], keep: Any, made: list[object]
) -> None:
    torch.manual_seed(0)
    model = Model().double()
    block(model, keep=keep)
    change(model)
    assert len(made) == 1
    tokens = block(model, keep=keep)
    assert len(made) == 2
    received = [name for name, each in model.named_parameters() if each.grad is not None]
    assert tokens.names == received
    assert tokens.coverage().residual < (1e-4 if change is change_dtype else 1e-12)
    for name in tokens:
        assert tokens[name].shape[2:] == model.get_parameter(name).shape
        if keep == "factors":
            expected = model.get_parameter(name).grad
            assert expected is not None
            assert torch.allclose(tokens[name].sum(), expected, atol=1e-4), name
    block(model, keep=keep)
    patched = [each for each in model.modules() if "forward" in vars(each)]
    assert len(made) == (3 if patched else 2)  # these are never kept


def test_a_function_put_into_a_container_is_noticed() -> None:
    """It may read weights, so that the container is looked at again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    assert torchfmri.token_gradients(model)._plan.watched["model.layers.0.mlp"].only_calls
    model.model.layers[0].mlp.helper = lambda x: x
    assert not torchfmri.token_gradients(model)._plan.watched["model.layers.0.mlp"].only_calls
    del model.model.layers[0].mlp.helper
    assert torchfmri.token_gradients(model)._plan.watched["model.layers.0.mlp"].only_calls


def test_a_class_that_gets_another_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nn.Linear):
        pass

    model = nn.Sequential(Layer(4, 4)).double()
    assert block(model)["0.weight"].rule == "linear"
    monkeypatch.setattr(Layer, "forward", lambda self, x: x * self.weight[0] + self.bias)
    tokens = block(model)
    assert tokens["0.weight"].rule != "linear"
    assert tokens.coverage().residual < 1e-12


def test_no_model_is_kept_alive() -> None:
    def fail(model: nn.Module) -> None:
        with torchfmri.token_gradients(model):
            model(numbers(2, 5, 4).float()).sum().backward()
            raise ZeroDivisionError

    model = Model()
    block(model)
    with pytest.raises(ZeroDivisionError):
        fail(model)
    assert len(plans._KEPT) == 1
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert not plans._KEPT


def test_a_model_in_the_place_of_another() -> None:
    """The address of a model that is gone may be that of the next one."""
    for width in range(2, 12):
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)).double()
        tokens = block(model)
        assert tokens["0.weight"].shape == (2, 5, width, 4)
        del model, tokens


def test_a_copy_has_a_plan_of_its_own(made: list[object]) -> None:
    model = Model().double()
    block(model)
    other = copy.deepcopy(model)
    tokens = block(other)
    assert len(made) == 2
    assert tokens.coverage().residual < 1e-13
    assert block(model).coverage().residual < 1e-13


def test_models_that_hide_modules_are_planned_anew(made: list[object]) -> None:
    """A wrapper inside could be handed another module that no layer shows."""

    class CheckpointWrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = inner

        def forward(self, x: Tensor) -> Tensor:
            return self._checkpoint_wrapped_module(x)

    wrapper = CheckpointWrapper(nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(4, 4), wrapper).double()
    assert block(model)["1.weight"].shape[2:] == (3, 4)
    wrapper._checkpoint_wrapped_module = nn.Linear(4, 2).double()
    assert block(model)["1.weight"].shape[2:] == (2, 4)
    assert len(made) == 2


def test_a_layer_without_values_yet_elsewhere_in_the_model() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "lazy": nn.LazyLinear(3)}).double()
    for _ in range(2):
        with torchfmri.token_gradients(model, "used.*") as tokens:
            loss_of(model["used"](numbers(2, 5, 4))).backward()
        assert tokens.names == ["used.weight", "used.bias"]
        model["used"].zero_grad()


def test_a_layer_without_values_yet_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(InspectionError, match=r"'0.weight' has no shape yet.*Run the model once"):
        torchfmri.token_gradients(model)
    model(X.float())
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(X.float())).backward()
    assert tokens.coverage().residual < 1e-6


def scripted(child: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is on its way out of torch
        return torch.jit.script(child)


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_scripted_child_says_why_it_has_no_token_gradients(keep: Any) -> None:
    plain = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).double()
    model = nn.Sequential(scripted(plain[0]), plain[1])
    with torchfmri.token_gradients(plain, keep=keep) as expected:
        loss_of(plain(X)).backward()
    plain.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        loss_of(model(X)).backward()
    assert tokens.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(tokens["1.weight"].norm(), expected["1.weight"].norm())
    for name in ("0.weight", "0.bias"):
        with pytest.raises(UnsupportedLayerError, match=f"'{name}' in layer '0'.*TorchScript"):
            tokens[name]
    rows = tokens.coverage()
    assert [each.rule for each in rows] == ["none", "none", "linear", "linear"]
    assert "TorchScript" in rows["0.weight"].note
    with torchfmri.token_gradients(model, "1.*", keep=keep) as tokens:
        loss_of(model(X)).backward()
    assert torch.equal(tokens.norm(), expected.norm("1.*"))


def test_a_scripted_encoder_is_no_obstacle() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.layer(x) + memory.mean(1, keepdim=True)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = scripted(nn.Linear(6, 6)), Decoder()

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x, memory=self.encoder(x))

    model = Pair().double()
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(X)).backward()
    assert [each.name for each in tokens.coverage().missing] == ["encoder.weight", "encoder.bias"]
    assert tokens.coverage()["decoder.layer.weight"].residual == 0


def test_a_layer_without_values_yet_gets_them_inside_of_a_block_for_token_losses() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)).double()
    with torchfmri.token_gradients(model, per="token_loss") as tokens:
        losses = model(X).square().sum(-1)
        tokens.backward(losses)
    weight = model[0].weight
    each = [torch.autograd.grad(one, weight, retain_graph=True)[0] for one in losses.flatten()]
    gap = tokens["0.weight"].norm().flatten() - torch.stack(each).flatten(1).norm(dim=1)
    assert float(gap.abs().max()) < 1e-12


def test_a_scripted_model_has_gradients_of_token_losses() -> None:
    """As the error advises; by hand, one loss at a time."""
    model = scripted(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4)).double())
    with torchfmri.token_gradients(model, per="token_loss") as tokens:
        tokens.backward(model(X + numbers(2, 5, 6)).square().sum(-1))
    weights = dict(model.named_parameters())
    losses = model(X + numbers(2, 5, 6)).square().sum(-1).flatten()
    for name in ("0.weight", "2.bias"):
        each = [torch.autograd.grad(loss, weights[name], retain_graph=True)[0] for loss in losses]
        gap = tokens[name].norm().flatten() - torch.stack(each).flatten(1).norm(dim=1)
        assert float(gap.abs().max()) < 1e-12


@pytest.mark.parametrize("make", [torch.jit.script, lambda each: torch.jit.trace(each, X)])
def test_a_scripted_child_is_no_obstacle(make: Callable[[Any], Any], made: list[object]) -> None:
    """From the beginning, and put there after a block; nothing is kept of such a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is on its way out of torch
        child = make(nn.Tanh())
    model = Model().double()
    expected = block(model).norm()
    model.inner.act = child
    for _ in range(2):
        assert torch.equal(block(model).norm(), expected)
    assert len(made) == 3
    fresh = Model().double()
    fresh.inner.act = child
    assert block(fresh).coverage().residual < 1e-12


def test_a_module_inside_itself_is_no_obstacle(made: list[object]) -> None:
    model = Model().double()
    expected = block(model).norm()
    model.inner.again = model.inner
    for _ in range(2):
        assert torch.equal(block(model).norm(), expected)
    assert len(made) == 3


def test_a_module_that_dies_takes_the_plan_along() -> None:
    """Its address may be that of another one, next."""
    model = Model().double()
    block(model)
    assert len(plans._KEPT) == 1
    model.head = nn.Linear(4, 4, bias=False).double()
    assert len(plans._KEPT) == 0
