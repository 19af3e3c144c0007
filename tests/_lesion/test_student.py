"""Student's t against values that stand in every table."""

import numpy as np
import pytest

from torchfmri._lesion.student import paired, probability_inside, quantile

# Two-sided 95 % and 99 % values of t, as printed in statistical tables.
TABLE = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    5: (2.571, 4.032),
    19: (2.093, 2.861),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom: int) -> None:
    assert quantile(0.95, freedom) == pytest.approx(TABLE[freedom][0], abs=6e-4)
    assert quantile(0.99, freedom) == pytest.approx(TABLE[freedom][1], abs=6e-3)
    assert float(probability_inside(TABLE[freedom][0], freedom)) == pytest.approx(0.95, abs=1e-4)


def test_one_freedom_has_a_closed_form() -> None:
    t = np.array([0.1, 1.0, 7.0, 300.0])
    np.testing.assert_allclose(probability_inside(t, 1), 2 / np.pi * np.arctan(t), atol=1e-9)


def test_paired_differences() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(0.4, 1.0, (12, 3))
    found = paired(values)
    error = values.std(0, ddof=1) / np.sqrt(12)
    np.testing.assert_allclose(found.t, values.mean(0) / error)
    np.testing.assert_allclose(found.high - found.mean, 2.20099 * error, rtol=1e-5)
    inside = [(abs(paired(draw.normal(0, 1, (8, 1))).t[0]) < quantile(0.9, 7)) for _ in range(3000)]
    assert 0.88 < np.mean(inside) < 0.92
    assert np.isnan(paired(values[:1]).t).all()
    assert paired(np.zeros((4, 2))).t.tolist() == [0.0, 0.0]
