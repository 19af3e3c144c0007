"""A table of numbers says of each tensor what `reduce_values` says of it alone."""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from torchfmri import _kernels
from torchfmri._kernels import (
    NumberTable,
    merge_numbers,
    no_numbers,
    numbers_of_layers,
    reduction_of,
)
from torchfmri._kernels.reduction import Reduction


@pytest.fixture(params=["numba", "torch"])
def accelerator(request: pytest.FixtureRequest):
    if request.param == "numba":
        pytest.importorskip("numba")
    _kernels.use_accelerator(request.param == "numba")
    yield
    _kernels.use_accelerator(True)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 40, generator=generator)
    odd = x.clone()
    odd[3, 4], odd[5, 6], odd[7, 8] = math.nan, math.inf, -math.inf
    large = torch.randn(3 << 18, generator=generator)
    large[5] = math.nan
    mirrored = torch._neg_view(x)
    assert mirrored.is_neg()
    return {
        "normal": x,
        "relu": x.relu(),
        "far": x + 1000,
        "zeros": torch.zeros(9),
        "negative zero": torch.tensor([-0.0, 0.0]),
        "ones": torch.ones(7),
        "one value": torch.tensor(3.5),
        "tiny": x * 1e-41,
        "small": x * 1e-20,
        "huge": x * 1e30,
        "odd": odd,
        "nothing finite": torch.full((5,), math.nan),
        "infinite": torch.full((5,), -math.inf),
        "large": large,
        "transposed": x.T,
        "every other": x[:, ::2],
        "expanded": x[:1].expand(50, 40),
        "mirrored": mirrored,
        "parameter": nn.Parameter(x).detach(),
    }


def exactly(values: torch.Tensor) -> Reduction:
    """The slow and obvious answer, in float64."""
    x = values.to(torch.float64)
    finite = x[x.isfinite()]
    normal = torch.finfo(values.dtype).tiny
    found = Reduction(
        count=x.numel(),
        nan=int(x.isnan().sum()),
        pos_inf=int((x == math.inf).sum()),
        neg_inf=int((x == -math.inf).sum()),
        zero=int((x == 0).sum()),
        subnormal=int(((x.abs() < normal) & (x != 0)).sum()),
    )
    if len(finite):
        found.mean = float(finite.mean())
        found.squared_deviations = float((finite - finite.mean()).square().sum())
        found.low, found.high = float(finite.min()), float(finite.max())
    return found


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_is_what_the_tensor_holds(name: str, dtype: torch.dtype, accelerator: None) -> None:
    values = tensors()[name]
    values = values if dtype == torch.float32 else values.to(dtype)
    table = NumberTable()
    number = table.add(values)
    assert number == 0
    row = table.read([number])[0]
    found, expected = reduction_of(row), exactly(values)
    for field in ("count", "nan", "pos_inf", "neg_inf", "zero", "subnormal", "low", "high"):
        assert getattr(found, field) == getattr(expected, field), field
    scale = max(abs(found.low), abs(found.high)) if found.finite else 0.0
    assert found.mean == pytest.approx(expected.mean, rel=1e-6, abs=1e-6 * scale)
    least = 1e-12 * scale**2  # what float32 leaves of equal values
    assert found.squared_deviations == pytest.approx(
        expected.squared_deviations, rel=1e-5, abs=least
    )
    if not found.finite:
        assert np.isnan(row[1:5]).all()


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "values",
    [
        torch.empty(0),
        torch.arange(4),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2).as_subclass(Subclass),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["empty", "int", "complex", "bool", "meta", "sparse", "subclass", "nested"],
)
def test_other_tensors_are_left_to_others(values: torch.Tensor) -> None:
    table = NumberTable()
    assert table.add(values) is None
    assert len(table.read([])) == 0


def test_tensors_inside_torch_func_are_left_to_others() -> None:
    table, seen = NumberTable(), []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(table.add(x))
        return x

    torch.func.vmap(note)(torch.ones(3, 4))
    assert seen == [None]


def test_rows_of_several_threads_are_not_mixed_up() -> None:
    table, found = NumberTable(), {}

    def add(first: int) -> None:
        for value in range(first, first + 700):
            found[value] = table.add(torch.full((20,), float(value)))

    threads = [threading.Thread(target=add, args=(1000 * k,)) for k in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    means = table.read([number for number in found.values() if number is not None])[:, 1]
    assert means.tolist() == [float(value) for value in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_of_layers_side_by_side(dtype: torch.dtype, accelerator: None) -> None:
    generator = torch.Generator().manual_seed(1)
    edges = np.array([0, 3, 4, 9, 30])
    values = torch.randn(4, 6, 30, generator=generator)
    values[1, 2, 5] = math.nan
    values[2, :, 3] = 2.0  # a layer of one unit
    values[3, 4, 10:] *= 1e-13
    kept = torch.rand(4, 6, generator=generator) > 0.3
    kept[0] = False
    values = values.to(dtype)
    spread = torch.zeros(4, 6, 60, dtype=dtype)
    spread[..., ::2] = values
    transposed = values.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (values, spread[..., ::2], transposed, values.mT.contiguous().mT):
        for mask in (kept, None):
            found = numbers_of_layers(given, edges, mask)
            for row in range(4):
                for layer in range(4):
                    own = given[row, :, edges[layer] : edges[layer + 1]]
                    expected = exactly(own if mask is None else own[mask[row]])
                    assert_same_numbers(merge_numbers(no_numbers(), found[row, layer]), expected)


def test_numbers_that_are_merged_are_those_of_all_values(accelerator: None) -> None:
    values = torch.cat([tensors()["odd"], tensors()["far"]]).reshape(1, -1, 40)
    edges, whole = np.array([0, 40]), no_numbers(1, 1)
    for part in values.split(70, 1):
        whole = merge_numbers(whole, numbers_of_layers(part, edges, None))
    assert_same_numbers(whole[0, 0], exactly(values))
    assert np.isnan(no_numbers(2)[:, 1:5]).all()
    assert no_numbers(2)[:, 0].tolist() == [0, 0]


def assert_same_numbers(row: np.ndarray, expected: Reduction) -> None:
    found = reduction_of(row)
    for field in ("count", "nan", "pos_inf", "neg_inf", "zero", "low", "high"):
        assert getattr(found, field) == getattr(expected, field), field
    assert found.mean == pytest.approx(expected.mean, rel=1e-5, abs=1e-6)
    assert found.squared_deviations == pytest.approx(expected.squared_deviations, rel=1e-5)
    assert found.finite or np.isnan(row[1:5]).all()
