"""The backward pass: its own rounding, and the layer that loses or changes a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build
from torchfmri import Comparison, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = 3


class TimesTwo(torch.autograd.Function):
    """The identity, with a wrong backward pass."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


double = TimesTwo.apply


# -- rounding of the backward pass itself --------------------------------------------------------


class Read(nn.Module):
    """Layers whose gradients depend on no value of the forward pass, if the loss is linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed, self.body = nn.Embedding(40, 16), nn.GRU(16, 24, batch_first=True)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 40)
        self.wrong = False

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.body(self.embed(input_ids))[0])
        found: Tensor = self.head(double(x) if self.wrong else x)
        return found


IDS = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(SEED))


def weighted(output: Tensor, *_: Any) -> Tensor:
    """A linear loss whose weights add up to zero, and so do its gradients."""
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return (output.float() * weights).sum()


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "float64"])
def test_a_linear_loss_rounds_going_back_too(how: str) -> None:
    def lower(run: Run) -> Run:
        if how == "autocast":
            return replace(run, autocast=torch.bfloat16)
        return replace(run, model=run.model.to(getattr(torch, how)))

    a = Run(Read().eval(), {"input_ids": IDS}, loss=weighted)
    found = compare(a, lower(replace(a, model=Read().eval())))
    assert found.agree, found.summary()
    assert max(pair.worst for pair in found.pairs) > 0, "they do round differently"
    model = Read().eval()
    model.wrong = True
    first = compare(a, lower(replace(a, model=model))).first
    assert first is not None
    assert (first.direction, first.layer) == ("backward", "")


# -- layers that return several tensors ----------------------------------------------------------


class Scored(nn.Module):
    """Returns its scores too, as experts and attention do, and uses them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)
        self.act: Callable[[Tensor], Tensor] = nn.Identity()

    def forward(self, *, states: Tensor, context: Tensor) -> dict[str, Tensor]:
        scores = self.gate(context).sigmoid()
        return {"out": self.act(self.up(states) * scores), "scores": scores}


class Mixed(nn.Module):
    """Reads its own encoder twice, and returns what that computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed, self.encoder = nn.Embedding(40, 16), nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)
        )  # fmt: skip
        self.blocks = nn.ModuleList(Scored() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        context = self.encoder(x)
        for block in self.blocks:
            x = x + block(states=x, context=context)["out"]
        logits = self.head(self.norm(x))
        return {"loss": logits.square().mean(), "logits": logits, "context": context}


def wrap(name: str, change: Callable[..., Any]) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        layer = model.get_submodule(name)
        forward = layer.forward
        layer.forward = lambda *given, **named: change(forward, *given, **named)

    return plant


def out_cut(forward: Any, **given: Tensor) -> Any:
    found = forward(**given)
    return {**found, "out": found["out"].detach()}


def context_cut(forward: Any, *, states: Tensor, context: Tensor) -> Any:
    return forward(states=states, context=context.detach())


def output_cut(forward: Any, x: Tensor) -> Tensor:
    found: Tensor = forward(x)
    return found.detach()


def out_doubled(forward: Any, **given: Tensor) -> Any:
    found = forward(**given)
    return {**found, "out": double(found["out"])}


def output_doubled(forward: Any, x: Tensor) -> Any:
    return double(forward(x))


def given_doubled(forward: Any, x: Tensor) -> Any:
    return forward(double(x))


def part(plant: Callable[[nn.Module], None], **options: Any) -> Comparison:
    sides = [Mixed().eval(), Mixed().eval()]
    plant(sides[1])
    found: Comparison = compare(*sides, data={"input_ids": IDS}, **options)
    return found


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("blocks.1", out_cut), ("encoder", output_cut), ("blocks.1.gate", output_cut),
        ("blocks.0", context_cut), ("blocks.2", context_cut), ("blocks.1", out_doubled),
        ("encoder.2", given_doubled), ("norm", given_doubled), ("blocks.0.up", given_doubled),
    ],
)  # fmt: skip
def test_the_layer_that_changes_a_gradient_is_named(layer: str, change: Callable[..., Any]) -> None:
    first = part(wrap(layer, change)).first
    assert first is not None
    assert (first.direction, first.layer) == ("backward", layer)
    doubled = change in (out_doubled, given_doubled)
    assert ("b is a times 2" in [kind.text for kind in first.kinds]) == doubled


@pytest.mark.parametrize("change", [output_doubled, given_doubled])
def test_attention_that_returns_its_weights_hides_no_layer_inside_it(
    change: Callable[..., Any],
) -> None:
    """The gradient of the weights arrives after that of the output projection."""
    layer, sides = "model.layers.1.self_attn.o_proj", [build("llama", "eager") for _ in range(2)]
    wrap(layer, change)(sides[1])
    first = compare(*sides, data=batch("llama")).first
    assert first is not None
    assert (first.direction, first.layer) == ("backward", layer)


def test_models_that_return_the_states_of_their_encoder_agree() -> None:
    assert part(lambda model: None).agree


# -- what the kinds of a forward difference are told from ----------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed, self.block = nn.Embedding(40, 16), nn.ModuleDict()
        self.block["attention"] = Seeing()
        self.causal = True

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = torch.ones(9, 9, dtype=torch.bool)
        found: Tensor = self.block["attention"](
            self.embed(input_ids), mask=mask.tril() if self.causal else mask
        )
        return found


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        weights = (x @ x.transpose(1, 2)).masked_fill(~mask, -torch.inf).softmax(-1)
        found: Tensor = self.value(weights @ x)
        return found


def test_another_mask_is_named() -> None:
    a, b = Masked(), Masked()
    data = {"input_ids": IDS}
    assert compare(a, b, data=data).agree
    b.causal = False
    first = compare(a, b, data=data).first
    assert first is not None
    assert (first.layer, first.token) == ("block.attention", 0)
    texts = [kind.text for kind in first.kinds if kind.name == "mask"]
    assert texts == ["'mask' that 'block.attention' is given differs in 36 of 81 values"]
    b.causal = True
    b.block["attention"].value.weight.data.mul_(2)
    first = compare(a, b, data=data).first
    assert first is not None
    assert "mask" not in [kind.name for kind in first.kinds], "both masks are equal"
