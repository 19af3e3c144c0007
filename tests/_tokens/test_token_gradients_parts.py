"""Token gradients where a module does not simply call those below it and return what they made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import loss_of, numbers
from test_token_gradients import assert_close, norms
from token_oracles import token_truth
from torch import Tensor, nn
from torch.nn import functional as F
from versions import needs

import torchfmri

pytestmark = pytest.mark.usefixtures("waiting")

# -- weights that are read without a call --------------------------------------------------------


def _read_elsewhere(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight)


def _hand_on(layer: nn.Linear, x: Tensor) -> Tensor:
    return _read_elsewhere(layer, x)


class _Holder(nn.Module):
    """Cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))


class _Part(nn.Module):
    """Has no parameters of its own, and never calls the module below it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = _Holder() if how == "holder" else nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Inner(_Part):
    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return (lambda each: F.linear(each, self.layer.weight))(x)

        return inner(x)


class _Global(_Part):
    def forward(self, x: Tensor) -> Tensor:
        return _hand_on(self.layer, x)


class _Method(_Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.apply_layer(x)

    def apply_layer(self, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self.layer, "weight"))  # noqa: B009


class _Held(_Part):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.w)


class _Listed(_Part):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, next(self.layer.parameters()))


class _Registry(_Part):
    """Reads a weight where no name in its code leads."""

    def forward(self, x: Tensor) -> Tensor:
        return _REGISTRY["linear"](self.layer, x)


_REGISTRY = {"linear": lambda layer, x: F.linear(x, layer.weight)}


class _Property(_Part):
    @property
    def matrix(self) -> Tensor:
        return self.layer.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


class _Stored(_Part):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.function = lambda x: F.linear(x, self.layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


_PARTS = [_Inner, _Global, _Method, _Held, _Listed, _Registry, _Property, _Stored]


@pytest.mark.parametrize("kind", _PARTS)
def test_weights_that_a_part_reads_itself(kind: type[_Part]) -> None:
    """Wherever its code has them from: the part is run again, and nothing is missing."""

    torch.manual_seed(0)
    part = kind("holder" if kind is _Held else "layer")
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Tanh(), nn.Linear(4, 2)).double()
    x = numbers(2, 5, 4)
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()

    def build() -> nn.Module:  # the same with a layer that is called
        layers = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)
        plain = nn.Sequential(*layers).double()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.data.copy_(other.data)
        return plain

    truth = token_truth(build, lambda model: loss_of(model(x)))
    assert tokens.names[2].startswith("1.layer.")
    for name, by in zip(tokens.names, truth.values(), strict=True):
        (whole,) = by.values()
        assert_close(tokens[name].materialise(), whole, 1e-12, name)
    assert tokens.coverage().residual < 1e-11


class _Table(nn.Module):
    """Makes something of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, count: int) -> Tensor:
        return self.table[:count]


class _WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = _Table(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table(x.shape[1]))  # type: ignore[no-any-return]


def test_a_child_that_is_called_without_a_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_WithTable(), nn.Linear(4, 2)).double()
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(numbers(2, 5, 4))).backward()
    assert not tokens.coverage().missing
    assert tokens.coverage().residual < 1e-11


