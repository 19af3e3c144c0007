"""Sums in which only some rows are of two positions: those are refused, and not given to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchfmri

Layer = Callable[[int, Tensor], Tensor]
B, S, H = 3, 4, 3


def _first_row_alone(how: str, layer: Layer, t: int, h: Tensor) -> Tensor:
    """What a layer makes of the first sample's state; zeros for the other samples."""
    zeros, first = torch.zeros_like(h), torch.tensor([0])
    if how == "cat":
        return torch.cat([layer(t, h[:1]), zeros[1:]])
    if how == "pad":
        return F.pad(layer(t, h[:1]), (0, 0, 0, B - 1))
    if how == "index_add":
        return zeros.index_add(0, first, layer(t, h[first]))
    if how == "index_put":
        zeros[first] = layer(t, h[first])
        return zeros
    if how == "slice":
        zeros[:1] = layer(t, h[:1])
        return zeros
    return layer(t, h) * (torch.arange(B) == 0)[:, None].to(h.dtype)  # every row goes through it


class _Model(nn.Module):
    """One layer, or a copy of it for each position: the slow oracle."""

    def __init__(self, body: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.body = nn.Linear(H, H), body
        self.copies: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        def layer(t: int, rows: Tensor) -> Tensor:
            if not self.copies:
                return self.w(rows)  # type: ignore[no-any-return]
            if rows.ndim == 2:
                return F.linear(rows, **self.copies[t])
            n = rows.shape[1]  # of a frame
            each = [F.linear(rows[:, j], **self.copies[t * n + j]) for j in range(n)]
            return torch.stack(each, 1)

        return self.body(layer, x)

    def wanted(self, x: Tensor) -> dict[str, Tensor]:
        """The gradient of every sample's loss by every copy, (b, positions, ...)."""
        named = dict(self.w.named_parameters())
        self.copies = [
            {name: each.detach().clone().requires_grad_() for name, each in named.items()}
            for _ in range(x[0, ..., 0].numel())
        ]
        losses = self(x).square().flatten(1).sum(1)
        found = {}
        for name in named:
            leaves = [each[name] for each in self.copies]
            rows = [
                torch.autograd.grad(
                    loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                for loss in losses
            ]
            found[f"w.{name}"] = torch.stack([torch.stack(each) for each in rows])
        self.copies = []
        return found


def _data(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (B, S, H)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _is_right(body: Callable[[Layer, Tensor], Tensor], x: Tensor) -> None:
    """Compare with the oracle, and with the oracle of other positions."""
    torch.manual_seed(0)
    model = _Model(body).to(x.dtype)
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if x.dtype == torch.float64 else {}
    for name, wanted in model.wanted(x).items():
        found = tokens[name].materialise()
        torch.testing.assert_close(found, wanted, **tolerance)  # type: ignore[arg-type]
        assert not torch.allclose(found, wanted.roll(1, 1))


def _is_refused(body: Callable[[Layer, Tensor], Tensor], x: Tensor) -> None:
    model = _Model(body).to(x.dtype)
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    assert [row.name for row in tokens.coverage().missing] == ["w.weight", "w.bias"]
    with pytest.raises(torchfmri.UnsupportedLayerError, match="different positions"):
        tokens["w.weight"]


def _walk(how: str, layer: Layer, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(1, S):
        h = (_first_row_alone(how, layer, t, h) + x[:, t]).tanh()
    return h


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("how", ["cat", "pad", "index_add", "index_put", "slice"])
def test_a_layer_on_some_samples_of_a_state_is_refused(how: str, dtype: torch.dtype) -> None:
    x = _data(dtype)
    _is_refused(lambda layer, x: _walk(how, layer, x), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_layer_on_a_state_of_which_a_mask_keeps_some_samples_is_right(dtype: torch.dtype) -> None:
    x = _data(dtype)
    _is_right(lambda layer, x: _walk("mask", layer, x), x)


_MIXED: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "pad": lambda layer, x: layer(0, x[:, 0] + F.pad(x[:1, 1], (0, 0, 0, B - 1))),
    "other order": lambda layer, x: layer(0, F.pad(x[:1, 1], (0, 0, 0, B - 1)) + x[:, 0]),
    "index_add": lambda layer, x: layer(0, x[:, 0].index_add(0, torch.tensor([0]), x[:1, 1])),
    "product": lambda layer, x: layer(0, torch.cat([x[:1, 1], torch.ones(B - 1, H)]) * x[:, 0]),
    "once": lambda layer, x: F.pad(layer(0, x[:1, 0]), (0, 0, 0, B - 1)) + x[:, 1],
}


@pytest.mark.parametrize("how", [*_MIXED])
def test_a_sum_of_two_positions_in_some_samples_is_refused(how: str) -> None:
    _is_refused(_MIXED[how], _data())


_ALIKE: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "own position": lambda layer, x: layer(0, x[:, 0] + F.pad(x[:1, 0], (0, 0, 0, B - 1))),
    "constants": lambda layer, x: layer(0, x[:, 0] + F.pad(torch.ones(1, H), (0, 0, 0, B - 1))),
    "own row added": lambda layer, x: layer(0, x[:, 0].index_add(0, torch.tensor([0]), x[:1, 0])),
}


@pytest.mark.parametrize("how", [*_ALIKE])
def test_rows_of_one_position_that_are_added_to_some_samples_are_right(how: str) -> None:
    _is_right(_ALIKE[how], _data())


N, MIX = 2, torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)  # rows of a frame


def _frames(how: str, layer: Layer, x: Tensor) -> Tensor:
    """A walk over frames of several rows, whose layer is followed by a mix of these rows."""
    begins = how in ("from zeros", "mean")
    h = torch.zeros_like(x[:, 0]) if begins else x[:, 0]
    for t in range(not begins, x.shape[1]):
        read = layer(t, x[:, t] if how == "inputs" else h)
        if how == "mean":
            h = (read.mean(1, keepdim=True) + x[:, t]).tanh()
        elif how == "einsum":
            h = (torch.einsum("nm,bmd->bnd", MIX.to(x.dtype), read) + x[:, t]).tanh()
        elif how == "inputs":
            h = (MIX.to(x.dtype) @ h + read).tanh()
        else:
            h = (MIX.to(x.dtype) @ read + x[:, t]).tanh()
    return h


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("how", ["from zeros", "from the first frame", "mean", "einsum"])
def test_a_layer_whose_rows_are_mixed_before_a_step_is_refused(how: str, count: int) -> None:
    _is_refused(lambda layer, x: _frames(how, layer, x), _data(shape=(B, count, N, H)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_layer_on_the_frames_that_such_a_walk_takes_in_is_right(dtype: torch.dtype) -> None:
    _is_right(lambda layer, x: _frames("inputs", layer, x), _data(dtype, (B, S, N, H)))


def test_a_mean_over_samples_between_a_layer_and_a_step_is_refused() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        h = x[:, 0]
        for t in range(1, S):
            h = (layer(t, h).mean(0, keepdim=True) + x[:, t]).tanh()
        return h

    _is_refused(body, _data())


def test_two_frames_that_are_all_are_refused() -> None:
    _is_refused(lambda layer, x: (layer(0, x[:, 1]) + x[:, 0]).tanh(), _data(shape=(B, 2, N, H)))


def test_a_gate_made_of_a_frame_for_itself_is_right() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        gated = [x[:, t] * layer(t, x[:, t]).mean(1, keepdim=True) for t in range(S)]
        return torch.stack(gated, 1)

    _is_right(body, _data(shape=(B, S, N, H)))


def test_rows_that_a_product_with_zeros_and_ones_reads_are_steps() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t, code in enumerate(torch.eye(S, dtype=x.dtype)):
            h = (layer(t, h) + torch.einsum("s,bsd->bd", code, x)).tanh()
        return h

    _is_right(body, _data())


class _Windows(nn.Module):
    """One layer on positions side by side: two of them at each step, or all of them at once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.u = nn.Linear(count * H, H)

    def forward(self, x: Tensor) -> Tensor:
        if self.u.in_features == S * H:
            return self.u(x.flatten(1))  # type: ignore[no-any-return]
        rows = [torch.cat([x[:, t], x[:, t - 1]], -1) for t in range(1, S)]
        return torch.stack([self.u(each) for each in rows], 1)


def test_a_layer_on_two_positions_side_by_side_at_each_step_is_refused() -> None:
    model = _Windows(2).double()
    with torchfmri.token_gradients(model) as tokens:
        model(_data()).square().sum().backward()
    assert [row.name for row in tokens.coverage().missing] == ["u.weight", "u.bias"]
    with pytest.raises(torchfmri.UnsupportedLayerError, match="different positions"):
        tokens["u.weight"]


def test_a_layer_on_all_positions_side_by_side_is_at_the_sample() -> None:
    model, x = _Windows(S).double(), _data()
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    found = tokens["u.weight"].materialise()[:, 0]
    losses = [model(each[None]).square().sum() for each in x]
    wanted = torch.stack([torch.autograd.grad(loss, model.u.weight)[0] for loss in losses])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found.roll(1, 0), wanted)
