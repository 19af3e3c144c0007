"""Numbers per row, by numba and by Triton's interpreter, against float64 torch.

Where there is no GPU, `test_in_the_interpreter` runs this file once more with Triton's
interpreter, which executes the same kernels on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri._kernels import rows as rows_module
from torchfmri._kernels.accelerator import compiled_rows, use_accelerator
from torchfmri._kernels.cuda_rows import BLOCK, MOST, WIDEST, RowQueue
from torchfmri._kernels.rows import Asked, Product, Rows

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or (HAS_TRITON and torch.cuda.is_available())),
    reason="needs a CUDA device, or Triton's interpreter",
)
needs_numba = pytest.mark.skipif(compiled_rows() is None, reason="needs numba")
CASES = [(5, 300, 300, 7), (3, 64, 64, 0), (4, 300, 64, 100), (2, 1500, 128, 900), (1, 1, 1, 0)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asked_of(width: int, size: int, start: int, dtype: torch.dtype, device: str) -> Asked:
    vector = draw(min(64, width - start), seed=1).to(device, dtype)
    return Asked(size, start, vector, vector.data_ptr(), len(vector))


def expected_of(values: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Squares by group and inner products, in float64."""
    wide = values.double()
    squares = torch.stack([each.square().sum(-1) for each in torch.split(wide, asked.size, -1)], -1)
    met = wide[:, asked.start : asked.start + asked.length]
    return squares.squeeze(-1), met @ asked.vector.double()


def product_of(dtype: torch.dtype, device: str) -> tuple[Product, Tensor]:
    """Heads before positions in g and behind them in x; and the rows they stand for."""
    g = draw(2, 4, 3, 100, seed=2).to(device, dtype).transpose(1, 2)
    x = draw(2, 3, 4, 100, seed=3).to(device, dtype)
    wide = x.double()
    hat = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt()
    product = Product(g, x, (2, 3, 4, 100), g.stride()[:3], x.stride()[:3], 0.1)  # type: ignore[arg-type]
    return product, (g.double() * hat).sum(2).flatten(0, 1)


def assert_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


# -- numba ---------------------------------------------------------------------------------------


@pytest.fixture
def for_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SMALLEST", 1)


@needs_numba
@pytest.mark.usefixtures("for_few_values")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_rows(case: tuple[int, int, int, int]) -> None:
    count, width, size, start = case
    rows, asked = Rows(), asked_of(width, size, start, torch.float32, "cpu")
    found = []
    for seed in range(20):  # more than are made ahead
        values = draw(count, width, seed=seed)
        reduced = rows.reduce(values.view(1, count, width), asked)
        assert reduced is not None
        found.append((reduced, expected_of(values, asked)))
    for reduced, expected in found:  # none was written over by a later one
        assert_close(reduced, expected)


@needs_numba
@pytest.mark.usefixtures("for_few_values")
@pytest.mark.parametrize("size", [100, 64])
def test_compiled_products(size: int) -> None:
    product, whole = product_of(torch.float32, "cpu")
    asked = asked_of(100, size, 20, torch.float32, "cpu")
    found = Rows().reduce_product(product, asked)
    assert found is not None
    assert_close(found, expected_of(whole, asked))
    wrong = expected_of(whole.flip(0), asked)
    with pytest.raises(AssertionError):
        assert_close(found, wrong)


@needs_numba
def test_what_numba_is_not_asked_for() -> None:
    asked = asked_of(300, 300, 0, torch.float32, "cpu")
    large = draw(80, 300)
    assert Rows().reduce(large, asked) is not None
    for other in (large.double(), large.bfloat16(), draw(5, 300), draw(300, 80).T):
        assert Rows().reduce(other, asked) is None
    use_accelerator(False)
    try:
        assert Rows().reduce(large, asked) is None
    finally:
        use_accelerator(True)


# -- Triton --------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queued_passes(dtype: torch.dtype) -> None:
    """Passes of all kinds wait, and are right after one `flush`."""
    queue, checks = RowQueue(), []
    for number, (count, width, size, start) in enumerate(CASES):
        values = draw(count, width, seed=number).to(DEVICE, dtype)
        asked = asked_of(width, size, start, dtype, DEVICE)
        assert queue.can_read(values, size, False)
        found = _results(count, width, size)
        queue.rows(values, count, width, asked, found)
        checks.append((found, expected_of(values, asked)))
    for size in (100, 64):
        product, whole = product_of(dtype, DEVICE)
        asked = asked_of(100, size, 20, dtype, DEVICE)
        found = _results(6, 100, size)
        queue.product(product, asked, found)
        checks.append((found, expected_of(whole, asked)))
    assert all(bool(found[0].isnan().all()) for found, _ in checks)  # nothing was launched yet
    queue.flush()
    for found, expected in checks:
        assert_close(found, expected)


