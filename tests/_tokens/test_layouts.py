"""Which axis of an input the positions are: told by the layers, said by the user, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread")

B, D, S = 2, 4, 6


class Model(nn.Module):
    """x * w + v, with parameters of these shapes, and what follows."""

    def __init__(self, shape: tuple[int, ...], after: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.after = after
        self.layer = nn.Linear(D, D).double()
        self.norm = nn.LayerNorm(D).double()
        self.square = nn.Parameter(torch.randn(D, D, dtype=torch.float64))
        self.over_last = nn.Linear(S, 3).double()
        self.convolution = nn.Conv1d(D, D, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.w).tanh() + self.v
        if self.after == "layer":
            return self.layer(h.mT)
        if self.after == "norm":
            return self.norm(h.mT)
        if self.after == "product":
            return self.layer.weight[:3] @ h
        if self.after == "square product":
            return self.square @ h
        if self.after == "convolution":
            return self.convolution(h)
        if self.after == "over last":
            return self.over_last(h)
        if self.after == "both":
            return self.over_last(self.layer(h.mT).mT)
        return h.cumsum(-1)


def gradients(
    model: Model, x: Tensor, **options: Any
) -> tuple[torchfmri.TokenGradients, list[Tensor]]:
    """The token gradients, and those of a copy of each parameter per entry of the input."""
    with torchfmri.token_gradients(model, **options) as tokens:
        model(x).square().sum().backward()
    copies = [each.detach().expand(x.shape).clone().requires_grad_() for each in (model.w, model.v)]
    kept = {name: model._parameters.pop(name) for name in ("w", "v")}
    model.w, model.v = copies  # type: ignore[assignment]
    try:
        found = torch.autograd.grad(model(x).square().sum(), copies)
    finally:
        for name in kept:
            delattr(model, name)
        model._parameters.update(kept)
    return tokens, list(found)


SECOND = ("layer", "norm", "product", "convolution")


@pytest.mark.parametrize("after", SECOND)
@pytest.mark.parametrize("shape", [(D, 1), (D, S), ()])
def test_layers_that_sum_over_channels_tell(after: str, shape: tuple[int, ...]) -> None:
    model, x = Model(shape, after), torch.randn(B, D, S, dtype=torch.float64)
    tokens, copies = gradients(model, x)
    for name, copy in zip(("w", "v"), copies, strict=True):
        wanted = torch.zeros(B, S, *shape, dtype=torch.float64)
        for t in range(S):
            here = copy[..., t : t + 1]
            if shape == (D, S):
                wanted[:, t, :, t] = here[..., 0]
            else:
                wanted[:, t] = here if shape else here.sum((1, 2))
        torch.testing.assert_close(tokens[name].materialise(), wanted)
    if after != "product":  # which reads a weight, and is no call that could be looked at
        assert not tokens.verify().refuted


def test_a_layer_over_the_last_axis_tells() -> None:
    model, x = Model((D, 1), "over last"), torch.randn(B, D, S, dtype=torch.float64)
    tokens, (copy, _) = gradients(model, x)
    wanted = torch.zeros(B, D, D, 1, dtype=torch.float64)
    wanted[:, range(D), range(D), 0] = copy.sum(-1)
    torch.testing.assert_close(tokens["w"].materialise(), wanted)
    assert not tokens.notes


def test_what_nothing_tells_is_refused_or_said() -> None:
    model, x = Model((D, 1), "nothing"), torch.randn(B, D, S, dtype=torch.float64)
    for _ in range(3):  # found by following, and looked up later
        tokens, copies = gradients(model, x)
        assert [row.name for row in tokens.coverage().missing] == ["w", "v"]
        with pytest.raises(torchfmri.UnsupportedLayerError, match=r"channels='last'.*'first'"):
            tokens["w"]
    for channels, s in (("first", S), ("last", D)):
        tokens, _ = gradients(model, x, channels=channels)
        assert tokens["w"].norm().shape == (B, s)
        assert tokens.coverage().residual < 1e-12
    tokens, _ = gradients(model, x, channels="first")
    torch.testing.assert_close(tokens["w"].materialise(), copies[0].movedim(-1, 1)[..., None])


def test_layers_over_both_axes_are_noted() -> None:
    model, x = Model((), "both"), torch.randn(B, D, S, dtype=torch.float64)
    for _ in range(3):
        tokens, _ = gradients(model, x)
        assert tokens["w"].norm().shape == (B, D)
        (note,) = tokens.notes
        assert "channels='first'" in note
    tokens, _ = gradients(model, x, channels="first")
    assert tokens["w"].norm().shape == tokens["layer.weight"].norm().shape == (B, S)
    assert not tokens.notes


def test_a_square_parameter_alone_is_noted() -> None:
    """It may mix the positions of (b, s, d) or the channels of (b, d, s)."""
    model, x = Model((), "square product"), torch.randn(B, D, S, dtype=torch.float64)
    tokens, _ = gradients(model, x)
    assert tokens["square"].norm().shape == (B, D)
    assert "channels='first'" in next(iter(tokens.notes))
    tokens, _ = gradients(model, x, channels="first")
    assert tokens["square"].norm().shape == (B, S)
    assert not tokens.notes
    tokens, _ = gradients(Model((D, 1), "square product"), x)
    with pytest.raises(torchfmri.UnsupportedLayerError, match="channels='last'"):
        tokens["w"]


def test_another_argument_has_a_layout_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(D, D), nn.Linear(3, D)
            self.scale = nn.Parameter(torch.randn(D, 1))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.one((x * self.scale).mT) + self.other(memory).sum(1, keepdim=True)

    model = Two()
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(B, D, S), torch.randn(B, 5, 3)).square().sum().backward()
    shapes = {name: tuple(tokens[name].norm().shape) for name in tokens}
    assert shapes == {
        "scale": (B, S), "one.weight": (B, S), "one.bias": (B, S),
        "other.weight": (B, 5), "other.bias": (B, 5),
    }  # fmt: skip


def test_wrong_options() -> None:
    model = Model((), "nothing")
    with pytest.raises(torchfmri.InspectionError, match="channels='second': choose 'last'"):
        torchfmri.token_gradients(model, channels="second")  # type: ignore[call-overload]
    with pytest.raises(torchfmri.InspectionError, match="belongs to per='position'"):
        torchfmri.token_gradients(model, per="token_loss", channels="last")  # type: ignore[call-overload]


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("groups", [1, 2])
def test_no_rows_through_a_convolution_leave_the_model_readable(
    layer: type[nn.Module], groups: int
) -> None:
    model = nn.ModuleDict({"c": layer(4, 4, 3, padding=1, groups=groups), "lin": nn.Linear(4, 4)})
    x = torch.randn(2, 5, 4)
    with torchfmri.token_gradients(model) as tokens:
        (model["lin"](x).sum() + model["c"](x[:0].mT).sum()).backward()
    assert not tokens["c.weight"].norm().numel()
    assert tokens["lin.weight"].norm().shape == (2, 5)
