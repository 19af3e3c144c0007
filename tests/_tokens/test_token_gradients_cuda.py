"""Token gradients on a GPU against the same in float64 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_layers import FusedRMSNorm, FusedSine
from torch import Tensor, nn
from torch.nn import functional as F

import torchfmri

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KEEPS = ["factors", "norms", "voxels"]
# Of the largest norm: what rounding in the model's own passes may make of it.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Small(nn.Module):
    """Embedding, norms of both kinds, biases, heads of their own, and a head that may be tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64, _weight=0.1 * torch.randn(96, 64))
        self.norm, self.other = nn.RMSNorm(64, eps=1e-6), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 160), nn.Linear(160, 64, bias=False)
        self.per_head = nn.RMSNorm(16, eps=1e-6)
        self.head = nn.Linear(64, 96, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        heads = self.norm(x).unflatten(-1, (4, 16)).transpose(1, 2)
        x = x + self.per_head(heads).transpose(1, 2).flatten(2)
        x = x + self.down(F.relu_(self.up(self.other(x))))
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    scores: Tensor = model(ids)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return F.cross_entropy(wide.flatten(0, 1), ids.roll(1, 1).flatten(), reduction="sum")


def found_of(model: nn.Module, ids: Tensor, keep: Any) -> Any:
    with torchfmri.token_gradients(model, keep=keep, voxel=16) as tokens:
        loss_of(model, ids).backward()
    return tokens


def truth_of(model: nn.Module, ids: Tensor) -> Any:
    twin = copy.deepcopy(model).cpu().double()
    twin.zero_grad()
    with torchfmri.token_gradients(twin) as tokens:
        loss_of(twin, ids.cpu()).backward()
    return tokens


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_coverage(keep: str, tied: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Small(tied).cuda().to(dtype)
    ids = torch.randint(96, (3, 40), device="cuda")
    tokens = found_of(model, ids, keep)
    truth = truth_of(model, ids)
    assert tokens.names == truth.names
    for name in tokens.names:
        expected = truth[name].norm()
        error = (tokens[name].norm().cpu().double() - expected).abs().max()
        assert float(error) <= TOLERANCES[dtype] * float(expected.max()), name
        if keep == "voxels":
            by_voxel = tokens[name].norm(by="voxel").square().sum(-1).sqrt().cpu().double()
            assert torch.allclose(by_voxel, tokens[name].norm().cpu().double(), rtol=1e-4), name
    for row in tokens.coverage():
        assert row.residual is not None
        assert row.residual < (1e-4 if dtype == torch.float32 else 5e-2), row
        assert row.note == "", row
    whole = truth.norm()
    assert float((tokens.norm().cpu() - whole).abs().max()) <= TOLERANCES[dtype] * float(
        whole.max()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_large_when_tokens_are_mixed_up(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchfmri._tokens.calls.arrivals import Arrivals

    arrived = Arrivals.arrived

    def swapped(arrivals: Any, record: Any, *rest: Any) -> Any:
        if record.watched.layer == "down":
            record.x = record.x.flip(1)
            record.version = record.x._version
        return arrived(arrivals, record, *rest)

    monkeypatch.setattr(Arrivals, "arrived", swapped)
    torch.manual_seed(0)
    model = Small(False).cuda().to(dtype)
    tokens = found_of(model, torch.randint(96, (3, 40), device="cuda"), "norms")
    assert tokens.coverage()["down.weight"].residual > 0.1
    assert tokens.coverage()["up.weight"].residual < 5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_gram_matrix(dtype: torch.dtype, tied: bool) -> None:
    """Products of 16-bit factors are added up in float32: the rounding is that of the factors."""
    torch.manual_seed(0)
    model = Small(tied).cuda().to(dtype)
    tokens = found_of(model, torch.randint(96, (3, 40), device="cuda"), "factors")
    gram = tokens.gram()
    assert gram.dtype == torch.float32
    for name in tokens.names:
        whole = tokens[name].materialise().flatten(0, 1).flatten(1).double()
        expected = whole @ whole.T
        error = (tokens[name].gram().double() - expected).abs().max()
        assert float(error) <= 1e-2 * float(expected.abs().max()), name
    squares = tokens.norm().flatten().double().square()
    assert torch.allclose(gram.diagonal().double(), squares, rtol=1e-3)


class Noisy(nn.Module):
    """Draws random numbers and owns a weight: it is run again with the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) @ self.w


def test_random_numbers_of_the_device_are_drawn_again_and_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Noisy()).cuda()
    x = torch.randn(2, 5, 4, device="cuda")
    torch.manual_seed(1)
    model(x).square().sum().backward()
    plain, after = model[1].w.grad.clone(), torch.cuda.get_rng_state()  # type: ignore[union-attr,operator]
    model.zero_grad()
    torch.manual_seed(1)
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    assert torch.equal(model[1].w.grad, plain)  # type: ignore[arg-type]
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert tokens.coverage()["1.w"].residual < 1e-5
    assert torch.allclose(tokens["1.w"].sum(), plain, rtol=1e-4, atol=1e-5)


def test_nothing_of_the_users_pass_changes() -> None:
    torch.manual_seed(0)
    model = Small(True).cuda().bfloat16()
    ids = torch.randint(96, (3, 40), device="cuda")
    loss_of(model, ids).backward()
    plain = {name: each.grad.clone() for name, each in model.named_parameters()}  # type: ignore[union-attr]
    for keep in KEEPS:
        model.zero_grad()
        found_of(model, ids, keep)
        for name, each in model.named_parameters():
            assert torch.equal(each.grad, plain[name]), (keep, name)  # type: ignore[arg-type]
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", [FusedRMSNorm, FusedSine])
def test_fused_layers_write_into_gradients_that_wait(kind: Any, keep: str) -> None:
    """Gradients are launched together, long after the layer has used their memory again."""

    def run(fused: bool) -> Any:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 96), kind(96, fused), nn.Linear(96, 32), kind(32, fused))
        model = nn.Sequential(*layers).cuda()
        x = torch.randn(2, 40, 64, device="cuda")
        with torchfmri.token_gradients(model, keep=keep) as tokens:  # type: ignore[call-overload]
            model(x).sin().sum().backward()
        return tokens

    plain, fused = run(False), run(True)
    assert fused.coverage().residual < 1e-4
    for name in plain.names:
        expected = plain[name].norm()
        error = (fused[name].norm() - expected).abs().max()
        assert float(error) <= TOLERANCES[torch.float32] * float(expected.max()), name
