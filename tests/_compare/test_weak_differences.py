"""Differences no larger than noise: what comes back counts, and what was set is listed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build
from benchmarks._compare_pairs import quiet
from benchmarks._compare_unseen import FAULTS, fault_pairs, lowered, rounding_pairs
from torchfmri import InspectionError, Run, compare
from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.kinds import kinds_of, parameter_kind
from torchfmri._compare.recording import RecordedRows

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.2.self_attn")


def scaled(factor: float) -> tuple[Run, Run]:
    """A small model in bfloat16, and one with another attention scale."""
    a, b = (Run(build("llama"), batch("llama")) for _ in range(2))
    for layer in b.model.model.layers:
        layer.self_attn.scaling *= factor
    return lowered(a), lowered(b)


def test_a_difference_that_comes_back_counts_within_noise() -> None:
    found = compare(*scaled(1.1))
    first = found.first
    assert first is not None
    assert first.layer in LAYERS
    assert first.relative < 8 * max(first.spread_a, first.spread_b), "no more than noise"
    assert "the same way when both sides round anew" in first.reason
    assert "attribute" in [kind.name for kind in first.kinds]


def test_rounding_does_not_come_back() -> None:
    """The same weights with other rounding: added noise of the size of the measured one."""

    class Rounds(nn.Module):
        def __init__(self, inner: nn.Module, seed: int) -> None:
            super().__init__()
            self.inner, self.generator = inner, torch.Generator().manual_seed(seed)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            noise = torch.randn(y.shape, generator=self.generator).to(y) * y.norm() * 3e-4
            return y + noise

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).bfloat16()
    data = torch.randn(6, 8, 32).bfloat16()
    noisy = [nn.Sequential(Rounds(copy.deepcopy(plain), seed)) for seed in (1, 2)]
    found = compare(*noisy, data=data)
    assert any(pair.worst > 0 for pair in found.pairs)
    assert found.agree, str(found)


@pytest.mark.parametrize("turned", [False, True])
def test_rounded_weights_come_back_and_are_no_difference(turned: bool) -> None:
    """Between two precisions what repeats must be larger than the unit of the coarser one."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(67, 32), nn.Linear(32, 67)
            self.middle = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.middle(self.embed(ids)))
            return y * 0.0625

    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return Scaled().to(dtype)

    def loss(y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1).float(), ids.flatten())

    ids = torch.randint(0, 67, (4, 12), generator=torch.Generator().manual_seed(1))
    sides = [made(torch.float32), made(torch.bfloat16)]
    found = compare(*(reversed(sides) if turned else sides), data=ids, loss=loss)
    assert found.agree, str(found)


def test_what_was_set_is_listed_though_it_is_within_noise() -> None:
    found = compare(*scaled(1.005))
    assert found.agree
    (change,) = found.changes
    assert (change.name, change.layers) == ("attribute", LAYERS)
    assert "scaling is 0.353553 in a and 0.355321 in b" in change.text
    assert "though the models differ: scaling" in found.summary()
    assert "within noise: scaling" in found.text()
    assert "model.layers.*.self_attn (3 layers)" in found.text()
    assert found.to_dict()["changes"][0]["name"] == "attribute"


def test_modes_data_dtypes_parameters_and_configurations_are_listed() -> None:
    a, b = build("llama"), build("llama", rms_norm_eps=3e-5).bfloat16().train()
    b.model.norm.weight.data += 1e-9
    data = batch("llama")
    found = compare(Run(a, data), Run(b, {k: v for k, v in data.items() if k != "position_ids"}))
    names = {change.name: change for change in found.changes}
    assert {"mode", "data", "dtype", "setting", "epsilon"} <= set(names)
    assert str(names["mode"]) == "training is False in a and True in b"
    assert str(names["data"]) == "only a is given position_ids"
    assert names["epsilon"].text == "variance_epsilon is 1e-06 in a and 3e-05 in b"
    assert "parameter" not in names, "the same weights in another precision"
    assert not compare(a, copy.deepcopy(a), data=data).changes