@needs("transformers", "5.22", "the code of its containers reads weights")
def test_containers_of_transformers_need_no_hooks_of_their_own() -> None:
    """What is left of them is one hook, unless somebody has put a function into an instance."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    model.model.layers[1].mlp.helper = lambda x: x
    watched = torchfmri.token_gradients(model)._plan.watched
    only = [name for name, each in watched.items() if each.only_calls]
    assert only == [
        *("model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp"),
        *("model.layers.1", "model.layers.1.self_attn"),
    ]


# -- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("layer", ["linear", "conv1d"])
def test_writing_into_the_output_of_a_layer_with_bias(keep: str, layer: str) -> None:
    """Such a layer returns a view of what it computed; whatever is written into it then."""
    from transformers.pytorch_utils import Conv1D

    def build() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Linear(4, 6) if layer == "linear" else Conv1D(6, 4)
        return nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(6, 2)).double()

    def run(model: nn.Module) -> Tensor:
        y = model(x)
        y.mul_(2.0)
        y[:, 1:3].zero_()
        return loss_of(y)

    model, x = build(), numbers(2, 5, 4)
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        run(model).backward()
    assert tokens.coverage().residual < 1e-11
    for name, by in token_truth(build, run).items():
        (whole,) = by.values()
        assert_close(tokens[name].norm(), norms(whole), 1e-12, name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", ["cut", "turned", "picked"])
@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_hook_that_returns_another_view(bias: bool, change: str, keep: str) -> None:
    """The user's backward pass runs, and nothing is attributed to the wrong token in silence."""
    changes: dict[str, Any] = {
        "cut": lambda *call: call[-1][:, -1:],
        "turned": lambda *call: call[-1].transpose(0, 1),
        "picked": lambda *call: call[-1][0],
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=bias)).double()
    x = numbers(2, 5, 4)
    model[1].register_forward_hook(changes[change])
    loss_of(model(x)).backward()
    plain = [each.grad.clone() for each in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        loss_of(model(x)).backward()
    for each, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(each.grad, expected)  # type: ignore[arg-type]
    row = tokens.coverage()["1.weight"]
    assert row.rule == "none" or row.residual > 1e-2 or row.note
    assert tokens.coverage()["0.weight"].residual < 1e-11


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
@pytest.mark.one_in(3)
def test_an_output_that_the_user_keeps_holds_on_to_nothing(keep: Any) -> None:
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    gc.collect()
    gc.disable()
    try:
        with torchfmri.token_gradients(model, keep=keep) as tokens:
            outputs = [model(torch.randn(2, 5, 4)) for _ in range(2)]
            outputs[0].sum().backward()
        parts = [weakref.ref(each) for each in tokens._capture.arrivals.records]
        assert len(parts) == 4
        del tokens
        assert [each() for each in parts] == [None] * 4
    finally:
        gc.enable()
    outputs[1].sum().backward()


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
def test_an_empty_batch(keep: str) -> None:
    model = nn.Sequential(nn.Linear(4, 130), nn.RMSNorm(130))
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(torch.randn(0, 5, 4)).sum().backward()
    assert {name: tokens[name].norm().shape for name in tokens} == {
        name: torch.Size([0, 5]) for name, _ in model.named_parameters()
    }


def test_results_that_are_read_inside_of_the_block_do_not_freeze() -> None:
    model = nn.Linear(4, 3).double()
    with torchfmri.token_gradients(model) as tokens:
        model(numbers(2, 5, 4)).sum().backward()
        assert tokens["weight"].shape[:2] == (2, 5)
        model(numbers(3, 5, 4)).sum().backward()
    assert tokens["weight"].shape[:2] == (5, 5)
    assert tokens.coverage().residual < 1e-12


class OfItsOwn(nn.Module):
    """Normalises heads that are a parameter, as many as there are positions; or a copy of it."""

    def __init__(self, kind: Any, copies: bool) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(2, 3, 3, 4).transpose(1, 2))  # (b, heads, s, i)
        self.layer, self.up, self.copies = kind(4), nn.Linear(4, 4), copies

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads * 1 if self.copies else self.heads
        result: Tensor = self.up(x)[:, None] * self.layer(heads)
        return result


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm, lambda width: nn.Linear(width, width)])
def test_a_parameter_that_a_layer_reads_has_its_positions(kind: Any, keep: Any) -> None:
    """Where heads are as many as positions, memory tells which are which."""
    found = []
    for copies in (True, False):
        torch.manual_seed(0)
        model = OfItsOwn(kind, copies)
        with torchfmri.token_gradients(model, "layer.*", keep=keep) as tokens:
            model(torch.randn(2, 3, 4)).square().sum().backward()
        found.append({name: tokens[name].norm() for name in tokens.names})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected), name


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_input_without_strides_costs_its_layer_alone(keep: Any) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            ragged = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 2, 4)])
            parts = [each.sum() for each in self.norm(ragged).unbind()]
            return torch.stack([self.up(x).square().sum(), *parts]).sum()

    model = Ragged()
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(torch.ones(1, 3, 4)).backward()
    rows = {row.name: row for row in tokens.coverage()}
    assert rows["up.weight"].residual < 1e-5
    assert rows["up.bias"].residual < 1e-5
    assert rows["norm.weight"].rule == "none"
    assert rows["norm.weight"].note
