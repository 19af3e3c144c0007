"""Statistics against a slow float64 oracle, and the algebra of merging."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchfmri import _kernels
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import (
    Histogram,
    Statistics,
    calculate_channel_statistics,
    calculate_statistics,
    merge_statistics,
)

KEYS = [
    *("count", "mean", "std", "variance", "min", "max", "abs_max", "l2", "nan", "inf", "pos_inf"),
    *("neg_inf", "zero", "subnormal", "quantiles", "histogram"),
]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float64, torch.float32, *HALVES]
FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
]
INTEGERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]
ACCELERATORS = ["off", "auto"]


@pytest.fixture(params=ACCELERATORS)
def accelerator(request):
    """Every test that asks for it runs with torch alone, and with numba where installed."""
    if request.param == "auto" and _kernels.accelerator_name() == "torch":
        pytest.skip("numba is not installed")
    _kernels.use_accelerator(request.param == "auto")
    yield request.param
    _kernels.use_accelerator(True)


def oracle(values: np.ndarray, smallest_normal: float = 0.0) -> dict:
    """Every statistic the slow way, from float64 values (or exact Python ints)."""
    floats = values.astype(np.float64).ravel()
    finite = floats[np.isfinite(floats)]
    exact = (finite if values.dtype.kind == "f" else values.ravel()).tolist()
    some = len(finite) > 0
    return {
        "count": floats.size,
        "mean": math.fsum(finite) / len(finite) if some else math.nan,
        "std": finite.std() if some else math.nan,
        "min": min(exact) if some else math.nan,
        "max": max(exact) if some else math.nan,
        "abs_max": max(map(abs, exact)) if some else math.nan,
        "l2": math.sqrt(math.fsum(finite * finite)),
        "nan": int(np.isnan(floats).sum()),
        "inf": int(np.isinf(floats).sum()),
        "pos_inf": int((floats == np.inf).sum()),
        "neg_inf": int((floats == -np.inf).sum()),
        "zero": int((floats == 0).sum()),
        "subnormal": int(((finite != 0) & (np.abs(finite) < smallest_normal)).sum()),
    }


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def normal_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal if dtype.is_floating_point else 0.0


def check(statistics: Statistics, expected: dict, tolerance: float = 1e-6) -> None:
    """Counts and extremes are equal, moments close."""
    for name, value in expected.items():
        if name in ("mean", "std", "l2"):
            # A mean near zero is as exact as the values that cancel in it.
            room = tolerance * expected["std"] if name == "mean" else 0.0
            assert statistics[name] == pytest.approx(value, rel=tolerance, abs=room, nan_ok=True)
        elif isinstance(value, float) and math.isnan(value):
            assert math.isnan(statistics[name]), name
        else:
            assert statistics[name] == value, (name, statistics[name], value)


def check_histogram(statistics: Statistics, values: np.ndarray) -> None:
    """The bins hold exactly the finite values that belong there."""
    finite = values.astype(np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    low, high = statistics.histogram.edges
    counts = statistics.histogram.counts
    assert counts.sum() == len(finite)
    assert (np.diff((low + high)[np.isfinite(low + high)]) > 0).all()
    finite = np.sort(finite)
    # Bins of positive values are closed below, those of negative values above.
    sides = np.where(high <= 0, "right", "left")
    first, last = (
        np.array([np.searchsorted(finite, edge, side) for edge, side in zip(e, sides, strict=True)])
        for e in (low, high)
    )
    # The two bins at zero share the zeros by their sign, which sorting does not see.
    away = (low != 0) & (high != 0)
    assert ((last - first)[away] == counts[away]).all()


def check_quantiles(statistics: Statistics, values: np.ndarray) -> None:
    """Values within 2**-6, ranks within the stated error."""
    finite = np.sort(values.astype(np.float64).ravel())
    finite = finite[np.isfinite(finite)]
    for q in (0.0, 0.01, 0.05, 0.2, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0):
        found = statistics.quantile(q)
        exact = finite[max(math.ceil(q * len(finite)) - 1, 0)]
        assert abs(found - exact) <= 2.0**-6 * abs(exact) * (1 + 1e-12) + 2.0**-130
        below = np.searchsorted(finite, found, "left") / len(finite)
        through = np.searchsorted(finite, found, "right") / len(finite)
        distance = max(below - q, q - through, 0.0)
        assert distance <= statistics.rank_error + 1e-12, (q, found, exact)


def sample(kind: str, count: int = 1500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    odd = normal.clone()
    odd[::7], odd[::11], odd[::13] = math.nan, math.inf, -math.inf
    return {
        "normal": normal,
        "offset": normal * 0.02 + 1,
        "far": normal + 1e4,
        "relu": normal.relu(),
        "negative": -normal.abs() - 3,
        "heavy": (normal * 3).exp(),
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
        "subnormal": normal * 1e-39,
        "outlier": torch.cat((normal * 1e-3 + 1, torch.tensor([1e6], dtype=torch.float64))),
        "constant": torch.full((count,), 3.0, dtype=torch.float64),
        "not finite": odd,
        "all nan": torch.full((10,), math.nan, dtype=torch.float64),
        "one": torch.tensor([-2.5], dtype=torch.float64),
        "empty": torch.empty(0, dtype=torch.float64),
        "signed zeros": torch.tensor([0.0, -0.0, 1.0, -0.0], dtype=torch.float64),
    }[kind]


KINDS = [
    *("normal", "offset", "far", "relu", "negative", "heavy", "tiny", "huge", "subnormal"),
    *("outlier", "constant", "not finite", "all nan", "one", "empty", "signed zeros"),
]


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_floats_equal_the_oracle(kind, dtype, accelerator):
    x = sample(kind).to(torch.float32 if dtype in FLOAT8 else dtype).to(dtype)
    values = as_numpy(x)
    for histogram in (True, False):
        statistics = calculate_statistics(x, histogram=histogram)
        check(statistics, oracle(values, normal_of(dtype)))
    statistics = calculate_statistics(x)
    check_histogram(statistics, values)
    if np.isfinite(values).any():
        check_quantiles(statistics, values)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "far", "not finite", "subnormal"])
def test_large_halves_equal_the_oracle(kind, dtype, accelerator):
    x = sample(kind, count=300_000).to(dtype)
    statistics = calculate_statistics(x)
    check(statistics, oracle(as_numpy(x), normal_of(dtype)))
    check_histogram(statistics, as_numpy(x))


@pytest.mark.parametrize("kind", ["normal", "far", "relu", "not finite", "huge", "tiny"])
def test_many_blocks_equal_the_oracle(kind, accelerator):
    x = sample(kind, count=300_001).float()
    for histogram in (True, False):
        statistics = calculate_statistics(x, histogram=histogram)
        check(statistics, oracle(as_numpy(x), normal_of(x.dtype)))


def test_drifting_blocks_equal_the_oracle(accelerator):
    x = torch.arange(600_000, dtype=torch.float32).square_()
    check(calculate_statistics(x), oracle(as_numpy(x)))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_equal_the_oracle(dtype, accelerator):
    info = torch.iinfo(dtype)
    generator = np.random.default_rng(0)
    numbers = generator.integers(max(info.min, -100), 100, 3000)
    x = torch.tensor(numbers, dtype=torch.int64).to(dtype)
    statistics = calculate_statistics(x)
    check(statistics, oracle(numbers))
    check_histogram(statistics, numbers)
    check_quantiles(statistics, numbers)
    assert type(statistics.min) is int
    edge = torch.from_numpy(np.array([info.min, info.max, info.max], str(dtype)[6:]))
    assert (calculate_statistics(edge).min, calculate_statistics(edge).max) == (info.min, info.max)


def test_integers_beyond_float64_are_exact():
    numbers = [2**53 + 1, 2**60 - 1, -(2**62) - 3, 2**53 + 3]
    statistics = calculate_statistics(torch.tensor(numbers))
    assert (statistics.min, statistics.max) == (min(numbers), max(numbers))
    assert statistics.abs_max == 2**62 + 3
    large = calculate_statistics(torch.tensor([2**60 - 1, 2**60 - 1]))
    low, high = large.histogram.edges
    assert low[0] <= 2**60 - 2**50
    assert high[0] == 2.0**60


def test_bool_equals_the_oracle(accelerator):
    x = torch.tensor([True, False, True, True])
    statistics = calculate_statistics(x)
    check(statistics, oracle(x.numpy().astype(np.int64)))
    assert statistics.quantiles[0.25] == 0
    assert statistics.quantiles[0.5] == 1


def test_float64_beyond_float32_goes_to_the_overflow_bins():
    x = torch.tensor([1e300, -1e300, 1e-300, 1.0, 3.4028235677973366e38], dtype=torch.float64)
    statistics = calculate_statistics(x)
    low, high = statistics.histogram.edges
    assert statistics.histogram.total == 5
    assert math.isinf(high[-1])
    assert math.isinf(low[0])
    assert statistics.quantile(1.0) == 1e300


def test_float16_overflow_is_counted_as_infinity(accelerator):
    x = torch.tensor([70000.0, -70000.0, 1.0]).half()
    statistics = calculate_statistics(x)
    assert (statistics.pos_inf, statistics.neg_inf, statistics.max) == (1, 1, 1.0)
    wide = torch.full((1000,), 60000.0).half()
    assert calculate_statistics(wide, histogram=False).mean == wide[0].item()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_is_its_absolute_value(dtype):
    real = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    x = torch.complex(real[0], real[1]).to(dtype)
    parts = torch.view_as_real(x).double().numpy()
    statistics = calculate_statistics(x.conj())
    magnitude = np.hypot(parts[:, 0], parts[:, 1])
    assert statistics.mean == pytest.approx(magnitude.mean(), rel=1e-6)
    assert statistics.max == pytest.approx(magnitude.max(), rel=1e-6)
    assert "absolute value" in statistics.note


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_is_dequantized():
    x = torch.quantize_per_tensor(torch.tensor([0.1, 0.9, 2.0]), 0.1, 0, torch.qint8)
    statistics = calculate_statistics(x)
    check(statistics, oracle(x.dequantize().double().numpy()))
    assert "quantized" in statistics.note


LAYOUTS = {
    "scalar": lambda x: x[0, 0, 0],
    "transposed": lambda x: x.transpose(0, 2),
    "sliced": lambda x: x[:, ::2, 1:],
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1, None].expand(-1, 5, 3, -1),
    "all expanded": lambda x: x[0, 0, 0].expand(4, 5),
    "negative": lambda x: torch._neg_view(x),
    "overlapping": lambda x: x.reshape(-1).as_strided((10, 4), (1, 1)),
    "no rows": lambda x: x[:0],
    "parameter": lambda x: torch.nn.Parameter(x),
    "part of a graph": lambda x: x.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_layouts_equal_the_oracle(layout, dtype, accelerator):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = LAYOUTS[layout](x)
    version = x._version
    statistics = calculate_statistics(x)
    check(statistics, oracle(as_numpy(x.detach().contiguous())))
    assert x._version == version
    assert statistics.shape == tuple(x.shape)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "uncoalesced"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_counts_implicit_zeros(layout):
    dense = torch.zeros(6, 8)
    dense[1, 2], dense[3, 4], dense[5, 1] = 2.0, -1.0, math.nan
    sparse = {
        "coo": dense.to_sparse_coo,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "uncoalesced": lambda: (dense / 2).to_sparse() + (dense / 2).to_sparse(),
    }[layout]()
    statistics = calculate_statistics(sparse)
    check(statistics, oracle(dense.double().numpy()))
    assert statistics.shape == (6, 8)
    assert "sparse" in statistics.note
    assert statistics.histogram == calculate_statistics(dense).histogram


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_equals_its_parts(layout):
    parts = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (2, 5, 3)]
    statistics = calculate_statistics(torch.nested.nested_tensor(parts, layout=layout))
    check(statistics, oracle(torch.cat(parts).double().numpy()))
    assert statistics.shape is None


def test_what_has_no_values_is_refused_with_a_reason():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(InspectionError, match="meta device"):
        calculate_statistics(torch.empty(3, device="meta"))
    with FakeTensorMode() as mode, pytest.raises(InspectionError, match="FakeTensor"):
        calculate_statistics(mode.from_tensor(torch.ones(3)))
    with pytest.raises(InspectionError, match=r"torch\.func"):
        torch.vmap(lambda x: calculate_statistics(x) and x)(torch.ones(2, 3))
    with pytest.raises(InspectionError, match=r"torch\.func"):
        torch.func.grad(lambda x: calculate_statistics(x) and x.sum())(torch.ones(3))
    with pytest.raises(InspectionError, match="not initialized"):
        calculate_statistics(torch.nn.LazyLinear(3).weight)
    with pytest.raises(InspectionError, match="not from list"):
        calculate_statistics([1.0])


def test_leaves_tensor_graph_and_generator_alone(accelerator):
    x = torch.randn(1000, requires_grad=True)
    y = x * 2
    state, before, version = torch.get_rng_state(), y.detach().clone(), y._version
    calculate_statistics(y)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(y, before)
    assert y._version == version
    seen = []
    y.register_hook(lambda gradient: seen.append(calculate_statistics(gradient)))
    y.sum().backward()
    assert (seen[0].mean, seen[0].std, seen[0].count) == (1.0, 0.0, 1000)
    assert torch.equal(x.grad, torch.full((1000,), 2.0))


def test_same_in_every_mode(accelerator):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    expected = calculate_statistics(x)
    with torch.inference_mode():
        assert calculate_statistics(x) == expected
        inside = calculate_statistics(x * 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert calculate_statistics(x) == expected
    with torch.no_grad(), torch.device("meta"):
        assert calculate_statistics(x) == expected
    assert inside == calculate_statistics(x) == expected


# ---------------------------------------------------------------- mapping and records


def test_is_a_mapping_that_does_not_change():
    statistics = calculate_statistics(torch.tensor([1.0, 2.0]))
    assert list(statistics) == KEYS
    assert len(statistics) == len(KEYS)
    assert dict(statistics)["mean"] == statistics.mean == 1.5
    with pytest.raises(KeyError, match="'median' is not a statistic"):
        statistics["median"]
    with pytest.raises(AttributeError):
        statistics.mean = 0.0
    assert "2 values" in repr(statistics)
    assert "\n" not in repr(statistics)
    assert repr(Statistics.empty())


def test_variance_is_the_unbiased_one_on_request():
    x = torch.tensor([1.0, 2.0, 4.0])
    statistics = calculate_statistics(x)
    assert statistics.variance() == pytest.approx(x.double().var().item())
    assert statistics.std == pytest.approx(x.double().std(unbiased=False).item())
    assert math.isnan(calculate_statistics(x[:1]).variance())


def test_variance_is_the_square_of_std():
    values = torch.tensor([1.0, 2.0, 4.0, 8.5], dtype=torch.float64)
    statistics = calculate_statistics(values)
    assert statistics["variance"] == statistics["std"] ** 2
    assert statistics["variance"] == pytest.approx(float(values.var(correction=0)), rel=1e-12)
    assert statistics.variance() == pytest.approx(float(values.var()), rel=1e-12)
    assert statistics.to_dict()["variance"] == statistics["variance"]
    assert math.isnan(Statistics.empty()["variance"])
    units = calculate_channel_statistics(values.reshape(2, 2), -1)
    np.testing.assert_allclose(
        units["variance"], values.reshape(2, 2).var(0, correction=0), rtol=1e-12
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_is_a_dict_that_json_takes(kind):
    values = torch.tensor([0, 1, 1, 3]).to(kind)
    statistics = calculate_statistics(values)
    assert isinstance(statistics, dict)
    for text in (json.dumps(statistics), json.dumps(statistics, indent=1, sort_keys=True)):
        read = json.loads(text)
        assert set(read) == set(KEYS)
        assert read["mean"] == statistics.mean
        assert read["histogram"]["counts"] == statistics.histogram.counts.tolist()
        assert read["quantiles"]["0.5"] == statistics.quantile(0.5)
    assert json.loads(json.dumps(dict(statistics))) == json.loads(json.dumps(statistics))
    assert json.loads(json.dumps({"layers": [statistics]}))["layers"][0]["count"] == 4
    assert (
        json.loads(json.dumps(calculate_statistics(values, histogram=False)))["quantiles"] is None
    )


def test_dict_can_be_read_in_every_way_and_not_changed():
    statistics = calculate_statistics(torch.arange(5.0))
    assert dict(statistics) == {key: statistics[key] for key in KEYS} == {**statistics}
    assert list(statistics.items()) == list(zip(KEYS, statistics.values(), strict=True))
    assert statistics.get("mean") == 2.0
    assert statistics.get("median") is None
    assert "" not in statistics
    assert (statistics | {"mean": 7})["mean"] == 7
    assert ({"mean": 7} | statistics)["mean"] == 2.0
    for same in (copy.copy(statistics), copy.deepcopy(statistics), statistics.copy()):
        assert same == statistics
    for change in (
        lambda: statistics.__setitem__("mean", 0),
        lambda: statistics.__delitem__("mean"),
        lambda: statistics.update(mean=0),
        lambda: statistics.pop("mean"),
        lambda: statistics.setdefault("median", 0),
        statistics.clear,
        statistics.popitem,
    ):
        with pytest.raises(TypeError, match="Statistics cannot be changed"):
            change()
    assert statistics["mean"] == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_survives_json_and_pickle(kind):
    statistics = calculate_statistics(sample(kind).float())
    text = json.dumps(statistics.to_dict(), allow_nan=False)
    assert Statistics.from_dict(json.loads(text)) == statistics
    assert pickle.loads(pickle.dumps(statistics)) == statistics


def test_without_histogram_says_so():
    statistics = calculate_statistics(torch.ones(3), histogram=False)
    assert statistics.histogram is statistics.quantiles is statistics.rank_error is None
    with pytest.raises(InspectionError, match="no histogram"):
        statistics.quantile(0.5)
    with pytest.raises(InspectionError, match="between 0 and 1"):
        statistics.quantile(2)


def test_linear_histogram_follows_numpy():
    x = sample("normal", 20_000)
    statistics = calculate_statistics(x.float())
    counts, edges = statistics.linear_histogram(bins=32)
    expected, expected_edges = np.histogram(x.numpy(), bins=32)
    np.testing.assert_allclose(edges, expected_edges, rtol=1e-6)
    assert counts.sum() == pytest.approx(len(x))
    assert np.abs(counts - expected).max() < 0.01 * len(x)
    inside, _ = statistics.linear_histogram(bins=10, range=(-1.0, 1.0))
    assert inside.sum() == pytest.approx((x.abs() <= 1).sum().item(), rel=0.01)
    constant, _ = calculate_statistics(torch.full((7,), 2.0)).linear_histogram(bins=5)
    assert constant.tolist() == [0, 0, 7, 0, 0]
    spike, edges = calculate_statistics(x.relu().float()).linear_histogram(bins=8)
    assert spike[0] >= (x <= 0).sum().item()
    counts, _ = statistics.histogram.to_linear(bins=32)
    assert counts.sum() == pytest.approx(len(x))


def test_offset_data_gets_a_finer_histogram():
    far = calculate_statistics(sample("far", 50_000).float())
    assert far.rank_error < 0.02
    assert far.quantiles[0.5] == pytest.approx(1e4, abs=0.05)
    bits = far.histogram
    assert bits.quantile(0.5) == pytest.approx(1e4, rel=2**-6)
    assert len(bits.codes) < 4


# ---------------------------------------------------------------- masks and channels


def test_mask_leaves_positions_out():
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    statistics = calculate_statistics(x, mask=mask)
    check(statistics, oracle(x[mask.bool()].double().numpy()))
    assert statistics.positions == (7, 10)
    assert statistics.shape == (2, 5, 3)
    assert calculate_statistics(x, mask=torch.ones(2, 5)).positions == (10, 10)
    both = statistics + calculate_statistics(x, mask=mask)
    assert both.positions == (14, 20)
    assert (statistics + calculate_statistics(x)).positions is None
    with pytest.raises(InspectionError, match=r"\(2, 4\)"):
        calculate_statistics(x, mask=torch.ones(2, 4))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_equal_the_oracle_per_unit(dtype, axis):
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0)) * 3
    if dtype in FLOATS:
        x[0, 0, 0], x[1, 2, 3], x[2], x[3, 3, 3] = math.nan, math.inf, -math.inf, 0.0
    x = x.to(dtype)
    statistics = calculate_channel_statistics(x, axis)
    assert statistics.axis == axis % 3
    assert len(statistics["mean"]) == x.shape[axis]
    for unit, values in enumerate(as_numpy(x).swapaxes(0, axis)):
        for name, value in oracle(values).items():
            if name != "subnormal":
                np.testing.assert_allclose(statistics[name][unit], value, rtol=1e-6)


def test_channels_merge_and_follow_the_mask():
    x = torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(0))
    x[:3, :, 1] = math.nan
    whole = calculate_channel_statistics(x, -1)
    parts = calculate_channel_statistics(x[:3], -1) + calculate_channel_statistics(x[3:], -1)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-12)
    assert merge_statistics([whole]) == whole
    mask = torch.tensor([[True, False, True, True]] * 7)
    masked = calculate_channel_statistics(x, -1, mask=mask)
    expected = calculate_channel_statistics(x[mask], -1)
    np.testing.assert_allclose(masked.mean, expected.mean, rtol=1e-12)
    assert masked.positions == (21, 28)
    assert len(calculate_channel_statistics(x[:0], 1).count) == 4
    with pytest.raises(InspectionError, match="no axis 3"):
        calculate_channel_statistics(x, 3)
    with pytest.raises(InspectionError, match="dimensions of the mask"):
        calculate_channel_statistics(x, 1, mask=mask)
    with pytest.raises(InspectionError, match="4 units"):
        whole + calculate_channel_statistics(x, 1)


def test_channels_of_a_tensor_without_units():
    statistics = calculate_channel_statistics(torch.zeros(3, 0), 1)
    assert len(statistics.mean) == 0
    assert (statistics + statistics).count.tolist() == []


def test_features_merge_whatever_stands_before_them():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    flat, deep = (calculate_channel_statistics(each, -1) for each in (x, x.reshape(2, 3, 4)))
    np.testing.assert_allclose((flat + deep).mean, flat.mean, rtol=1e-12)


def test_channels_of_many_rows_equal_the_oracle():
    x = torch.randn(3000, 200, generator=torch.Generator().manual_seed(0)) + 1e4
    statistics = calculate_channel_statistics(x, 1)
    np.testing.assert_allclose(statistics.std, x.double().numpy().std(0), rtol=1e-9)


# ---------------------------------------------------------------- algebra

floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 1.5, math.inf, -math.inf])
splits = st.lists(st.lists(floats, max_size=30), min_size=1, max_size=5)


def check_same(one: Statistics, two: Statistics, tolerance: float = 1e-12) -> None:
    """Counts, extremes and histogram are equal, moments close."""
    for name in KEYS:
        if name in ("mean", "std", "l2"):
            scale = 0.0 if math.isnan(one.abs_max) else tolerance * one.abs_max
            np.testing.assert_allclose(one[name], two[name], rtol=tolerance, atol=scale)
        elif name not in ("variance", "quantiles"):  # both follow from the others
            assert one[name] == two[name] or (math.isnan(one[name]) and math.isnan(two[name]))


@settings(deadline=None, max_examples=60)
@given(splits, st.sampled_from([torch.float64, torch.float16, torch.int32]))
def test_parts_add_to_the_whole(parts, dtype):
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    if dtype == torch.int32:
        tensors = [t.nan_to_num(0, 0, 0).clamp(-(2**31), 2**31 - 1) for t in tensors]
    tensors = [tensor.to(dtype) for tensor in tensors]
    whole = calculate_statistics(torch.cat(tensors))
    merged = merge_statistics(map(calculate_statistics, tensors))
    check_same(merged, whole, 1e-6 if dtype == torch.float16 else 1e-12)
    if whole.finite:
        values = as_numpy(torch.cat(tensors))
        check_quantiles(merged, values)
        check_quantiles(whole, values)


@settings(deadline=None, max_examples=60)
@given(splits, st.floats(-1e6, 1e6), st.floats(1e-3, 10))
def test_merging_is_associative(parts, offset, scale):
    parts = (parts * 3)[:3]
    one, two, three = (
        calculate_statistics(torch.tensor(part, dtype=torch.float64).nan_to_num() % scale + offset)
        for part in parts
    )
    left, right = (one + two) + three, one + (two + three)
    check_same(left, right)
    assert left.grid == right.grid
    np.testing.assert_equal(left.quantiles, right.quantiles)
    assert one + Statistics.empty() == one == Statistics.empty() + one


@settings(deadline=None, max_examples=80)
@given(st.lists(floats, min_size=1, max_size=200))
def test_arbitrary_float32_equal_the_oracle(numbers):
    x = torch.tensor(numbers, dtype=torch.float32)
    statistics = calculate_statistics(x)
    values = as_numpy(x)
    check(statistics, oracle(values, normal_of(x.dtype)))
    check_histogram(statistics, values)
    if statistics.finite:
        check_quantiles(statistics, values)


def test_split_of_offset_data_keeps_the_grid():
    x = sample("far", 4000).float()
    merged = merge_statistics(map(calculate_statistics, x.split(613)))
    whole = calculate_statistics(x)
    check_same(merged, whole, tolerance=1e-6)  # float32 within a block
    assert merged.grid == whole.grid
    assert merged.quantiles == whole.quantiles


def test_merge_of_different_tensors_says_what_it_holds():
    one = calculate_statistics(torch.ones(2, 2))
    two = calculate_statistics(torch.ones(3).bfloat16())
    both = one + two
    assert (both.dtype, both.shape, both.count) == ("bfloat16+float32", None, 7)
    assert (one + one).shape == (2, 2)
    assert merge_statistics([]) == Statistics.empty()
    assert (one + calculate_statistics(torch.ones(1), histogram=False)).histogram is None


# ---------------------------------------------------------------- controls: the checks can fail


def test_checks_notice_a_wrong_value():
    x = sample("normal").float()
    statistics = calculate_statistics(x)
    wrong = as_numpy(x).copy()
    wrong[7] += 0.1
    with pytest.raises(AssertionError):
        check(statistics, oracle(wrong))
    with pytest.raises(AssertionError):
        check_histogram(statistics, wrong)
    with pytest.raises(AssertionError):
        check_quantiles(statistics, as_numpy(x) + 0.1)
    with pytest.raises(AssertionError):
        check_same(statistics, calculate_statistics(x[1:]))
    assert statistics != calculate_statistics(x[1:])
    empty = Histogram.from_codes([], [])
    assert statistics.histogram != empty
    assert math.isnan(empty.quantile(0.5))


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("count", [37, 4160, 32_768])
def test_mean_near_zero_is_right_relative_to_itself(count: int, accelerated: bool) -> None:
    _kernels.use_accelerator(accelerated)
    try:
        for seed in range(20):
            x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
            found = calculate_statistics(x, histogram=False)
            assert found.mean == pytest.approx(x.double().mean().item(), rel=1e-9)
            assert found.std == pytest.approx(x.double().std(correction=0).item(), rel=1e-6)
    finally:
        _kernels.use_accelerator(True)


@pytest.mark.parametrize("accelerated", [False, True])
def test_mean_of_a_large_tensor_is_right_relative_to_its_spread(accelerated: bool) -> None:
    _kernels.use_accelerator(accelerated)
    try:
        for seed in range(10):
            x = torch.randn(1 << 19, generator=torch.Generator().manual_seed(seed))
            found = calculate_statistics(x, histogram=False)
            assert abs(found.mean - x.double().mean().item()) < 1e-9 * found.std
    finally:
        _kernels.use_accelerator(True)
