"""Wrong backward passes are named with their layer; right ones raise no false alarm."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from wrong_functions import WIDTH, ZOO, Elementwise, MissingTerm, Weighted, WrongScale
from wrong_functions import Linear as RightLinear

from torchfmri import InspectionError, LayerNotFoundError, Verification, cli, verify_gradients
from torchfmri._verify.comparison import GradientComparison, Judgement
from torchfmri._verify.directional import PRECISIONS, Scales, Slope, measure_slope
from torchfmri._verify.varied_call import VariedTensor
from torchfmri.reference import attention, light_attention


@pytest.fixture(autouse=True)
def _same_numbers(one_thread: None) -> None:
    torch.manual_seed(0)


def within(layer: nn.Module) -> nn.Module:
    return nn.Sequential(
        OrderedDict(first=nn.Linear(4, WIDTH), suspect=layer, last=nn.Linear(WIDTH, 2))
    )


def layers_of(verification: Verification) -> set[str]:
    return {check.layer for check in verification.findings}


# -- the zoo ---------------------------------------------------------------------------------


def test_the_zoo_is_large_enough() -> None:
    assert len(ZOO) >= 20


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ZOO)
def test_wrong_function_is_named(name: str) -> None:
    case = ZOO[name]
    layer = case.make()
    alone = case.data is not None
    model, data = (layer, case.data()) if case.data else (within(layer), torch.randn(8, 4))
    verification = verify_gradients(model, data, second=case.second)
    assert not verification.ok
    assert layers_of(verification) == {"" if alone else "suspect"}
    assert {check.of for check in verification.findings} == case.of
    assert {check.order for check in verification.findings} == {2 if case.second else 1}
    assert all(case.says in check.reason for check in verification.findings)
    assert verification.first_wrong is verification.findings[0]


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.second])
def test_wrong_second_derivative_is_right_the_first_time(name: str) -> None:
    assert verify_gradients(within(ZOO[name].make()), torch.randn(8, 4)).ok


# -- no false alarm --------------------------------------------------------------------------


class Called(nn.Module):
    """A layer out of a function, with layers inside."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._run(self, *arguments, **keywords)


class FloatNorm(nn.Module):
    """A norm that computes in float32 whatever it is given, as those of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Counting(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin() * self.calls


class Experts(nn.Module):
    """Two of three experts for each token, chosen by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return y


class Tied(nn.Module):
    """The output weights are those of the embedding, used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mlp(self.embedding(ids)).tanh(), self.embedding.weight)


class Cache:
    """An object with a tensor inside, as a key/value cache is."""

    def __init__(self, seen: Tensor) -> None:
        self.layers = [{"keys": seen}]


def in_place(self: nn.Module, x: Tensor) -> Tensor:
    x += 1
    y = self.inner(x)
    y.mul_(2)
    return y.relu_()


def in_place_of_first(self: nn.Module, given: list[Tensor]) -> Tensor:
    return in_place(self, given[0])


def listed() -> tuple[list[Tensor]]:
    return ([rows()],)


def cached(self: nn.Module, x: Tensor, cache: Cache) -> Tensor:
    keys = torch.cat([cache.layers[0]["keys"], self.inner(x)])
    cache.layers[0]["keys"] = keys
    return keys.tanh()


class Masked(nn.Module):
    """Takes a mask of zeros and ones, compares it with 0, and adds the smallest number."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x + torch.zeros_like(x).masked_fill(mask == 0, torch.finfo(x.dtype).min)).softmax(
            -1
        )


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, WIDTH)))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, **options)


Case = tuple[Callable[[], nn.Module], Callable[[], Any]]
SEQUENCE: Callable[[], Tensor] = lambda: rows(2, 4, WIDTH)  # noqa: E731
IMAGE: Callable[[], Tensor] = lambda: rows(2, 2, 6, 6)  # noqa: E731