def test_attributes_that_a_port_calls_otherwise_are_compared() -> None:
    class Norm(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.weight, self.eps = inner.weight, 1e-4

        def forward(self, x: Tensor) -> Tensor:
            size = x.square().mean(-1, keepdim=True)
            return self.weight * x * torch.rsqrt(size + self.eps)

    a = build("llama")
    b = copy.deepcopy(a)
    b.model.layers[1].input_layernorm = Norm(b.model.layers[1].input_layernorm)
    first = compare(a, b, data=batch("llama")).first
    assert first is not None
    assert first.layer == "model.layers.1.input_layernorm"
    assert "epsilon" in [kind.name for kind in first.kinds]
    assert "variance_epsilon (eps in b) is 1e-06 in a and 0.0001 in b" in str(first)


@pytest.mark.slow
def test_unseen_pairs_are_silent() -> None:
    """One pair of each kind and architecture; `python -m benchmarks compare --unseen` has all."""
    seen = set()
    with quiet():
        for kind, name, a, b in rounding_pairs():
            if (kind, name) in seen or name not in ("opt", "qwen2_moe", "deit"):
                continue
            seen.add((kind, name))
            found = compare(a, b)
            routed = [each for each in (found.first.kinds if found.first else ())
                      if each.name == "routing"]  # fmt: skip
            if name == "qwen2_moe" and routed:  # two scores are nearly equal: true, and said
                assert routed[0].text.startswith("rounding sends 1 of 27 tokens to other experts")
                continue
            assert found.agree, f"{kind}, {name}: {found.first}"
    assert len(seen) == 12


@pytest.mark.slow
def test_unseen_faults_are_found_in_bfloat16() -> None:
    with quiet():
        found = [
            compare(a, b) for _, a, b in fault_pairs("attention scale x 1.5", low=(True, True))
        ]
    assert len(FAULTS) >= 7
    assert sum(not each.agree for each in found) == len(found)


# -- kinds ---------------------------------------------------------------------------------------


def rows(values: Tensor) -> RecordedRows:
    grid = PositionGrid(kept=torch.ones(1, len(values), dtype=torch.bool), order=(0,))
    return RecordedRows(values.double(), grid)


@pytest.mark.parametrize("value", [torch.float64, torch.float32])
def test_autocast_to_a_dtype_that_torch_ignores_is_an_error(value: torch.dtype) -> None:
    with pytest.raises(InspectionError, match=r"give torch.bfloat16, torch.float16 or None"):
        Run(nn.Tanh(), torch.ones(2, 2), autocast=value)


def test_precision_needs_evidence() -> None:
    torch.manual_seed(0)
    one = torch.randn(12, 64)
    noisy = one * (1 + 1e-3 * torch.randn(12, 64))
    assert kinds_of(rows(one), rows(noisy), 1e-6) == [], "noise without a pattern tells nothing"
    (kind,) = kinds_of(rows(one), rows(one.bfloat16().float()), 1e-6)
    assert kind.name == "precision"
    assert kind.text.startswith("b was rounded to bfloat16")
    assert kinds_of(rows(one), rows(one.bfloat16()), 1e-6, (torch.float32, torch.bfloat16)) == []
    halved = (noisy * 1.2).bfloat16().float()
    assert "precision" not in [each.name for each in kinds_of(rows(one), rows(halved), 1e-6)]


def test_kinds_are_told_through_the_rounding_of_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 32), torch.randn(64, 32)
    grid = PositionGrid(kept=torch.ones(1, 20, dtype=torch.bool), order=(0,))

    def rows(values: Tensor) -> RecordedRows:
        return RecordedRows(values=values.bfloat16().double(), grid=grid)

    for changed, name in ((1.05 * x, "factor"), (x + 0.05, "shift"), (1.05 * x.square(), "")):
        kinds = [each.name for each in kinds_of(rows(x), rows(changed), 1e-3, (torch.bfloat16,))]
        assert kinds == ([name] if name else []), name
    kind = parameter_kind("weight", weight.bfloat16(), (1.05 * weight).bfloat16())
    assert kind is not None
    assert (kind.name, kind.text) == ("factor", "weight: b is a times 1.05")
    noisy = weight + 0.05 * torch.randn(64, 32)
    kind = parameter_kind("weight", weight.bfloat16(), noisy.bfloat16())
    assert kind is not None
    assert kind.name == "parameter"


def test_a_quantised_weight_is_told_by_its_few_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    step = weight.abs().max() / 127
    kind = parameter_kind("weight", weight, (weight / step).round() * step)
    assert kind is not None
    assert kind.name == "precision"
    assert "4,096 different values in a" in kind.text
    other = parameter_kind("weight", weight, weight + 0.01 * torch.randn(64, 64))
    assert other is not None
    assert other.name == "parameter"


