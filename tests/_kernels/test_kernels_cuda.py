"""The passes over many CUDA tensors, against float64 NumPy and the CPU's histogram.

Where there is no GPU, `test_in_the_interpreter` runs this file once more with Triton's
interpreter, which executes the same kernels on CPU tensors.
"""

import importlib
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchfmri._kernels import cpu, cuda, cuda_native, cuda_plan
from torchfmri._kernels.reduction import Reduction

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or cuda.available()), reason="needs a CUDA device, or Triton's interpreter"
)
needs_device = pytest.mark.skipif(
    INTERPRETED or not cuda.available(), reason="needs a CUDA device and Triton"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _no_plans_left():
    cuda_plan.make_plan.cache_clear()
    yield
    cuda_plan.make_plan.cache_clear()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_right(tensor: torch.Tensor, found: Reduction, histogram: bool = True) -> None:
    values = tensor.detach().cpu().float().numpy().astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    normal_from = torch.finfo(tensor.dtype).smallest_normal
    expected = {
        "count": values.size,
        "nan": np.isnan(values).sum(),
        "pos_inf": (values == np.inf).sum(),
        "neg_inf": (values == -np.inf).sum(),
        "zero": (values == 0).sum(),
        "subnormal": ((values != 0) & (np.abs(values) < normal_from)).sum(),
        "low": finite.min(initial=np.inf),
        "high": finite.max(initial=-np.inf),
    }
    assert {name: getattr(found, name) for name in expected} == expected
    if finite.size:
        mean, std = finite.mean(), finite.std()
        assert found.mean == pytest.approx(mean, rel=1e-6, abs=1e-6 * std)
        std_found = (found.squared_deviations / finite.size) ** 0.5
        assert std_found == pytest.approx(std, rel=1e-6, abs=0)
    if histogram:
        flat = tensor.detach().cpu().reshape(-1)
        assert found.histogram == cpu.reduce_values(flat, histogram=True).histogram
    else:
        assert found.histogram is None


def check(tensors, **options):
    moved = [tensor.to(DEVICE) for tensor in tensors]
    for tensor, found in zip(moved, cuda.reduce_many(moved, **options).read(), strict=True):
        assert_right(tensor, found, options.get("histogram", False))


# ---------------------------------------------------------------- the kernels


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_the_tiles(dtype):
    sizes = (0, 1, 7, 8, 1023, 4096, 4097, 16383, 16400)
    check([(3 * normal(size, seed=size) + 100).to(dtype) for size in sizes], histogram=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_zero_or_subnormal(dtype):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-41, 3e-6, 1.0])
    late = normal(6000)
    late[5000] = torch.inf
    hard = [special, special.repeat(99), torch.full((900,), torch.nan), late, late.relu()]
    check([values.to(dtype) for values in hard], histogram=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e35])
def test_extreme_ranges(dtype, scale):
    check([(scale * normal(5000)).to(dtype)])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_far_from_zero(dtype):
    # The second is centred on zeros that say nothing about what follows; the third is constant.
    offset = normal(9000) + 1e4
    check([v.to(dtype) for v in (offset, torch.cat((torch.zeros(5000), offset)), 0 * offset + 0.1)])


@needs_kernels
def test_unaligned_and_strided_tensors():
    x = normal(30, 200).to(torch.bfloat16)
    views = [x.t(), x[::2, ::3], x[:, :1].expand(30, 7), x.flatten()[3:], x.flatten()[1:2]]
    views += [normal(9000).float()[5:], normal(9000).half()[7:8999], torch.tensor(2.5)]
    on_device = x.to(DEVICE)
    moved = [
        torch.as_strided(on_device, v.shape, v.stride(), v.storage_offset()) for v in views[:5]
    ]
    check(views[5:], histogram=True)
    for tensor, found in zip(moved, cuda.reduce_many(moved, histogram=True).read(), strict=True):
        assert_right(tensor, found)


@needs_kernels
def test_all_dtypes_in_one_call_keep_their_order():
    tensors = [normal(50 + index, seed=index).to(DTYPES[index % 3]) for index in range(7)]
    check([*tensors, torch.empty(0)], histogram=True)


@needs_kernels
def test_nothing_to_reduce():
    assert cuda.reduce_many([]).read() == []
    (found,) = cuda.reduce_many([torch.empty(3, 0, device=DEVICE)], histogram=True).read()
    assert found.count == 0
    assert found.histogram is not None
    assert found.histogram.total == 0


@needs_kernels
def test_many_chunks_and_rows_add_up(monkeypatch):
    monkeypatch.setattr(cuda_plan, "CHUNKS", (8192, 8192))
    monkeypatch.setattr(cuda_plan, "LONGEST", 20_480)
    check([normal(60_001), normal(20_481).bfloat16()], histogram=True)


