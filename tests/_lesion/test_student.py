"""Student's t over prompts, against SciPy."""

import numpy as np
import pytest

from torchfmri._lesion.lesion_map import paired

stats = pytest.importorskip("scipy.stats")


def test_paired_differences() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(0.4, 1.0, (12, 3))
    found, wanted = paired(values), stats.ttest_1samp(values, 0.0)
    np.testing.assert_allclose(found.t, wanted.statistic)
    np.testing.assert_allclose(found.p, wanted.pvalue, rtol=1e-9)
    for level in (0.95, 0.5):
        interval = wanted.confidence_interval(level)
        np.testing.assert_allclose(paired(values, level).low, interval.low)
        np.testing.assert_allclose(paired(values, level).high, interval.high)


def test_where_there_is_nothing_to_test() -> None:
    assert np.isnan(paired(np.ones((1, 2))).t).all()
    assert paired(np.zeros((4, 2))).t.tolist() == [0.0, 0.0]
    alike = paired(np.ones((4, 1)))
    assert (alike.t[0], alike.p[0]) == (np.inf, 0.0)
