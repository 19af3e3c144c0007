"""The passes agree with each other: torch alone, numba, and the one for accelerators."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchfmri import _kernels
from torchfmri._kernels import device
from torchfmri._kernels.histogram import CodeGrid, Histogram, grid_code, grid_exponent
from torchfmri._kernels.reduction import Reduction

COUNTS = ("count", "nan", "pos_inf", "neg_inf", "zero", "subnormal", "low", "high")


def samples(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator)
    odd = x.clone()
    odd[::1000], odd[5::7777] = math.nan, -math.inf
    found = {"normal": x, "relu": x.relu(), "far": x + 100, "small": x * 1e-20, "odd": odd}
    return {name: values.to(dtype) for name, values in found.items()}


def assert_same(one: Reduction, two: Reduction) -> None:
    for name in COUNTS:
        assert getattr(one, name) == getattr(two, name), name
    scale = max(abs(one.low), abs(one.high))
    assert one.mean == pytest.approx(two.mean, rel=1e-6, abs=1e-6 * scale)
    assert one.squared_deviations == pytest.approx(two.squared_deviations, rel=1e-6)
    assert one.histogram == two.histogram


@pytest.fixture
def torch_alone():
    _kernels.use_accelerator(False)
    yield
    _kernels.use_accelerator(True)


@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("name", samples(torch.float32))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pass_for_accelerators_equals_that_of_the_cpu(name, dtype, histogram, torch_alone):
    x = samples(dtype)[name]
    expected = _kernels.reduce_values(x, histogram=histogram)
    assert_same(device.reduce_values(x, histogram), expected)


@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("name", samples(torch.float32))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numba_equals_torch(name, dtype, histogram):
    pytest.importorskip("numba")
    assert _kernels.accelerator_name() == "numba"
    x = samples(dtype)[name]
    compiled = _kernels.reduce_values(x, histogram=histogram)
    _kernels.use_accelerator(False)
    try:
        assert _kernels.accelerator_name() == "torch"
        assert_same(compiled, _kernels.reduce_values(x, histogram=histogram))
    finally:
        _kernels.use_accelerator(True)


def test_comparison_of_passes_notices_a_difference():
    x = samples(torch.float32)["normal"]
    with pytest.raises(AssertionError):
        assert_same(_kernels.reduce_values(x), _kernels.reduce_values(x * (1 + 1e-4)))


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_equals_the_cpu(dtype):
    for x in samples(dtype).values():
        assert_same(_kernels.reduce_values(x.cuda()), _kernels.reduce_values(x))


def test_numba_is_not_needed():
    code = (
        "import sys, torch\n"
        "from torchfmri import _kernels\n"
        "from torchfmri.statistics import calculate_statistics\n"
        "assert 'numba' not in sys.modules, 'imported before it is used'\n"
        "sys.modules['numba'] = None\n"
        "assert calculate_statistics(torch.tensor([1.0, 3.0])).mean == 2.0\n"
        "assert _kernels.accelerator_name() == 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_grid_is_the_narrowest_that_fits():
    for low, high in [(0.0, 1.0), (1e4, 1e4 + 7), (-3.0, 5e-300), (-1e308, 1e308), (1.0, 1.5)]:
        exponent = grid_exponent(low, high)
        assert grid_code(high, exponent) - grid_code(low, exponent) < 512
        assert grid_code(high, exponent - 1) - grid_code(low, exponent - 1) >= 512
    assert grid_exponent(3, 200) == 0
    assert grid_code(-5e-324, 10) == -1
    assert grid_code(-(2**62) - 1, 62) == -2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e15])
def test_grid_counts_are_those_of_each_value(dtype, scale):
    x = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * scale + 7 * scale).to(dtype)
    values = x.tolist()
    grid = _kernels.count_grid(x, min(values), max(values), finite=True)
    codes, counts = np.unique(
        [grid_code(value, grid.exponent) for value in values], return_counts=True
    )
    assert grid == CodeGrid(grid.exponent, codes, counts)
    assert grid != CodeGrid(grid.exponent + 1, codes, counts)


def test_edges_meet_and_codes_are_truncated_floats():
    magnitudes = np.arange(255 << 5)
    low, high = Histogram.from_codes(magnitudes, np.ones_like(magnitudes)).edges
    bits = (magnitudes << 18).astype(np.int32)
    np.testing.assert_array_equal(low, bits.view(np.float32).astype(np.float64))
    np.testing.assert_array_equal(high[:-1], low[1:])
    assert high[-1] == 2.0**128