@needs_kernels
def test_more_occupied_bins_than_are_copied(monkeypatch):
    monkeypatch.setattr(cuda, "OCCUPIED", 16)
    check([normal(3000), torch.ones(10)], histogram=True)


@needs_kernels
def test_two_runs_are_identical():
    tensors = [normal(20_000).to(DEVICE), normal(9001).bfloat16().to(DEVICE)]
    first, second = (cuda.reduce_many(tensors, histogram=True).read() for _ in range(2))
    assert first == second


@needs_kernels
def test_reading_twice_and_copying_twice():
    found = cuda.reduce_many([normal(100).to(DEVICE)])
    assert not found.ready()
    found.start_copy()
    found.start_copy()
    assert found.read() == found.read()
    assert found.ready()


@needs_device
@pytest.mark.accelerator
def test_both_ways_to_count_give_the_same():
    tensors = [normal(100_000).to(DEVICE, dtype) for dtype in DTYPES]
    if not all(cuda_native.compiles(dtype) for dtype in DTYPES):
        pytest.skip("torch cannot compile CUDA C here")
    native = cuda.reduce_many(tensors, histogram=True).read()
    cuda_native.use_native(False)
    try:
        assert cuda.reduce_many(tensors, histogram=True).read() == native
    finally:
        cuda_native.use_native(True)


@needs_device
@pytest.mark.accelerator
def test_more_than_two_to_the_31_values():
    x = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = torch.tensor([torch.nan, -2.0, 3.0])
    x[:4] = 1.0
    (found,) = cuda.reduce_many([x], histogram=True).read()
    assert (found.count, found.nan, found.zero) == (2**31 + 5, 1, 2**31 - 2)
    assert (found.low, found.high) == (-2.0, 3.0)
    assert found.mean == pytest.approx(5 / (2**31 + 4), rel=1e-6)
    assert found.squared_deviations == pytest.approx(17, rel=1e-6)
    assert found.histogram is not None
    assert found.histogram.total == 2**31 + 4


@needs_device
@pytest.mark.accelerator
def test_nothing_waits_for_the_device():
    tensors = [normal(1000).to(DEVICE)]
    cuda.reduce_many(tensors, histogram=True).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda.reduce_many(tensors, histogram=True).start_copy()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- around the kernels


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or cuda.available(), reason="the kernels were tested already")
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, whose interpreter runs without a GPU")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]


def test_not_available_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "torchfmri._kernels.cuda_triton", raising=False)
    cuda.triton_kernels.cache_clear()
    cuda.available.cache_clear()
    try:
        assert not cuda.available()
    finally:
        cuda.triton_kernels.cache_clear()
        cuda.available.cache_clear()


def make_plan(sizes, dtypes):
    return cuda_plan.make_plan(tuple(sizes), tuple(dtypes), torch.device("cpu"), 0)


def test_every_value_is_in_one_chunk():
    sizes = [5, 0, 300_000, 1 << 20, 1]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float16]
    plan = make_plan(sizes, dtypes)
    assert plan.owners.tolist() == [2, 4, 0, 3]
    for programs in (plan.moments, plan.codes):
        assert sum(number for _, _, number in programs.groups) == programs.number
        assert [dtype for dtype, _, _ in programs.groups] == DTYPES
        parts = torch.bincount(programs.rows, minlength=4)
        assert torch.equal(parts, programs.firsts.diff())
        assert parts.tolist() == [-(-int(size) // programs.chunk) for size in plan.sizes]


def test_long_tensors_have_several_rows():
    plan = make_plan([2 * cuda_plan.LONGEST + 3], [torch.bfloat16])
    assert plan.sizes.tolist() == [cuda_plan.LONGEST, cuda_plan.LONGEST, 3]
    assert plan.skipped.tolist() == [0, 2 * cuda_plan.LONGEST, 4 * cuda_plan.LONGEST]


def test_chunks_shrink_until_all_have_work():
    large, small = (make_plan([1 << power], [torch.float32]) for power in (29, 16))
    assert large.moments.chunk == cuda_plan.CHUNKS[1]
    assert small.moments.chunk == cuda_plan.CHUNKS[0]


def test_the_plan_is_made_once():
    tensors = [torch.zeros(4, 5), torch.zeros(6, dtype=torch.float16)]
    device = torch.device("cpu")
    plan = cuda_plan.current_plan(tensors, device)
    assert cuda_plan.current_plan([torch.ones(20), tensors[1] + 1], device) is plan


def test_dense_tensors_are_not_copied():
    x = torch.randn(2, 3, 4, 5)
    for dense in (x.permute(0, 2, 3, 1), x.transpose(0, 3)):
        assert cuda._in_memory_order(dense).data_ptr() == x.data_ptr()
    gaps = cuda._in_memory_order(x[..., ::2])
    assert gaps.is_contiguous()
    assert gaps.data_ptr() != x.data_ptr()
