"""Tails of t and F, against SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchfmri._contrast.distributions import f_tail, t_power, t_quantile, t_tail

stats = pytest.importorskip("scipy.stats")


@given(
    st.floats(-1e4, 1e4, allow_subnormal=False),
    st.floats(0.5, 1e4),
    st.booleans(),
)
def test_tail_of_t(t: float, dof: float, two_sided: bool) -> None:
    expected = 2 * stats.t.sf(abs(t), dof) if two_sided else stats.t.sf(t, dof)
    found = float(t_tail(t, dof, two_sided=two_sided))
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-250)


@given(st.floats(1e-8, 1e4), st.integers(1, 50), st.floats(0.5, 1e4))
def test_tail_of_f(f: float, above: int, below: float) -> None:
    found = float(f_tail(f, above, below))
    assert found == pytest.approx(stats.f.sf(f, above, below), rel=1e-10, abs=1e-250)


@pytest.mark.parametrize("dof", [1, 1.5, 2, 7, 40, 5_000])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.975, 1 - 1e-6])
def test_quantile_of_t(dof: float, share: float) -> None:
    assert t_quantile(share, dof) == pytest.approx(stats.t.ppf(share, dof), rel=1e-8, abs=1e-12)


def test_ends_of_the_scale() -> None:
    assert t_tail(0.0, 5.0) == 1.0
    assert t_tail(np.inf, 5.0) == 0.0
    assert float(t_tail(-np.inf, 5.0, two_sided=False)) == 1.0
    assert np.isnan(t_tail(np.nan, 5.0))
    assert np.isnan(t_tail(1.0, np.nan))
    assert f_tail(0.0, 2, 5) == 1.0
    assert f_tail(np.inf, 2, 5) == 0.0


@pytest.mark.parametrize("dof", [1, 2, 5, 38])
@pytest.mark.parametrize("two_sided", [True, False])
def test_power_is_the_tail_of_a_noncentral_t(dof: int, two_sided: bool) -> None:
    limit = stats.t.isf(0.05 / (1 + two_sided), dof)
    expected = stats.nct.sf(limit, dof, 2.0) + two_sided * stats.nct.cdf(-limit, dof, 2.0)
    assert t_power(2.0, dof, 0.05, two_sided=two_sided) == pytest.approx(expected, abs=2e-4)
