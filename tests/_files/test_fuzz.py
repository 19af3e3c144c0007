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
    refused = ("scan", "incident", "inspection", "contrast", "lesions", "states", "model")
    for outcome in (*(f"{each}_refused" for each in refused), "scan_reported", "history_reported"):
        assert found[outcome] > 50


def test_some_mutations() -> None:
    found = fuzz.main(Namespace(mutations=75, seed=1))
    assert found["harm"] == []
    assert found["scan_refused"] + found["scan_reported"] > 15