RIGHT: dict[str, Case] = {
    "Linear": (linear, rows),
    "Bilinear": (lambda: nn.Bilinear(3, 4, 2), lambda: (rows(5, 3), rows(5, 4))),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), lambda: rows(2, 2, 7)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2), IMAGE),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), lambda: rows(1, 1, 3, 3, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), IMAGE),
    "LSTM": (lambda: nn.LSTM(WIDTH, 4, 2, bidirectional=True), SEQUENCE),
    "GRU": (lambda: nn.GRU(WIDTH, 4, dropout=0.2, num_layers=2), SEQUENCE),
    "RNN": (lambda: nn.RNN(WIDTH, 4, nonlinearity="relu"), SEQUENCE),
    "LSTMCell": (lambda: nn.LSTMCell(WIDTH, 4), rows),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1),
        lambda: (rows(2, 4, WIDTH), rows(2, 5, WIDTH), rows(2, 5, WIDTH)),
    ),
    "attention to itself": (
        lambda: Called(
            lambda self, x: self.inner(x, x, x, need_weights=False)[0],
            inner=nn.MultiheadAttention(WIDTH, 2),
        ),
        SEQUENCE,
    ),
    "TransformerEncoderLayer": (encoder, SEQUENCE),
    "TransformerEncoder, eval": (lambda: nn.TransformerEncoder(encoder(), 2).eval(), SEQUENCE),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 2, 8, activation="gelu"),
        lambda: (rows(4, 2, WIDTH), rows(3, 2, WIDTH)),
    ),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), rows),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), rows),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), rows),
    "BatchNorm2d, eval": (lambda: nn.BatchNorm2d(2).eval(), IMAGE),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: rows(2, 4, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(2, affine=True), IMAGE),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "Embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), lambda: torch.tensor([0, 1, 1, 6])),
    "Embedding, sparse": (lambda: nn.Embedding(7, 3, sparse=True), lambda: torch.tensor([1, 1, 6])),
    "Embedding, max_norm": (lambda: nn.Embedding(7, 3, max_norm=1.0), lambda: torch.arange(7)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 3), lambda: torch.randint(7, (2, 4))),
    "ReLU": (nn.ReLU, rows),
    "ReLU at its kink": (nn.ReLU, lambda: torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0])),
    "ReLU in place": (lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)), rows),
    "many ReLUs": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6))),
        lambda: rows(64, 64),
    ),
    "GELU": (nn.GELU, rows),
    "SiLU": (nn.SiLU, rows),
    "PReLU": (nn.PReLU, rows),
    "Hardtanh": (nn.Hardtanh, rows),
    "Hardtanh at its kinks": (nn.Hardtanh, lambda: torch.tensor([-1.0, 1.0, 0.5])),
    "Softmax": (lambda: nn.Softmax(-1), rows),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), rows),
    "GLU": (nn.GLU, rows),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "MaxPool2d, all equal": (lambda: nn.MaxPool2d(2), lambda: torch.zeros(1, 1, 4, 4)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: rows(1, 4, 3, 3)),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), IMAGE),
    "Dropout": (lambda: nn.Sequential(linear(), nn.Dropout(0.5)), rows),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.5), rows),
    "round": (lambda: Called(lambda _, x: x.round() + x), rows),
    "comparison": (lambda: Called(lambda _, x: (x > 0).to(x.dtype) * x), rows),
    "smallest number as mask": (Masked, lambda: (rows(), torch.eye(5, WIDTH))),
    "infinite output": (lambda: Called(lambda _, x: (x.tril(), x.triu().abs().log())), rows),
    "Fourier transform": (
        lambda: Called(lambda self, x: torch.fft.rfft(self.inner(x)), inner=linear()),
        rows,
    ),
    "complex parameter": (
        lambda: nn.Linear(3, 2, dtype=torch.complex64),
        lambda: torch.randn(4, 3, dtype=torch.complex64),
    ),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), rows),
    "weight norm of old": (lambda: nn.utils.weight_norm(linear()), rows),
    "spectral norm": (lambda: parametrizations.spectral_norm(linear()), rows),
    "spectral norm of old": (lambda: nn.utils.spectral_norm(linear()), rows),
    "float32 inside": (lambda: nn.Sequential(FloatNorm(), linear(), FloatNorm()), rows),
    "loss in float32 beside exact outputs": (
        lambda: Called(
            lambda self, x: (self.inner(x).float().square().mean(), x.sin()), inner=linear()
        ),
        rows,
    ),
    "gradient that is zero": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), FloatNorm()),
        rows,
    ),
    "checkpoint": (
        lambda: Called(
            lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
            inner=nn.Sequential(linear(), nn.Dropout(0.5)),
        ),
        rows,
    ),
    "reentrant checkpoint": (
        lambda: Called(
            lambda self, x: checkpoint(self.inner, x, use_reentrant=True),
            inner=nn.Sequential(linear(), nn.Dropout(0.5)),
        ),
        rows,
    ),
    "writes in place": (lambda: Called(in_place, inner=linear()), rows),
    "writes in place into a list": (lambda: Called(in_place_of_first, inner=linear()), listed),
    "object with tensors": (
        lambda: Called(cached, inner=linear()),
        lambda: (rows(), Cache(rows())),
    ),
    "experts": (Experts, rows),
    "tied weights": (Tied, lambda: torch.randint(9, (2, 3))),
    "one layer called twice": (
        lambda: Called(lambda self, x: self.inner(self.inner(x)), inner=linear()),
        rows,
    ),
    "counts its calls": (Counting, rows),
    "half precision": (lambda: linear().bfloat16(), lambda: rows().bfloat16()),
    "custom function": (lambda: Weighted(RightLinear), rows),
    "reference attention": (
        lambda: Called(lambda _, q, k, v: attention(q, k, v, causal=True)),
        lambda: (rows(1, 4, 3, 2), rows(1, 2, 3, 2), rows(1, 2, 3, 2)),
    ),
    "light attention": (
        lambda: Called(lambda _, q, k, v: light_attention(q, k, v, block=2)),
        lambda: (rows(1, 2, 3, 2), rows(1, 2, 3, 2), rows(1, 2, 3, 2)),
    ),
}


