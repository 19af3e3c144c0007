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


def test_ctrl_c_keeps_what_was_found_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def judge(subject: str, *_: object) -> str:
        judged.append(subject)
        if len(judged) == 4:
            raise KeyboardInterrupt
        if len(judged) == 2:
            raise fuzz.Harm("as an example")
        return "read"

    monkeypatch.setattr(fuzz, "_judge", judge)
    found = fuzz.main(Namespace(mutations=100, seed=1))
    assert (found["mutations"], found["asked_for"], found["scan_read"]) == (3, 100, 2)
    assert len(found["harm"]) == found["harmful"] == 1
