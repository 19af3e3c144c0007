"""Numbers per row, by numba and by Triton's interpreter, against float64 torch.

Where there is no GPU, `test_in_the_interpreter` runs this file once more with Triton's
interpreter, which executes the same kernels on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchfmri._kernels import cuda_rows, row_tables
from torchfmri._kernels import rows as rows_module
from torchfmri._kernels.accelerator import compiled_rows, use_accelerator
from torchfmri._kernels.cuda_rows import BLOCK, MOST, WIDEST, RowQueue, can_read, launch_forms
from torchfmri._kernels.rows import (
    SMALLEST,
    Asked,
    Form,
    Lane,
    Numbers,
    Product,
    RowLanes,
    bilinear_forms,
)

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
    groups = torch.split(wide, asked.size or wide.shape[-1], -1)
    squares = torch.stack([each.square().sum(-1) for each in groups], -1)
    met = wide[:, asked.start : asked.start + asked.length]
    return squares if asked.size else squares[:, 0], met @ asked.vector.double()


def product_of(dtype: torch.dtype, device: str) -> tuple[Product, Tensor, Tensor, Tensor]:
    """Heads before positions in g and behind them in x; and the rows they stand for."""
    g = draw(2, 4, 3, 100, seed=2).to(device, dtype).transpose(1, 2)
    x = draw(2, 3, 4, 100, seed=3).to(device, dtype)
    wide = x.double()
    hat = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt()
    product = Product((2, 3, 4, 100), g.stride()[:3], x.stride()[:3], 0.1)  # type: ignore[arg-type]
    return product, g, x, (g.double() * hat).sum(2).flatten(0, 1)


def flat_product_of(dtype: torch.dtype, device: str) -> tuple[Product, Tensor, Tensor, Tensor]:
    """One row for each token, as of a norm over the features of a model."""
    g, x = (draw(7, 1500, seed=seed).to(device, dtype) for seed in (4, 5))
    wide = x.double()
    hat = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt()
    strides = (0, 1500, 0)
    return Product((1, 7, 1, 1500), strides, strides, 0.1), g, x, g.double() * hat


def assert_close(found: Numbers, expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip((found.squares, found.products), expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


# -- numba ---------------------------------------------------------------------------------------


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are queued, as on CUDA; those over CPU tensors run in the interpreter."""
    monkeypatch.setattr(rows_module, "_is_queued", lambda values: True)


@pytest.fixture
def for_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SMALLEST", 1)


@pytest.fixture
def torch_alone() -> Iterator[None]:
    use_accelerator(False)
    yield
    use_accelerator(True)


