"""Norms and statistics of voxels by the kernel, against float64 NumPy.

Where there is no GPU, `test_in_the_interpreter` runs this file once more with Triton's
interpreter, which executes the same kernel on CPU tensors.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchfmri._kernels import voxels

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_kernel = pytest.mark.skipif(
    not (INTERPRETED or (HAS_TRITON and torch.cuda.is_available())),
    reason="needs a CUDA device, or Triton's interpreter",
)
SIZES = [64, 64, 10, 3, 64, 80, 1]
"""Units of the voxels: whole ones, the rest of a layer, heads that are no power of two."""
COLUMNS = [5, 0, 1, 2, 7, 3, 4]
GROUPS = [0, 1, 0, 2, 1, 0, 0, 2]
"""The layer of each of the eight columns; column 6 is never written."""


def make_values(b, tokens, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(b, tokens, sum(SIZES) + 5, generator=generator) * 3 + 100
    values[:, :, :7] = 0
    return values.to(dtype).to(DEVICE)


def make_table():
    starts = np.concatenate([[0], np.cumsum(SIZES)[:-1]])
    return voxels.VoxelTable.of(starts, np.array(SIZES), np.array(COLUMNS), DEVICE)


def expected_of(parts):
    """Mean, squared deviations, low, high and counts of some values, in float64."""
    values = np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0)
    fine = values[np.isfinite(values)]
    mean = fine.mean() if len(fine) else 0.0
    return [
        len(fine), mean, ((fine - mean) ** 2).sum(),
        fine.min(initial=np.inf), fine.max(initial=-np.inf),
        np.isnan(values).sum(), np.isinf(values).sum(), (values == 0).sum(),
    ]  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_and_statistics(dtype):
    b, table = 3, make_table()
    sums = voxels.VoxelSums(b, 8, DEVICE)
    norms = torch.full((b, 6, 8), torch.nan, device=DEVICE)
    kept = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]], device=DEVICE).bool()
    first, second = make_values(b, 4, dtype), make_values(b, 2, dtype, seed=1)
    first[0, 1, 70], first[0, 2, 71], first[1, 3, 200] = torch.nan, torch.inf, -torch.inf
    voxels.reduce_voxels(first, table, norms[:, :4], sums, kept)
    voxels.reduce_voxels(second, table, norms[:, 4:], sums)
    whole = torch.cat([first, second], 1).double().cpu().numpy()
    counted = np.concatenate([kept.cpu().numpy(), np.ones((b, 2), bool)], 1)
    edges = np.concatenate([[0], np.cumsum(SIZES)])
    found = norms.cpu().double().numpy()
    parts = {(row, group): [] for row in range(b) for group in range(3)}
    for column, start, stop in zip(COLUMNS, edges[:-1], edges[1:], strict=True):
        values = whole[:, :, start:stop]
        np.testing.assert_allclose(
            found[:, :, column], np.sqrt((values**2).sum(-1)), rtol=2e-6, atol=0
        )
        for row in range(b):
            parts[row, GROUPS[column]].append(values[row][counted[row]])
    assert np.isnan(found[:, :, 6]).all()
    statistics = sums.by_group(torch.tensor(GROUPS, device=DEVICE), 3)
    for (row, group), values in parts.items():
        np.testing.assert_allclose(statistics[row, group], expected_of(values), rtol=1e-9)


@needs_kernel
def test_another_call_is_added():
    values, table = make_values(1, 2, torch.float32), make_table()
    norms = torch.full((1, 2, 8), torch.nan, device=DEVICE)
    voxels.reduce_voxels(values, table, norms, added=True)
    once = norms.clone()
    voxels.reduce_voxels(values, table, norms, added=True)
    torch.testing.assert_close(norms, once * 2**0.5, equal_nan=True)


@needs_kernel
def test_a_wide_voxel_and_one_value():
    for size in (1, 1500):
        values = torch.linspace(-2, 5, size, device=DEVICE).reshape(1, 1, size)
        one = np.array([0])
        table = voxels.VoxelTable.of(one, np.array([size]), one, DEVICE)
        norms = torch.empty(1, 1, 1, device=DEVICE)
        voxels.reduce_voxels(values, table, norms)
        torch.testing.assert_close(norms.reshape(()), values.norm())


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="tested already")
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, whose interpreter runs without a GPU")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
