"""FLOPs against closed forms, and against torch's own counter where that is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread")


def flops(model: nn.Module, data: Any, **options: Any) -> tuple[int, int]:
    total = torchfmri.cost(model, data, rounds=0, **options).total
    return total.forward_flops, total.backward_flops


def torch_flops(model: nn.Module, data: Any) -> tuple[int, int]:
    """What torch's own counter says."""
    with FlopCounterMode(display=False) as forward:
        output = model(**data) if isinstance(data, dict) else model(data)
    loss = output.loss if hasattr(output, "loss") else first(output).sum()
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return forward.get_total_flops(), backward.get_total_flops()


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class Attention(nn.Module):
    """One projection for each of query, key and value; attention fused or written out."""

    def __init__(self, width: int, heads: int, *, fused: bool, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.fused = heads, kv_heads or heads, fused
        size = width // heads
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, size * self.kv_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, -1)).transpose(1, 2)

        q, k, v = (
            split(self.q(x), self.heads),
            split(self.k(x), self.kv_heads),
            split(self.v(x), self.kv_heads),
        )
        if self.fused:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
            )
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (5, 7), (2, 3, 5)])
def test_linear(bias: bool, shape: tuple[int, ...]) -> None:
    rows = torch.Size(shape).numel()
    one = 2 * rows * 6 * 4
    # The first layer needs no dL/d input.
    assert flops(nn.Linear(6, 4, bias), torch.randn(*shape, 6)) == (one, one)
    two = nn.Sequential(nn.Linear(6, 4, bias), nn.Linear(4, 3, bias))
    second = 2 * rows * 4 * 3
    assert flops(two, torch.randn(*shape, 6)) == (one + second, one + 2 * second)


@pytest.mark.parametrize(
    ("layer", "shape", "positions"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 11), 9),
        (nn.Conv2d(4, 6, (3, 2), stride=2, padding=1), (2, 4, 9, 8), 5 * 5),
        (nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 9, 9), 5 * 5),
        (nn.Conv2d(6, 6, 3, groups=6), (1, 6, 5, 5), 3 * 3),
        (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), 3 * 3 * 3),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5), 5 * 5),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5), 5 * 5),
    ],
    ids=str,
)
def test_convolution(layer: nn.Module, shape: tuple[int, ...], positions: int) -> None:
    one = 2 * shape[0] * positions * layer.weight.numel()
    x = torch.randn(*shape, requires_grad=True)
    assert flops(layer, x) == (one, 2 * one)
    assert flops(layer, torch.randn(*shape)) == (one, one)


def test_torch_counts_grouped_convolutions_wrong_in_backward() -> None:
    layer, x = nn.Conv2d(8, 8, 3, groups=4), torch.randn(1, 8, 6, 6)
    assert flops(layer, x)[1] == 2 * 16 * layer.weight.numel()
    assert torch_flops(layer, x)[1] != flops(layer, x)[1]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_counts_alike_fused_and_written_out(kv_heads: int) -> None:
    b, s, width, heads = 2, 9, 16, 4
    x = torch.randn(b, s, width)
    projections = 2 * b * s * width * (width + 2 * width * kv_heads // heads)
    products = 4 * b * heads * s * s * (width // heads)
    written_out = Attention(width, heads, fused=False, kv_heads=kv_heads)
    fused = Attention(width, heads, fused=True, kv_heads=kv_heads)
    assert flops(written_out, x) == (projections + products, projections + 2 * products)
    # The fused backward computes the scores a second time: five products for four.
    assert flops(fused, x) == (projections + products, projections + 5 * products // 2)


def test_torch_counts_no_attention_on_a_cpu() -> None:
    """If this fails, torch has learnt it: then the two must agree."""
    x = torch.randn(2, 9, 16)
    model = Attention(16, 4, fused=True)
    assert torch_flops(model, x)[0] in (2 * 2 * 9 * 16 * 48, flops(model, x)[0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "bidirectional"])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent(kind: type[nn.Module], gates: int, both: bool, layers: int) -> None:
    t, b, i, h = 5, 3, 8, 6
    model = kind(i, h, layers, bidirectional=both)
    sides = 2 if both else 1
    inputs = [i] + [sides * h] * (layers - 1)
    forward = sum(2 * t * b * gates * h * (each + h) * sides for each in inputs)
    found = flops(model, torch.randn(t, b, i))
    assert found[0] == forward
    if kind is nn.LSTM and hasattr(torch.ops.aten, "mkldnn_rnn_layer"):
        assert found[1] == 2 * forward


def test_bilinear() -> None:
    assert flops(nn.Bilinear(3, 4, 5), (torch.randn(7, 3), torch.randn(7, 4)))[0] == 2 * 7 * 60


def test_mixture_of_experts() -> None:
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES, BATCH, LENGTH

    architecture = ARCHITECTURES["qwen3-moe"]
    cost = torchfmri.cost(architecture.build(), architecture.batch(), rounds=0)
    tokens, hidden, inner, chosen, experts = BATCH * LENGTH, 16, 8, 2, 4
    mlp = cost["model.layers.0.mlp"]
    routed = 2 * tokens * chosen * 3 * hidden * inner
    assert cost["model.layers.0.mlp.experts"].forward_flops == routed
    assert mlp.forward_flops == routed + 2 * tokens * hidden * experts
    assert cost["model.layers.0.mlp.experts"].backward_flops == 2 * routed


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), (5, 6)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)), (2, 3, 9, 9)),
        (nn.ConvTranspose1d(3, 4, 3), (2, 3, 9)),
        (nn.GRU(4, 5, 2), (6, 2, 4)),
        (Attention(16, 4, fused=False), (2, 9, 16)),
        (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1), (7, 2, 16)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torch_counts_the_same(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape)
    assert flops(model, x) == torch_flops(model, x)


def test_an_operation_of_the_user_is_named_or_counted() -> None:
    @torch.library.custom_op("torchfmri_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x)

    cost = torchfmri.cost(Model(), torch.randn(3, 4), rounds=0)
    assert any("torchfmri_test::twice ran 1 times" in note for note in cost.notes)

    @register_flop_formula(torch.ops.torchfmri_test.twice)
    def formula(shape: Any, **_: Any) -> int:
        return int(torch.Size(shape).numel())

    cost = torchfmri.cost(Model(), torch.randn(3, 4), rounds=0)
    assert cost.total.forward_flops == 12
    assert not any("twice" in note for note in cost.notes)


def test_composite_operations_in_inference_mode_are_counted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                return self.linear(x)

    assert flops(Model(), torch.randn(5, 4)) == (2 * 5 * 4 * 3, 0)