@needs_numba
@pytest.mark.usefixtures("for_few_values")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_rows(case: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows(case, monkeypatch)


@pytest.mark.usefixtures("for_few_values", "torch_alone")
@pytest.mark.parametrize("start", [0, 7, 290])
def test_rows_by_torch_alone(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows((5, 300, 0, start), monkeypatch)


@pytest.mark.usefixtures("torch_alone")
def test_numbers_by_torch_alone_share_a_table() -> None:
    """Those of 81 layers are then read by a few operations."""
    values, asked = draw(80, 300), asked_of(300, 0, 0, torch.float32, "cpu")
    lane = RowLanes().lane(values, asked)
    assert lane is not None
    one, other = lane.read(values), lane.read(2 * values)
    assert one.all_squares is other.all_squares
    assert torch.equal(other.squares, 4 * one.squares)
    for other_kind in (values.double(), values.bfloat16(), draw(5, 300)):
        assert RowLanes().lane(other_kind, asked) is None
    assert RowLanes().lane(values, asked._replace(size=64)) is None


def check_rows(case: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    count, width, size, start = case
    monkeypatch.setattr(row_tables, "_AHEAD", 8)
    asked = asked_of(width, size, start, torch.float32, "cpu")
    lane = RowLanes().lane(torch.empty(1, count, width), asked)
    assert lane is not None
    found = []
    for seed in range(20):  # more than are made ahead
        values = draw(count, width, seed=seed)
        found.append((lane.read(values.view(1, count, width)), expected_of(values, asked)))
    for reduced, expected in found:  # none was written over by a later one
        assert_close(reduced, expected)


@needs_numba
@pytest.mark.usefixtures("for_few_values")
@pytest.mark.parametrize("size", [0, 100, 64])
def test_compiled_products(size: int) -> None:
    product, g, x, whole = product_of(torch.float32, "cpu")
    asked = asked_of(100, size, 20, torch.float32, "cpu")
    lane = RowLanes().product_lane(g, product, asked)
    assert lane is not None
    found = lane.read(g, x)
    assert_close(found, expected_of(whole, asked))
    wrong = expected_of(whole.flip(0), asked)
    with pytest.raises(AssertionError):
        assert_close(found, wrong)


@needs_numba
def test_what_numba_is_not_asked_for() -> None:
    asked = asked_of(300, 300, 0, torch.float32, "cpu")
    large = draw(80, 300)
    assert RowLanes().lane(large, asked) is not None
    for other in (large.double(), large.bfloat16(), draw(5, 300)):
        assert RowLanes().lane(other, asked) is None
    use_accelerator(False)
    try:
        assert RowLanes().lane(large, asked) is None
    finally:
        use_accelerator(True)


# -- Triton --------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.usefixtures("queued")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queued_passes(dtype: torch.dtype) -> None:
    """Passes of all kinds wait, and are right after one `flush`."""
    rows, checks = RowLanes(), []
    for number, (count, width, size, start) in enumerate(CASES):
        for groups in (size, 0):
            values = draw(count, width, seed=number).to(DEVICE, dtype)
            asked = asked_of(width, groups, start, dtype, DEVICE)
            found = _nothing(_lane(rows.lane(values, asked)).read(values))
            checks.append((found, expected_of(values, asked)))
    for size, build in itertools.product((0, 1500, 100, 64), (product_of, flat_product_of)):
        product, g, x, whole = build(dtype, DEVICE)
        if product.shape[-1] > size > 64:
            continue  # groups of such a size are not read
        asked = asked_of(product.shape[-1], size, 20, dtype, DEVICE)
        found = _nothing(_lane(rows.product_lane(g, product, asked)).read(g, x))
        checks.append((found, expected_of(whole, asked)))
    assert all(bool(found.squares.isnan().all()) for found, _ in checks)  # nothing was launched yet
    rows.flush()
    for found, expected in checks:
        assert_close(found, expected)


def _lane(found: Lane | None) -> Lane:
    assert found is not None
    return found


def _nothing(numbers: Numbers) -> Numbers:
    """The same where nothing was written yet."""
    numbers.squares.fill_(torch.nan)
    numbers.products.fill_(torch.nan)
    return numbers


@needs_kernels
@pytest.mark.usefixtures("queued")
def test_a_long_queue_is_launched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tables, "_AHEAD", 8)  # lines are renewed while passes wait
    rows, asked = RowLanes(), asked_of(8, 0, 0, torch.float32, DEVICE)
    values = draw(2, 8).to(DEVICE)
    lane = _lane(rows.lane(values, asked))
    found: list[Numbers] = []
    for _ in range(MOST):
        assert not found or bool(found[0].squares.isnan().all())
        found.append(lane.read(values))
        if len(found) < MOST:
            _nothing(found[-1])
    for numbers in found:
        assert_close(numbers, expected_of(values, asked))
    rows.flush()  # there is nothing left to do


class Streams:
    """A stand-in for CUDA streams: which one is current, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done = 0, list[Any]()
        self.kept = list[object]()
        monkeypatch.setattr(cuda_rows, "stream_of", lambda device: self.now)
        monkeypatch.setattr(cuda_rows, "_wait_for", lambda _, number: self.note("wait", number))
        monkeypatch.setattr(cuda_rows, "_launch", lambda *_: self.note("launch", self.now))
        monkeypatch.setattr(cuda_rows, "_keep_from_others", lambda alive, _: self.keep(alive))

    def note(self, what: str, number: int) -> None:
        self.done.append((what, number))

    def keep(self, alive: list[object]) -> None:
        self.kept += alive


def test_tensors_of_another_stream_are_waited_for_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, values = Streams(monkeypatch), draw(2, 8)
    asked = asked_of(8, 0, 0, torch.float32, "cpu")
    queue = RowQueue(values.device)
    rest = (asked.address, 0, asked.length, 2, 8)
    lines = rows_module._Lines(2, 0, values.device, queue.alive_until_launched)
    lane = rows_module.QueuedLane(lines, queue, values, 0, rest)

    streams.now = 5  # one stream for everything: nothing to wait for
    lane.read(values)
    queue.flush()
    assert streams.done == [("launch", 5)]
    assert streams.kept == []

    streams.done.clear()
    lane.read(values)
    streams.now = 7
    lane.read(values)
    queue.flush()
    assert streams.done == [("wait", 5), ("launch", 7)]
    assert len(streams.kept) == 2
    assert all(each is values for each in streams.kept)

    streams.done.clear()
    streams.now = 5  # nothing waits, but results are being computed on the other stream
    queue.flush()
    assert streams.done == [("wait", 7)]


def test_what_the_queue_does_not_read() -> None:
    wide = torch.empty(1, WIDEST + 1)
    assert not can_read(wide, 0, True)  # a product in one piece
    assert not can_read(wide, 48, False)  # groups that no block holds
    assert not can_read(wide, 2 * BLOCK, False)
    assert not can_read(wide.double(), 0, False)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forms_of_the_queue(dtype: torch.dtype) -> None:
    """Matrices between vectors, against float64; none is mistaken for another."""
    forms, expected, alive = forms_of(dtype, DEVICE)
    found = launch_forms(np.array(forms), dtype, torch.device(DEVICE))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(found.roll(1), expected, rtol=1e-2, atol=1e-2)
    del alive


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
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "queue", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "13 passed" in run.stdout, run.stdout[-500:]


# -- in use --------------------------------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("keep", ["norms", "voxels"])
def test_token_gradients_with_and_without_numba(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same norms and the same coverage, whoever computes them."""
    import torchfmri

    called: list[bool] = []
    monkeypatch.setattr(Lane, "read", _noting(Lane.read, called))
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
    assert called == [True, False, False, False, False]  # a product, two gradients, two inputs
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

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 4))
    x, found = draw(2, 5, 8), []
    for queued in (False, True):
        with monkeypatch.context() as patch:
            if queued:
                patch.setattr(rows_module, "_is_queued", lambda values: True)
            with torchfmri.token_gradients(model, keep=keep, voxel=4) as tokens:
                model(x).square().mean().backward()
        assert tokens.coverage().residual < 1e-4
        found.append(tokens)
        model.zero_grad()
    for name in found[0]:
        one, other = (each[name].norm() for each in found)
        assert torch.allclose(one, other, rtol=1e-4, atol=0), name
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "_is_queued", lambda values: True)
        with torchfmri.token_gradients(model, "2.*", keep=keep) as tokens:
            y = model(x)
            model[1].weight.register_hook(_fail)  # type: ignore[operator]
            with pytest.raises(ZeroDivisionError):
                y.square().mean().backward()
    assert torch.allclose(tokens["2.weight"].norm(), found[0]["2.weight"].norm(), rtol=1e-4)


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def _noting(read: Callable[..., Any], called: list[bool]) -> Callable[..., Any]:
    """The same, with a note of every pass that was made, and whether it was over a product."""

    def noted(lane: Lane, values: Tensor, other: Tensor | None = None) -> Numbers:
        called.append(other is not None)
        return read(lane, values, other)  # type: ignore[no-any-return]

    return noted