def test_parameters_with_nan_are_told_apart() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    broken = weight.clone()
    broken[3, 3] = float("nan")
    kind = parameter_kind("weight", weight, broken)
    assert kind == ("nonfinite", "weight has 0 NaN or infinite values in a and 1 in b")
    assert parameter_kind("weight", broken, broken.clone()) is None
    other = parameter_kind("weight", broken, broken * 2)
    assert other is not None
    assert other.name == "parameter"


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_values_that_are_not_finite_on_both_sides_are_said_not_to_be_compared(bad: str) -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        a[0].bias[1] = float(bad)
    found = compare(a, copy.deepcopy(a), data=torch.randn(6, 4))
    assert found.first is None, str(found.first)
    kind = {"nan": "NaN", "inf": "infinite"}[bad]
    said = f"both sides have {kind} values from '0' (forward) on, in 3 tensors"
    assert any(said in each for each in found.notes), found.notes
    assert found.agree == (bad == "inf"), "an infinity may be meant, as in a mask"
    assert (said in found.summary()) == (bad == "nan")


def test_factors_have_as_many_digits_as_tell_them_apart() -> None:
    torch.manual_seed(0)
    one = torch.randn(12, 64)
    (kind,) = kinds_of(rows(one), rows(one * 1.00003), 1e-7)
    assert kind.text == "b is a times 1.00003"
    factors = torch.linspace(1.000001, 1.000009, 12)[:, None].double()
    (kind,) = kinds_of(rows(one), rows(one.double() * factors), 1e-9)
    assert kind.name == "factor_per_token"
    low, high = kind.text.split("own, ")[1].split(", ")[0].split(" to ")
    assert (float(low), float(high)) == pytest.approx((1.000001, 1.000009), abs=2e-6)
    assert low != high


# -- noise ---------------------------------------------------------------------------------------


def test_rows_that_depend_on_their_place_are_no_noise() -> None:
    """A mistake in the third row of the batch strikes another sample if rows change places."""
    a, b = (Run(build("llama"), batch("llama", None)) for _ in range(2))
    plain = b.model.model.layers[1].mlp.forward

    def wrong(x: Tensor) -> Tensor:
        y = plain(x)
        return torch.cat([y[:2], y[2:] * 1.3])

    b.model.model.layers[1].mlp.forward = wrong
    a, b = lowered(a), lowered(b)
    first = compare(a, b).first
    assert first is not None
    assert (first.layer, first.row) == ("model.layers.1.mlp", 2)
    assert max(first.spread_a, first.spread_b) < 0.15, "the mistake itself is 0.23"


def test_recurrent_layers_compute_in_the_precision_of_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.GRU(16, 24, 2, batch_first=True))
    run = Run(model, torch.randint(0, 20, (4, 9)))
    lower = Run(model, run.data, autocast=torch.bfloat16)
    assert compare(run, lower).agree
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].bias_hh_l0.mul_(-1)
    assert not compare(run, Run(other, run.data, autocast=torch.bfloat16)).agree


class Scaled(nn.Module):
    """Two layers, and code between them that scales one row of the batch by a wrong number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.value, self.o_proj, self.factor = nn.Linear(32, 32), nn.Linear(32, 32), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.value(x)
        return self.o_proj(torch.cat([y[:1] * self.factor, y[1:]]))


def test_few_rows_that_differ_come_from_the_code_between_layers() -> None:
    def made(factor: float) -> nn.Module:
        torch.manual_seed(0)
        layers = [each for _ in range(4) for each in (nn.Linear(32, 32), nn.SiLU())]
        return nn.Sequential(nn.Embedding(20, 32), *layers, Scaled(factor)).bfloat16()

    ids = torch.randint(0, 20, (4, 12))
    found = compare(made(1.0), made(1.06), data=ids)
    assert found.first is not None
    assert (found.first.layer, found.first.seen_at, found.first.row) == ("9", "9.o_proj", 0)
    assert all(pair.repeats for pair in found.pairs if pair.differs), "no more than noise"


def test_code_behind_the_last_layer_is_the_models_own() -> None:
    """A gradient that is wrong on its way from the output of the model to its last layer."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, g: Tensor) -> Tensor:
            return g * 2

    class Model(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head, self.wrong = nn.Embedding(20, 16), nn.Linear(16, 20), wrong

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.embed(ids))
            return Doubled.apply(y) if self.wrong else y.clone()

    ids = torch.randint(0, 20, (3, 8))
    first = compare(Model(False), Model(True), data=ids, loss=lambda y: y.square().mean()).first
    assert first is not None
    assert (first.direction, first.layer, first.seen_at) == ("backward", "", "head")
