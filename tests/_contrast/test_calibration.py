"""Null draws made of real scans: every path finds something in about one of 20, and no more.

`python -m benchmarks contrast --part calibration` makes 200 draws; a quarter of them is made here.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.contrast import paths, permutation_p, power, scan_questions
from torchfmri import Scan

stats = pytest.importorskip("scipy.stats")
pytest.importorskip("formulaic")
pytestmark = pytest.mark.slow
DRAWS = 50
BOUND = int(stats.binom.ppf(0.99, DRAWS, 0.05))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Scan:
    folder: Path = tmp_path_factory.mktemp("questions") / "tiny.fmri"
    return scan_questions("tiny", folder)


def test_every_path_is_calibrated_and_a_test_over_tokens_is_not(questions: Scan) -> None:
    for name, ask in paths(questions).items():
        found = sum(ask(np.random.default_rng(draw)) for draw in range(DRAWS))
        if name.startswith("NAIVE"):
            assert found > BOUND, name
        else:
            assert found <= BOUND, name


def test_p_values_by_relabelling_are_uniform(questions: Scan) -> None:
    p = permutation_p(questions, DRAWS)
    steps = np.random.default_rng(0).random(p.shape) / 200  # p is a multiple of 1/200
    found = [stats.kstest(column, "uniform").pvalue for column in (p - steps).T]
    assert min(found) > 0.01 / len(found)


def test_power_grows_with_prompts_and_effects(questions: Scan) -> None:
    lines = power(questions, repeats=4)
    shares = [float(text.split()[1].rstrip(",")) for text in lines.values()]
    table = np.array(shares).reshape(5, 3)  # size of the effect, prompts
    assert table[0, 0] < 0.2
    assert table[-1, -1] > 0.95
    assert (np.diff(table[:, -1]) > -0.05).all()
    assert (np.diff(table[2:], axis=1) > -0.05).all()