def test_there_are_enough_right_modules() -> None:
    assert len(RIGHT) >= 30


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name: str) -> None:
    make, data = RIGHT[name]
    model = make()
    verification = verify_gradients(model, data())
    assert [str(check) for check in verification.findings] == []
    assert verification.checks
    assert {check.status for check in verification.checks} == {"right"}
    assert not [layer for layer, why in verification.missing.items() if "not called" not in why]
    trainable = [name for name, each in model.named_parameters() if each.requires_grad]
    assert not trainable or any("input" not in check.of for check in verification.checks)


LOSSES: dict[str, tuple[nn.Module, Callable[[], Any], Callable[[], Any]]] = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), rows, lambda: torch.randint(WIDTH, (5,))),
    "CrossEntropyLoss, probabilities": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        rows,
        lambda: rows().softmax(-1),
    ),
    "MSELoss": (nn.MSELoss(), rows, rows),
    "L1Loss": (nn.L1Loss(), rows, rows),
    "SmoothL1Loss": (nn.SmoothL1Loss(), rows, rows),
    "HuberLoss": (nn.HuberLoss(), rows, rows),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), rows, lambda: torch.rand(5, WIDTH)),
    "KLDivLoss": (nn.KLDivLoss(reduction="batchmean"), rows, lambda: rows().softmax(-1)),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), rows, lambda: torch.rand(5, WIDTH)),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), rows, lambda: rows().gt(0).float()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_raise_no_false_alarm(name: str) -> None:
    loss, data, target = LOSSES[name]
    verification = verify_gradients(linear(), data(), loss, target=target())
    assert verification.ok
    assert "(loss)" in verification.layers


class WrongMean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.expand(ctx.shape)


