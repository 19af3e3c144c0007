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


class Spectrogram(nn.Module):
    """A convolution over both axes of (b, t, f) or (b, f, t), and a layer on each frame."""

    def __init__(self, bins: int, last: bool) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * bins, 3)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.conv(x[:, None]))

    def read(self, y: Tensor) -> Tensor:
        y = y.tanh()
        return self.out((y.permute(0, 3, 1, 2) if self.last else y.transpose(1, 2)).flatten(2))

    def by_frames(self, x: Tensor) -> list[dict[str, Tensor]]:
        """The gradients of a copy of the convolution's parameters for each frame of a sample."""
        rows = x.shape[-1] if self.last else x.shape[-2]
        copies = [
            {name: each.detach().clone().requires_grad_()
             for name, each in self.conv.named_parameters()}
            for _ in range(rows)
        ]  # fmt: skip
        made = [
            torch.func.functional_call(self.conv, some, (x[None, None],)).select(
                -1 if self.last else -2, t
            )
            for t, some in enumerate(copies)
        ]
        self.read(torch.stack(made, -1 if self.last else -2)).square().sum().backward()
        return [{name: each.grad for name, each in some.items()} for some in copies]  # type: ignore[misc]


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("frames", "bins"), [(3, 4), (4, 3), (4, 4)])
def test_a_convolution_over_time_and_frequency(
    frames: int, bins: int, last: bool, keep: str
) -> None:
    """Frames are told by the layer that reads them, and not by which axis is longer."""
    model = Spectrogram(bins, last).double()
    x = torch.randn((B, bins, frames) if last else (B, frames, bins), dtype=torch.float64)
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(x).square().sum().backward()
    assert not tokens.notes
    truth = [model.by_frames(each) for each in x]
    for name in ("weight", "bias"):
        wanted = torch.stack([torch.stack([e[name].norm() for e in some]) for some in truth])
        found = tokens[f"conv.{name}"].norm()
        torch.testing.assert_close(found, wanted)
        assert not torch.allclose(found.flip(1), wanted)  # a wrong frame would be seen
    assert tokens["out.weight"].norm().shape == (B, frames)


def test_a_convolution_over_two_axes_that_nothing_tells_apart() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv2d(1, 2, 3, padding=1)).double()
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(B, 5, 7, dtype=torch.float64)).square().sum().backward()
    assert tokens["1.weight"].norm().shape == (B, 5)
    assert any("channels='first'" in str(each) for each in tokens.notes)
    with torchfmri.token_gradients(model, channels="first") as tokens:
        model(torch.randn(B, 5, 7, dtype=torch.float64)).square().sum().backward()
    assert tokens["1.weight"].norm().shape == (B, 7)
    assert not tokens.notes
