"""A scan on the device under test, beside one on the CPU in float64.

With `TORCHFMRI_TEST_DEVICE=cuda` it runs on a GPU, where values are reduced by other kernels and
nothing waits for the host. Scans on the CPU have oracles of their own in the other files, so few of
these cases are in the fast tier.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from oracles import DEVICE, assert_same_state, state_of
from scan_oracles import build, prompts

import torchfmri
from torchfmri import LiveToken, Scan

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
GRADIENTS = (None, "position", "cached", "token_loss")


@cache
def on_cpu(name: str) -> Any:
    """The model in float32: random weights that are the same on every device."""
    with torch.device("cpu"):
        return build(name)


def on_device(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(on_cpu(name)).to(DEVICE, dtype)


@cache
def rows() -> list[list[int]]:
    """Two prompts of different lengths, so that one is padded."""
    with torch.device("cpu"):
        return prompts()


def reference(name: str, ids: list[list[int]], new_tokens: int, **options: Any) -> Scan:
    with torch.device("cpu"):
        model = build(name, torch.float64, experts="eager")  # the fused ones know no float64
        return torchfmri.scan(model, None, ids, new_tokens, **options)


def assert_alike(found: Scan, expected: Scan, tolerance: float) -> None:
    """Assert equal tokens, and numbers apart by at most `tolerance` of their layer's largest."""
    assert found.layers == expected.layers
    assert found.metrics == expected.metrics
    assert len(found) == len(expected) == len(rows())
    for ours, truth in zip(found, expected, strict=True):
        assert ours.tokens.ids.tolist() == truth.tokens.ids.tolist()
        for metric in truth.layers:
            for kind in ("layers", "voxels"):
                one, other = getattr(ours, kind)[metric], getattr(truth, kind)[metric]
                assert (np.isnan(one) == np.isnan(other)).all(), (metric, kind)
                columns = ~np.isnan(other).all(0)
                assert columns.sum() > 10
                largest = np.nanmax(other[:, columns], 0)
                apart = np.nanmax(np.abs(one - other)[:, columns], 0)
                assert (apart <= tolerance * np.maximum(largest, 1e-6)).all(), (metric, kind)
        for name in ("surprisal", "entropy"):
            one, other = getattr(ours.tokens, name), getattr(truth.tokens, name)
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        statistics = ours.statistics["activations"], truth.statistics["activations"]
        assert (np.isnan(statistics[0]) == np.isnan(statistics[1])).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("per", GRADIENTS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gpt2"])
def test_a_padded_batch_that_is_generated(name: str, per: Any) -> None:
    model = on_device(name)
    before = state_of(model)
    found = torchfmri.scan(model, None, rows(), STEPS, per=per, eos_token_id=66)
    assert_same_state(before, state_of(model))
    expected = reference(name, rows(), STEPS, per=per, eos_token_id=66)
    assert_alike(found, expected, TOLERANCE[torch.float32])
    assert len({each.padding for each in found}) == 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per", GRADIENTS)
def test_sixteen_bits(per: Any, dtype: torch.dtype) -> None:
    """A text that is read, so that rounding cannot choose other tokens."""
    model = on_device("qwen3", dtype)
    found = torchfmri.scan(model, None, rows(), 0, per=per)
    expected = reference("qwen3", rows(), 0, per=per)
    assert_alike(found, expected, TOLERANCE[dtype])


def test_tokens_come_live_with_their_activations() -> None:
    model = on_device("qwen3")
    stream = torchfmri.stream(model, None, rows()[0], STEPS, per=None, eos_token_id=66)
    tokens: list[LiveToken] = list(stream)
    scan = stream.scan
    assert [each.id for each in tokens] == scan.tokens.ids.tolist()
    plain = model.generate(
        torch.tensor(rows()[:1], device=DEVICE), max_new_tokens=STEPS, do_sample=False,
        eos_token_id=66,
    )  # fmt: skip
    assert scan.tokens.ids.tolist() == plain[0].tolist()
    for at, each in enumerate(tokens):
        np.testing.assert_array_equal(each.voxels, scan.only.voxels["activation"][at])


def test_a_wrong_weight_is_seen() -> None:
    """The comparison can fail."""
    model = on_device("qwen3")
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight.mul_(1.01)
    found = torchfmri.scan(model, None, rows(), 0, per="position")
    with pytest.raises(AssertionError):
        assert_alike(found, reference("qwen3", rows(), 0, per="position"), 2e-4)