def test_a_wrong_loss_is_named() -> None:
    verification = verify_gradients(linear(), rows(), WrongMean.apply)
    assert layers_of(verification) == {"(loss)"}
    assert "30 times the derivative" in str(verification.first_wrong)


# -- which layer -----------------------------------------------------------------------------


def blocks(wrong: int) -> nn.Module:
    def block(number: int) -> nn.Module:
        act = Elementwise(MissingTerm) if number == wrong else nn.SiLU()
        inner = nn.Sequential(
            OrderedDict(up=nn.Linear(WIDTH, 8), act=act, down=nn.Linear(8, WIDTH))
        )
        return Called(lambda self, x: x + self.mlp(x), mlp=inner)

    return nn.Sequential(*(block(number) for number in range(3)))


def test_the_innermost_layer_is_named_and_not_its_ancestors() -> None:
    verification = verify_gradients(blocks(1), rows())
    assert layers_of(verification) == {"1.mlp.act"}
    statuses = {check.layer: check.status for check in verification.checks}
    assert {statuses[each] for each in ("0", "1", "1.mlp", "2", "")} == {"right"}


def test_two_mistakes_at_different_depths_are_both_found() -> None:
    layers: dict[str, nn.Module] = {"act": Elementwise(MissingTerm)}
    block = Called(lambda self, x: WrongScale.apply(self.act(x.sin())).cos(), **layers)
    verification = verify_gradients(nn.Sequential(linear(), block, linear()), rows())
    assert layers_of(verification) == {"1.act", "1"}
    assert verification.first_wrong is not None
    assert verification.first_wrong.layer == "1.act"
    own = {check.of for check in verification.findings if check.layer == "1"}
    assert own == {"output of 1.act"}


def test_a_mistake_before_a_wrong_layer_is_found_too() -> None:
    block = Called(lambda self, x: self.act(WrongScale.apply(x)), act=Elementwise(MissingTerm))
    verification = verify_gradients(nn.Sequential(linear(), block), rows())
    assert [(check.layer, check.of) for check in verification.findings] == [
        ("1.act", "input x"),
        ("1", "input arguments.0"),
    ]


def test_only_the_layers_asked_for() -> None:
    model = blocks(1)
    assert verify_gradients(model, rows(), layers="*.up").layers == [
        "0.mlp.up",
        "1.mlp.up",
        "2.mlp.up",
    ]
    assert not verify_gradients(model, rows(), layers=Elementwise).ok
    # The container alone: its inner layer is not known to be wrong, so the container is.
    assert layers_of(verify_gradients(model, rows(), layers="1.mlp")) == {"1.mlp"}
    with pytest.raises(LayerNotFoundError, match=r"'0\.mlp\.up'"):
        verify_gradients(model, rows(), layers="0.mlp.upp")


def test_the_wrong_call_of_several() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return MissingTerm.apply(x) if x.shape[0] > 3 else F.silu(x)

    model = Called(lambda self, x: self.act(x[:2]).sum() + self.act(x), act=Picky())
    verification = verify_gradients(model, rows())
    assert [(check.layer, check.call) for check in verification.findings] == [("act", 1)]
    assert "call 1" in str(verification.first_wrong)


