"""Inner products by one forward-mode pass, against a loop of `autograd.grad`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import ARCHITECTURES
from oracles import assert_same_state, numbers, state_of
from torch import Tensor, nn

from torchfmri import InspectionError, LayerNotFoundError, token_loss_dots, token_losses
from torchfmri._tokens.algebra.sketch import Sketch


def loop(
    model: nn.Module, losses_of: Callable[[nn.Module], Tensor], direction: dict[str, Tensor]
) -> Tensor:
    parameters = dict(model.named_parameters())
    losses = losses_of(model)
    dots = []
    for loss in losses.flatten():
        found = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        parts = [
            (each * direction[name]).sum()
            for name, each in zip(parameters, found, strict=True)
            if each is not None and name in direction
        ]
        dots.append(torch.stack(parts).sum())
    return torch.stack(dots).view(losses.shape)


def directions(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    return {
        name: numbers(*each.shape, dtype=each.dtype, seed=seed)
        for name, each in model.named_parameters()
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral", "mamba"])
def test_transformers(name: str, attention: str) -> None:
    architecture = ARCHITECTURES[name]
    experts = "eager" if name == "mixtral" else None
    chosen = attention if architecture.attention else None
    model = architecture.build(attention=chosen, experts=experts, num_hidden_layers=1)
    model = model.double().eval()
    batch = architecture.batch()
    labels = batch.pop("labels")

    def losses_of(model: nn.Module) -> Tensor:
        return token_losses(model(**batch, use_cache=False).logits, labels)

    direction = directions(model)
    before = state_of(model)
    found = token_loss_dots(model, losses_of, direction)
    assert_same_state(before, state_of(model))
    expected = loop(model, losses_of, direction)
    # Some layers of these models compute in float32 whatever their dtype.
    tolerance = 1e-12 if name == "gpt2" else 1e-6
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())
    assert expected.abs().min(dim=1).values.max() == 0  # the last column
    swapped = expected.flip(1)
    assert float((found - swapped).abs().max()) > 1e-2 * float(expected.abs().max())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layer.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x)).cumsum(1)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.head(self.drop(x))


X = numbers(2, 5, 4)


def squares_of(model: nn.Module) -> Tensor:
    return model(X).square().sum(-1)


def test_tied_weights_move_together_and_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    model = Small().double().train()
    direction = directions(model)
    before = state_of(model)
    found = token_loss_dots(model, squares_of, direction)
    assert_same_state(before, state_of(model))  # running averages and random numbers too
    expected = loop(model, squares_of, direction)  # draws the same dropout mask
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    second = {"head.weight": direction["layer.weight"]}
    torch.set_rng_state(torch.get_rng_state())
    torch.manual_seed(3)
    first = token_loss_dots(model, squares_of, {"layer.weight": direction["layer.weight"]})
    torch.manual_seed(3)
    assert torch.equal(first, token_loss_dots(model, squares_of, second))


def test_directions_of_a_sketch_give_its_projection() -> None:
    torch.manual_seed(0)
    model = Small().double().eval()
    sketches = {
        name: Sketch(name, tuple(each.shape), 6, 2) for name, each in model.named_parameters()
    }
    rows = [
        {
            name: sketch.direction(number, X).view(model.get_parameter(name).shape)
            for name, sketch in sketches.items()
        }
        for number in range(6)
    ]
    found = token_loss_dots(model, squares_of, rows)
    assert found.shape == (2, 5, 6)
    losses = squares_of(model)
    parameters = dict(model.named_parameters())
    for b in range(2):
        for s in range(5):
            gradients = torch.autograd.grad(
                losses[b, s], list(parameters.values()), retain_graph=True
            )
            pairs = zip(parameters, gradients, strict=True)
            parts = [sketches[name].dense(each.reshape(1, -1))[0] for name, each in pairs]
            torch.testing.assert_close(found[b, s], torch.stack(parts).sum(0))


def test_a_parameter_that_does_not_matter_gives_zeros() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "other": nn.Linear(2, 2)}).double()
    found = token_loss_dots(model, lambda m: m["used"](X).sum(-1), {"other.weight": numbers(2, 2)})
    assert torch.equal(found, torch.zeros(2, 5, dtype=torch.float64))


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g


def test_an_operation_without_forward_mode_says_what_to_do() -> None:
    model = nn.Linear(4, 4).double()
    direction = {"weight": numbers(4, 4)}
    with pytest.raises(InspectionError, match=r"no forward mode.*backward\(losses, dot="):
        token_loss_dots(model, lambda m: NoForwardMode.apply(m(X)).sum(-1), direction)


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Linear(4, 4).double()
    with pytest.raises(LayerNotFoundError, match="Nearest: 'weight'"):
        token_loss_dots(model, squares_of, {"wieght": numbers(4, 4)})
    with pytest.raises(InspectionError, match=r"\(4,\).*\(4, 4\)"):
        token_loss_dots(model, squares_of, {"weight": numbers(4)})
    with pytest.raises(InspectionError, match=r"direction=\[\]: map names"):
        token_loss_dots(model, squares_of, [])
    with pytest.raises(InspectionError, match="not a tensor"):
        token_loss_dots(model, lambda m: (m(X),), {"weight": numbers(4, 4)})
    with pytest.raises(ZeroDivisionError):
        token_loss_dots(model, lambda m: 1 / 0, {"weight": numbers(4, 4)})
