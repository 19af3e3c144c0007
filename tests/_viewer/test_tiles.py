"""Tiles: what a byte means, and what is pooled."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from torchfmri._viewer.tiles import SAMPLED, WIDTH, Plane, pool
from torchfmri.visualization._colour_scale import tops as scale_tops


def decoded(plane: Plane, codes: np.ndarray) -> np.ndarray:
    """(row, column) the values of bytes, by the formula that the page uses."""
    scale = plane.scale[:, None].astype(np.float64)
    span = np.arcsinh(plane.limit[:, None].astype(np.float64) / scale)
    values = scale * np.sinh((codes.astype(float) - 128) / 126 * span)
    return np.where(codes <= 1, np.nan, values)


def slowly_pooled(values: np.ndarray, step: int) -> np.ndarray:
    """(column, row) the value of the largest size; infinity wins, NaN (not measured) loses."""
    if step == 1:
        return values
    expected = []
    for first in range(0, len(values), step):
        column = []
        for row in values[first : first + step].T.tolist():
            known = sorted((x for x in row if not math.isnan(x)), key=lambda x: (abs(x), x))
            column.append(known[-1] if known else math.nan)
        expected.append(column)
    return np.array(expected, np.float32).reshape(len(expected), values.shape[1])


def slowly_coded(plane: Plane, values: np.ndarray) -> np.ndarray:
    """(row, column) the byte of each value, by the formula in the heading of the module."""
    codes = np.zeros(values.T.shape, np.uint8)
    for row, column in np.ndindex(codes.shape):
        x, scale = float(values[column, row]), float(plane.scale[row])
        if math.isfinite(x):
            share = math.asinh(x / scale) / math.asinh(float(plane.limit[row]) / scale)
            codes[row, column] = 128 + round(126 * share)
        else:
            codes[row, column] = 1 if math.isnan(x) else 0
    return codes


def read(plane: Plane, level: int, x: int, **options: bool) -> np.ndarray:
    return np.frombuffer(plane.tile(level, x, **options), np.uint8).reshape(plane.rows, -1)


numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.just(math.nan) | st.just(math.inf)


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=numbers)
)
@pytest.mark.parametrize("metric", ["activation", "gradient"])
def test_a_byte_is_within_half_a_step_of_its_value(metric: str, values: np.ndarray) -> None:
    plane = Plane(values, metric)
    codes = plane.coded(0, len(values))
    finite = np.isfinite(values.T)
    assert ((codes == 0) == ~finite).all()
    scale = plane.scale[:, None].astype(np.float64)
    span = np.arcsinh(plane.limit[:, None].astype(np.float64) / scale)
    with np.errstate(invalid="ignore"):
        wanted = np.arcsinh(values.T.astype(np.float64) / scale)
        found = np.arcsinh(decoded(plane, codes) / scale)
        error = np.abs(wanted - found)[finite]
    half = np.broadcast_to(span / 126 / 2, wanted.shape)[finite]
    assert (error <= half * (1 + 1e-4) + 1e-6).all()
    assert (np.sign(codes.astype(int) - 128)[finite] * values.T[finite] >= 0).all(), (
        "signs are kept"
    )


def test_resolution_of_usual_rows() -> None:
    """The error is below two hundredths of the colour scale, linear and logarithmic."""
    random = np.random.default_rng(0)
    values = random.lognormal(0, 0.5, (5000, 3)).astype(np.float32)
    linear = Plane(values, "activation")
    top = linear.tops
    error = np.abs(decoded(linear, linear.coded(0, len(values))) - values.T)
    error = error[top[:, None] >= values.T]
    assert error.max() < 0.011 * top.max()
    gradients = (10 ** random.normal(-6, 1.5, (5000, 3))).astype(np.float32)
    plane = Plane(gradients, "gradient")
    inside = plane.tops[:, None] / 100 <= gradients.T
    found = decoded(plane, plane.coded(0, len(gradients)))
    ratio = np.log10(found[inside] / gradients.T[inside])
    assert np.abs(ratio).max() < 0.03, "of two decades: less than two hundredths"


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 3)), elements=numbers),
    st.sampled_from([2, 4, 8]),
)
def test_pooling_against_a_loop(values: np.ndarray, step: int) -> None:
    found = pool(values, step)
    expected = slowly_pooled(values, step)
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    shown = ~np.isinf(expected)
    np.testing.assert_array_equal(found[shown], expected[shown])


def test_pooling_in_blocks_and_by_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=(70_001, 70)).astype(np.float32)
    found = pool(values, 16)
    assert found.shape == (4376, 70)
    part = values[-1:]
    np.testing.assert_array_equal(found[-1], part[0])
    np.testing.assert_array_equal(
        np.abs(found[:4375]), np.abs(values[:70_000].reshape(4375, 16, 70)).max(1)
    )
    means = pool(values[:70_000], 16, mean=True)
    expected = values[:70_000].reshape(4375, 16, 70).astype(np.float64).mean(1)
    np.testing.assert_allclose(means, expected, atol=1e-6)


@pytest.mark.parametrize("columns", [0, 1, 255, 256, 257, 1000, 40_000])
def test_tiles_cover_the_plane_at_every_level(columns: int) -> None:
    values = np.random.default_rng(0).lognormal(0, 1, (columns, 5)).astype(np.float32)
    plane = Plane(values, "activation")
    assert plane.levels == 1 + max(0, math.ceil(math.log2(max(columns, 1) / WIDTH)))
    for level in range(plane.levels):
        tiles = max(1, -(-columns // (WIDTH << level)))
        got = np.concatenate([read(plane, level, x) for x in range(tiles)], 1)
        np.testing.assert_array_equal(got, slowly_coded(plane, slowly_pooled(values, 1 << level)))
        with pytest.raises(IndexError):
            plane.tile(level, tiles)
    assert -(-max(columns, 1) // (WIDTH << (plane.levels - 1))) == 1, "the last is one tile"
    with pytest.raises(IndexError):
        plane.tile(plane.levels, 0)


def test_percentiles_of_long_rows_are_of_a_sample_and_of_short_ones_exact() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, (SAMPLED, 2)).astype(np.float32)
    expected = np.quantile(values.astype(np.float64), 0.995, axis=0, method="lower")
    np.testing.assert_array_equal(Plane(values, "activation").tops, expected)
    long = np.random.default_rng(0).lognormal(0, 1, (5 * SAMPLED, 2)).astype(np.float32)
    exact = np.quantile(long, 0.995, axis=0)
    np.testing.assert_allclose(Plane(long, "activation").tops, exact, rtol=0.1)


def test_bars_end_at_the_largest_value_of_all() -> None:
    values = np.ones((3 * SAMPLED, 2), np.float32)
    values[SAMPLED + 1, 1] = 1000  # beside the sample
    assert Plane(values, "tracks", bars=True).tops.tolist() == [1, 1000]
    assert Plane(values, "activation").tops.tolist() == [1, 1]


def test_rows_without_values_and_of_zeros() -> None:
    values = np.zeros((300, 3), np.float32)
    values[:, 1] = np.nan
    values[:, 2] = 1e-38
    plane = Plane(values, "gradient")
    codes = read(plane, 0, 0)
    assert (codes[0] == 128).all()
    assert (codes[1] == 0).all()
    assert (codes[2] > 128).all()
    assert plane.nonfinite.tolist() == [0, 300, 0]
    assert all(np.isfinite(each) for each in plane.header()["scale"])


def test_what_was_not_measured_is_no_nan() -> None:
    values = np.ones((400, 3), np.float32)
    values[-1] = np.nan  # never run
    values[:, 2] = np.nan  # has no such value
    values[7, 1] = np.nan  # went wrong
    values[9, 0] = np.inf
    missing = ~np.isfinite(values).any(1, keepdims=True) | ~np.isfinite(values).any(0)
    plane = Plane(values, "activation", missing=missing)
    assert plane.nonfinite.tolist() == [1, 1, 0]
    assert plane.missing.tolist() == [1, 1, 400]
    codes = plane.coded(0, 400)
    assert codes[1, 7] == codes[0, 9] == 0
    assert (codes[:, -1] == 1).all()
    assert (codes[2] == 1).all()
    coarse = read(plane, 1, 0)
    assert coarse[1, 3] == coarse[0, 4] == 0, "what went wrong wins"
    assert (coarse[:2, -1] > 1).all(), "what was not measured leaves its neighbour"
    mean = read(plane, 1, 0, mean=True)
    assert (mean[:2, -1] == coarse[:2, -1]).all()
    assert mean[1, 3] == 0


def test_a_longer_plane_has_the_tiles_of_a_whole_one() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, (40_000, 2)).astype(np.float32)
    values[0] = 100  # the largest is there from the beginning, so that the codes stay
    whole = Plane(values, "activation", headroom=4)
    longer = Plane(values[:30_011], "activation", headroom=4)
    for end in (30_100, 39_999, 40_000):
        longer = longer.longer(values[:end])
    for name in ("scale", "limit", "tops", "middle"):
        setattr(longer, name, getattr(whole, name))
    for level in range(whole.levels):
        assert longer.tile(level, 0) == whole.tile(level, 0), level


def test_tiles_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfmri._viewer.tiles.TILE_BYTES", 20_000)
    plane = Plane(np.ones((5000, 10), np.float32), "activation")
    for x in range(20):
        plane.tile(0, x)
    assert sum(map(len, plane._tiles.values())) <= 20_000


@pytest.mark.parametrize("row", [[1.0, 3.0], [100.0, 1.0], [2.0, 5.0, 3.0], [1.0, np.nan, 9.0]])
def test_two_or_three_values_of_a_row_can_be_told_apart(row: list[float]) -> None:
    """By the next lower value two tokens would have the same colour whatever they are."""
    values = np.array(row, np.float32)[:, None]
    assert Plane(values, "activation").tops.tolist() == [np.nanmax(row)]
    assert scale_tops(values.T).tolist() == [np.nanmax(row)], "as in the pictures"
    loud = np.array([[500.0, 1.0, 2.0, 3.0]], np.float32)
    assert Plane(loud.T, "activation").tops.tolist() == scale_tops(loud).tolist() == [3.0]