@needs_numba
def test_compiled_bilinear_forms() -> None:
    """Each against float64, with rows left out at both ends, and none mistaken for another."""
    forms, expected, alive = forms_of(torch.float32, "cpu")
    found = bilinear_forms(np.array(forms), alive[0])
    assert found is not None
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found.roll(1), expected, rtol=1e-2, atol=1e-2)
    assert sum(each.rows * each.width for each in forms[:2]) < SMALLEST
    assert bilinear_forms(np.array(forms[:2]), alive[0]) is None


def forms_of(dtype: torch.dtype, device: str) -> tuple[list[Form], Tensor, list[Tensor]]:
    """Matrices between vectors, what they are in float64, and the tensors."""
    forms, expected, alive = [], [], []
    for seed, (rows, width, first) in enumerate(
        ((1, 5, 0), (7, 3, 2), (64, 256, 0), (130, 1, 5), (9, 1030, 0))
    ):
        matrix = draw(rows + first, width + 4, seed=seed).to(device, dtype)
        left, right = draw(rows, seed=seed + 10).to(device), draw(width, seed=seed + 20).to(device)
        alive += [matrix, left, right]
        start = matrix.data_ptr() + matrix.itemsize * first * (width + 4)
        forms.append(Form(start, rows, width, width + 4, left.data_ptr(), right.data_ptr()))
        seen = matrix[first:, :width].double()
        expected.append(left.double() @ seen @ right.double())
    return forms, torch.stack(expected), alive
