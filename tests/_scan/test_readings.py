"""Readings on a device: what waits and is reduced by the kernel is what the CPU reads at once.

Where there is no GPU, `test_in_the_interpreter` runs this file once more with Triton's interpreter,
which executes the kernel on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from oracles import DEVICE
from scan_oracles import build, prompts
from torch import Tensor, nn

import torchfmri
from torchfmri._scan.run import readings

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
WITH_KERNEL = INTERPRETED or (DEVICE.type == "cuda" and HAS_TRITON)
needs_kernel = pytest.mark.skipif(not WITH_KERNEL, reason="needs CUDA or Triton's interpreter")
pytestmark = pytest.mark.usefixtures("one_thread")


@needs_kernel
@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_what_waits_is_what_is_read_at_once(
    name: str, per: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name).to(DEVICE)
    options = {"do_sample": False, "voxel": 48}
    monkeypatch.setattr(readings, "voxels_reducible", lambda *_: False)
    expected = torchfmri.scan(model, None, prompts()[:2], 3, per=per, **options)
    monkeypatch.setattr(readings, "voxels_reducible", lambda *_: True)
    found = torchfmri.scan(model, None, prompts()[:2], 3, per=per, **options)
    assert found.meta["missed"] == expected.meta["missed"]
    for one, other in zip(found, expected, strict=True):
        for metric in one.voxels:
            np.testing.assert_allclose(
                one.voxels[metric], other.voxels[metric], rtol=1e-5, atol=1e-9
            )
        for what in one.statistics:
            np.testing.assert_allclose(
                one.statistics[what], other.statistics[what], rtol=1e-5, atol=1e-9
            )


class _Block(nn.Module):
    """Adds to what its layer returned, in place: after the layer's hook has seen it."""

    def __init__(self, width: int, by_length: bool) -> None:
        super().__init__()
        self.linear, self._by_length = nn.Linear(width, width), by_length

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self._by_length or x.shape[1] > 7:
            y += x
        return y


class _Writer(nn.Module):
    """A small language model with such a block; perhaps in long sequences alone."""

    def __init__(self, by_length: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.block = _Block(16, by_length)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(input_ids)))


def plain_norms(model: _Writer, ids: list[int]) -> Any:
    with torch.no_grad():
        rows = model.block.linear(model.embedding(torch.tensor([ids], device=DEVICE)))
    return (rows.norm(dim=-1) / 4)[0].cpu().numpy()


def test_an_output_that_is_written_into_is_read_before_that() -> None:
    model = _Writer().to(DEVICE)
    ids = list(range(3, 14))
    found = torchfmri.scan(model, None, ids, 4, per=None)
    column = found.layers.index("block.linear")
    norms = found[0].layers["activation"][:-1, column]
    np.testing.assert_allclose(norms, plain_norms(model, found[0].tokens.ids[:-1].tolist()), 1e-5)
    assert not found.meta["missed"]


@needs_kernel
def test_a_write_that_nobody_expected_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "voxels_reducible", lambda *_: True)
    model = _Writer(by_length=True).to(DEVICE)  # the probe's passes are shorter
    found = torchfmri.scan(model, None, list(range(3, 14)), 0, per=None)
    column = found.layers.index("block.linear")
    assert np.isnan(found[0].layers["activation"][:, column]).all()
    assert "wrote into its output" in found.meta["missed"]["block.linear"]


@pytest.mark.slow
@pytest.mark.skipif(WITH_KERNEL, reason="tested already")
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, whose interpreter runs without a GPU")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
