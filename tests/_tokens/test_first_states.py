"""Layers that are run again, in loops whose first state is a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread")

B, S, H = 2, 5, 3


class Doubled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Product(nn.Module):
    """A layer of free parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(H, H)), nn.Parameter(torch.randn(H))

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.matrix + self.shift


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: weight_norm(nn.Linear(H, H)),
    "subclass": lambda: Doubled(H, H),
    "free parameters": Product,
}
STATES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x.new_zeros(len(x), H),
    "ones": lambda x: torch.ones_like(x[:, 0]),
}


class Loop(nn.Module):
    """h = tanh(layer(h) + x[:, t]), or tanh(layer(h + x[:, t]))."""

    def __init__(self, layer: str, first: str, inside: bool) -> None:
        super().__init__()
        self.layer, self.first, self.inside = LAYERS[layer](), STATES[first], inside
        self.copies: list[dict[str, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h, made = self.first(x), []
        for t in range(S):
            read = h + x[:, t] if self.inside else h
            own = {} if self.copies is None else self.copies[t]
            y = functional_call(self.layer, own, (read,)) if own else self.layer(read)
            h = (y if self.inside else y + x[:, t]).tanh()
            made.append(h)
        return torch.stack(made, 1)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("first", STATES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_layer_that_is_run_again_on_a_constant_state(
    layer: str, first: str, inside: bool, dtype: torch.dtype
) -> None:
    model, x = Loop(layer, first, inside).to(dtype), torch.randn(B, S, H, dtype=dtype)
    weights = torch.linspace(-1, 2, S * H, dtype=dtype).view(S, H)
    names = [name for name, _ in model.layer.named_parameters()]
    truth = []
    for each in x:
        model.copies = [
            {name: one.detach().clone().requires_grad_()
             for name, one in model.layer.named_parameters()}
            for _ in range(S)
        ]  # fmt: skip
        (model(each[None]) * weights).sum().backward()
        truth.append([{name: step[name].grad for name in names} for step in model.copies])
    model.copies = None
    for _ in range(3):  # the tokens of later passes are those that were kept
        model.zero_grad()
        with torchfmri.token_gradients(model) as tokens:
            (model(x) * weights).sum().backward()
        for name in names:
            wanted = torch.stack([torch.stack([step[name] for step in some]) for some in truth])
            found = tokens[f"layer.{name}"].materialise()
            exact = dtype == torch.float64
            torch.testing.assert_close(
                found, wanted, rtol=1e-9 if exact else 1e-4, atol=1e-12 if exact else 1e-5
            )
            assert not torch.allclose(found.roll(1, 1), wanted, rtol=1e-3)


def test_rows_of_constants_that_are_spread_are_tokens_of_their_own() -> None:
    """No position can be told from another one: the axis says that it is none of the model's."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(torch.ones(H))

    model = Shifted()
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(B, S, H)).square().sum().backward()
    assert list(tokens.axes) == ["1 x 1"]
    grad = model.layer.bias.grad
    assert grad is not None
    torch.testing.assert_close(tokens["layer.bias"].materialise(), grad.view(1, 1, H))
