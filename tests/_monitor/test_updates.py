"""How far an optimizer step moves the weights."""

import math

import pytest
import torch
from torch import Tensor

from torchfmri._monitor.updates import Updates, is_sampled
from torchfmri._records import UPDATE_SAMPLE
from torchfmri._torch import private
from torchfmri._torch.deferred import Deferred
from torchfmri._torch.private import norms


def ratios(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    parameters = {name: each.clone() for name, each in before.items()}
    updates = Updates(parameters)
    for name, each in after.items():
        parameters[name].copy_(each)
    found = {}
    for moved in updates.moved():
        change, weight = moved.norms
        found |= dict(zip(moved.names, (change / weight).tolist(), strict=True))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ratio_equals_the_obvious_one(dtype: torch.dtype) -> None:
    before = {"a": torch.randn(30, 20).to(dtype), "b": torch.randn(7).to(dtype)}
    after = {name: (each.double() + 0.01).to(dtype) for name, each in before.items()}
    found = ratios(before, after)
    for name in before:
        change = (after[name].double() - before[name].double()).norm()
        assert math.isclose(found[name], float(change / before[name].double().norm()), rel_tol=1e-5)


def test_a_large_parameter_is_sampled_evenly() -> None:
    weight = torch.randn(UPDATE_SAMPLE * 5 + 3)
    assert is_sampled(weight)
    assert not is_sampled(weight[:UPDATE_SAMPLE])
    update = torch.randn_like(weight) * 0.01
    found = ratios({"w": weight}, {"w": weight + update})["w"]
    assert math.isclose(found, 0.01, rel_tol=0.05)


def test_memory_of_a_sample_is_bounded() -> None:
    updates = Updates({"w": torch.ones(UPDATE_SAMPLE * 7 + 1)})
    assert updates._before["w"].numel() <= UPDATE_SAMPLE


def test_odd_parameters() -> None:
    before = {
        "e": torch.empty(0),
        "c": torch.ones(3, dtype=torch.complex64),
        "t": torch.ones(2, 3).T,
        "z": torch.zeros(3),
    }
    found = ratios(before, {"c": torch.full((3,), 1 + 1j), "z": torch.ones(3)})
    assert found["c"] == pytest.approx(1.0)
    assert found["t"] == 0.0
    assert math.isinf(found["z"])
    assert math.isnan(found["e"])


def test_norms_without_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(4), torch.randn(2, 3)]
    expected = [float(each.norm()) for each in tensors]
    assert [float(each) for each in norms(tensors)] == pytest.approx(expected)
    monkeypatch.delattr(private.torch, "_foreach_norm")
    assert [float(each) for each in norms(tensors)] == pytest.approx(expected)


def test_deferred_reads_in_order_what_was_there_then() -> None:
    tensors = [
        torch.tensor(1.5),
        torch.arange(4.0).reshape(2, 2),
        torch.empty(0),
        torch.tensor(True),
    ]
    deferred = Deferred(tensors)
    tensors[0].fill_(9)
    assert deferred.ready()
    assert deferred.read() == [[1.5], [0.0, 1.0, 2.0, 3.0], [], [1.0]]
    assert Deferred([]).read() == []
