"""Random damage to everything that is read: refused, reported or harmless, and nothing else."""

from argparse import Namespace

import pytest

from benchmarks import fuzz

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_ten_thousand_mutations() -> None:
    found = fuzz.main(Namespace(mutations=10_000, seed=0))
    assert found["harm"] == []
    assert found["mutations"] == 10_000
    for outcome in ("scan_refused", "scan_reported", "incident_refused", "model_refused"):
        assert found[outcome] > 50


def test_some_mutations() -> None:
    found = fuzz.main(Namespace(mutations=75, seed=1))
    assert found["harm"] == []
    assert found["scan_refused"] + found["scan_reported"] > 15