# -- intended --------------------------------------------------------------------------------


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversal(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.3 * g


@pytest.mark.parametrize("factor", [1.0001, 0.9999, 1.00037, 0.99988, 1.5, 0.99])
def test_factor_near_one_is_told_with_its_digits(factor: float) -> None:
    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * factor * g

    found = verify_gradients(within(Elementwise(Scaled)), torch.randn(8, 4))
    assert layers_of(found) == {"suspect"}
    (told,) = {check.reason for check in found.findings}
    assert told.endswith(" times the derivative: a wrong factor")
    assert float(told.split()[0]) - 1 == pytest.approx(factor - 1, rel=0.05)


INTENDED = {
    "straight-through": (Elementwise(StraightThrough), "straight-through estimator"),
    "straight-through without a function": (
        Called(lambda _, x: x + (x.sign() - x).detach()),
        "straight-through estimator",
    ),
    "reversal": (Elementwise(Reversal), "-0.3 times the derivative: gradient reversal"),
    "stop": (Called(lambda _, x: x.detach() * 2), "no gradient arrives"),
}


@pytest.mark.parametrize("name", INTENDED)
def test_intended_gradients_are_recognised_and_can_be_expected(name: str) -> None:
    layer, says = INTENDED[name]
    found = verify_gradients(within(layer), torch.randn(8, 4))
    assert layers_of(found) == {"suspect"}
    assert all(says in check.reason for check in found.findings)
    expected = verify_gradients(within(layer), torch.randn(8, 4), expected="suspect")
    assert expected.ok
    assert {check.status for check in expected.checks if check.layer == "suspect"} == {"expected"}
    assert "1 expected" in repr(expected)


def test_what_is_expected_and_does_not_happen_is_said() -> None:
    verification = verify_gradients(within(nn.Tanh()), torch.randn(8, 4), expected="suspect")
    assert verification.ok
    assert verification.notes["expected to deviate, but its gradient is right"] == ["suspect"]
    with pytest.raises(LayerNotFoundError):
        verify_gradients(within(nn.Tanh()), torch.randn(8, 4), expected="suspekt")


def test_a_straight_through_estimator_does_not_hide_another_mistake() -> None:
    model = nn.Sequential(linear(), Elementwise(StraightThrough), Elementwise(MissingTerm))
    verification = verify_gradients(model, rows(), expected="1")
    assert layers_of(verification) == {"2"}


# -- second derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "GELU", "Conv2d", "light attention"])
def test_right_second_derivatives(name: str) -> None:
    make, data = RIGHT[name]
    verification = verify_gradients(make(), data(), second=True)
    assert verification.ok
    assert any(check.order == 2 for check in verification.checks)
    assert any(check.of == "gradient that arrives" for check in verification.checks)


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


def test_a_function_without_second_derivative_says_so() -> None:
    verification = verify_gradients(Elementwise(Once), rows(), second=True)
    assert verification.ok
    assert any("once_differentiable" in note for note in verification.notes)


# -- bad input, and what cannot be judged ----------------------------------------------------


def test_integer_output_cannot_be_differentiated() -> None:
    with pytest.raises(InspectionError, match="no floating-point numbers"):
        verify_gradients(Called(lambda _, x: x.argmax(-1)), rows())


def test_an_undifferentiable_end_does_not_keep_the_layers_from_being_verified() -> None:
    model = Called(lambda self, x: self.inner(x).argmax(-1), inner=linear())
    verification = verify_gradients(model, rows())
    assert verification.layers == ["inner"]
    assert verification.missing == {"": "it returns no floating-point numbers"}


def test_nothing_to_differentiate() -> None:
    frozen = nn.Embedding(5, 3).requires_grad_(False)
    with pytest.raises(InspectionError, match="nothing that requires a gradient goes in"):
        verify_gradients(frozen, torch.tensor([1, 2]))


def test_no_parameters_are_no_obstacle() -> None:
    verification = verify_gradients(nn.Tanh(), rows())
    assert [check.of for check in verification.checks] == ["input"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_no_number(value: str) -> None:
    bad = Called(lambda _, x: x * float("nan") if value == "nan" else x)
    loss = (lambda y: y.sum()) if value == "nan" else (lambda y: y.sum() / 0)
    with pytest.raises(InspectionError, match=rf"The loss is -?{value}") as caught:
        verify_gradients(nn.Sequential(linear(), bad, linear()), rows(), loss)
    assert ("layer '1'" in str(caught.value)) == (value == "nan")


def test_nan_in_one_layer_is_listed_and_the_others_are_verified() -> None:
    bad = Called(lambda _, x: torch.full_like(x, math.nan))
    model = Called(lambda self, x: (self.inner(x), self.bad(x))[0], inner=linear(), bad=bad)
    verification = verify_gradients(model, rows())
    assert verification.ok
    assert verification.missing == {"bad": "its output has NaN"}


def test_calls_that_fail_for_several_reasons_keep_them_all() -> None:
    bad = Called(lambda _, x: torch.full_like(x, math.nan) if len(x) > 1 else x.argmax(-1))

    def both(self: nn.Module, x: Tensor) -> Tensor:
        for part in (x, x[:1], x[:2]):  # the first and the last for one reason
            self.bad(part)
        return self.inner(x)

    verification = verify_gradients(Called(both, inner=linear(), bad=bad), rows())
    reasons = "its output has NaN; it returns no floating-point numbers"
    assert verification.missing == {"bad": reasons}


def test_a_loss_that_is_no_scalar() -> None:
    with pytest.raises(InspectionError, match="must be one number"):
        verify_gradients(linear(), rows(), lambda y: y)


class Single(nn.Module):
    """Runs in float32 only."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return self.act(x)


def test_a_module_that_cannot_run_in_float64_is_verified_as_it_is_and_that_is_said() -> None:
    right = verify_gradients(Single(), rows())
    assert right.ok
    (note,) = right.notes
    assert note == "verified as it is: float64 does not work (TypeError: float32 only)"
    assert right.checks[0].allowed > 1e-3
    assert not verify_gradients(Single(MissingTerm.apply), rows()).ok


def test_a_module_that_runs_only_once_is_listed() -> None:
    def once(self: nn.Module, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or sys._getframe(3).f_code.co_name == "nobody":
            return x
        if x.dtype != torch.float32 or self.ran:
            raise RuntimeError("only once")
        self.ran = True
        return x

    layer = Called(once)
    layer.ran = False
    verification = verify_gradients(nn.Sequential(linear(), layer), rows(), layers=["0", "1"])
    assert verification.layers == ["0"]
    assert verification.missing == {"1": "it cannot be run alone: RuntimeError: only once"}


def test_a_module_with_a_will_of_its_own_is_listed() -> None:
    generator = torch.Generator().manual_seed(1)
    wild = Called(lambda _, x: x * torch.rand(x.shape, generator=generator, dtype=x.dtype))
    model = Called(lambda self, x: (self.inner(x), self.wild(x))[0], inner=linear(), wild=wild)
    verification = verify_gradients(model, rows())
    assert verification.ok
    assert "not deterministic" in verification.missing["wild"]


def test_frozen_parameters_are_not_verified() -> None:
    layer = linear()
    layer.bias.requires_grad_(False)
    assert {check.of for check in verify_gradients(layer, rows()).checks} == {"input", "weight"}


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((nn.Linear, rows()), {}, "give a model: an nn.Module"),
        ((linear(), rows()), {"directions": 0}, "directions=0"),
        ((linear(), [rows(), rows()]), {}, "a list of 2"),
        ((nn.LazyLinear(3), rows()), {}, "lazy parameters"),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, says: str) -> None:
    with pytest.raises(InspectionError, match=says):
        verify_gradients(*arguments, **options)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    with pytest.raises(InspectionError, match="TORCHFMRI=off"):
        verify_gradients(linear(), rows())


def test_under_no_grad_and_inference_mode() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        model, data = within(Elementwise(MissingTerm)), torch.randn(8, 4)
        with mode():
            assert layers_of(verify_gradients(model, data)) == {"suspect"}


# -- no trace --------------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes whatever a forward pass can change, and may fail."""

    def __init__(self, fail_at: int = -1, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.fail_at, self.error = fail_at, error
        self.norm = nn.BatchNorm1d(4)
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.lstm = nn.LSTM(4, 4)
        self.act = Elementwise(MissingTerm)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.cache: list[Any] = []
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        self.steps += 1
        self.latest = x
        self.cache.append(x)
        if self.calls[0] == self.fail_at:
            raise self.error("planned")
        random.random()
        np.random.rand()
        y = self.lstm(self.act(self.spectral(self.norm(x))))[0]
        return F.dropout(y + self.embedding(torch.arange(len(x)) % 5))


@pytest.mark.parametrize("training", [True, False])
def test_success_leaves_no_trace(training: bool) -> None:
    model, data = Restless().train(training), torch.randn(6, 4, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    handle = model.norm.register_forward_hook(lambda *_: None)
    before = state_of(model, data)
    assert layers_of(verify_gradients(model, data, lambda y: y.sum(), second=True)) == {"act"}
    assert_same_state(before, state_of(model, data))
    handle.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_at", [1, 9])
def test_failure_leaves_no_trace(fail_at: int, error: type[BaseException]) -> None:
    model, data = Restless(fail_at, error), torch.randn(6, 4)
    before = state_of(model, data)
    if fail_at == 1 or error is KeyboardInterrupt:
        with pytest.raises(error, match="planned"):
            verify_gradients(model, data)
    else:  # an exception in a later run is one of a module that cannot be run alone
        assert not verify_gradients(model, data).ok
    assert_same_state(before, state_of(model, data))


def test_an_embedding_that_writes_into_its_weight_is_put_back() -> None:
    model = nn.Embedding(5, 3, max_norm=0.1)
    before = model.weight.detach().clone()
    assert verify_gradients(model, torch.arange(5)).ok
    assert torch.equal(model.weight, before)
    assert model.max_norm == 0.1
    with torch.no_grad():
        model(torch.arange(5))
    assert not torch.equal(model.weight, before)


def test_the_same_numbers_every_time() -> None:
    model, data = Restless(), torch.randn(6, 4)
    one, other = verify_gradients(model, data), verify_gradients(model, data)
    assert one.checks == other.checks


def test_warnings_are_not_raised_by_us() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify_gradients(within(nn.Tanh()), torch.randn(8, 4), lambda y: y.sum(), second=True)


# -- numerical derivatives -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "slope"),
    [
        (lambda t: math.sin(1 + t), math.cos(1)),
        (lambda t: math.exp(5 * t), 5.0),
        (lambda t: 3.0, 0.0),
        (lambda t: float(np.float32(math.sin(1 + t))), math.cos(1)),
        (lambda t: max(t - 1e-5, 0) + 2 * t, 2.0),
        (lambda t: 1e6 + t, 1.0),
    ],
)
def test_measured_slope_is_right_within_its_error(curve: Any, slope: float) -> None:
    size = abs(curve(0))
    precision = PRECISIONS[torch.float64]
    for guess in (slope, slope + 1):
        scales = Scales(1.0, size, precision.rounding * size)
        found = measure_slope(curve, curve(0), guess, scales, precision)
        assert abs(found.value - slope) <= 2 * found.error + 1e-6
        assert found.error < 1e-2
        assert found.bend < 1e-2


@pytest.mark.parametrize("curve", [abs, lambda t: float(t > 0)])
def test_a_kink_is_noticed(curve: Any) -> None:
    scales = Scales(1.0, 1.0, 1e-16)
    found = measure_slope(curve, curve(0), 0.3, scales, PRECISIONS[torch.float64])
    assert found.bend > 0.5


# -- result and command line -----------------------------------------------------------------


def test_report() -> None:
    verification = verify_gradients(blocks(1), rows())
    text = str(verification)
    assert repr(verification).startswith("<Verification of Sequential: 16 layers verified, 1 wrong")
    assert "1.mlp.act (Elementwise), input x: off by" in text
    assert "*.mlp.up (3 layers)" in text
    assert max(map(len, verification.table(width=60).splitlines())) <= 60
    assert "1.mlp.act" in verification._repr_html_()
    data = verification.to_dict()
    assert data["first_wrong"]["layer"] == "1.mlp.act"
    assert json.loads(json.dumps(data))["ok"] is False
    assert len(data["checks"]) == len(verification.checks)


def test_html_is_escaped() -> None:
    model = nn.Sequential()
    model.add_module("<script>", Elementwise(MissingTerm))
    assert "<script>" not in verify_gradients(model, rows())._repr_html_()


SUBJECTS = """
import torch
from torch import nn
from wrong_functions import Elementwise, MissingTerm

def right():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3), lambda y: y.sum()

def wrong():
    return nn.Sequential(nn.Linear(3, 4), Elementwise(MissingTerm)), torch.randn(5, 3)

def impossible():
    return nn.Softmax(-1), torch.arange(3)
"""


@pytest.fixture
def subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "subjects.py"
    path.write_text(SUBJECTS)
    return path


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("wrong", 1)])
def test_command(subjects: Path, name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", f"{subjects}:{name}"]) == code
    output = capsys.readouterr()
    assert ("1 (Elementwise), input x" in output.out) == (name == "wrong")
    assert "torchfmri verify: Sequential" in output.err
    assert cli.main(["verify", f"{subjects}:{name}", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (name == "right")


def test_command_options(subjects: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{subjects}:wrong"
    assert cli.main(["verify", spec, "--layers", "0", "--json"]) == 0
    assert {each["layer"] for each in json.loads(capsys.readouterr().out)["checks"]} == {"0"}
    assert cli.main(["verify", spec, "--expected", "1", "--second", "--directions", "1"]) == 0
    assert "expected" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["impossible", "absent"])
def test_command_that_cannot_be_done(
    subjects: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", f"{subjects}:{what}"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "error:" in output.err


class Terminal:
    """Standard error as somebody looks at it."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_shown_on_a_terminal_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    verify_gradients(within(nn.Tanh()), torch.randn(8, 4))
    assert "verify [....................] 0/4" in terminal.text
    assert "suspect" in terminal.text
    assert terminal.text.endswith("\r")


def test_no_progress_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    verify_gradients(within(nn.Tanh()), torch.randn(8, 4))
    assert capsys.readouterr().err == ""


# -- size ------------------------------------------------------------------------------------


def test_the_number_of_runs_does_not_depend_on_the_number_of_parameters() -> None:
    class Counted(nn.Linear):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.runs += 1
            return super().forward(x)

    counts = []
    for width in (4, 64):
        Counted.runs = 0
        verify_gradients(Counted(width, width), torch.randn(2, width))
        counts.append(Counted.runs)
    assert counts[0] == counts[1]


def test_a_wrong_layer_in_a_transformer() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)
    model.layers[2].activation = Elementwise(MissingTerm)
    verification = verify_gradients(model, torch.randn(1, 5, 16))
    assert layers_of(verification) == {"layers.2.activation"}


def test_the_benchmark_finds_its_wrong_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    subject = importlib.import_module("benchmarks.verify")
    parser = argparse.ArgumentParser()
    subject.add_arguments(parser)
    sizes = {"width": 32, "depth": 3, "vocabulary": 40, "tokens": 5, "wrong": 1}
    result = subject.main(parser.parse_args([f"--{key}={value}" for key, value in sizes.items()]))
    assert result["layers_named"] == ["layers.1.act"]
    assert result["findings_without_mistake"] == []


@pytest.mark.parametrize("order", list(permutations([0, 1, 2])))
@pytest.mark.parametrize("unmeasured", [(math.nan, 0.0), (1.0, math.inf), (math.inf, math.nan)])
def test_a_direction_that_cannot_be_measured_counts_the_same_in_any_order(
    order: tuple[int, ...], unmeasured: tuple[float, float]
) -> None:
    value, error = unmeasured
    measured, unknown = Slope(1.0, 1e-6, 0.0), Slope(value, error, 0.0)
    variable = VariedTensor("x", (0,))
    for bad, status in (([measured, unknown, measured], "wrong"), ([unknown] * 3, "undecided")):
        several = [
            GradientComparison(
                analytic=3.0,
                slope=bad[place],
                scale=1.0,
                allowed=0.2 + 5 * bad[place].error,
                size=1.0,
            )
            for place in order
        ]
        judgement = Judgement(variable, several)
        assert judgement.status == status
        assert not math.isnan(judgement.deviation)