def _results(count: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    groups = -(-width // size)
    shape = (count,) if groups == 1 else (count, groups)
    nothing = torch.full((count,), torch.nan, device=DEVICE)
    return torch.full(shape, torch.nan, device=DEVICE), nothing


@needs_kernels
def test_a_long_queue_is_launched_by_itself() -> None:
    queue, asked = RowQueue(), asked_of(8, 8, 0, torch.float32, DEVICE)
    values, found = draw(2, 8).to(DEVICE), _results(2, 8, 8)
    for number in range(MOST):
        assert bool(found[0].isnan().all()), number
        queue.rows(values, 2, 8, asked, found)
    assert_close(found, expected_of(values, asked))
    queue.flush()  # there is nothing left to do


def test_what_the_queue_does_not_read() -> None:
    queue = RowQueue()
    wide = torch.empty(1, WIDEST + 1)
    assert not queue.can_read(wide, WIDEST + 1, True)  # a product in one piece
    assert not queue.can_read(wide, 48, False)  # groups that no block holds
    assert not queue.can_read(wide, 2 * BLOCK, False)
    assert not queue.can_read(wide.double(), WIDEST + 1, False)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_queue_is_tried_before_it_is_relied_on(dtype: torch.dtype) -> None:
    rows_module.queue_works.cache_clear()
    assert rows_module.queue_works(torch.device(DEVICE), dtype)


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_kernels_that_do_not_work_are_left_alone(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a compiler or a driver does: one warning, and torch computes the same."""

    def flush(queue: RowQueue) -> None:
        if fault == "raises":
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(RowQueue, "flush", flush)
    rows_module.queue_works.cache_clear()
    with pytest.warns(RuntimeWarning, match="no such instruction|disagree with torch"):
        assert not rows_module.queue_works(torch.device("cpu"), torch.float32)
    assert not rows_module.queue_works(torch.device("cpu"), torch.float32)  # said once
    rows_module.queue_works.cache_clear()


@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="this is the interpreter, or no Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device itself is there")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "queue", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "10 passed" in run.stdout, run.stdout[-500:]


# -- in use --------------------------------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("keep", ["norms", "voxels"])
def test_token_gradients_with_and_without_numba(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same norms and the same coverage, whoever computes them."""
    import torchfmri

    called: list[str] = []
    for name in ("reduce", "reduce_product"):
        monkeypatch.setattr(Rows, name, _noting(getattr(Rows, name), name, called))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.RMSNorm(64))
    x, found = draw(2, 150, 64), []
    for allowed in (True, False):
        use_accelerator(allowed)
        try:
            with torchfmri.token_gradients(model, keep=keep) as tokens:
                model(x).square().mean().backward()
        finally:
            use_accelerator(True)
        assert tokens.coverage().residual < 1e-4
        found.append(tokens)
        model.zero_grad()
    assert called.count("reduce") == 4  # two gradients and two inputs
    assert called.count("reduce_product") == 1
    for name in found[0]:
        one, other = (each[name].norm() for each in found)
        assert torch.allclose(one, other, rtol=1e-4, atol=0), name
        if keep == "voxels":
            one, other = (each[name].norm(by="voxel") for each in found)
            assert torch.allclose(one, other, rtol=1e-4, atol=0), name


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("keep", ["norms", "voxels"])
def test_token_gradients_from_a_queue(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited is there when the block is over, also where the backward pass failed."""
    import torchfmri

    def can(rows: Any, values: Tensor, count: int, size: int, is_product: bool) -> bool:
        rows._queue = rows._queue or RowQueue()
        return bool(rows._queue.can_read(values, size, is_product))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 4))
    x, found = draw(2, 5, 8), []
    for queued in (False, True):
        with monkeypatch.context() as patch:
            if queued:
                patch.setattr(Rows, "_can", can)
            with torchfmri.token_gradients(model, keep=keep, voxel=4) as tokens:
                model(x).square().mean().backward()
        assert tokens.coverage().residual < 1e-4
        found.append(tokens)
        model.zero_grad()
    for name in found[0]:
        one, other = (each[name].norm() for each in found)
        assert torch.allclose(one, other, rtol=1e-4, atol=0), name
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "_can", can)
        with torchfmri.token_gradients(model, "2.*", keep=keep) as tokens:
            y = model(x)
            model[1].weight.register_hook(_fail)  # type: ignore[operator]
            with pytest.raises(ZeroDivisionError):
                y.square().mean().backward()
    assert torch.allclose(tokens["2.weight"].norm(), found[0]["2.weight"].norm(), rtol=1e-4)


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def _noting(reduce: Callable[..., Any], name: str, called: list[str]) -> Callable[..., Any]:
    """The same, with a note of every pass that was made."""

    def noted(*arguments: Any) -> Any:
        found = reduce(*arguments)
        if found is not None:
            called.append(name)
        return found

    return noted


@needs_numba
def test_compiled_bilinear_forms() -> None:
    """Each against float64, with rows left out at both ends, and none mistaken for another."""
    from torchfmri._kernels.rows import SMALLEST, Form, bilinear_forms

    generator = torch.Generator().manual_seed(0)
    forms, expected, alive = [], [], []
    for rows, width, first in ((1, 5, 0), (7, 3, 2), (64, 256, 0), (130, 1, 5)):
        matrix = torch.randn(rows + first, width + 4, generator=generator)
        left, right = (torch.randn(each, generator=generator) for each in (rows, width))
        alive += [matrix, left, right]
        start = matrix.data_ptr() + 4 * first * (width + 4)
        forms.append(Form(start, rows, width, width + 4, left.data_ptr(), right.data_ptr()))
        seen = matrix[first:, :width].double()
        expected.append(left.double() @ seen @ right.double())
    found = bilinear_forms(forms, SMALLEST)
    assert found is not None
    assert torch.allclose(found, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found.roll(1), torch.stack(expected), rtol=1e-2, atol=1e-2)
    assert bilinear_forms(forms, SMALLEST - 1) is None
