"""Planted faults are named, one finding each; healthy models raise no alarm over 200 steps."""

import warnings
from pathlib import Path

import pytest

from benchmarks._cases import Fault, Healthy
from benchmarks._cuts import CUTS
from benchmarks._diagnosis_peers import anomaly_mode, sagemaker_rules
from benchmarks._faults import FAULTS
from benchmarks._healthy import HEALTHY, STEPS
from benchmarks.diagnosis import MEASURED, examine, is_right, make


def test_there_are_enough_of_both() -> None:
    assert len(FAULTS) >= 30
    assert len(HEALTHY) >= 15
    assert len({fault.make for fault in FAULTS}) == len(FAULTS)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.make.__name__)
@pytest.mark.one_in(8)
def test_fault_is_named(fault: Fault) -> None:
    case = make(fault.make)
    diagnosis = examine(case, case.steps)
    assert is_right(diagnosis, fault), str(diagnosis)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.make.__name__)
@pytest.mark.one_in(15)
def test_healthy_model_raises_nothing(healthy: Healthy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        diagnosis = examine(make(healthy.make), STEPS)
    assert diagnosis.steps == STEPS
    assert diagnosis.ok, str(diagnosis)


def test_every_threshold_is_in_the_docs_with_its_value_and_reason() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md").read_text("utf-8")
    for name, cut in CUTS.items():
        row = next((line for line in page.splitlines() if line.startswith(f"| `{name}` |")), "")
        assert f"| {'>' if cut.above else '<'} {cut.value:g} |" in row, name
        assert row.endswith(f"| {cut.reason} |".replace("|tanh|", "&#124;tanh&#124;")), name
    assert set(MEASURED) <= set(CUTS)


def test_every_problem_of_the_suite_is_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md").read_text("utf-8")
    absent = [
        fault.problem
        for fault in FAULTS
        if fault.problem not in page
        and f"`_{fault.problem.partition('_')[2]}`" not in page
        and f"`_{fault.problem.removeprefix('learning_rate_')}`" not in page
    ]
    assert not absent


def test_a_peer_says_what_it_is_known_for() -> None:
    """The rules of others work: each names the fault that it was written for."""
    by_name = {fault.make.__name__: fault for fault in FAULTS}
    sigmoid, bias = (make(by_name[name].make) for name in ("sigmoid_stack", "dead_by_bias"))
    assert "VanishingGradient" in sagemaker_rules(sigmoid, 10)
    assert "DeadRelu" in sagemaker_rules(bias, 10)
    assert anomaly_mode(make(by_name["root_of_zero"].make), 3) == {"anomaly_mode": 0}
    assert anomaly_mode(make(HEALTHY[0].make), 3) == {}
